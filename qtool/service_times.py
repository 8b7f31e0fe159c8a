"""How long a batch of each size takes, from one recipe's stored samples. Draws, never fits a distribution.

Between two measured batch sizes the quantiles are interpolated, linearly in the batch size; beyond the largest
nothing is known, and nothing is said.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from qtool.rows import Trial

END_TO_END, MODEL_ONLY, AFTER_PAUSE = "end_to_end_s", "latency_s", "after_pause_s"


@dataclass(frozen=True)
class ServiceTimes:
    """Sorted seconds of a call by round (one process each) and measured batch size; the smallest size is 1.

    `after_pause`: of calls before which the process was idle, which take longer; None where they were not measured.
    """

    rounds: Mapping[int, Mapping[int, Sequence[float]]]
    after_pause: ServiceTimes | None = None
    _between: dict[tuple[int, int], Sequence[float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sizes(self) -> list[int]:
        return sorted(next(iter(self.rounds.values())))

    @property
    def fewest(self) -> int:
        """Samples of all rounds at the batch size that has the fewest."""
        return min(sum(len(sizes[size]) for sizes in self.rounds.values()) for size in self.sizes)

    def table(self, number: int, size: int) -> Sequence[float]:
        """Equally likely seconds of a batch of `size` in round `number`.

        Raises ValueError beyond the largest measured size.
        """
        own = self.rounds[number]
        if size in own:
            return own[size]
        if (number, size) not in self._between:
            sizes = self.sizes
            place = bisect_left(sizes, size)
            if not 0 < place < len(sizes):
                raise ValueError(f"batch size {size} lies outside what was measured ({sizes})")
            low, high = sizes[place - 1], sizes[place]
            share = (size - low) / (high - low)
            count = max(len(own[low]), len(own[high]))
            self._between[number, size] = [
                (1 - share) * _quantile(own[low], i, count) + share * _quantile(own[high], i, count)
                for i in range(count)
            ]
        return self._between[number, size]

    def capacity_per_s(self, number: int, max_batch: int) -> float:
        """Requests a second at full batches: what an overloaded server takes, for its batches are always full.

        Below it the queue is stable, at or above it the queue grows without bound (Chaudhry & Templeton 1983, A
        First Course in Bulk Queues).
        """
        return max_batch / fmean(self.table(number, max_batch))

    def sampler(self, number: int, seed: int) -> Callable[[int], float]:
        """A function that draws the seconds of a batch of a size, from one round's process."""
        uniform, tables = random.Random(f"{seed} {number}").random, {}

        def draw(size: int) -> float:
            table = tables.get(size)
            if table is None:
                table = tables[size] = self.table(number, size)
            return table[int(uniform() * len(table))]

        return draw

    def sampler_after_pause(self, number: int, seed: int) -> Callable[[int], float] | None:
        """As `sampler`, of calls that an idle process gets."""
        return self.after_pause.sampler(number, seed + 1_000_003) if self.after_pause else None


def _quantile(ordered: Sequence[float], i: int, count: int) -> float:
    """The middle of the i-th of `count` equal shares, read off the sorted samples without interpolation."""
    return ordered[int((i + 0.5) / count * len(ordered))]


def from_trials(trials: Mapping[int, Trial], what: str) -> ServiceTimes | None:
    """From a recipe's trials by batch size; None where no round has every size."""
    samples = {size: trial.samples(what) for size, trial in trials.items()}
    shared = sorted(set.intersection(*(set(found) for found in samples.values()))) if samples else []
    if not shared:
        return None
    rested = from_trials(trials, AFTER_PAUSE) if what == END_TO_END else None
    if rested is not None and rested.rounds.keys() != set(shared):
        rested = None
    times = {r: {size: sorted(found[r]) for size, found in samples.items()} for r in shared}
    return ServiceTimes(times, rested)
