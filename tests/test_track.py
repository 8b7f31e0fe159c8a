"""Logging to MLflow: into a real tracking folder, read back by MLflow's own client; to a server where one can start."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from qtool import track
from qtool.core import QtoolError
from qtool.summary import summarise
from tests.conftest import need, qtool
from tests.run_folder import Made, contents, write_regression, write_run

LABELS = [0, 1] * 200
HOST = {"hash": "h1", "cpu_model": "A CPU"}
FACTS = {
    "started_at": "2026-11-30T12:00:00+00:00",
    "host": HOST,
    "versions": {"torch": "2.13.0"},
    "data": {"rows": 400, "data_hash": "d" * 64},
}


def made(p50_s, wrong, **more):
    answers = [1 - label if i in wrong else label for i, label in enumerate(LABELS)]
    return Made(p50_s, answers, metrics={"accuracy": 1 - len(wrong) / 400}, **more)


def write(folder, int8_s=0.0027, **run):
    recipes = {
        "fp32": made((0.0108, 0.0110, 0.0109), range(40)),
        "int8": made((int8_s * 0.99, int8_s, int8_s * 1.01), range(2, 42), disk_bytes=23_400_000),
        "odd": Made((1, 1, 1), bad={"build": ("failed", "no such file", None)}),
    }
    return write_run(folder, recipes, labels=LABELS, run=FACTS | run)


@pytest.fixture
def store_uri(tmp_path, monkeypatch):
    need("mlflow")
    uri = (tmp_path / "tracked").as_uri()
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def no_files(monkeypatch):
    """Drawing takes a second, and most of what is tested here does not look at the files."""
    monkeypatch.setattr(track, "_files", lambda *_: [])


def client_of(uri):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def runs_of(client, name="a/model/demo"):
    """The parent runs of an experiment, and the nested ones by recipe."""
    runs = client.search_runs([client.get_experiment_by_name(name).experiment_id])
    nested = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    return [run for run in runs if run not in nested], {run.data.params["recipe"]: run for run in nested}


def test_the_numbers_read_back_are_those_of_the_summary(store_uri, no_files, tmp_path):
    run = write(tmp_path / "my-run")
    assert track.log(run).startswith(f"logged {run}")
    (parent,), nested = runs_of(client_of(store_uri))
    assert set(nested) == {"fp32", "int8"}
    for row in summarise(run)["rows"]:
        if row["status"] != "ok":
            continue
        expected = {}
        for name, cell in row["metrics"].items():
            expected |= {
                name + end: cell[key] for end, key in (("", "value"), ("_low", "low"), ("_high", "high"))
            }
        found = nested[row["recipe"]].data
        assert found.metrics == {name: value for name, value in expected.items() if value is not None}
        assert found.metrics["latency_p50_s"] == pytest.approx(0.0109 if row["recipe"] == "fp32" else 0.0027)
        assert found.params["batch_size"] == "1"
        assert found.params["threads"] == "2"
        assert found.params["version.torch"] == "2.13.0"
        assert found.tags["mlflow.parentRunId"] == parent.info.run_id
        assert found.tags["qtool.host"] == "h1"
        assert found.tags["qtool.data_hash"] == "d" * 64
    assert parent.info.run_name == "my-run"
    assert parent.info.status == "FINISHED"
    assert parent.info.start_time == 1796040000000  # 2026-11-30T12:00:00Z, by `date -d ... +%s`
    assert parent.data.tags["qtool.recommended.cpu.1"] == "int8"


def test_the_report_is_among_the_artifacts_and_the_run_folder_is_only_read(store_uri, tmp_path):
    run = write(tmp_path / "my-run")
    before = contents(run)
    track.log(run)
    assert contents(run) == before
    client = client_of(store_uri)
    (parent,), _ = runs_of(client)
    names = {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    assert names == {"summary.json", "report.md", "report.html", "frontier.png", "frontier.svg"}
    path = client.download_artifacts(parent.info.run_id, "summary.json", str(tmp_path))
    with open(path, encoding="utf-8") as file:
        assert json.load(file) == summarise(run)


def test_a_regression_is_logged_and_no_file_of_it_appears_or_changes(store_uri, tmp_path):
    run = write_regression(tmp_path / "my-run", FACTS)
    before = contents(run)
    track.log(run)
    assert contents(run) == before
    _, nested = runs_of(client_of(store_uri))
    (row,) = (row for row in summarise(run)["rows"] if row["recipe"] == "int8")
    # this stored draws, so there was something to write
    assert contents(run) != before
    assert nested["int8"].data.metrics["score_delta_low"] == row["metrics"]["score_delta"]["low"]


def test_logging_twice_does_not_log_twice_even_from_another_folder(store_uri, no_files, tmp_path):
    run = write(tmp_path / "my-run")
    track.log(run)
    assert "is already in" in track.log(run)
    run.rename(tmp_path / "moved")
    assert "is already in" in track.log(tmp_path / "moved")
    parents, nested = runs_of(client_of(store_uri))
    assert len(parents) == 1
    assert len(nested) == 2


def test_a_run_that_changed_replaces_its_log(store_uri, no_files, tmp_path):
    track.log(write(tmp_path / "my-run"))
    assert "replaced" in track.log(write(tmp_path / "my-run", 0.0054))
    (parent,), nested = runs_of(client_of(store_uri))
    assert nested["int8"].data.metrics["latency_p50_s"] == pytest.approx(0.0054)
    assert nested["int8"].data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_a_log_that_was_interrupted_is_replaced_by_a_whole_one(store_uri, no_files, tmp_path, monkeypatch):
    run = write(tmp_path / "my-run")
    with monkeypatch.context() as patch:
        patch.setattr(track, "_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            track.log(run)
    assert "replaced" in track.log(run)
    (parent,), nested = runs_of(client_of(store_uri))
    assert parent.info.status == "FINISHED"
    assert len(nested) == 2


def refusals():
    """What an upload raises: MLflow's own errors, and its HTTP library's as they are."""
    need("mlflow")
    import requests
    from mlflow.exceptions import MlflowException

    address = "http://me:s3cr3t@store.example/run/report.html?sig=s1gned"
    return {
        "mlflow": MlflowException(f"no room at {address}\nmore"),
        "status": requests.HTTPError(f"413 Client Error: too large for url: {address}"),
        "connection": requests.ConnectionError("Max retries exceeded with url: /run/report.html?sig=s1gned"),
        "wordless": requests.Timeout(),
        "folder": PermissionError(13, "Permission denied", "/mlruns/0"),
    }


@pytest.mark.parametrize(
    ("step", "kind", "told"),
    [
        ("log_artifact", "mlflow", "no room at http://store.example/run/report.html. Check"),
        (
            "log_artifact",
            "status",
            "413 Client Error: too large for url: http://store.example/run/report.html. Check",
        ),
        ("log_artifact", "connection", "Max retries exceeded with url: /run/report.html. Check"),
        ("log_artifact", "wordless", "Timeout. Check"),
        ("log_batch", "folder", "Permission denied"),
        ("set_terminated", "mlflow", "no room"),
    ],
)
def test_a_refused_log_leaves_the_old_one_and_nothing_half(
    store_uri, no_files, tmp_path, monkeypatch, step, kind, told
):
    from mlflow.entities import ViewType
    from mlflow.tracking import MlflowClient

    track.log(write(tmp_path / "my-run"))
    client = client_of(store_uri)
    (old,), _ = runs_of(client)
    run = write(tmp_path / "my-run", 0.0054)
    error, real = refusals()[kind], getattr(MlflowClient, step)

    def failing(self, *args, **more):
        # the server takes the end of what failed
        if step == "set_terminated" and args[1:] != ("FINISHED",):
            return real(self, *args, **more)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, step, failing)
        patch.setattr(track, "_files", lambda *_: [run / "run.json"])
        with pytest.raises(QtoolError) as caught:
            track.log(run)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "s3cr3t" not in str(caught.value)
    assert "s1gned" not in str(caught.value)
    (kept,), nested = runs_of(client)
    assert kept.info.run_id == old.info.run_id
    assert kept.info.status == "FINISHED"
    assert nested["int8"].data.metrics["latency_p50_s"] == pytest.approx(0.0027)
    gone = client.search_runs([old.info.experiment_id], run_view_type=ViewType.DELETED_ONLY)
    assert [r.info.status for r in gone if "mlflow.parentRunId" not in r.data.tags] == ["FAILED"]
    # a server that takes it replaces the old one
    assert "replaced" in track.log(run)
    (new,), nested = runs_of(client)
    assert new.info.run_id != old.info.run_id
    assert nested["int8"].data.metrics["latency_p50_s"] == pytest.approx(0.0054)


def test_a_log_whose_old_one_could_not_be_deleted_is_alone_after_the_next(
    store_uri, no_files, tmp_path, monkeypatch
):
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    def refuse(*_):
        raise MlflowException("not now")

    track.log(write(tmp_path / "my-run"))
    run = write(tmp_path / "my-run", 0.0054)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "delete_run", refuse)
        with pytest.raises(QtoolError, match="not now"):
            track.log(run)
    assert "is already in" in track.log(run)
    (parent,), nested = runs_of(client_of(store_uri))
    assert parent.info.status == "FINISHED"
    assert nested["int8"].data.metrics["latency_p50_s"] == pytest.approx(0.0054)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("http://me:secret@host:5000/x", "http://host:5000/x"),
        ("http://me:p@ss@host/x", "http://host/x"),
        ("https://host/a?sv=1&sig=secret and more", "https://host/a and more"),
        ("file:///a/b", "file:///a/b"),
        ("who knows? me@host.example", "who knows? me@host.example"),
    ],
)
def test_an_address_is_shown_without_what_opens_it(words, shown):
    assert track._shown(words) == shown


def interrupted(*_):
    raise KeyboardInterrupt


def test_another_run_of_the_same_model_is_another_log(store_uri, no_files, tmp_path):
    track.log(write(tmp_path / "one"))
    track.log(write(tmp_path / "two", started_at="2026-12-01T12:00:00+00:00"))
    parents, _ = runs_of(client_of(store_uri))
    assert {parent.info.run_name for parent in parents} == {"one", "two"}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("owner/name", "owner/name/demo"),
        ("./models/mine", "mine/demo"),
        ("/home/me/models/mine/", "mine/demo"),
        ("demo", "demo/demo"),
        ("evil\x1b[31m\nname", "evil [31m name/demo"),
    ],
)
def test_an_experiment_is_a_model_and_a_task(model, name):
    assert track._experiment_name({"model": model, "task": "demo"}) == name


def test_a_deleted_experiment_is_an_error_that_says_how_to_restore_it(store_uri, no_files, tmp_path):
    run = write(tmp_path / "my-run")
    track.log(run)
    client = client_of(store_uri)
    client.delete_experiment(client.get_experiment_by_name("a/model/demo").experiment_id)
    with pytest.raises(QtoolError, match="mlflow experiments restore"):
        track.log(run)


def test_a_server_that_does_not_answer_is_one_line_without_its_password(store_uri, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{port}")
    with pytest.raises(QtoolError, match="Check MLFLOW_TRACKING_URI") as caught:
        track.log(write(tmp_path / "my-run"))
    assert "secret" not in str(caught.value)


def test_a_database_without_its_driver_says_what_to_install(store_uri, tmp_path, monkeypatch):
    if importlib.util.find_spec("sqlalchemy"):
        pytest.skip("sqlalchemy is installed: MLflow can use the database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(QtoolError, match="pip install mlflow"):
        track.log(write(tmp_path / "my-run"))


def test_without_mlflow_the_error_names_the_pip_line(tmp_path, monkeypatch):
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "true")
    for name in [name for name in sys.modules if name.split(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[mlflow\]'"):
        track.log(write(tmp_path / "my-run"))


@pytest.mark.slow
def test_the_command_line_logs_into_the_folder_mlruns_by_default(tmp_path):
    need("mlflow")
    write(tmp_path / "my-run")
    env = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, "-m", "qtool.cli", "report", "my-run", "--track", "mlflow"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("logged my-run to MLflow experiment 'a/model/demo' at file:///")
    assert (tmp_path / "mlruns").is_dir()
    assert len(done.stdout.splitlines()) == 1


def test_tracking_and_a_format_are_two_things(tmp_path):
    done = qtool("report", tmp_path, "--track", "mlflow", "--format", "csv")
    assert done.returncode == 2
    assert "two different things" in done.stderr


@pytest.mark.slow
def test_a_real_server_takes_the_run(tmp_path, monkeypatch, store_uri):
    need("flask", "sqlalchemy", "alembic")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "1"]
    uri = f"http://127.0.0.1:{port}"
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path)
    try:
        wait_for(f"{uri}/health", process)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run = write(tmp_path / "my-run")
        assert track.log(run).startswith("logged")
        assert "is already in" in track.log(run)
        client = client_of(uri)
        (parent,), nested = runs_of(client)
        assert nested["int8"].data.metrics["accuracy"] == 0.9
        assert "report.html" in {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(timeout=60)


def wait_for(url, process):
    for _ in range(240):
        if process.poll() is not None:
            pytest.fail("the server ended")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    pytest.fail("the server did not answer")
