"""What one recipe's service times mean under traffic: percentiles at a rate, and the largest rate within an SLA.

Each round of the run was a process of its own, and processes differ by more than the simulation errs: so every
round is simulated apart, and the median over rounds is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from qtool import stats
from qtool.arrivals import Pattern
from qtool.queueing import Policy, Served, block_error, simulate
from qtool.service_times import ServiceTimes

SHARES = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}
COARSE, FINE, REPORTED = 4_500, 20_000, 30_000
"""Requests of all rounds together: to search, to settle a rate, and behind a figure that is printed."""
WARM_UP_SHARE = 0.1
ALONE = Policy(1, 0.0)
# An empty start is forgotten within 1 / (rate of service (1 - sqrt(load))^2) (the M/M/1 relaxation time, Cohen 1982,
# The Single Server Queue, III.7): at a load of 0.95 about 1,500 services. Beyond it no rate is called safe.
MOST_LOAD = 0.95
CLOSE_LOAD = 0.8
LARGE_ERROR = 0.05
STEP, APART = 1.02, 1.1
SCAN = (1.0, 0.9, 0.75, 0.55, 0.35, 0.2, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Seen:
    """One round's replica under load, after its warm-up; None in its place where the queue grows without bound."""

    percentiles_s: dict[str, float]
    mean_wait_s: float
    busy_ratio: float
    mean_batch: float
    requests: int
    error_ratio: float | None


def see(served: Served, warm: int) -> Seen:
    """Figures of the requests from number `warm` on."""
    response_s = served.response_s[warm:]
    found = np.quantile(response_s, list(SHARES.values()))
    return Seen(
        dict(zip(SHARES, map(float, found), strict=True)),
        float(served.wait_s[warm:].mean()),
        served.busy_ratio,
        float(served.sizes.mean()),
        len(response_s),
        block_error(response_s, 0.95),
    )


def evaluate(
    times: ServiceTimes,
    pattern: Pattern,
    rate_per_s: float,
    policy: Policy,
    requests: int,
    seed: int,
    replicas: int = 1,
    *,
    whole: bool = False,
) -> list[Seen | None]:
    """One replica in each round at its share of `rate_per_s`: each request goes to any of `replicas` alike.

    A trace longer than a round's part of `requests` is cut, unless it is to be `whole`.
    """
    each = requests_each(times, requests)
    # a random share of Poisson traffic is Poisson traffic: it is drawn as such
    thinned = replicas > 1 and pattern.name != "poisson"
    drawn = each * replicas if thinned else each
    unit_rate = rate_per_s if thinned else rate_per_s / replicas
    found: list[Seen | None] = []
    for number in times.rounds:
        if rate_per_s / replicas >= times.capacity_per_s(number, policy.max_batch):
            found.append(None)
            continue
        rng = np.random.default_rng([seed, number])
        unit = pattern.draw(drawn, rng, whole=whole)
        if thinned:
            unit = unit[rng.random(len(unit)) * replicas < 1]
        rested = times.sampler_after_pause(number, seed)
        served = simulate((unit / unit_rate).tolist(), times.sampler(number, seed), policy, rested)
        warm = 0 if pattern.trace_s is not None else int(WARM_UP_SHARE * len(unit))
        found.append(see(served, warm))
    return found


def requests_each(times: ServiceTimes, requests: int) -> int:
    """A round's part of the requests of all rounds."""
    return max(200, requests // len(times.rounds))


def middle(found: Sequence[Seen | None], name: str) -> float:
    """A percentile's median over rounds; infinite where the median round's queue grows without bound."""
    return median(seen.percentiles_s[name] if seen else math.inf for seen in found)


def report(
    times: ServiceTimes, pattern: Pattern, rate_per_s: float, policy: Policy, seed: int
) -> list[Seen | None]:
    """As `evaluate`, with the requests of a printed figure: four times as many where the load makes it err.

    A trace is whole.
    """
    found = evaluate(times, pattern, rate_per_s, policy, REPORTED, seed, whole=True)
    errors = [seen.error_ratio or 0.0 for seen in found if seen]
    if errors and median(errors) > LARGE_ERROR and load(times, rate_per_s, policy) > CLOSE_LOAD:
        return evaluate(times, pattern, rate_per_s, policy, 4 * REPORTED, seed, whole=True)
    return found


def load(times: ServiceTimes, rate_per_s: float, policy: Policy) -> float:
    """The rate as a share of what full batches take (median over rounds); from 1 on the queue has no bound."""
    return median(rate_per_s / times.capacity_per_s(number, policy.max_batch) for number in times.rounds)


def most_rate(times: ServiceTimes, policy: Policy) -> float:
    """MOST_LOAD of the median round's capacity."""
    return MOST_LOAD / load(times, 1.0, policy)


def lone_s(times: ServiceTimes, policy: Policy) -> float:
    """p95 of a request that comes alone, and waits in vain where it waits for others (median over rounds)."""
    wait_s = policy.max_wait_s if policy.max_batch > 1 else 0.0
    rested = times.after_pause or times
    return wait_s + median(float(np.quantile(rested.table(number, 1), 0.95)) for number in rested.rounds)


def largest_rate(
    times: ServiceTimes,
    pattern: Pattern,
    policy: Policy,
    sla_s: float,
    seed: int,
    *,
    more_than: float = 0.0,
    whole: bool = False,
) -> float:
    """The largest rate whose p95 is at most `sla_s`, at most `most_rate`; 0 where none is.

    It is searched to 2 %; its standard error is about 3 %, which is what FINE requests tell of a p95.

    With `more_than` only a rate at least 2 % above it is looked for. With `whole` the beginning of a trace leads
    to a rate, and all of it settles it. Lower rates need not keep the SLA: a batch that does not fill waits.
    """

    def meets(rate_per_s: float) -> bool:
        return middle(evaluate(times, pattern, rate_per_s, policy, COARSE, seed), "p95_s") <= sla_s

    def settled(rate_per_s: float) -> bool:
        found = evaluate(times, pattern, rate_per_s, policy, FINE, seed, whole=whole)
        return middle(found, "p95_s") <= sla_s

    top = most_rate(times, policy)
    least = STEP * more_than
    if least >= top or (least and not meets(least)):
        return 0.0
    low, high = least, top
    for share in SCAN:
        if share * top <= least:
            break
        if meets(share * top):
            low = share * top
            break
        high = share * top
    if not low:
        if not whole:
            return 0.0
        low = high
    low = _halve(meets, low, high, 1.05)
    # what few requests found is settled with more of them, in both directions; each step is the square of the last
    step = APART
    while not settled(low):
        high, low, step = low, low / step, step * step
        if low < SCAN[-1] * top / 2:
            return 0.0
    step, high = APART, min(top, max(high, APART * low))
    while settled(high):
        if high >= top:
            return high
        step *= step
        low, high = high, min(top, step * high)
    return _halve(settled, low, high, STEP)


def _halve(meets: Callable[[float], bool], low: float, high: float, within: float) -> float:
    """The largest rate between one that meets and one that may not, within a ratio."""
    while high > within * low:
        rate = math.sqrt(low * high)
        low, high = (rate, high) if meets(rate) else (low, rate)
    return low


def policies(
    times: ServiceTimes, sla_s: float, max_batch: int | None, max_wait_s: float | None
) -> list[Policy]:
    """What is tried: powers of two and the largest measured batch size; no waiting, or 1/10, 1/4 of the SLA.

    A wait that breaks the SLA of a lone request is not tried: it would fail while traffic is thin. A given value is
    the only one tried. Simple ones come first: another must carry 2 % more to be taken.
    """
    most = times.sizes[-1]
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    sizes = [min(max_batch, most)] if max_batch else [*doubling, most]
    brief = [wait for wait in (sla_s / 10, sla_s / 4) if lone_s(times, Policy(most, wait)) <= sla_s]
    waits = [0.0, *brief] if max_wait_s is None else [max_wait_s]
    found = [Policy(size, wait) for size in sizes for wait in (waits if size > 1 else waits[:1])]
    return sorted(found, key=lambda policy: (policy.max_batch, policy.max_wait_s))


def best_policy(
    times: ServiceTimes, pattern: Pattern, sla_s: float, tried: Sequence[Policy], seed: int
) -> tuple[Policy, float]:
    """The policy that carries the largest rate within the SLA, and that rate; the first and 0 where none does.

    Policies meet the beginning of a long trace; the rate of the one that is chosen is settled with all of it.
    """
    best, rate = tried[0], 0.0
    for policy in tried:
        more = largest_rate(times, pattern, policy, sla_s, seed, more_than=rate)
        if more > rate:
            best, rate = policy, more
    if pattern.trace_s is not None and len(pattern.trace_s) > requests_each(times, FINE):
        rate = largest_rate(times, pattern, best, sla_s, seed, whole=True)
    return best, rate


def mean(found: Sequence[Seen | None], name: str) -> float | None:
    """A field's mean over the rounds whose queue is bounded; None where none is."""
    values = [getattr(seen, name) for seen in found if seen]
    return fmean(values) if values else None


def cell(found: Sequence[Seen | None], name: str) -> dict[str, float | None]:
    """A percentile with its t interval over rounds; all None where the median round's queue has no bound."""
    value = middle(found, name)
    if math.isinf(value):
        return {"value": None, "low": None, "high": None}
    if any(seen is None for seen in found):
        return {"value": value, "low": None, "high": None}
    interval = stats.t_log([seen.percentiles_s[name] for seen in found if seen], value)
    return {"value": value, "low": interval.low, "high": interval.high}
