"""One replica of a model as a queue: when a batch starts, and how long each request then takes.

Knows nothing of models and runs: it gets arrival times and a function that says how long a batch takes. The same
`next_start` and `waiting` decide in the simulation and in the real driver (`open_loop`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import stats
from qtool.core import QtoolError

Array = NDArray[Any]
BLOCKS = 10


@dataclass(frozen=True)
class Policy:
    """Dynamic batching on one server, first come first served.

    A batch is the oldest requests that wait, at most `max_batch` of them. It starts once the server is free and
    either `max_batch` wait or the oldest has waited `max_wait_s`. With `max_wait_s` 0 a free server takes at once
    whatever waits. A request that arrives while a batch runs waits for the next one.
    """

    max_batch: int
    max_wait_s: float


def next_start(arrivals_s: Sequence[float], first: int, free_s: float, policy: Policy) -> float:
    """When the batch that begins with request `first` starts, on a server that is free from `free_s` on."""
    due = arrivals_s[first] + policy.max_wait_s
    full = first + policy.max_batch - 1
    if full < len(arrivals_s):
        due = min(due, arrivals_s[full])
    return max(free_s, due)


def waiting(arrivals_s: Sequence[float], first: int, now_s: float, policy: Policy) -> int:
    """How many requests from `first` on a batch that starts at `now_s` takes."""
    most = min(len(arrivals_s), first + policy.max_batch)
    return bisect_right(arrivals_s, now_s, first, most) - first


@dataclass(frozen=True)
class Served:
    """What became of requests: (requests,) arrays in seconds, and (batches,) sizes and busy seconds."""

    arrivals_s: Array
    start_s: Array
    finish_s: Array
    sizes: Array
    took_s: Array

    @property
    def wait_s(self) -> Array:
        """From arrival to the start of its batch."""
        return self.start_s - self.arrivals_s

    @property
    def response_s(self) -> Array:
        """From arrival to answer."""
        return self.finish_s - self.arrivals_s

    @property
    def busy_ratio(self) -> float:
        """Share of the time, from the first arrival to the last answer, in which the server worked."""
        return float(self.took_s.sum() / (self.finish_s[-1] - self.arrivals_s[0]))


def make_served(
    arrivals_s: Sequence[float], starts_s: Sequence[float], finishes_s: Sequence[float], sizes: Sequence[int]
) -> Served:
    """From batches in the order they ran; `sizes` sum to the number of arrivals."""
    starts, finishes, counts = np.asarray(starts_s), np.asarray(finishes_s), np.asarray(sizes)
    return Served(
        np.asarray(arrivals_s), starts.repeat(counts), finishes.repeat(counts), counts, finishes - starts
    )


def simulate(
    arrivals_s: Sequence[float],
    service_s: Callable[[int], float],
    policy: Policy,
    after_pause_s: Callable[[int], float] | None = None,
) -> Served:
    """Every request of `arrivals_s` (in order) through one replica; `service_s(size)` draws a batch's seconds.

    `after_pause_s` draws those of a batch before which the server was idle, where they are known apart.
    Arrival times are fixed beforehand (an open loop), so an event of the simulation is the end of a batch.
    Raises QtoolError where simpy is missing.
    """
    try:
        import simpy
    except ImportError:
        raise QtoolError(
            "qtool load simulates with simpy, which is not installed: pip install simpy"
        ) from None
    world = simpy.Environment()
    starts: list[float] = []
    finishes: list[float] = []
    sizes: list[int] = []

    def replica() -> Any:
        first = 0
        while first < len(arrivals_s):
            start = next_start(arrivals_s, first, world.now, policy)
            size = waiting(arrivals_s, first, start, policy)
            rested = not first or start > world.now
            finish = start + (after_pause_s if after_pause_s and rested else service_s)(size)
            starts.append(start)
            finishes.append(finish)
            sizes.append(size)
            yield world.timeout(finish - world.now)
            first += size

    world.process(replica())
    world.run()
    return make_served(arrivals_s, starts, finishes, sizes)


def block_error(values: Array, share: float) -> float | None:
    """Half the width of a 95 % interval of a percentile, as a share of it; None for less than 20 a block.

    Requests that follow each other wait together, so blocks of them are the unit: non-overlapping batch means
    (Schmeiser 1982, Operations Research 30:556-568, who finds 10 to 30 blocks enough), with Student's t.
    """
    if len(values) < 20 * BLOCKS:
        return None
    each = [float(np.quantile(block, share)) for block in np.array_split(values, BLOCKS)]
    found = stats.t_mean(each)
    return None if found.high is None else (found.high - found.value) / float(np.quantile(values, share))
