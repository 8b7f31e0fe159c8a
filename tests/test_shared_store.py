"""Folders that travel by content: what arrives is what was put, or an error."""

from __future__ import annotations

import hashlib
import json

import pytest

from qtool.core import QtoolError
from qtool.shared_store import SharedStore, hashes, name_of
from tests.conftest import need


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    (made / "model").mkdir(parents=True)
    (made / "model" / "weights.bin").write_bytes(b"\x00\x01")
    (made / "manifest.json").write_text("{}")
    return made


@pytest.fixture(params=["folder", "file", "memory"])
def shared(request, tmp_path):
    need("fsspec")
    root = tmp_path / "shared"
    url = {"folder": str(root), "file": f"file://{root}", "memory": f"memory://{tmp_path.name}"}
    return SharedStore(url[request.param])


def test_a_folder_arrives_as_it_was_put(shared, folder, tmp_path):
    assert not shared.has("artifacts", "key")
    shared.put("artifacts", "key", folder)
    assert shared.has("artifacts", "key")
    to = tmp_path / "cache" / "key"
    shared.get("artifacts", "key", to)
    assert hashes(to) == {
        "manifest.json": hashlib.sha256(b"{}").hexdigest(),
        "model/weights.bin": hashlib.sha256(b"\x00\x01").hexdigest(),
    }
    assert [path.name for path in to.parent.iterdir()] == ["key"]  # nothing is left of the copying


def test_what_lies_broken_at_its_place_is_replaced(shared, folder, tmp_path):
    shared.put("artifacts", "key", folder)
    to = tmp_path / "cache"
    to.mkdir()
    (to / "half").write_text("of it")
    shared.get("artifacts", "key", to)
    assert hashes(to) == hashes(folder)


def test_the_name_follows_the_content_alone(folder, tmp_path):
    twin = tmp_path / "twin"
    (twin / "model").mkdir(parents=True)
    (twin / "manifest.json").write_text("{}")
    (twin / "model" / "weights.bin").write_bytes(b"\x00\x01")
    assert name_of(hashes(twin)) == name_of(hashes(folder))
    (twin / "manifest.json").write_text("{ }")
    assert name_of(hashes(twin)) != name_of(hashes(folder))


def test_a_changed_file_is_noticed_and_leaves_nothing(folder, tmp_path):
    need("fsspec")
    shared = SharedStore(str(tmp_path / "shared"))
    shared.put("artifacts", "key", folder)
    (tmp_path / "shared" / "artifacts" / "key" / "model" / "weights.bin").write_bytes(b"\x00\x02")
    with pytest.raises(QtoolError, match=r"artifacts/key/model/weights.bin is not what was put there"):
        shared.get("artifacts", "key", tmp_path / "cache" / "key")
    assert not (tmp_path / "cache" / "key").exists()


@pytest.mark.parametrize(
    "content", [{"../escaped": "0"}, {"/etc/passwd": "0"}, {"a\\..\\b": "0"}, {"": "0"}, [], {"a": 1}]
)
def test_a_list_that_leads_out_of_the_folder_is_refused(content, tmp_path):
    need("fsspec")
    (tmp_path / "shared" / "artifacts").mkdir(parents=True)
    (tmp_path / "shared" / "artifacts" / "key.json").write_text(json.dumps(content))
    with pytest.raises(QtoolError, match="is no list of files"):
        SharedStore(str(tmp_path / "shared")).get("artifacts", "key", tmp_path / "cache" / "key")
    assert not (tmp_path / "cache" / "key").exists()


def test_what_is_not_there_is_told(tmp_path):
    need("fsspec")
    with pytest.raises(QtoolError, match="holds no data/key"):
        SharedStore(str(tmp_path)).get("data", "key", tmp_path / "to")
    with pytest.raises(QtoolError, match="no folder or URL that fsspec opens"):
        SharedStore("nosuch://bucket/path")
