"""`--track mlflow`: a run in an MLflow tracking server or folder, with a nested run for each trial that is ok.

MLflow's client alone is used (https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html): no active
run, no autologging, no telemetry. What is logged is derived anew from the stored samples.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from qtool import __version__, evidence, store
from qtool import summary as summaries
from qtool.core import QtoolError, content_hash, file_hash
from qtool.evidence import Evidence, group_of
from qtool.report.text import printable
from qtool.report.tidy import run_hash

MISSING = "--track mlflow needs mlflow: pip install 'qtool[mlflow]'."
FOLDER = "mlruns"
LEAST_RETRIES = "2"
RUN, CONTENT = "qtool.run", "qtool.content"
"""Tags: which run it is, and what was in it when it was logged."""


def log(run_dir: Path) -> str:
    """Log to MLFLOW_TRACKING_URI, else to the folder `mlruns` here; a sentence on what was done.

    A run that is there already is left as it is; one that changed since, or whose logging was interrupted, is
    replaced: the old one goes to MLflow's deleted runs once the new one is whole. The run folder is only read.
    Raises QtoolError where mlflow is missing, the server does not answer, or it refuses: then the old one stays.
    """
    uri, found = check(), evidence.load(run_dir, keep=False)
    with _as_qtool_error(uri):
        from mlflow.tracking import MlflowClient

        client, name = MlflowClient(tracking_uri=uri), _experiment_name(found.run)
        experiment = _experiment(client, name)
        told = f"MLflow experiment '{name}' at {_shown(uri)}"
        tags = {RUN: run_hash(found.run), CONTENT: _content(found)}
        old = client.search_runs([experiment], f"tags.`{RUN}` = '{tags[RUN]}'")
        whole = [run for run in old if _is_whole(run, tags[CONTENT])]
        if whole:
            _delete(client, experiment, (run for run in old if run is not whole[0]))
            return f"{run_dir} is already in {told}: run {whole[0].info.run_id}"
    summary = summaries.of(found)
    with tempfile.TemporaryDirectory(prefix="qtool-track-") as scratch:
        files = _files(found, summary, Path(scratch))
        with _as_qtool_error(uri):
            parent, nested = _log(client, experiment, found, summary, tags, files)
            _delete(client, experiment, old)
    replaced = "; an older log of it was replaced" if old else ""
    return f"logged {run_dir} to {told}: run {parent}, {nested} nested runs{replaced}"


def _settings() -> str:
    """The tracking URI; switches off MLflow's telemetry and lets it write into a folder, before it is imported."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it refuses folders without it
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", LEAST_RETRIES)
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    return os.environ.get("MLFLOW_TRACKING_URI") or (Path.cwd() / FOLDER).as_uri()


def check() -> str:
    """The tracking URI. A sweep asks before it spends half an hour.

    Raises QtoolError where mlflow is not installed, or where its small package is and the URI is a database.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise QtoolError(MISSING)
    uri = _settings()
    if re.match(r"(sqlite|postgresql|mysql|mssql)\b", uri) and importlib.util.find_spec("sqlalchemy") is None:
        raise QtoolError(
            f"mlflow-skinny cannot open the database {_shown(uri)}. Run pip install mlflow, or name a server or a"
            " folder in MLFLOW_TRACKING_URI."
        )
    return uri


@contextmanager
def _as_qtool_error(uri: str) -> Iterator[None]:
    """MLflow's errors as ours, and those of its HTTP library, which are OSErrors: uploads let them through."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        words = str(error).partition("\n")[0] or type(error).__name__
        first = _shown(words)[:300].rstrip(".")
        raise QtoolError(
            f"MLflow at {_shown(uri)} does not take the run: {first}. Check MLFLOW_TRACKING_URI and the server."
        ) from None


def _shown(words: str) -> str:
    """Without the name and password of an address in it, and without its query: stores sign their addresses there."""
    return printable(re.sub(r"//[^/\s]*@", "//", re.sub(r"(/[^?\s]*)\?\S+", r"\1", words)))


def _experiment_name(run: Mapping[str, Any]) -> str:
    """Model and task. A hub id keeps its owner; of a path the last part is enough."""
    model = printable(str(run["model"]))
    hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model)
    return f"{model if hub else Path(model).name or 'model'}/{run['task'] or 'no-task'}"


def _experiment(client: Any, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name)
    if experiment.lifecycle_stage != "active":
        number = experiment.experiment_id
        raise QtoolError(
            f"MLflow experiment '{name}' is deleted. Restore it: mlflow experiments restore -x {number}."
        )
    return experiment.experiment_id


def _content(found: Evidence) -> str:
    """A hash of everything that the logged numbers are derived from; qtool's version stands for the formulas."""
    files = [file_hash(found.run_dir / name) for name in ("run.json", "results.jsonl")]
    return content_hash([*files, __version__])[:16]


def _is_whole(run: Any, content: str) -> bool:
    return run.info.status == "FINISHED" and run.data.tags.get(CONTENT) == content


def _delete(client: Any, experiment: str, runs: Iterable[Any]) -> None:
    """With the runs nested in them."""
    for run_id in (run.info.run_id for run in runs):
        for nested in client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'"):
            client.delete_run(nested.info.run_id)
        client.delete_run(run_id)


def _log(
    client: Any,
    experiment: str,
    found: Evidence,
    summary: Mapping[str, Any],
    tags: Mapping[str, str],
    files: Sequence[Path],
) -> tuple[str, int]:
    """The parent's id and how many runs are nested in it. The parent is finished last: till then it is no log."""
    start_ms = _milliseconds(found.run.get("started_at"))
    whole = _whole(found)
    tags = {**tags, "qtool.host": whole["host"], "qtool.data_hash": whole["data_hash"]}
    for group in summary["frontier"]:
        place = ".".join(map(str, group_of(group)[0 if len(found.hosts) > 1 else 1 :]))
        tags[f"qtool.recommended.{place}"] = group["recommended"] or "none"
        tags[f"qtool.frontier.{place}"] = ", ".join(group["recipes"])
    name = printable(found.run_dir.resolve().name)
    parent = client.create_run(experiment, start_ms, tags, name)
    try:
        nested = _fill(client, parent.info, whole, tags, summary)
        for path in files:
            client.log_artifact(parent.info.run_id, str(path))
        client.set_terminated(parent.info.run_id, "FINISHED")
    except Exception:
        _discard(client, experiment, parent)
        raise
    return parent.info.run_id, nested


def _fill(
    client: Any, parent: Any, whole: Mapping[str, str], tags: Mapping[str, str], summary: Mapping[str, Any]
) -> int:
    """Parameters and nested runs of the run that `parent` is the RunInfo of; how many were nested."""
    now_ms = time.time_ns() // 1_000_000
    _batch(client, parent.run_id, whole, {}, now_ms)
    ok = [row for row in summary["rows"] if row["status"] == "ok"]
    for row in ok:
        trial = {key: row[key] for key in ("recipe", "device", "batch_size")}
        own = {"mlflow.parentRunId": parent.run_id, "qtool.on_frontier": str(row["on_frontier"]).lower()}
        own |= {key: tags[key] for key in ("qtool.host", "qtool.data_hash")}
        title = f"{row['recipe']} {row['device']} batch {row['batch_size']}"
        title += f" at {row['host']}" if "/" in (row["host"] or "") else ""
        nested = client.create_run(parent.experiment_id, parent.start_time, own, title).info.run_id
        _batch(client, nested, {**whole, **trial}, _numbers(row), now_ms)
        client.set_terminated(nested, "FINISHED")
    return len(ok)


def _discard(client: Any, experiment: str, parent: Any) -> None:
    """A half log is no log. Where the server takes even this no more, the next log replaces what is left."""
    from mlflow.exceptions import MlflowException

    # the error that led here is the one to tell
    with suppress(MlflowException, OSError):
        client.set_terminated(parent.info.run_id, "FAILED")
        _delete(client, experiment, [parent])


def _whole(found: Evidence) -> dict[str, str]:
    """What holds for every trial of the run, as parameters."""
    run = found.run
    host, args, data, versions = (run.get(key) or {} for key in ("host", "args", "data", "versions"))
    facts = {key: run.get(key) for key in ("model", "task", "metric", "rounds", "baseline")}
    facts |= {key: args.get(key) for key in ("threads", "seq_len", "limit", "split", "seed")}
    facts |= {
        "host": host.get("hash"),
        "cpu_model": host.get("cpu_model"),
        "data_hash": data.get("data_hash"),
    }
    facts |= {
        f"version.{re.sub('[^A-Za-z0-9_.-]', '_', name)[:100]}": told for name, told in versions.items()
    }
    return {key: "none" if told is None else printable(str(told)) or "none" for key, told in facts.items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Every metric that has a value, and its interval where it has one, in seconds, bytes and fractions."""
    found = {}
    for name, cell in row["metrics"].items():
        for end, key in (("", "value"), ("_low", "low"), ("_high", "high")):
            if cell[key] is not None:
                found[name + end] = float(cell[key])
    return found


def _batch(
    client: Any, run_id: str, params: Mapping[str, Any], numbers: Mapping[str, float], now_ms: int
) -> None:
    from mlflow.entities import Metric, Param

    client.log_batch(
        run_id,
        [Metric(name, value, now_ms, 0) for name, value in numbers.items()],
        [Param(name, str(value)) for name, value in params.items()],
    )


def _files(found: Evidence, summary: Mapping[str, Any], out: Path) -> list[Path]:
    """The report's files as they are now, in `out`; the run folder is only read."""
    from qtool.report import markdown, page, plots

    store.write_json(out / "summary.json", summary)
    (out / "report.md").write_text(markdown.render(dict(summary), dict(found.run)), "utf-8")
    (out / "report.html").write_text(page.render(found, summary), "utf-8")
    plots.draw(dict(summary), out)
    return sorted(out.iterdir())


def _milliseconds(started_at: Any) -> int | None:
    try:
        return int(datetime.fromisoformat(started_at).timestamp() * 1000)
    except (TypeError, ValueError, OverflowError):
        return None
