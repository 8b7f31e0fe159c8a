"""`qtool load`: what dynamic batching would do with the recipes of a run, from stored samples alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import capacity, evidence, stats
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
    rows = [_row(name, times, question) for name, times in gathered.times.items()]
    best = _best(rows)
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
        "rounds": max(len(times.rounds) for times in gathered.times.values()),
        "arrival_per_s": question.rate_per_s,
        "pattern": question.pattern.name,
        "pattern_told": question.pattern.told(),
        "sla_s": question.sla_s,
        "percentile": "p95",
        "seed": question.seed,
        "rows": rows,
        "best": best["recipe"] if best else None,
        "not_told_apart": _tied(rows, best, gathered.times) if best else [],
        "left_out": dict(gathered.left_out),
        "notes": _notes(gathered, question),
    }


def gather(run_dir: Path, recipes: Sequence[str], device: str | None) -> Gathered:
    """Service times of every ok recipe on one device. Raises QtoolError where there are none."""
    found = evidence.load_times(run_dir)
    devices = list(dict.fromkeys(trial.group[0] for trial in found.trials))
    if not devices:
        raise QtoolError(f"{run_dir} planned no trial. Sweep again.")
    device = device or devices[0]
    if device not in devices:
        raise QtoolError(f"--device {device}: {run_dir} was swept on {', '.join(devices)}.")
    trials = [trial for trial in found.trials if trial.group[0] == device]
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
    ok = {name: {t.group[1]: t for t in own if t.status == "ok"} for name, own in by_recipe.items()}
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


def _row(name: str, times: ServiceTimes, question: Question) -> dict[str, Any]:
    policy, largest = settle(times, question)
    rate, pattern, seed = question.rate_per_s, question.pattern, question.seed
    seen = capacity.report(times, pattern, rate, policy, seed)
    cells = {key: capacity.cell(seen, key) for key in capacity.SHARES}
    p95_s, load = cells["p95_s"]["value"], capacity.load(times, rate, policy)
    needed = stats.least_samples(0.99)
    errors = [s.error_ratio for s in seen if s and s.error_ratio is not None]
    return {
        "recipe": name,
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
        "meets": p95_s is not None and p95_s <= question.sla_s,
        "mean_wait_s": capacity.mean(seen, "mean_wait_s"),
        "busy_ratio": capacity.mean(seen, "busy_ratio"),
        "mean_batch": capacity.mean(seen, "mean_batch"),
        "simulated_requests": sum(s.requests for s in seen if s),
        "simulation_error_ratio": max(errors) if errors else None,
        "largest_rate_per_s": largest or None,
        "at_most_load": largest >= 0.999 * capacity.most_rate(times, policy),
        "replicas": 1
        if p95_s is not None and p95_s <= question.sla_s
        else capacity.replicas(times, pattern, policy, rate, largest, question.sla_s, seed),
    }


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The recipe that carries the largest rate within the SLA."""
    able = [row for row in rows if row["largest_rate_per_s"]]
    return max(able, key=lambda row: row["largest_rate_per_s"]) if able else None


def _tied(
    rows: Sequence[dict[str, Any]], best: dict[str, Any], times: Mapping[str, ServiceTimes]
) -> list[str]:
    """Recipes that meet the SLA at all and whose capacity, paired by round, is not shown to differ from the best's."""
    tied = []
    for row in rows:
        if row is best or not row["largest_rate_per_s"]:
            continue
        mine, its = times[best["recipe"]], times[row["recipe"]]
        ratios = [
            mine.capacity_per_s(r, best["max_batch"]) / its.capacity_per_s(r, row["max_batch"])
            for r in mine.rounds.keys() & its.rounds.keys()
        ]
        interval = Rounds(ratios).interval() if ratios else None
        if interval is None or interval.low is None or interval.low <= 1:
            tied.append(row["recipe"])
    return tied


def _count(value: object) -> int | None:
    """A number of threads or cores; None where the run does not say it."""
    return value if isinstance(value, int) and value > 0 else None


def _runtime(run: Mapping[str, Any], name: str) -> str | None:
    return ((run.get("recipes") or {}).get(name) or {}).get("runtime")


def _notes(gathered: Gathered, question: Question) -> list[str]:
    notes = []
    largest = {name: times.sizes[-1] for name, times in gathered.times.items()}
    most = max(largest.values())
    if most == 1:
        notes.append(
            "batching is off: the run measured batch size 1 only. To learn more: "
            + _sweep(gathered, question)
        )
    elif question.max_batch and question.max_batch > min(largest.values()):
        capped = min(largest.values())
        notes.append(
            f"max-batch is capped at the largest measured batch size, {capped} of {question.max_batch}:"
            " nothing is extrapolated"
        )
    if gathered.what == MODEL_ONLY:
        notes.append("tokenising is left out: the run holds no end-to-end times of every recipe")
    if any(trial.contended for trial in gathered.found.trials if trial.recipe in gathered.times):
        notes.append("other work used the CPUs while the run was measured: sweep again on an idle machine")
    return notes


def _sweep(gathered: Gathered, question: Question) -> str:
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
    for size in (1, 8, 32):
        words += ["--batch-size", str(size)]
    return shlex.join([*words, *(["--no-score"] if not args.get("score", True) else [])])
