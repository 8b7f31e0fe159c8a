"""`qtool load`: what dynamic batching would do with the recipes of a run, from stored samples alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import capacity, evidence, replicas, rows, stats
from qtool.arrivals import Pattern
from qtool.claims import Rounds
from qtool.core import QtoolError, did_you_mean
from qtool.evidence import Evidence
from qtool.queueing import Policy
from qtool.rows import Trial
from qtool.service_times import END_TO_END, MODEL_ONLY, ServiceTimes, from_trials


@dataclass(frozen=True)
class Question:
    """Traffic, the limit of its p95 in seconds, and what is given of the policy (None: the best is searched)."""

    rate_per_s: float
    pattern: Pattern
    sla_s: float
    max_batch: int | None = None
    max_wait_s: float | None = None
    recipes: Sequence[str] = ()
    device: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Gathered:
    """What is simulated: service times of each ok recipe, which samples they are, and why others are left out."""

    found: Evidence
    device: str
    what: str
    times: Mapping[str, ServiceTimes]
    left_out: Mapping[str, str]


def answer(run_dir: Path, question: Question) -> dict[str, Any]:
    """Rows by recipe, the best of them, and what follows from it, JSON-able.

    Raises QtoolError for a run that cannot be read, or that holds no recipe whose service times are known.
    """
    gathered = gather(run_dir, question.recipes, question.device)
    found = [_row(gathered, name, question) for name in gathered.times]
    best = _best(found)
    run = gathered.found.run
    threads = _count((run.get("args") or {}).get("threads"))
    cores = _count((run.get("host") or {}).get("physical_cores"))
    return {
        "run": str(run_dir),
        "model": run["model"],
        "device": gathered.device,
        "threads": threads,
        "physical_cores": cores,
        "replicas_that_fit": cores // threads if gathered.device == "cpu" and cores and threads else None,
        "runtimes": {name: _runtime(run, name) for name in gathered.times},
        "samples": gathered.what,
        "arrival_per_s": question.rate_per_s,
        "pattern": question.pattern.name,
        "pattern_told": question.pattern.told(),
        "sla_s": question.sla_s,
        "percentile": "p95",
        "most_load_ratio": capacity.MOST_LOAD,
        "seed": question.seed,
        "rows": found,
        "best": best["recipe"] if best else None,
        "not_told_apart": _tied(found, best, gathered.times, question) if best else [],
        "left_out": dict(gathered.left_out),
        "notes": _notes(gathered, question),
    }


def gather(run_dir: Path, recipes: Sequence[str], device: str | None) -> Gathered:
    """Service times of every ok recipe on one device. Raises QtoolError where there are none."""
    found = evidence.load_times(run_dir)
    devices = list(dict.fromkeys(trial.group.device for trial in found.trials))
    if len(found.hosts) > 1:
        raise QtoolError(
            f"{run_dir} holds {len(found.hosts)} hosts ({', '.join(found.hosts)}), and one server runs on one."
            " Sweep with one --on."
        )
    if not devices:
        raise QtoolError(f"{run_dir} planned no trial. Sweep again.")
    device = device or devices[0]
    if device not in devices:
        raise QtoolError(f"--device {device}: {run_dir} was swept on {', '.join(devices)}.")
    trials = [trial for trial in found.trials if trial.group.device == device]
    known = list(dict.fromkeys(trial.recipe for trial in trials))
    for name in recipes:
        if name not in known:
            raise QtoolError(
                f"--recipe {name}: run {run_dir} has none of that name.{did_you_mean(name, known)}"
            )
    by_recipe = {
        name: [trial for trial in trials if trial.recipe == name]
        for name in known
        if name in recipes or not recipes
    }
    ok = {name: {t.group.batch_size: t for t in own if t.status == "ok"} for name, own in by_recipe.items()}
    # one kind of sample for all: a recipe must not look faster because its tokenising is left out
    whole = all(trial.samples(END_TO_END) for sizes in ok.values() for trial in sizes.values())
    what = END_TO_END if whole else MODEL_ONLY
    times: dict[str, ServiceTimes] = {}
    left_out: dict[str, str] = {}
    for name, sizes in ok.items():
        made = from_trials(sizes, what) if 1 in sizes else None
        if made:
            times[name] = made
        else:
            left_out[name] = _why(by_recipe[name], sizes)
    if not times:
        why = next(iter(left_out.values()), "it has no recipe")
        raise QtoolError(f"{run_dir} holds no service times on {device}: {why}.")
    return Gathered(found, device, what, times, left_out)


def _why(trials: Sequence[Trial], ok: Mapping[int, Trial]) -> str:
    if not ok:
        return f"{trials[0].status}: {trials[0].cause}"
    if 1 not in ok:
        return (
            "batch size 1 was not measured, and a lone request is a batch of 1. Sweep with --batch-size 1 too"
        )
    return "no round has samples of every batch size. Sweep again with --resume"


def settle(times: ServiceTimes, question: Question) -> tuple[Policy, float]:
    """The policy that is given, or the best that was tried, and the largest rate that it carries."""
    tried = capacity.policies(times, question.sla_s, question.max_batch, question.max_wait_s)
    return capacity.best_policy(times, question.pattern, question.sla_s, tried, question.seed)


def _row(gathered: Gathered, name: str, question: Question) -> dict[str, Any]:
    times = gathered.times[name]
    policy, largest = settle(times, question)
    rate, pattern, seed = question.rate_per_s, question.pattern, question.seed
    seen = capacity.report(times, pattern, rate, policy, seed)
    cells = {key: capacity.cell(seen, key) for key in capacity.SHARES}
    p95_s, load = cells["p95_s"]["value"], capacity.load(times, rate, policy)
    meets = p95_s is not None and p95_s <= question.sla_s and load <= capacity.MOST_LOAD
    largest = replicas.agree(times, pattern, policy, question.sla_s, seed, rate, meets, largest)
    needed = stats.least_samples(0.99)
    errors = [s.error_ratio for s in seen if s and s.error_ratio is not None]
    return {
        "recipe": name,
        "rounds": len(times.rounds),
        "measured_batch_sizes": times.sizes,
        "max_batch": policy.max_batch,
        "max_wait_s": policy.max_wait_s,
        "given": bool(question.max_batch) and question.max_wait_s is not None,
        "capacity_per_s": rate / load,
        "load_ratio": load,
        **cells,
        "p99_reason": f"{times.fewest} service samples, a p99 of theirs needs {needed}"
        if times.fewest < needed
        else None,
        "rounds_without_bound": sum(s is None for s in seen),
        "after_pause": times.after_pause is not None,
        "lone_service_p95_s": capacity.lone_s(times, capacity.ALONE),
        "lone_p95_s": capacity.lone_s(times, policy),
        "meets": meets,
        "mean_wait_s": capacity.mean(seen, "mean_wait_s"),
        "busy_ratio": capacity.mean(seen, "busy_ratio"),
        "mean_batch": capacity.mean(seen, "mean_batch"),
        "simulated_requests": sum(s.requests for s in seen if s),
        "simulation_error_ratio": max(errors) if errors else None,
        "largest_rate_per_s": largest or None,
        "at_most_load": largest >= 0.999 * capacity.most_rate(times, policy),
        "replicas": 1
        if meets
        else replicas.replicas(times, pattern, policy, rate, largest, question.sla_s, seed),
        "curve": _curve(gathered, name),
    }


def _curve(gathered: Gathered, name: str) -> list[dict[str, Any]]:
    """Latency and throughput of the model alone at each measured batch size, as the report tells them."""
    trials = [t for t in gathered.found.trials if t.recipe == name and t.group.device == gathered.device]
    points = []
    for trial in sorted((t for t in trials if t.status == "ok"), key=lambda t: t.group.batch_size):
        told = rows.times_and_sizes(trial, None)
        points.append(
            {
                "batch_size": trial.group.batch_size,
                "p50_s": told["latency_p50_s"]["value"],
                "p95_s": told["latency_p95_s"]["value"],
                "throughput_per_s": told["throughput_per_s"]["value"],
            }
        )
    return points


def _best(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The recipe that carries the largest rate within the SLA, of those that keep it at the asked one if any do."""
    able = [row for row in found if row["largest_rate_per_s"]]
    return max(able, key=lambda row: (row["meets"], row["largest_rate_per_s"])) if able else None


def _tied(
    found: Sequence[dict[str, Any]],
    best: dict[str, Any],
    times: Mapping[str, ServiceTimes],
    question: Question,
) -> list[str]:
    """Recipes whose p95 at the best's largest rate, paired by round, is not shown to differ from the best's.

    Only those that keep the SLA at some rate. The same requests come to all of them.
    """

    def p95_s(row: dict[str, Any]) -> dict[int, float]:
        own, policy = times[row["recipe"]], Policy(row["max_batch"], row["max_wait_s"])
        rate = best["largest_rate_per_s"]
        seen = capacity.evaluate(own, question.pattern, rate, policy, capacity.FINE, question.seed)
        told = (each.percentiles_s["p95_s"] if each else math.inf for each in seen)
        return dict(zip(own.rounds, told, strict=True))

    rivals = [row for row in found if row is not best and row["largest_rate_per_s"]]
    mine = p95_s(best) if rivals else {}
    return [row["recipe"] for row in rivals if may_equal(mine, p95_s(row))]


def may_equal(mine: Mapping[int, float], its: Mapping[int, float]) -> bool:
    """Whether 1 lies in the paired interval of two recipes' seconds by round.

    Infinite seconds are a queue without bound: such a round counts as the farthest of the others. One round has no
    interval and shows nothing either way: not equal.
    """
    shared = sorted(r for r in mine.keys() & its.keys() if not math.isinf(mine[r]) or not math.isinf(its[r]))
    if len(shared) < 2:
        return False
    ratios = [its[r] / mine[r] for r in shared]
    told = [ratio for ratio in ratios if 0 < ratio < math.inf]
    if not told:
        return min(ratios) < max(ratios)
    low, high = min(1.0, *told), max(1.0, *told)
    interval = Rounds([min(max(ratio, low), high) for ratio in ratios]).interval()
    return interval.low is not None and interval.high is not None and interval.low <= 1 <= interval.high


def _count(value: object) -> int | None:
    """A number of threads or cores; None where the run does not say it."""
    return value if isinstance(value, int) and value > 0 else None


def _runtime(run: Mapping[str, Any], name: str) -> str | None:
    return ((run.get("recipes") or {}).get(name) or {}).get("runtime")


def _notes(gathered: Gathered, question: Question) -> list[str]:
    notes = []
    largest = {name: times.sizes[-1] for name, times in gathered.times.items()}
    alone = [name for name, size in largest.items() if size == 1]
    asked = question.max_batch
    if len(alone) == len(largest):
        notes.append(
            "batching is off: the run measured batch size 1 only. To learn more: "
            + sweep_command(gathered, question)
        )
    elif capped := [f"{name} {size}" for name, size in largest.items() if asked and size < asked]:
        notes.append(
            f"max-batch {asked} is capped at the largest measured batch size ({', '.join(capped)}):"
            " nothing is extrapolated"
        )
    elif alone and asked != 1:
        notes.append(f"batching is off for {', '.join(alone)}: measured at batch size 1 only")
    if gathered.what == MODEL_ONLY:
        notes.append("tokenising is left out: the run holds no end-to-end times of every recipe")
    busy = [t for t in gathered.found.trials if t.recipe in gathered.times and t.contended]
    if busy:
        used = "GPU" if any(trial.gpu_shared for trial in busy) else "CPUs"
        notes.append(f"other work used the {used} while the run was measured: sweep again on an idle machine")
    return notes


def sweep_command(gathered: Gathered, question: Question) -> str:
    """The command that would measure larger batches."""
    run = gathered.found.run
    args = run.get("args") or {}
    words = ["qtool", "sweep", str(run["model"])]
    words += ["--task", str(args["task"])] if args.get("task") else []
    words += ["--data", str(args["data"])] if args.get("data") else []
    for flag in ("text", "text_pair", "label"):
        words += [f"--{flag.replace('_', '-')}", str(args[flag])] if args.get(flag) else []
    for name in list(gathered.times)[:3] if not question.recipes else question.recipes:
        words += ["--recipe", name]
    for size in sorted({1, 8, 32, question.max_batch or 1}):
        words += ["--batch-size", str(size)]
    return shlex.join([*words, *(["--no-score"] if not args.get("score", True) else [])])
