"""Writes a small run folder by hand, as a sweep would leave it, for the tests of summary and report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qtool.core import Measurement

STARTED = "2026-11-30T12:00:00+00:00"


@dataclass
class Made:
    """What one recipe's processes found: a p50 a round; `answers` are classes, or values of a regression."""

    p50_s: Sequence[float]
    answers: Sequence[float] | None = None
    peak_bytes: Sequence[float] = (400e6, 400e6, 400e6)
    disk_bytes: int = 90_000_000
    metrics: dict[str, float | None] = field(default_factory=dict)
    batch_size: int = 1
    device: str = "cpu"
    contended: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    bad: dict[str, tuple[str, str, str | None]] = field(default_factory=dict)
    """Stage (`plan`, `build`, `score`, `measure-1`): its status, error and next step."""


def times(p50_s: float, calls: int) -> list[float]:
    """Samples spread evenly by 10 % on both sides of `p50_s`: their p95 is 1.09 times it."""
    return [float(x) for x in np.linspace(0.9 * p50_s, 1.1 * p50_s, calls)]


def write_run(
    folder: Path,
    recipes: dict[str, Made],
    *,
    labels: Sequence[float] | None = None,
    metric: str | None = "accuracy",
    metrics: Sequence[str] | None = None,
    calls: int = 131,
    run: dict[str, Any] | None = None,
    more: Sequence[Measurement] = (),
) -> Path:
    """`run.json`, `results.jsonl` and `predictions/` of a run in which every recipe was swept once."""
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    lines, plan = [], []
    rounds = max(len(made.p50_s) for made in recipes.values())
    for name, made in recipes.items():
        trial = f"{name}-{made.device}-b{made.batch_size}"
        recipe = name.split("@")[0]
        common = {"recipe": recipe, "device": made.device, "started_at": STARTED}
        plan.append(
            {
                "trial_id": trial,
                "recipe": recipe,
                "device": made.device,
                "batch_size": made.batch_size,
                "fingerprint": f"print-{recipe}",
                "description": f"what {recipe} does",
            }
        )

        def add(
            stage: str, trial_id: str, made: Made = made, common: dict[str, Any] = common, **facts: Any
        ) -> bool:
            key = stage if facts.get("round") is None else f"{stage}-{facts['round']}"
            status, error, next_step = made.bad.get(key, ("ok", None, None))
            if status != "ok":
                facts = {"round": facts.get("round"), "error": error, "next_step": next_step}
            size = made.batch_size if stage in ("plan", "measure") else None
            record = {"stage": stage, "trial_id": trial_id, "status": status, "batch_size": size, "host": "h"}
            lines.append(Measurement(**(record | common | facts)))
            return status == "ok"

        # As a sweep does: what went wrong is the last line of its trial.
        if "plan" in made.bad:
            add("plan", trial)
            continue
        build = {"artifact": "a", "disk_bytes": made.disk_bytes, "build_s": 1.0, "cached": False}
        if not add("build", f"print-{recipe}", values=build):
            continue
        predictions = None
        if made.answers is not None and labels is not None:
            predictions = f"predictions/{recipe}-{made.device}.npz"
            save(folder / predictions, labels, made.answers, regression=metric in ("pearson", "spearman"))
        audit = {"weight_bytes_by_dtype": {"float32": made.disk_bytes}}
        score = {"audit": audit, "weight_bytes": made.disk_bytes, "metrics": made.metrics}
        if not add("score", f"print-{recipe}-{made.device}", values=score | {"predictions": predictions}):
            continue
        for number, p50_s in enumerate(made.p50_s, 1):
            samples = {"latency_s": times(p50_s, calls)}
            samples |= {"tokenize_s": [0.2 * p50_s] * 64, "end_to_end_s": [1.25 * p50_s] * 64}
            values = {"load_s": float(number), "first_call_s": 0.5, "contended": made.contended}
            values |= {"peak_rss_bytes": made.peak_bytes[number - 1], "load_peak_rss_bytes": 5e8}
            values["steady_rss_bytes"] = 3e8
            for absent in ("peak_vram_bytes", "gpu_utilization_ratio", "energy_j"):
                values |= {absent: None, f"{absent}_reason": "not measured on a CPU"}
            if not add("measure", trial, round=number, samples=samples, values=values | made.values):
                break
    facts = {
        "schema": 1,
        "model": "a/model",
        "task": "demo" if metric else None,
        "metric": metric,
        "metrics": list(metrics or ([metric] if metric else [])),
        "limit": None,
        "rounds": rounds,
        "plan": plan,
        "host": {"cpu": "A CPU | two cores", "cores": 2},
        "versions": {"torch": "2.13.0"},
        "args": {"threads": 2},
        "notes": ["tokens were truncated"],
        "data": {"rows": len(labels) if labels is not None else None, "truncated": 0},
    }
    (folder / "run.json").write_text(json.dumps(facts | (run or {})))
    with (folder / "results.jsonl").open("w") as out:
        for line in [*lines, *more]:
            out.write(json.dumps(line.model_dump()) + "\n")
    return folder


def write_regression(folder: Path, run: dict[str, Any] | None = None) -> Path:
    """A run of two recipes scored by Pearson's correlation of 60 examples: its draws are made, and may be stored."""
    labels = [float(i % 7) for i in range(60)]
    recipes = {
        name: Made(
            (0.01,) * 3, [x + shift * ((5 * i) % 11) for i, x in enumerate(labels)], metrics={"pearson": 0.9}
        )
        for name, shift in (("fp32", 0.1), ("int8", 0.2))
    }
    return write_run(folder, recipes, labels=labels, metric="pearson", run=run)


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Everything below a folder with its time of change and its bytes, to see that nothing was written."""
    return {
        path: (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


def save(path: Path, labels: Sequence[float], answers: Sequence[float], *, regression: bool = False) -> None:
    """Stored predictions whose best class (or value) for example i is answers[i]."""
    told, ids = np.asarray(answers), np.arange(len(labels))
    if regression:
        logits, true = told[:, None].astype(np.float32), np.asarray(labels, float)
    else:
        true = np.asarray(labels, np.int64)
        logits = np.eye(max(2, int(true.max(initial=0)) + 1, int(told.max()) + 1), dtype=np.float32)[told]
    np.savez(path, logits=logits, labels=true, ids=ids)
