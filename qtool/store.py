"""The run folder's files: `results.jsonl` (appended line by line, never rewritten) and `run.json`.

Schema history of a line: 1 = the first.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from qtool.core import Device, Measurement, QtoolError

SCHEMA = 1
Key = tuple[str, str, int | None]
"""Trial id, stage and round of a line."""
RUN_KEYS = {"model", "task", "metric", "rounds", "plan"}


class Writer:
    """Appends measurements to a run, alone: a second sweep into the same folder is refused."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "results.jsonl"
        self._one_at_a_time = Lock()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise QtoolError(
                f"another sweep is writing to {run_dir}. Wait for it, or choose another --out."
            ) from None
        self._drop_torn_tail()

    def append(self, measurement: Measurement) -> None:
        """One write and one sync a line, so that a kill leaves whole lines.

        Raises QtoolError where the disk does not take it; what was written before stays readable.
        """
        line = (json.dumps(measurement.model_dump(), ensure_ascii=False, allow_nan=False) + "\n").encode()
        problem = None
        with self._one_at_a_time:
            before = os.fstat(self._fd).st_size
            try:
                written = os.write(self._fd, line)
                os.fsync(self._fd)
                problem = None if written == len(line) else "the disk is full"
            except OSError as error:
                problem = error.strerror
            if problem:
                os.ftruncate(self._fd, before)
        if problem:
            raise QtoolError(f"cannot write to {self.path}: {problem}. Make room, then add --resume.")

    def _drop_torn_tail(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._fd, whole)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def read(run_dir: Path) -> list[Measurement]:
    """Every whole line of a run in the order it was written. Raises QtoolError with the line's number."""
    path = run_dir / "results.jsonl"
    if not path.is_file():
        raise QtoolError(
            f"{run_dir} holds no run: there is no results.jsonl. Give a folder made by qtool sweep."
        )
    measurements = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            version = record.get("schema_version")
            if not isinstance(version, int) or version > SCHEMA:
                raise QtoolError(
                    f"{path} line {number} has schema {version!r}; this qtool reads up to {SCHEMA}."
                    " Upgrade qtool."
                )
            measurements.append(Measurement.model_validate(record))
        except (ValueError, RecursionError, AttributeError) as error:
            raise QtoolError(
                f"{path} line {number} is not a measurement ({type(error).__name__}). Remove the line or sweep again."
            ) from None
    return measurements


def latest(measurements: list[Measurement]) -> dict[Key, Measurement]:
    """The last line for each (trial id, stage, round): what a resumed sweep found replaces a failure."""
    return {(m.trial_id, m.stage, m.round): m for m in measurements}


def current(lines: Mapping[Key, Measurement], run: Mapping[str, Any]) -> dict[Key, Measurement]:
    """`lines` without those that a lost node left: its host's trials were begun again on another node."""
    hosts = run.get("hosts")
    if not hosts:
        return dict(lines)
    attempts = {entry["trial_id"]: hosts[entry["host"]].get("attempt", 1) for entry in run["plan"]}
    return {
        key: line
        for key, line in lines.items()
        if line.stage != "measure" or _attempt(line) == attempts.get(line.trial_id, 1)
    }


def _attempt(line: Measurement) -> int:
    told = line.values.get("attempt")
    return told if isinstance(told, int) else 1


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all: to a sibling first, then renamed into place."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    temporary.replace(path)


def read_run(run_dir: Path) -> dict[str, Any]:
    """`run.json` of a run folder. Raises QtoolError when there is none or it cannot be read."""
    path = run_dir / "run.json"
    if not path.is_file():
        raise QtoolError(f"{run_dir} holds no run: there is no run.json. Give a folder made by qtool sweep.")
    try:
        run = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise QtoolError(f"{path} is not valid JSON ({error}). Sweep again into a new --out.") from None
    if isinstance(run, dict) and run.get("schema") == SCHEMA and (missing := RUN_KEYS - run.keys()):
        raise QtoolError(f"{path} lacks {', '.join(sorted(missing))}. Sweep again into a new --out.")
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        found = run.get("schema") if isinstance(run, dict) else type(run).__name__
        raise QtoolError(f"{path} has schema {found!r}; this qtool reads {SCHEMA}. Sweep again.")
    try:
        _Run.model_validate(run)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise QtoolError(f"{path}: {where}: {first['msg']}. Sweep again into a new --out.") from None
    unknown = {entry.get("host") for entry in run["plan"]} - (run.get("hosts") or {}).keys()
    if run.get("hosts") and unknown:
        raise QtoolError(f"{path}: the plan names a host that hosts lacks. Sweep again into a new --out.")
    return run


class _Planned(BaseModel):
    trial_id: str
    recipe: str
    device: Device
    batch_size: int = Field(ge=1)
    fingerprint: str | None = None
    host: str | None = None
    kind: str | None = None


class _Node(BaseModel):
    """A host of a sweep over several nodes; `attempt` counts the nodes that its trials were begun on."""

    hash: str
    kind: str | None = None
    attempt: int = Field(default=1, ge=1)


class _Lost(BaseModel):
    host: str
    cause: str


class _Pair(BaseModel):
    gpus: tuple[int, int]
    nvlinks: int
    nvswitch: bool
    ancestor: int | None = None


class _Topology(BaseModel):
    gpus: list[dict[str, Any]] | None = None
    pairs: list[_Pair] | None = None


class _Host(BaseModel):
    hash: str | None = None
    cpu_flags: list[str] | None = None
    gpus: list[dict[str, Any]] | None = None
    topology: _Topology | None = None


class _Data(BaseModel):
    rows: int | None = None
    data_hash: str | None = None


class _Fit(BaseModel):
    """What `estimate.total` told of a recipe."""

    weight_bytes: int | None = Field(None, ge=0, le=10**18)
    weight_bytes_reason: str | None = None


class _Run(BaseModel):
    """What readers of a run rely on; everything else is theirs to look for."""

    model: str
    task: str | None
    metric: Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearman"] | None
    metrics: list[str] | None = None
    rounds: int = Field(ge=1, strict=True)
    plan: list[_Planned]
    baseline: str = ""
    notes: list[str] | None = None
    host: _Host | None = None
    hosts: dict[str, _Node] | None = None
    lost: list[_Lost] | None = None
    versions: dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    data: _Data | None = None
    model_info: dict[str, Any] | None = None
    recipes: dict[str, dict[str, Any]] | None = None
    fit: dict[str, _Fit] | None = None
