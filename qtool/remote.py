"""What a sweep runs on a node of a cluster: one stage in a fresh child there, as on the machine of the sweep itself.

Folders come to the node by content, through the shared store or a cache folder that all machines see.
"""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtool import artifacts, host, isolate, recipes
from qtool.core import QtoolError, Recipe, cache_dir
from qtool.shared_store import SharedStore, hashes, name_of

MOST_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """One stage of one trial. `spec` has the paths of the sweep's machine; `data`, `model` and `artifact` are names
    in the shared store, used where there is one.
    """

    stage: str
    spec: dict[str, Any]
    threads: int
    timeout_s: float
    shared: str | None
    data: str
    model: str
    artifact: str
    quiet: bool
    """Whether other stages may run beside it: its idle threads sleep then."""


def ping() -> None:
    """Returns where its node is alive."""


def describe(marker: str, shared: str | None) -> dict[str, Any]:
    """What a node is: its fingerprint with its hash, its versions, and whether it has the marker file."""
    facts = host.fingerprint()
    # Ray sets it in its workers; a stage's child gets its own value from `isolate` either way
    facts["environment"].pop("OMP_NUM_THREADS", None)
    return {
        "fingerprint": {**facts, "hash": host.fingerprint_hash(facts)},
        "versions": host.versions(),
        "sees": shared is not None or Path(marker).is_file(),
    }


def refusals(
    chosen: list[dict[str, Any]], devices: list[str], has_calibration: bool, source: str
) -> dict[tuple[str, str], tuple[str, str]]:
    """By recipe and device: why it cannot run on this node and what would change that."""
    found = {}
    for recipe in (Recipe(**content) for content in chosen):
        for device in devices:
            why = recipes.why_not(recipe, device, has_calibration=has_calibration, source=source)
            if why:
                found[recipe.name, device] = (why.reason, why.fix)
    return found


def run(job: Job) -> dict[str, Any]:
    """The outcome of a stage as plain data, with the end of its log and what it scored: `predictions`, npz bytes."""
    with tempfile.TemporaryDirectory(prefix="qtool-stage-") as scratch:
        log = Path(scratch) / "stage.log"
        try:
            outcome, predictions = _carry_out(job, log, Path(scratch))
        except QtoolError as error:  # of the shared store
            outcome, predictions = isolate.Outcome("failed", {}, str(error), "then --resume"), None
        except OSError as error:
            told = f"the node cannot use {error.filename or 'its disk'}: {error.strerror or error}"
            outcome, predictions = isolate.Outcome("failed", {}, told, "make room there, then --resume"), None
        told = log.read_bytes()[-MOST_LOG_BYTES:] if log.is_file() else b""
    return {**asdict(outcome), "log": told, "predictions": predictions}


def _carry_out(job: Job, log: Path, scratch: Path) -> tuple[isolate.Outcome, bytes | None]:
    spec, store = _here(job), SharedStore(job.shared) if job.shared else None
    if job.stage == "build":
        return _build(job, spec, store, log), None
    at = Path(spec["artifact"])
    if store and job.stage != "harness" and not _is_whole(at):
        store.get("artifacts", job.artifact, at)
    if job.stage != "score":
        return _child(job, spec, log), None
    predictions = scratch / Path(spec["predictions"]).name
    outcome = _child(job, spec | {"predictions": str(predictions)}, log)
    return outcome, predictions.read_bytes() if predictions.is_file() else None


def _build(job: Job, spec: dict[str, Any], store: SharedStore | None, log: Path) -> isolate.Outcome:
    place = Path(spec["artifact"])
    if store and not artifacts.is_whole(place) and store.has("artifacts", job.artifact):
        store.get("artifacts", job.artifact, place)
    outcome = artifacts.obtain(place, lambda made: _child(job, {**spec, "out": str(made)}, log))
    if store and outcome.status == "ok":
        store.put("artifacts", job.artifact, place)
    return outcome


def _child(job: Job, spec: dict[str, Any], log: Path) -> isolate.Outcome:
    read_end, write_end = os.pipe()
    try:
        return isolate.run(
            job.stage,
            spec,
            log=log,
            timeout_s=job.timeout_s,
            threads=job.threads,
            stop=read_end if job.quiet else None,
        )
    finally:
        os.close(read_end)
        os.close(write_end)


def _here(job: Job) -> dict[str, Any]:
    """The job's spec with paths of this node; what it lacks is fetched."""
    if job.shared is None:
        return job.spec
    store, cache = SharedStore(job.shared), cache_dir()
    data, model = cache / "data" / job.data, Path(job.spec["model_dir"])
    if not (data / "meta.json").is_file():
        store.get("data", job.data, data)
    if not model.is_dir() or _model_name(str(model)) != job.model:
        model = cache / "models" / job.model
        if not model.is_dir():
            store.get("models", job.model, model)
    place = cache / "artifacts" / job.artifact
    return {**job.spec, "data": str(data), "model_dir": str(model), "artifact": str(place)}


@functools.lru_cache(maxsize=8)
def _model_name(folder: str) -> str:
    """A worker of Ray runs many stages of one model, and its files do not change meanwhile."""
    return name_of(hashes(Path(folder)))


@functools.lru_cache(maxsize=256)
def _seen_whole(place: str, changed_ns: int) -> bool:
    return artifacts.is_whole(Path(place))


def _is_whole(place: Path) -> bool:
    manifest = place / "manifest.json"
    return manifest.is_file() and _seen_whole(str(place), manifest.stat().st_mtime_ns)
