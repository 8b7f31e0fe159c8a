"""The nouns every other module speaks: recipe, trial, measurement, metric, and the errors.

Imports nothing but the standard library and pydantic, so that any process may import it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

BASELINES = {"checkpoint": "fp32", "onnx": "onnx-fp32", "openvino": "openvino-fp32"}
"""What every speed-up and score change is against, by what MODEL is: weights for PyTorch or an exported graph."""
BASELINE = BASELINES["checkpoint"]

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
Status = Literal["ok", "skipped", "failed", "timeout", "oom"]


class QtoolError(Exception):
    """The user can fix it: one line saying what is wrong, what was found, what would work. Exit code 2."""


class Unavailable(Exception):
    """This machine or installation cannot run a recipe: it is skipped with this reason."""


class _Closed(BaseModel):
    """A record that refuses unknown keys and is never changed after it was made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Requires(_Closed):
    """What a recipe needs. `packages` are import names; `capability` is a CUDA compute capability."""

    packages: list[str] = []
    cpu_flags: list[str] = Field(default=[], description="any of these flags in /proc/cpuinfo is enough")
    capability: float | None = None


class Expect(_Closed):
    """What the audit of a loaded artifact must find; anything unmet fails the trial."""

    weight_share: dict[str, float] = Field(default={}, description="dtype: least share of all weight bytes")
    linear_share: dict[str, float] = Field(
        default={}, description="dtype: least share of linear weight elements"
    )
    changed_modules: int | None = Field(default=None, ge=0, description="least number of modules replaced")
    engine: dict[str, str] = Field(default={}, description="property read back from the engine: its value")
    compiled_graphs: int | None = Field(
        default=None, ge=1, description="least number of compiled graphs that ran"
    )
    autocast: Dtype | None = None


class Calibration(_Closed):
    """How many rows of the task's training split a static method looks at."""

    rows: int = Field(default=300, ge=1)


class Recipe(_Closed):
    """One way to deploy a model: which method makes the artifact and which runtime runs it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)
    description: str = Field(min_length=1)
    source: str = Field(min_length=1, description="paper or documentation the method comes from")
    method: str
    dtype: Dtype = "float32"
    quantize: dict[str, Any] = {}
    compile: dict[str, Any] = {}
    runtime: str
    runtime_options: dict[str, Any] = {}
    placement: dict[str, Any] = {}
    search: dict[str, Any] = {}
    calibration: Calibration | None = None
    devices: list[Device] = Field(default=["cpu"], min_length=1)
    requires: Requires = Requires()
    expect: Expect = Expect()
    env: str | None = None

    @field_validator("placement")
    @classmethod
    def _as_json_keeps_it(cls, value: dict[str, Any]) -> dict[str, Any]:
        """A GPU's number as a key is a string in JSON: the same recipe must be equal after a journey through it."""
        return {
            str(key): {str(name): each for name, each in part.items()} if isinstance(part, dict) else part
            for key, part in value.items()
        }

    def content(self) -> dict[str, Any]:
        """The parts that decide what is built: prose and what is demanded of the result are left out."""
        return self.model_dump(include={"method", "dtype", "quantize", "calibration"})


class Task(_Closed):
    """What is scored. `labels` are in the order of the table's class numbers; `score` is the primary metric."""

    name: str
    description: str
    score: str
    metrics: list[str] = []
    text: str
    text_pair: str | None = None
    label: str
    labels: list[str] | None = None
    source: str


class Trial(_Closed):
    """One row of the summary: a recipe on a device at a batch size, with everything that decides its numbers."""

    model: str
    revision: str | None
    recipe: str
    fingerprint: str = Field(description="hash of the artifact's inputs")
    task: str | None
    data_hash: str
    limit: int | None
    calibration_hash: str | None
    device: Device
    batch_size: int
    seq_len: int | None
    threads: int
    seed: int
    kind: str | None = Field(None, description="the kind of node of a sweep over several; see qtool.cluster")

    @cached_property
    def id(self) -> str:
        # a sweep on one machine keeps the ids it had before there were kinds
        return content_hash(self.model_dump(exclude=None if self.kind else {"kind"}))[:16]


class Measurement(_Closed):
    """One line of `results.jsonl`: what one child process found. Times in seconds, sizes in bytes."""

    schema_version: int = 1
    trial_id: str
    recipe: str
    device: Device
    batch_size: int | None
    stage: Literal["plan", "build", "score", "measure", "harness"]
    round: int | None = None
    status: Status
    samples: dict[str, list[float]] = {}
    values: dict[str, Any] = {}
    host: str = Field("", description="the host's fingerprint; run.json holds the whole")
    started_at: str
    error: str | None = None
    next_step: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> Measurement:
        """Every number that statistics are made of is one that a clock or a kernel can give."""
        if self.stage == "measure" and not all(1e-9 <= x <= 1e6 for xs in self.samples.values() for x in xs):
            raise ValueError("a sample is not a time")
        for name, value in self.values.items():
            sized = name.endswith(("_bytes", "_s"))
            if sized and value is not None and not (isinstance(value, int | float) and 0 <= value <= 1e18):
                raise ValueError(f"{name} is {value!r}")
        predictions, metrics = self.values.get("predictions"), self.values.get("metrics")
        if not isinstance(predictions, str | None) or not isinstance(metrics, dict | None):
            raise ValueError("predictions or metrics are of the wrong type")
        return self


@dataclass(frozen=True)
class Metric:
    """How a number is called, what unit it has and which way is better."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    digits: int
    label: str


METRICS = {
    m.name: m
    for m in (
        Metric("accuracy", "", "higher", 4, "accuracy"),
        Metric("f1", "", "higher", 4, "F1"),
        Metric("matthews_correlation", "", "higher", 4, "Matthews"),
        Metric("pearson", "", "higher", 4, "Pearson"),
        Metric("spearman", "", "higher", 4, "Spearman"),
        Metric("score_delta", "", "higher", 4, "Δ score"),
        Metric("agreement", "", "higher", 4, "agreement"),
        Metric("mean_kl", "", "lower", 4, "KL"),
        Metric("max_logit_difference", "", "lower", 4, "max Δ logit"),
        Metric("calibration_error", "", "lower", 4, "ECE"),
        Metric("latency_p50_s", "s", "lower", 4, "p50"),
        Metric("latency_p95_s", "s", "lower", 4, "p95"),
        Metric("throughput_per_s", "/s", "higher", 1, "texts/s"),
        Metric("speedup", "x", "higher", 2, "speed-up"),
        Metric("disk_bytes", "B", "lower", 0, "disk"),
        Metric("weight_bytes", "B", "lower", 0, "weights"),
        Metric("peak_rss_bytes", "B", "lower", 0, "peak RSS"),
        Metric("load_peak_rss_bytes", "B", "lower", 0, "load peak RSS"),
        Metric("steady_rss_bytes", "B", "lower", 0, "steady RSS"),
        Metric("peak_vram_bytes", "B", "lower", 0, "peak VRAM"),
        Metric("vram_allocated_bytes", "B", "lower", 0, "VRAM allocated"),
        Metric("vram_device_bytes", "B", "lower", 0, "VRAM of the process"),
        Metric("gpu_utilization_ratio", "", "higher", 2, "GPU use"),
        Metric("energy_j", "J", "lower", 3, "energy"),
        Metric("power_w", "W", "lower", 1, "power"),
        Metric("load_s", "s", "lower", 3, "load"),
        Metric("first_call_s", "s", "lower", 3, "first call"),
        Metric("end_to_end_p50_s", "s", "lower", 4, "end-to-end p50"),
        Metric("tokenize_share", "", "lower", 3, "tokenise share"),
    )
}
SCORES = ("accuracy", "f1", "matthews_correlation", "pearson", "spearman")


Batch = dict[str, Any]
"""Model inputs by name (`input_ids`, `attention_mask`, ...): int64 numpy arrays of shape (batch, tokens)."""


class Predict(Protocol):
    def __call__(self, batch: Batch, /) -> Any:
        """Host arrays in, a float32 host array of logits (batch, classes) out; returns when it is finished."""


Part = Callable[[str], AbstractContextManager[Any]]
"""Makes the context in which one part of a call runs, by the part's name."""


@dataclass(frozen=True)
class Split:
    """`predict` told in its parts: make_tensors, copy_in, model, copy_out; it is finished where a part is left.

    `absent`: the parts that this runtime does not have or cannot tell apart, each with the reason.
    """

    run: Callable[[Batch, Part], Any]
    absent: dict[str, str]


@dataclass
class Loaded:
    """A runtime's answer: the function to time and what was found when the artifact was opened.

    `audit` is read after the first prediction, because some facts (compiled graphs, autocast) exist only then.
    """

    predict: Predict
    audit: Callable[[], Audit]
    threads: int | None = None
    """Intra-op threads read back from the engine; None where it does not tell."""
    split: Split | None = None
    """None where the runtime does not tell the parts of a call."""
    placement: Callable[[Batch], dict[str, Any]] | None = None
    """Where the weights are and what a pass over a batch moves; None where the runtime places nothing."""


@dataclass
class Audit:
    """What an artifact turned out to be. Bytes and elements are counted once for tied weights."""

    weight_bytes_by_dtype: dict[str, int] = field(default_factory=dict)
    linear_elements_by_dtype: dict[str, int] = field(default_factory=dict)
    changed_modules: dict[str, int] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)
    compiled_graphs: int | None = None
    autocast: str | None = None


@dataclass(frozen=True)
class BuildJob:
    """What a method's `build` gets. It writes the deployable files into `out`, before any forward pass."""

    model_dir: Path
    out: Path
    recipe: Recipe
    calibration: list[Batch]
    threads: int
    device: str = "cpu"
    """Where weights are made; "cuda" for what no CPU computes."""


def unmet(expect: Expect, audit: Audit) -> list[str]:
    """The expectations that `audit` does not meet, one sentence each; empty when all hold."""
    problems = []
    for what, wanted, found in (
        ("weight bytes", expect.weight_share, audit.weight_bytes_by_dtype),
        ("linear weight elements", expect.linear_share, audit.linear_elements_by_dtype),
    ):
        total = sum(found.values())
        for dtype, least in wanted.items():
            share = found.get(dtype, 0) / total if total else 0.0
            if share < least:
                problems.append(f"{share:.1%} of the {what} are {dtype}, expected at least {least:.1%}")
    if expect.changed_modules is not None:
        changed = sum(audit.changed_modules.values())
        if changed < expect.changed_modules:
            problems.append(f"{changed} modules changed, expected at least {expect.changed_modules}")
    for key, value in expect.engine.items():
        if audit.engine.get(key) != value:
            problems.append(f"the engine reports {key}={audit.engine.get(key)}, expected {value}")
    if expect.compiled_graphs is not None and (audit.compiled_graphs or 0) < expect.compiled_graphs:
        problems.append(f"{audit.compiled_graphs or 0} graphs compiled, expected {expect.compiled_graphs}")
    if expect.autocast is not None and audit.autocast != expect.autocast:
        problems.append(f"autocast ran as {audit.autocast}, expected {expect.autocast}")
    return problems


def content_hash(value: Any) -> str:
    """SHA-256 of `value` as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_hash(path) for path in files}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for a near miss, else the list of what exists."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""


def cache_dir() -> Path:
    """Where artifacts, prepared data and the demo model live: $QTOOL_CACHE, else the user's cache folder."""
    if own := os.environ.get("QTOOL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qtool"
