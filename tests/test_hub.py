"""`qtool sweep distilbert` against a local server that acts as the hub, and then from the cache it filled."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WORDS, make_checkpoint, need, qtool

MODEL = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
DATASET = "nyu-mll/glue"
COMMITS = {MODEL: "1a" * 20, DATASET: "2b" * 20}
ROWS = 40
# The card of a data set says which files make a configuration, and names the classes.
CARD = """---
configs:
- config_name: sst2
  data_files:
  - split: train
    path: sst2/train-*
  - split: validation
    path: sst2/validation-*
dataset_info:
- config_name: sst2
  features:
  - name: sentence
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': negative
          '1': positive
  - name: idx
    dtype: int32
---
"""
FLAGS = ("--recipe", "fp32", "--rounds", "1", "--threads", "1", "--limit", "20")


class Hub:
    """Serves folders as hub repositories: information, listings and files, all at one commit."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                length = int(self.headers.get("Content-Length") or 0)
                path, _, query = self.path.partition("?")
                form = urllib.parse.parse_qs(query) | urllib.parse.parse_qs(self.rfile.read(length).decode())
                status, headers, body = hub.answer(urllib.parse.unquote(path), form)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, form: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        parts = parts[1:] if parts[0] in ("models", "datasets") else parts
        name, verb, revision, rest = "/".join(parts[:2]), *[*parts[2:4], "", ""][:2], "/".join(parts[4:])
        if name not in self.repositories:
            return _missing("RepoNotFound")
        folder, commit = self.repositories[name], COMMITS[name]
        if revision not in ("", "main", commit):
            return _missing("RevisionNotFound")
        files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
        if api and verb in ("", "revision"):
            siblings = [{"rfilename": file} for file in files]
            return _json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})
        if api and verb == "tree":
            inside = [path for path in folder.joinpath(rest).rglob("*") if path.is_file()]
            if form.get("recursive", [""])[0].lower() != "true":
                inside = list(folder.joinpath(rest).iterdir())
            return _json([_entry(path, folder) for path in sorted(inside)])
        if api and verb == "paths-info":
            return _json(
                [_entry(folder / path, folder) for path in form["paths"] if (folder / path).exists()]
            )
        if verb == "resolve" and rest in files:
            body = files[rest].read_bytes()
            return 200, {"ETag": f'"{_blob(body)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, body
        return _missing("EntryNotFound", commit)


def _missing(code: str, commit: str = "") -> tuple[int, dict[str, str], bytes]:
    return (
        404,
        {"X-Error-Code": code, "X-Error-Message": code, **({"X-Repo-Commit": commit} if commit else {})},
        b"",
    )


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _blob(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, object]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
    body = path.read_bytes()
    return {"type": "file", "path": name, "size": len(body), "oid": _blob(body)}


def _rows(first: int) -> list[tuple[str, int]]:
    count = len(WORDS)
    return [
        (
            " ".join(WORDS[(first + row * 5 + place * 3) % count] for place in range(3 + row % 8))
            + f" {row}",
            row % 2,
        )
        for row in range(ROWS)
    ]


def _write_glue(folder: Path) -> Path:
    (folder / "SST-2").mkdir(parents=True)
    for name, first in (("train", 1), ("dev", 0)):
        lines = [f"{text}\t{label}" for text, label in _rows(first)]
        (folder / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return folder


def _write_dataset(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    (folder / "sst2").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for name, first in (("train", 1), ("validation", 0)):
        texts, labels = zip(*_rows(first), strict=True)
        table = pyarrow.table(
            {
                "sentence": list(texts),
                "label": pyarrow.array(labels, pyarrow.int64()),
                "idx": pyarrow.array(range(ROWS), pyarrow.int32()),
            }
        )
        pyarrow.parquet.write_table(table, folder / "sst2" / f"{name}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The served model and data set."""
    need("torch", "transformers", "datasets", "evaluate", "sklearn", "accelerate")
    root = tmp_path_factory.mktemp("hub")
    model = make_checkpoint(root / "model", "distilbert", ("NEGATIVE", "POSITIVE"))
    hub = Hub({MODEL: model, DATASET: _write_dataset(root / "dataset")})
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hf-home")


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    return _write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture
def online(hub, monkeypatch):
    """The environment of a job that may ask the hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return _asking(hub.endpoint)


def _asking(endpoint: str) -> dict[str, Any]:
    # a proxy of the machine must not be asked for a server of the test
    return {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.fixture(scope="module")
def fetched(hub, home, tmp_path_factory):
    """One sweep that fetches the model and the data set, as a job with an empty cache does."""
    out = tmp_path_factory.mktemp("fetched") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        done = qtool("sweep", "distilbert", *FLAGS, "--out", out, QTOOL_CACHE=str(out.parent / "cache"),
                     HF_HOME=str(home), **_asking(hub.endpoint))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


def _logits(run: Path):
    import numpy as np

    with np.load(run / "predictions" / "fp32-cpu.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.mark.slow
def test_a_hub_model_and_data_set_are_fetched_and_the_commit_is_recorded(hub, fetched):
    record = json.loads((fetched / "run.json").read_text())
    assert (record["model"], record["task"], record["metric"]) == ("distilbert", "sst2", "accuracy")
    assert record["model_info"]["revision"] == COMMITS[MODEL]
    rows = json.loads((fetched / "summary.json").read_text())["rows"]
    assert [(row["recipe"], row["status"]) for row in rows] == [("fp32", "ok")]
    assert any(f"/resolve/{COMMITS[MODEL]}/model.safetensors" in asked for asked in hub.asked)
    # _rows gives every even row class 0, and the file order is the data set's
    found = _logits(fetched)
    assert (found["labels"] == found["ids"] % 2).all()


@pytest.mark.slow
def test_a_filled_cache_is_enough_without_a_hub(fetched, home, tmp_path):
    done = qtool("sweep", "distilbert", *FLAGS, "--out", tmp_path / "run", HF_HOME=str(home),
                 HF_HUB_OFFLINE="1", HF_ENDPOINT=_closed_port())  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["model_info"]["revision"] == COMMITS[MODEL]
    before, now = _logits(fetched), _logits(tmp_path / "run")
    assert {name: array.tolist() for name, array in now.items()} == {
        name: array.tolist() for name, array in before.items()
    }


@pytest.mark.slow
def test_the_glue_folder_gives_the_rows_of_the_hubs_data_set(fetched, home, glue, tmp_path):
    arguments = ("--data", glue, "--dry-run", "--recipe", "fp32", "--limit", "20", "--threads", "1")
    done = qtool("sweep", "distilbert", *arguments, "--out", tmp_path / "run", HF_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "20 rows" in done.stdout
    record = json.loads((fetched / "run.json").read_text())
    mean = record["data"]["mean_tokens"]
    assert f"{mean:.0f} tokens on average" in done.stdout


def _closed_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def _refused(done, *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("qtool: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in line


@pytest.mark.slow
def test_an_unknown_revision_is_named(online, glue, tmp_path):
    done = qtool("sweep", "distilbert", "--data", glue, *FLAGS, "--revision", "v9", "--out", tmp_path / "run",
                 HF_HOME=str(tmp_path / "home"), **online)  # fmt: skip
    _refused(done, MODEL, "no revision 'v9'", "Leave --revision out")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_unknown_model_is_named(online, glue, tmp_path):
    done = qtool("sweep", "distilbert/no-such-model", "--task", "sst2", "--data", glue, *FLAGS, "--out",
                 tmp_path / "run", HF_HOME=str(tmp_path / "home"), **online)  # fmt: skip
    _refused(done, "there is no model 'distilbert/no-such-model' on the hub")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("down", ["closed", "silent", "broken"])
def test_a_hub_that_is_down_is_a_line_and_no_long_wait(online, down, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = {
            "closed": _closed_port(),
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "broken": "http://127.0.0.1:1/not a url",
        }[down]
        started = time.monotonic()
        done = qtool("sweep", "distilbert", *FLAGS, "--out", tmp_path / "run", timeout_s=120,
                     HF_HOME=str(tmp_path / "home"), **{**online, "HF_ENDPOINT": endpoint})  # fmt: skip
        waited_s = time.monotonic() - started
    _refused(done, "hub", "Give --data DIR" if "comes from the hub" in done.stderr else "Give a model folder")
    assert waited_s < 100  # the libraries' own retries would take minutes
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_empty_cache_offline_says_what_to_do(glue, tmp_path):
    done = qtool(
        "sweep",
        "distilbert",
        "--data",
        glue,
        *FLAGS,
        "--out",
        tmp_path / "run",
        HF_HOME=str(tmp_path / "home"),
    )
    _refused(done, MODEL, "not in the local cache", "HF_HUB_OFFLINE")
