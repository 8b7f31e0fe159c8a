"""What samples allow to be claimed about a limit: one kind of estimate for each kind of evidence.

An estimate has a value, an interval at any confidence, and the p of the two claims "the truth lies above
(below) this limit": one less the largest confidence at which the one-sided interval leaves the limit out, so
that interval and test never disagree. "Not worse" is such a claim with the margin as its limit
(non-inferiority: Piaggio et al. 2012, JAMA 308:2594), never a failed test of difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qtool import stats
from qtool.stats import Array, Interval

POWER = 0.8
"""Chance with which the advised number of rounds or examples settles a claim, should the samples be right."""
MOST_NEEDED = 10_000_000
MOST_ROUNDS = 1000


class Estimate(Protocol):
    @property
    def value(self) -> float: ...

    def interval(self, confidence: float = 0.95) -> Interval:
        """Two-sided; no bounds where the samples carry none."""
        ...

    def p_above(self, limit: float) -> float:
        """p of the claim that the truth is above `limit`; 1 where the samples cannot tell."""
        ...

    def p_below(self, limit: float) -> float:
        """p of the claim that the truth is below `limit`; 1 where the samples cannot tell."""
        ...

    def needed(self, limit: float, alpha: float) -> int | None:
        """How many rounds or examples would settle on which side of `limit` the truth is, were it what was
        found: for one-sided `alpha` and `POWER`. None where no number would."""
        ...


@dataclass(frozen=True)
class Paired:
    """Difference of two accuracies on the same examples, from the four counts of `stats.paired_difference`."""

    both: int
    gained: int
    lost: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.gained + self.lost + self.neither

    @property
    def value(self) -> float:
        return (self.gained - self.lost) / self.n

    def interval(self, confidence: float = 0.95) -> Interval:
        return stats.paired_difference(self.both, self.gained, self.lost, self.neither, confidence)

    def p_above(self, limit: float) -> float:
        from scipy.special import ndtr

        above = self.value > limit
        # the bound on the limit's side moves away from the value as z grows: bisect for where they meet
        inside, outside = 0.0, 40.0
        for _ in range(60):
            z = (inside + outside) / 2
            found = stats.newcombe(self.both, self.gained, self.lost, self.neither, z)
            bound = found.low if above else found.high
            if bound is not None and (bound > limit if above else bound < limit):
                inside = z
            else:
                outside = z
        return float(ndtr(-inside if above else inside))

    def p_below(self, limit: float) -> float:
        return Paired(self.both, self.lost, self.gained, self.neither).p_above(-limit)

    def needed(self, limit: float, alpha: float) -> int | None:
        # one example is added to each kind of change: without any, the spread would be nothing
        changed = (self.gained + self.lost + 2) / (self.n + 2)
        return examples_needed(abs(self.value - limit), math.sqrt(changed - self.value**2), alpha)


@dataclass(frozen=True)
class Draws:
    """A score, or the change of one, by the bias-corrected and accelerated bootstrap.

    Efron 1987 (JASA 82:171-185); Efron & Tibshirani 1993, chapter 14. `draws` scatter around `centre`, which
    is `value` but for the pseudo-examples of `bootstrap.Bootstrap`; `n` is how many examples there were.
    """

    value: float
    centre: float
    draws: Array
    acceleration: float
    n: int

    def _bias(self) -> float:
        from scipy.special import ndtri

        # draws of a discrete score equal the centre often: half of those count as below
        below = np.mean(self.draws < self.centre) + np.mean(self.draws == self.centre) / 2
        return float(ndtri(self._inside(below)))

    def _inside(self, share: float) -> float:
        """A share of the draws that a normal quantile exists for."""
        least = 0.5 / len(self.draws)
        return min(max(float(share), least), 1 - least)

    def _told(self) -> bool:
        return len(self.draws) > 0 and math.isfinite(self.value)

    def interval(self, confidence: float = 0.95) -> Interval:
        if not self._told():
            return Interval(self.value)
        ordered, tail = np.sort(self.draws), (1 - confidence) / 2
        # whole draws, none interpolated: the ends then agree with the counts behind p, draw by draw
        low = math.floor(self._share(tail) * len(ordered))
        high = math.ceil(self._share(1 - tail) * len(ordered)) - 1
        return stats.around(self.value, ordered[low], ordered[high])

    def _share(self, tail: float) -> float:
        """Share of the draws below the end of the one-sided interval that leaves `tail` out."""
        from scipy.special import ndtr, ndtri

        bias = self._bias()
        shifted = bias + float(ndtri(tail))
        return self._inside(float(ndtr(bias + shifted / max(1 - self.acceleration * shifted, 1e-9))))

    def _tail(self, share: float) -> float:
        """The inverse of `_share`."""
        from scipy.special import ndtr, ndtri

        if share <= 0 or share >= 1:
            return float(share)
        bias = self._bias()
        distance = float(ndtri(self._inside(share))) - bias
        return float(ndtr(distance / max(1 + self.acceleration * distance, 1e-9) - bias))

    def p_above(self, limit: float) -> float:
        if not self._told():
            return 1.0
        return self._p(self._tail(float(np.mean(self.draws <= limit))), self.value > limit)

    def p_below(self, limit: float) -> float:
        if not self._told():
            return 1.0
        return self._p(1 - self._tail(float(np.mean(self.draws < limit))), self.value < limit)

    def _p(self, found: float, passed: bool) -> float:
        """No p is below half a draw in all, nor below one half where the value itself has not passed."""
        return max(found, 0.5 / len(self.draws) if passed else 0.5)

    def needed(self, limit: float, alpha: float) -> int | None:
        if len(self.draws) < 2 or not math.isfinite(self.value):
            return None
        each = float(np.std(self.draws)) * math.sqrt(self.n)
        return examples_needed(abs(self.value - limit), each, alpha)


@dataclass(frozen=True)
class Rounds:
    """Geometric mean of one positive number a round: a ratio of paired processes, or a time, or a size.

    The t interval of a fixed number of rounds. Adding rounds until it is narrow stops at spreads that happen to
    be small: simulated from 3 rounds to at most 15, asking for 10 %, a 95 % interval covered 94-95, 92-93 and
    90-91 % where a round's log ratio deviates by 0.03, 0.08 and 0.2; from 5 rounds 93-95 %.
    """

    values: Sequence[float]

    @property
    def value(self) -> float:
        return float(np.exp(np.mean(np.log(self.values))))

    def interval(self, confidence: float = 0.95) -> Interval:
        return stats.t_log(self.values, None, confidence)

    def _t(self, limit: float) -> float | None:
        """t of the mean logarithm against the limit's; None for one round. Zero or less lies below them all."""
        if len(self.values) < 2:
            return None
        if limit <= 0:
            return math.inf
        logs = np.log(np.asarray(self.values, float)) - math.log(limit)
        error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
        mean = float(logs.mean())
        return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0

    def p_above(self, limit: float) -> float:
        from scipy.special import stdtr

        t = self._t(limit)
        return 1.0 if t is None else float(stdtr(len(self.values) - 1, -t))

    def p_below(self, limit: float) -> float:
        from scipy.special import stdtr

        t = self._t(limit)
        return 1.0 if t is None else float(stdtr(len(self.values) - 1, t))

    def needed(self, limit: float, alpha: float) -> int | None:
        if len(self.values) < 2:
            return 3  # the fewest that tell a spread from a drift; what they show may ask for more
        if limit <= 0:
            return 2
        logs = np.log(np.asarray(self.values, float))
        return rounds_needed(abs(float(logs.mean()) - math.log(limit)), float(np.std(logs, ddof=1)), alpha)


@dataclass(frozen=True)
class Exact:
    """A number without any spread, such as a size on disk."""

    value: float

    def interval(self, confidence: float = 0.95) -> Interval:
        return Interval(self.value, self.value, self.value)

    def p_above(self, limit: float) -> float:
        return 0.0 if self.value > limit else 1.0

    def p_below(self, limit: float) -> float:
        return 0.0 if self.value < limit else 1.0

    def needed(self, limit: float, alpha: float) -> int | None:
        return None


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p of claims made together, so that any false one is claimed with at most the level's chance.

    Holm 1979 (Scand. J. Stat. 6:65-70): valid however the claims depend on each other.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted, largest = [1.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def examples_needed(distance: float, each: float, alpha: float, power: float = POWER) -> int | None:
    """Examples at which a mean difference `distance` from the limit is shown, one-sided.

    `each` is the standard deviation of one example's difference: n = ((z_alpha + z_power) each / distance)^2
    (Chow, Shao & Wang 2008, Sample Size Calculations in Clinical Research, 3.1.3). None at the limit itself.
    """
    from scipy.special import ndtri

    if distance <= 0:
        return None
    root = (float(ndtri(1 - alpha)) + float(ndtri(power))) * each / distance
    return max(1, math.ceil(root**2)) if root <= math.sqrt(MOST_NEEDED) else None


def rounds_needed(distance: float, each: float, alpha: float, power: float = POWER) -> int | None:
    """Fewest rounds at which a one-sided t test of a mean `distance` from the limit has the power.

    `each` is the standard deviation of one round; the power is that of the noncentral t distribution
    (Chow, Shao & Wang 2008, 3.1). None at the limit itself, or above `MOST_ROUNDS`.
    """
    from scipy.special import nctdtr, stdtrit

    if distance <= 0:
        return None
    if each <= 0:
        return 2
    for n in range(2, MOST_ROUNDS + 1):
        critical = float(stdtrit(n - 1, 1 - alpha))
        missed = float(nctdtr(n - 1, distance / each * math.sqrt(n), critical))
        # far from the limit the noncentral t runs out of its range: what it misses there is nothing
        if math.isnan(missed) or missed <= 1 - power:
            return n
    return None
