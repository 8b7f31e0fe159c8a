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
# An empty start is forgotten within 1 / (rate of service (1 - sqrt(load))^2) (the M/M/1 relaxation time, Cohen 1982,
# The Single Server Queue, III.7): at a load of 0.95 about 1,500 services. Beyond it no rate is called safe.
MOST_LOAD = 0.95
CLOSE_LOAD = 0.8
LARGE_ERROR = 0.05
STEP = 1.02
SCAN = (1.0, 0.9, 0.75, 0.55, 0.35, 0.2, 0.1, 0.03, 0.01)
MOST_THINNED = 50


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
) -> list[Seen | None]:
    """One replica in each round at its share of `rate_per_s`: each request goes to any of `replicas` alike."""
    each = max(200, requests // len(times.rounds))
    found: list[Seen | None] = []
    for number in times.rounds:
        if rate_per_s / replicas >= times.capacity_per_s(number, policy.max_batch):
            found.append(None)
            continue
        rng = np.random.default_rng([seed, number])
        unit = pattern.draw(each * replicas, rng)
        if replicas > 1:
            unit = unit[rng.random(len(unit)) * replicas < 1]
        served = simulate((unit / rate_per_s).tolist(), times.sampler(number, seed), policy)
        warm = 0 if pattern.trace_s is not None else int(WARM_UP_SHARE * len(unit))
        found.append(see(served, warm))
    return found


def middle(found: Sequence[Seen | None], name: str) -> float:
    """A percentile's median over rounds; infinite where the median round's queue grows without bound."""
    return median(seen.percentiles_s[name] if seen else math.inf for seen in found)


def report(
    times: ServiceTimes, pattern: Pattern, rate_per_s: float, policy: Policy, seed: int
) -> list[Seen | None]:
    """As `evaluate`, with the requests of a printed figure: four times as many where the load makes it err."""
    found = evaluate(times, pattern, rate_per_s, policy, REPORTED, seed)
    errors = [seen.error_ratio or 0.0 for seen in found if seen]
    if errors and median(errors) > LARGE_ERROR and load(times, rate_per_s, policy) > CLOSE_LOAD:
        return evaluate(times, pattern, rate_per_s, policy, 4 * REPORTED, seed)
    return found


def load(times: ServiceTimes, rate_per_s: float, policy: Policy) -> float:
    """The rate as a share of what full batches take (median over rounds); from 1 on the queue has no bound."""
    return median(rate_per_s / times.capacity_per_s(number, policy.max_batch) for number in times.rounds)


def most_rate(times: ServiceTimes, policy: Policy) -> float:
    """MOST_LOAD of the median round's capacity."""
    return MOST_LOAD / load(times, 1.0, policy)


def largest_rate(
    times: ServiceTimes, pattern: Pattern, policy: Policy, sla_s: float, seed: int, *, more_than: float = 0.0
) -> float:
    """The largest rate whose p95 is at most `sla_s`, at most `most_rate`; 0 where none is.

    It is searched to 2 % and known to about 5 %, which is what FINE requests tell of a p95.

    With `more_than` only a rate at least 2 % above it is looked for.
    """

    def meets(rate_per_s: float, requests: int = COARSE) -> bool:
        return middle(evaluate(times, pattern, rate_per_s, policy, requests, seed), "p95_s") <= sla_s

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
        return 0.0
    low = _halve(meets, low, high, 1.05)
    # what few requests found is settled with more of them, in both directions
    while not meets(low, FINE):
        high, low = low, low / 1.1
        if low < SCAN[-1] * top / 2:
            return 0.0
    high = min(top, max(high, 1.1 * low))
    if meets(high, FINE):
        return high
    return _halve(lambda rate: meets(rate, FINE), low, high, STEP)


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

    A given value is the only one tried. Simple ones come first: another must carry 2 % more to be taken.
    """
    most = times.sizes[-1]
    doubling = [2**i for i in range(most.bit_length()) if 2**i < most]
    sizes = [min(max_batch, most)] if max_batch else [*doubling, most]
    waits = [0.0, sla_s / 10, sla_s / 4] if max_wait_s is None else [max_wait_s]
    found = [Policy(size, wait) for size in sizes for wait in (waits if size > 1 else waits[:1])]
    return sorted(found, key=lambda policy: (policy.max_batch, policy.max_wait_s))


def best_policy(
    times: ServiceTimes, pattern: Pattern, sla_s: float, tried: Sequence[Policy], seed: int
) -> tuple[Policy, float]:
    """The policy that carries the largest rate within the SLA, and that rate; the first and 0 where none does."""
    best, rate = tried[0], 0.0
    for policy in tried:
        more = largest_rate(times, pattern, policy, sla_s, seed, more_than=rate)
        if more > rate:
            best, rate = policy, more
    return best, rate


def replicas(
    times: ServiceTimes,
    pattern: Pattern,
    policy: Policy,
    rate_per_s: float,
    largest_per_s: float,
    sla_s: float,
    seed: int,
) -> int | None:
    """Fewest replicas that keep the SLA when each request goes to any of them alike; None where none can.

    A random share of Poisson traffic is Poisson traffic. A share of bursts is less bursty, which is simulated; of
    many replicas it is not, and their number is then an upper bound.
    """
    if not largest_per_s:
        return None
    most = math.ceil(rate_per_s / largest_per_s)
    least = max(1, math.ceil(rate_per_s / most_rate(times, policy)))
    if pattern.name != "poisson" and most <= MOST_THINNED:
        for count in range(least, most):
            found = evaluate(times, pattern, rate_per_s, policy, COARSE, seed, replicas=count)
            if middle(found, "p95_s") <= sla_s:
                return count
    return most


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
