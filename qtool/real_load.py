"""`qtool load --real`: the artifact of a run under real traffic, beside what was predicted for the same arrivals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qtool import capacity, comparability, host, isolate, load, measure, open_loop, stats
from qtool.arrivals import Pattern
from qtool.artifacts import built, is_whole
from qtool.core import QtoolError, cache_dir
from qtool.load import Gathered, Question
from qtool.queueing import Array, Policy, Served, block_error, make_served, simulate
from qtool.service_times import END_TO_END, ServiceTimes

LEAST_REQUESTS = 150
"""Of them 135 are left after the warm-up, and a p95 needs 130 (see `stats.least_samples`)."""
MOST_REQUESTS = 200_000
SET_UP_S = 300.0
"""To start, open the artifact and read the texts."""
SLOWER = 3.0
"""How many times as long as the run's a call is allowed to take before its child counts as stuck."""
PREDICTED = 30_000


def drive(run_dir: Path, question: Question, duration_s: float) -> dict[str, Any]:
    """Predicted and real percentiles, JSON-able, of one recipe under `duration_s` of traffic.

    Raises QtoolError where another machine or other versions measured the run, where its artifact is gone, and for
    traffic that is too short or that the run says no replica can take.
    """
    if len(question.recipes) != 1:
        raise QtoolError("--real drives one recipe: give --recipe NAME once.")
    gathered = load.gather(run_dir, question.recipes, question.device)
    name = question.recipes[0]
    run, times = gathered.found.run, gathered.times[name]
    refuse_other_machine(run_dir, run)
    if gathered.what != END_TO_END:
        raise QtoolError(
            f"{run_dir} holds no end-to-end times of '{name}' to predict from: its tokenizer cannot pad."
        )
    most = times.sizes[-1]
    if question.max_batch and question.max_batch > most:
        raise QtoolError(
            f"--max-batch {question.max_batch}: {run_dir} measured '{name}' up to batch size {most}. Use --max-batch"
            f" {most}, or first: {load.sweep_command(gathered, question)}"
        )
    requests = int(duration_s * question.rate_per_s)
    if requests < LEAST_REQUESTS:
        longer = LEAST_REQUESTS / question.rate_per_s
        raise QtoolError(
            f"--duration: {duration_s:g} s at {question.rate_per_s:g}/s are {requests} requests, and a p95 needs"
            f" {LEAST_REQUESTS}. Use --duration {longer + 1:.0f}s or more."
        )
    if requests > MOST_REQUESTS:
        raise QtoolError(
            f"--duration: {requests:,} requests are more than {MOST_REQUESTS:,}. Drive a shorter time."
        )
    policy, _ = load.settle(times, question)
    share = capacity.load(times, question.rate_per_s, policy)
    if share >= 1:
        raise QtoolError(
            f"--arrival {question.rate_per_s:g}/s is {share:.2f} times what '{name}' takes at full batches of"
            f" {policy.max_batch}: the queue would grow without bound. Ask for less."
        )
    arrivals_s = draw(question.pattern, requests, question)
    spec = _spec(run_dir, gathered, name, policy, times.sizes)
    outcome = isolate.run(
        "open_loop",
        spec | {"arrivals_s": arrivals_s},
        log=run_dir / "logs" / f"load-{name}-{gathered.device}.log",
        timeout_s=limit_s(times, spec["measured_sizes"], policy.max_batch, duration_s),
        threads=spec["threads"],
    )
    if outcome.status in ("user_error", "unavailable"):
        raise QtoolError(outcome.error or "")
    if outcome.status != "ok":
        raise QtoolError(f"driving '{name}' failed: {outcome.error}. See {run_dir / 'logs'}.")
    real = outcome.values
    compared = compare(
        arrivals_s,
        real,
        times,
        ServiceTimes({1: {int(size): sorted(samples) for size, samples in real["own"].items()}}),
        policy,
        question.seed,
    )
    return {
        "run": str(run_dir),
        "recipe": name,
        "device": gathered.device,
        "threads": spec["threads"],
        "arrival_per_s": question.rate_per_s,
        "pattern": question.pattern.name,
        "sla_s": question.sla_s,
        "max_batch": policy.max_batch,
        "max_wait_s": policy.max_wait_s,
        "load_ratio": share,
        "meets": compared["real"]["p95_s"] <= question.sla_s,
        **compared,
    }


def limit_s(times: ServiceTimes, measured: list[int], max_batch: int, duration_s: float) -> float:
    """Seconds after which the child counts as stuck: the bounds of every step of `open_loop.open_loop`.

    Each measured size is warmed and then timed, and both bounds are overshot: by a call, and by a whole pass.
    Every size up to `max_batch` is then served for a while.
    """

    def call_s(size: int) -> float:
        return SLOWER * max(float(np.mean(times.table(number, size))) for number in times.rounds)

    timed_s = sum(
        measure.WARM_UP_MAX_S + measure.MAX_TIME_S + (measure.CALLS + 1) * call_s(size) for size in measured
    )
    shapes_s = sum(open_loop.WARM_S + call_s(size) for size in range(1, max_batch + 1))
    return SET_UP_S + timed_s + shapes_s + 10 * duration_s


def draw(pattern: Pattern, requests: int, question: Question) -> list[float]:
    """The arrivals to drive, in seconds; a trace is cut or repeated to that many."""
    rng = np.random.default_rng(question.seed)
    return (pattern.draw(requests, rng)[:requests] / question.rate_per_s).tolist()


def compare(
    arrivals_s: list[float],
    real: Mapping[str, Any],
    times: ServiceTimes,
    own: ServiceTimes,
    policy: Policy,
    seed: int,
) -> dict[str, Any]:
    """Percentiles in seconds of what was served and of three predictions for the very same arrivals.

    `predicted` draws from the run's rounds; `predicted_own` from the driven process's own closed-loop calls;
    `predicted_served` from what its calls took while they were served, so that only the queue is predicted.
    """
    served = make_served(arrivals_s, real["starts_s"], real["finishes_s"], [int(n) for n in real["sizes"]])
    warm = int(capacity.WARM_UP_SHARE * len(arrivals_s))
    response_s = served.response_s[warm:]
    percentiles = {
        key: float(np.quantile(response_s, q)) if len(response_s) >= stats.least_samples(q) else None
        for key, q in capacity.SHARES.items()
    }
    predicted = predict(arrivals_s, times, policy, seed)
    predicted_own = predict(arrivals_s, own, policy, seed)
    predicted_served = predict(arrivals_s, as_served(served, policy.max_batch), policy, seed)
    sizes, counts = np.unique(served.sizes, return_counts=True)
    return {
        "requests": len(response_s),
        "real": percentiles,
        "real_error_ratio": block_error(response_s, 0.95),
        "predicted": predicted,
        "predicted_own": predicted_own,
        "predicted_served": predicted_served,
        "predicted_over_real": _ratios(predicted, percentiles),
        "predicted_own_over_real": _ratios(predicted_own, percentiles),
        "predicted_served_over_real": _ratios(predicted_served, percentiles),
        "own_over_run": {
            str(size): float(
                np.mean(samples) / np.mean([np.mean(times.rounds[r][size]) for r in times.rounds])
            )
            for size, samples in own.rounds[1].items()
        },
        "served_over_own": float(
            served.took_s.sum()
            / sum(np.mean(own.table(1, int(s))) * n for s, n in zip(sizes, counts, strict=True))
        ),
        "busy_ratio": served.busy_ratio,
        "mean_batch": float(served.sizes.mean()),
        "late_p50_s": float(np.quantile(real["late_s"], 0.5)),
        "late_p95_s": float(np.quantile(real["late_s"], 0.95)),
        "contended": real["contended"],
        "contention": real["reason"],
    }


def predict(arrivals_s: list[float], times: ServiceTimes, policy: Policy, seed: int) -> dict[str, Any]:
    """Percentiles for these arrivals: service times drawn anew many times in each round, the median over rounds."""
    warm = int(capacity.WARM_UP_SHARE * len(arrivals_s))
    repeats = max(3, PREDICTED // len(arrivals_s) // len(times.rounds))
    by_round: list[Array] = []
    for number in times.rounds:
        drawn = [
            simulate(
                arrivals_s,
                times.sampler(number, seed + i),
                policy,
                times.sampler_after_pause(number, seed + i),
            ).response_s[warm:]
            for i in range(repeats)
        ]
        by_round.append(np.quantile(np.concatenate(drawn), list(capacity.SHARES.values())))
    found = {}
    for place, key in enumerate(capacity.SHARES):
        each = [float(quantiles[place]) for quantiles in by_round]
        interval = stats.t_log(each, float(np.median(each)))
        found[key] = {"value": interval.value, "low": interval.low, "high": interval.high}
    return found


def as_served(served: Served, max_batch: int) -> ServiceTimes:
    """Seconds of the batches that were served, by size; a size that none had is told by its neighbours."""
    found = {
        int(size): sorted(served.took_s[served.sizes == size].tolist()) for size in np.unique(served.sizes)
    }
    ends = {1: found[min(found)], max_batch: found[max(found)]}
    return ServiceTimes({1: ends | found})


def _ratios(predicted: Mapping[str, Any], real: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: predicted[key]["value"] / value if value else None for key, value in real.items()}


def refuse_other_machine(run_dir: Path, run: Mapping[str, Any]) -> None:
    """Raises QtoolError where this host or these versions are not the run's."""
    machine = host.fingerprint()
    here = {
        **run,
        "host": {**machine, "hash": host.fingerprint_hash(machine)},
        "versions": host.versions(),
    }
    found = comparability.differences(run, here)
    if not found:
        return
    words = []
    for difference in found:
        was, now = difference["a"] or {}, difference["b"] or {}
        parts = [f"{key} {was.get(key)} is now {now.get(key)}" for key in now if was.get(key) != now.get(key)]
        words.append(f"{difference['what']}: {', '.join(parts) or 'not the same'}"[:300])
    raise QtoolError(
        f"--real compares with times of {run_dir}, which was measured elsewhere ({'; '.join(words)})."
        " Sweep here and now, then drive that run."
    )


def _spec(run_dir: Path, gathered: Gathered, name: str, policy: Policy, sizes: list[int]) -> dict[str, Any]:
    """What the child needs. Raises QtoolError where the cache no longer holds the artifact or the texts."""
    run, lines = gathered.found.run, gathered.found.lines
    recipe, threads = (run.get("recipes") or {}).get(name), (run.get("args") or {}).get("threads")
    if recipe is None or not isinstance(threads, int):
        raise QtoolError(f"{run_dir / 'run.json'} does not say how '{name}' was run. Sweep again.")
    place = built(lines.values(), name)
    if place is None or not is_whole(place):
        raise QtoolError(
            f"the artifact of '{name}' is no longer whole in {cache_dir() / 'artifacts'}. Sweep again with --resume."
        )
    return {
        "recipe": recipe,
        "model_dir": str(place / "tokenizer"),
        "data": str(find_data(run_dir, run)),
        "artifact": str(place),
        "device": gathered.device,
        "threads": threads,
        "max_batch": policy.max_batch,
        "max_wait_s": policy.max_wait_s,
        "measured_sizes": _needed(sizes, policy.max_batch),
    }


def _needed(sizes: list[int], max_batch: int) -> list[int]:
    """Measured batch sizes up to the first that covers `max_batch`."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_batch]


def find_data(run_dir: Path, run: Mapping[str, Any]) -> Path:
    """The prepared texts of a run in the cache. Raises QtoolError where they are gone."""
    for path in sorted((cache_dir() / "data").glob("*/meta.json")):
        try:
            if (
                json.loads(path.read_text("utf-8")) == run.get("data")
                and (path.parent / "texts.json").is_file()
            ):
                return path.parent
        except (OSError, ValueError):  # another run's, and damaged: not the one that is looked for
            continue
    raise QtoolError(
        f"the texts of {run_dir} are no longer in the cache {cache_dir() / 'data'}. Sweep again with --resume."
    )
