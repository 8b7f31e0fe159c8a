"""Every CUDA path once on this machine's GPU: build, score, measure, profile, and both clocks.

    python benchmarks/gpu_check.py [--out DIR]

Target: every recipe that lists cuda is ok with its memory, utilisation, power and energy, in under six minutes and
without a network; one that this GPU is too old for is skipped. Exit code 0 for that or where no GPU is visible (which
it says), else 1. With --out the table is kept as gpu_check.md and gpu_check.json.

The stages are those of a sweep, run with fewer calls: builds and scores several at a time, then one measuring child
after the other, each of which imports its libraries while the one before it measures. The times are a check that
each path runs, no comparison of recipes: that is `qtool sweep demo --device cuda`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import common
from gpu_children import CHILD_TIMEOUT_S, finish, start

from qtool import host, recipes
from qtool.core import BASELINE, Recipe

FIGURES = {"peak_vram_bytes": 1.0, "gpu_utilization_ratio": 0.0, "power_w": 1.0, "energy_j": 0.0}
"""Metrics that need a GPU, and the least value that a real forward pass on one can have."""
LIMIT_ROWS = 64
BUDGET_S = 360.0
SECONDS = {
    "probe": 8.0,
    "prepare": 14.0,
    "compile": 30.0,
    "measure": 7.0,
    "import": 6.0,
    "profile": 30.0,
    "clocks": 12.0,
}
"""Guesses for the estimate alone: one child of each kind, and what a compiled recipe adds where it is prepared."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="keep gpu_check.md and gpu_check.json here")
    options = parser.parse_args()
    gpus = host.gpus()
    if not host.cuda_available():
        print("no CUDA GPU is visible\nnot run on a GPU")
        return
    chosen = [recipe for recipe in recipes.load_all() if "cuda" in recipe.devices]
    cores = host.physical_cores()
    print(f"GPU: {gpus[0]['name']}, capability {gpus[0]['capability']}, driver {gpus[0]['driver']}")
    print(f"{len(chosen)} recipes, about {estimate_s(chosen, cores):.0f} s on {cores} cores", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, others = check(chosen, Path(folder), cores)
        compare(rows)
    seconds = time.monotonic() - started
    found = problems(rows, [recipe.name for recipe in chosen]) + [why for why in others.values() if why]
    if seconds > BUDGET_S:
        found.append(f"it took {seconds:.0f} s, more than {BUDGET_S:.0f}")
    whole = {
        "gpu": gpus[0],
        "versions": host.versions(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "rows": rows,
        "paths": others,
        "problems": found,
    }
    table = markdown(whole)
    print(table)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_check.md").write_text(table)
        (options.out / "gpu_check.json").write_text(json.dumps(whole, indent=1, allow_nan=False))
    sys.exit(1 if found else 0)


def estimate_s(chosen: list[Recipe], cores: int) -> float:
    """Seconds of the whole check, from `SECONDS`."""
    cost, compiled = SECONDS, sum(bool(recipe.compile) for recipe in chosen)
    prepared = (len(chosen) * cost["prepare"] + compiled * cost["compile"]) / at_once(cores)
    # the longest may be the last to start
    prepared += cost["compile"] if compiled else 0.0
    measured = cost["import"] + len(chosen) * cost["measure"]
    return cost["probe"] + prepared + measured + cost["profile"] + cost["clocks"]


def at_once(cores: int) -> int:
    """Children that build and score side by side: most of their time is one thread importing libraries."""
    return max(1, min(6, cores // 2))


def check(
    chosen: list[Recipe], scratch: Path, cores: int
) -> tuple[list[dict[str, Any]], dict[str, str | None]]:
    """A row for each recipe, and what is wrong with each path that is no recipe (None: nothing)."""
    model = common.pick_model(scratch)
    threads = min(4, cores)
    asked = argparse.Namespace(model=model, data=None, limit=LIMIT_ROWS, threads=threads)
    bench = common.prepare_model(asked, scratch, score=True)
    base = {"model_dir": str(bench.model_dir), "data": str(bench.data), "device": "cuda", "threads": threads}
    specs: dict[str, dict[str, Any]] = {}
    rows = {}
    for recipe in chosen:
        why = recipes.why_not(recipe, "cuda")
        if why:
            rows[recipe.name] = row(recipe.name, {"status": "skipped", "error": str(why)})
            continue
        artifact = scratch / "artifacts" / recipe.name
        artifact.parent.mkdir(exist_ok=True)
        specs[recipe.name] = base | {
            "recipe": recipe.model_dump(),
            "out": str(artifact),
            "artifact": str(artifact),
            "batch_size": 1,
            "score": True,
            "metrics": ["accuracy"],
            "predictions": str(scratch / "predictions" / f"{recipe.name}.npz"),
        }
    with ThreadPoolExecutor(at_once(cores)) as pool:
        # compiled ones first: they take longest
        order = sorted(specs, key=lambda name: not specs[name]["recipe"]["compile"])
        answers = pool.map(lambda name: finish(start("prepare", specs[name]), specs[name]), order)
        prepared = dict(zip(order, answers, strict=True))
    good = [name for name in specs if prepared[name]["status"] == "ok"]
    waiting = start("measure", specs[good[0]]) if good else None
    for name, following in zip(good, [*good[1:], None], strict=True):
        assert waiting is not None
        # the next one imports meanwhile, and touches the GPU only when it gets its line
        running, waiting = waiting, start("measure", specs[following]) if following else None
        rows[name] = row(name, finish(running, specs[name]), prepared[name])
    for name, answer in prepared.items():
        rows.setdefault(name, row(name, answer))
    others = {"profile on cuda": profile(model, scratch), "both clocks": clocks(scratch)}
    return [rows[recipe.name] for recipe in chosen], others


def problems(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What is wrong with the summary's `rows`, one sentence each, given the recipes that should have run.

    A skip is fine only where the GPU itself is too old for the recipe.
    """
    found = []
    on_gpu = {row["recipe"]: row for row in rows if row["device"] == "cuda"}
    for name in names:
        row = on_gpu.get(name)
        if row is None:
            found.append(f"{name}: no row on cuda")
        elif row["status"] == "skipped" and "capability" in (row["cause"] or ""):
            continue
        elif row["status"] != "ok":
            found.append(f"{name}: {row['status']}: {row['cause']}")
        else:
            for figure, least in FIGURES.items():
                metric = row["metrics"][figure]
                if metric["value"] is None:
                    found.append(f"{name}: no {figure}: {metric.get('reason')}")
                elif metric["value"] <= least:
                    found.append(f"{name}: {figure} is {metric['value']}, expected more than {least:g}")
    return found


def row(name: str, answer: dict[str, Any], prepared: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row like a summary's from the answers of a recipe's children."""
    values = answer.get("values") or {}
    metrics = {
        figure: {"value": values.get(figure), "reason": values.get(f"{figure}_reason")}
        for figure in (*FIGURES, "vram_allocated_bytes", "vram_device_bytes", "latency_p50_s")
    }
    return {
        "recipe": name,
        "device": "cuda",
        "status": answer["status"],
        "cause": answer.get("error"),
        "metrics": metrics,
        "throttled_by": values.get("throttle_reasons") or [],
        "gpu_shared": bool(values.get("other_processes")),
        "prepared": (prepared or {}).get("values") or {},
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Put into every ok row its p50 over the baseline's, and the share of answers that agree with it."""
    import numpy as np

    answers = {}
    for each in rows:
        path = each["prepared"].get("predictions")
        if each["status"] == "ok" and path and Path(path).is_file():
            with np.load(path, allow_pickle=False) as file:
                answers[each["recipe"]] = file["logits"].argmax(axis=1)
    base = next((each for each in rows if each["recipe"] == BASELINE and each["status"] == "ok"), None)
    for each in rows:
        name = each["recipe"]
        if base is None or name not in answers or BASELINE not in answers:
            continue
        ours, theirs = (row_["metrics"]["latency_p50_s"]["value"] for row_ in (each, base))
        each["metrics"]["speedup"] = {"value": theirs / ours}
        each["metrics"]["agreement"] = {"value": float((answers[name] == answers[BASELINE]).mean())}


def profile(model: str, scratch: Path) -> str | None:
    """`qtool profile` of the baseline on the GPU; None where it ended well and saw copies, else what is wrong."""
    out = scratch / "profile"
    command = [sys.executable, "-m", "qtool.cli", "profile", model, "--recipe", BASELINE, "--device", "cuda"]
    command += [
        "--task",
        "demo",
        "--batch-size",
        "1",
        "--limit",
        str(LIMIT_ROWS),
        "--out",
        str(out),
        "--json",
    ]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"profile: no answer within {CHILD_TIMEOUT_S} s"
    if done.returncode:
        return f"profile: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    return None


def clocks(scratch: Path) -> str | None:
    """`clocks_agree.py` as a user runs it; None where its targets are met."""
    command = [sys.executable, str(Path(__file__).with_name("clocks_agree.py")), str(scratch / "random")]
    if not (scratch / "random").is_dir():
        command.pop()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"clocks: no answer within {CHILD_TIMEOUT_S} s"
    print(done.stdout, end="")
    if done.returncode:
        return f"clocks: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    missed = [line for line in done.stdout.splitlines() if line.endswith(": missed")]
    return f"clocks: {missed[0]}" if missed else None


def markdown(whole: dict[str, Any]) -> str:
    """The table that is printed, and committed as a report."""
    gpu, libraries = whole["gpu"], ("torch", "transformers", "torchao", "bitsandbytes", "onnxruntime")
    versions = ", ".join(
        f"{name} {whole['versions'][name]}" for name in libraries if name in whole["versions"]
    )
    lines = [
        f"# {gpu['name']}: every CUDA path once",
        "",
        f"Capability {gpu['capability']}, driver {gpu['driver']}; {versions}; {whole['made_at']}, {whole['seconds']:.0f} s."
        " Batch 1, few calls: a check that each path runs, no comparison of recipes.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * (len(COLUMNS) - 1)}",
        *(f"| {' | '.join(cells(row))} |" for row in whole["rows"]),
        "",
        *(f"- {name}: {why or 'ok'}" for name, why in whole["paths"].items()),
        "",
        f"{len(whole['problems'])} problems" + "".join(f"\n- {problem}" for problem in whole["problems"]),
    ]
    return "\n".join(lines) + "\n"


COLUMNS = ("recipe", "p50 ms", "x fp32", "agrees", "VRAM allocated MB", "VRAM of process MB")
COLUMNS = (*COLUMNS, "GPU use %", "power W", "energy J", "flags")
SCALED = {
    "latency_p50_s": 1e3,
    "speedup": 1,
    "agreement": 1,
    "vram_allocated_bytes": 1e-6,
    "vram_device_bytes": 1e-6,
    "gpu_utilization_ratio": 100,
    "power_w": 1,
    "energy_j": 1,
}
"""Metric of each column after the first, and what its unit is multiplied with."""


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table; what is not ok says why."""
    if row["status"] != "ok":
        return [
            row["recipe"],
            f"{row['status']}: {row['cause']}".replace("|", "/"),
            *[""] * (len(COLUMNS) - 2),
        ]
    shown = []
    for name, scale in SCALED.items():
        value = (row["metrics"].get(name) or {}).get("value")
        shown.append("-" if value is None else f"{value * scale:.4g}")
    flags = [*row["throttled_by"], *(["shared GPU"] if row["gpu_shared"] else [])]
    return [row["recipe"], *shown, ", ".join(flags)]


if __name__ == "__main__":
    main()
