"""The cache: what a kill left behind goes, what is in use or whole stays."""

from __future__ import annotations

import json
import os
import time

from qtool import artifacts
from qtool.core import cache_dir, file_hash


def test_scratch_of_killed_sweeps_goes_after_a_day_and_nothing_else():
    old = time.time() - artifacts.STALE_S - 60
    places = ["artifacts/.aa-left", "artifacts/.bb-new", "artifacts/whole", "data/.probe-left", "data/kept"]
    for name in places:
        folder = cache_dir() / name
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
        if name != "artifacts/.bb-new":
            os.utime(folder, (old, old))
    artifacts.drop_stale()
    assert [name for name in places if not (cache_dir() / name).exists()] == [
        "artifacts/.aa-left",
        "data/.probe-left",
    ]


def test_an_artifact_is_whole_only_while_every_file_is_what_its_build_left(tmp_path):
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "weights"
    weights.write_text("1")
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {"model/weights": file_hash(weights)}}))
    assert artifacts.is_whole(tmp_path)
    weights.write_text("2")
    assert not artifacts.is_whole(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert not artifacts.is_whole(tmp_path)


def test_two_builds_of_one_artifact_leave_one(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made").write_text("same")
        artifacts.place(tmp_path / name, tmp_path / "place")
    assert (tmp_path / "place" / "made").read_text() == "same"
