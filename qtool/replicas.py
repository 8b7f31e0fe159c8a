"""What a rate asks for: the largest that one replica carries, and how many replicas it takes."""

from __future__ import annotations

import math

from qtool import capacity
from qtool.arrivals import Pattern
from qtool.queueing import Policy
from qtool.service_times import ServiceTimes

NEAR = 1.1
"""A rate this close to the largest may lie on either side of it by chance."""
MOST_THINNED = 100
"""Replicas: every request of all of them is drawn."""


def agree(
    times: ServiceTimes,
    pattern: Pattern,
    policy: Policy,
    sla_s: float,
    seed: int,
    rate_per_s: float,
    meets: bool,
    largest_per_s: float,
) -> float:
    """The largest rate beside the verdict at `rate_per_s`, which rests on more requests than the search did.

    At least a rate that keeps the SLA, and below one that does not; unless that one breaks it because batches wait
    and do not fill, for then higher rates keep it.
    """
    if meets:
        return max(largest_per_s, rate_per_s)
    if rate_per_s > largest_per_s:
        return largest_per_s
    waits = policy.max_batch > 1 and policy.max_wait_s > 0
    if waits and largest_per_s > NEAR * rate_per_s:
        return largest_per_s
    least = rate_per_s / NEAR if waits else capacity.SCAN[-1] * capacity.most_rate(times, policy) / 2
    step, lower = capacity.STEP, rate_per_s / capacity.STEP
    while lower >= least:
        if capacity.middle(capacity.report(times, pattern, lower, policy, seed), "p95_s") <= sla_s:
            return lower
        step *= step
        lower /= step
    return largest_per_s if waits else 0.0


def replicas(
    times: ServiceTimes,
    pattern: Pattern,
    policy: Policy,
    rate_per_s: float,
    largest_per_s: float,
    sla_s: float,
    seed: int,
) -> int | None:
    """Fewest replicas, two or more, that keep the SLA when each request goes to any of them alike.

    Each number is simulated: a share of bursts, or of a trace, is less bursty. None where no number that was tried
    keeps it. Beyond `MOST_THINNED` replicas the number for shares as bursty as the whole is told, an upper bound.
    """
    poisson, lone_keeps = pattern.name == "poisson", capacity.lone_s(times, policy) <= sla_s
    if not largest_per_s and (poisson or capacity.lone_s(times, capacity.ALONE) > sla_s):
        return None
    bound = math.ceil(rate_per_s / largest_per_s) if largest_per_s else None
    least = max(
        2, math.ceil(rate_per_s / capacity.most_rate(times, policy)), bound if poisson and bound else 0
    )
    most = 64 * least if poisson else MOST_THINNED

    def keeps(count: int) -> bool:
        found = capacity.evaluate(times, pattern, rate_per_s, policy, capacity.FINE, seed, count, whole=True)
        return capacity.middle(found, "p95_s") <= sla_s

    if not lone_keeps:
        # thin traffic breaks it: only a share near the largest rate can keep it
        return next((count for count in range(least, min(most, least + 9) + 1) if keeps(count)), None)
    low, high = least - 1, least
    while high <= most and not keeps(high):
        low, high = high, 2 * high
    if high > most:
        if low >= most or not keeps(most):
            return bound if bound and bound > most else None
        high = most
    while high - low > 1:
        count = (low + high) // 2
        low, high = (low, count) if keeps(count) else (count, high)
    return high
