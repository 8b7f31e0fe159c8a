"""What the driver of a sweep over a cluster costs by itself: 1,000 trials that do nothing on a local Ray node.

    python benchmarks/ray_driver_cost.py [--trials 1000]

Each trial is a task of Ray that calls the `null` runtime in its own process: 1,000 child processes would take an hour,
and none of it is the driver's. Counted is everything the driver does between the first build and the last line: hand
tasks to Ray, wait for each before the next of its node, check and store what it found. Target: under 20 milliseconds a
trial, and memory that does not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET_S = 0.020
FLAT_BYTES = 32 * 2**20
BATCHES = 20


@dataclass
class Cost:
    """Seconds from start to end, CPU seconds of this process, and its resident bytes every 100 lines."""

    trials: int
    wall_s: float
    cpu_s: float
    rss_bytes: list[int]
    run_dir: Path


def null_stage(job: Any) -> dict[str, Any]:
    """Stands in for `remote.run`: the null runtime, timed in this process."""
    import numpy as np

    from qtool import plugins, timing
    from qtool.core import Recipe

    values: dict[str, Any] = {"artifact": job.artifact, "build_s": 0.0, "cached": False, "disk_bytes": 1}
    if job.stage == "score":
        values = {"audit": {}, "weight_bytes": 0, "predictions": None, "metrics": {}}
    if job.stage in ("measure", "harness"):
        loaded = plugins.load("runtimes", "null").wrap(None, Recipe(**job.spec["recipe"]), "cpu", 1)
        batch = {"input_ids": np.ones((job.spec.get("batch_size", 1), 16), np.int64)}
        found = timing.time_calls(loaded.predict, [batch], min_time_s=0.0, min_calls=130, max_time_s=1.0)
        values = {"values": {"threads": 1}, "samples": {"latency_s": found}}
    return {
        "status": "ok",
        "values": values,
        "error": None,
        "next_step": None,
        "log": b"",
        "predictions": None,
    }


@contextmanager
def null_stages() -> Iterator[None]:
    from qtool import remote

    before, remote.run = remote.run, null_stage  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        remote.run = before


def measure(trials: int, folder: Path, address: str | None = None, on: tuple[str, ...] = ()) -> Cost:
    """A plan of `trials` trials of the null runtime, carried out over Ray into `folder`."""
    import psutil

    from qtool import ray_sweep, recipes, store
    from qtool.plan import Options, make_plan, run_record

    baseline = next(recipe for recipe in recipes.load_all() if recipe.name == "fp32")
    null = {"runtime": "null", "runtime_options": {}, "compile": {}}
    names = [baseline.name, *(f"null-{number}" for number in range(1, trials // BATCHES))]
    chosen = {name: baseline.model_copy(update={"name": name, **null}) for name in names}
    data = {"data_hash": "d", "calibration_hash": None, "calibration_rows": 0, "rows": 1, "notes": []}
    model = {"content": "m", "revision": None, "source": "checkpoint", "model_type": "bert", "folder": "/"}
    probed = {
        "model": {**model, "weight_bytes": 1},
        "data": data,
        "task": {"name": "demo", "score": "accuracy", "metrics": []},
    }
    nothing = dict.fromkeys(
        ("revision", "task", "data", "text", "text_pair", "label", "metric", "seq_len", "policy", "track")
    ) | dict.fromkeys(("limit", "split", "calibration"))
    flags = {"auto_rounds": False, "score": False, "resume": False, "dry_run": False}
    options = Options(
        model="null",
        patterns=[],
        devices=["cpu"],
        batch_sizes=list(range(1, BATCHES + 1)),
        rounds=1,
        speedup_within=0.1,
        time_budget_s=1.0,
        threads=1,
        timeout_s=60.0,
        out=folder,
        executor="ray",
        address=address,
        on=list(on),
        **nothing,
        **flags,
    )
    reach = ray_sweep.Reach(options)
    plan = make_plan(options, chosen, probed, folder, [(kind, _never) for kind in reach.kinds])
    plan.cluster, plan.hosts = reach, reach.hosts(options)
    folder.mkdir(parents=True, exist_ok=True)
    process, rss = psutil.Process(), []
    with store.Writer(folder) as writer, null_stages():
        store.write_json(folder / "run.json", run_record(plan))
        sweep, append = reach.sweep(plan, folder, writer), writer.append
        lines = 0

        def counted(line: Any) -> None:
            nonlocal lines
            append(line)
            lines += 1
            if lines % 100 == 0:
                rss.append(process.memory_info().rss)

        writer.append = counted  # pyright: ignore[reportAttributeAccessIssue]
        started, cpu = time.perf_counter(), time.process_time()
        sweep.go()
        return Cost(len(plan.trials), time.perf_counter() - started, time.process_time() - cpu, rss, folder)


def _never(*_: Any, **__: Any) -> None:
    """Every recipe can run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QTOOL_CACHE"] = f"{folder}/cache"
        cost = measure(options.trials, Path(folder) / "run")
        lines = [json.loads(line) for line in (cost.run_dir / "results.jsonl").read_text().splitlines()]
    measured = sum(line["stage"] == "measure" and line["status"] == "ok" for line in lines)
    each, cpu = cost.wall_s / cost.trials, cost.cpu_s / cost.trials
    half = cost.rss_bytes[len(cost.rss_bytes) // 2]
    grown = cost.rss_bytes[-1] - half
    print(f"{measured} of {cost.trials} trials measured in {cost.wall_s:.1f} s")
    print(f"resident MiB every 100 lines: {[round(x / 2**20) for x in cost.rss_bytes]}")
    verdict = "met" if each < TARGET_S else "missed"
    print(
        f"driver: {1e3 * each:.1f} ms a trial ({1e3 * cpu:.1f} ms of CPU), target under {1e3 * TARGET_S:g}: {verdict}"
    )
    verdict = "met" if grown < FLAT_BYTES else "missed"
    print(
        f"driver memory over the second half: {grown / 2**20:+.1f} MiB, target under {FLAT_BYTES >> 20}: {verdict}"
    )


if __name__ == "__main__":
    main()
