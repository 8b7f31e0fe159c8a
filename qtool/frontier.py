"""Which recipes are worth having and which one to take: dominance that respects intervals, as pure functions.

Knows nothing of files, units or wording. Everything is decided from pairwise evidence: in each objective one
recipe is better than another, worse, tied with it, or the evidence does not say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from qtool.stats import Interval, t_ratio

Evidence = Literal["better", "worse", "tie", "unresolved"]
Pairs = Mapping[tuple[str, str], Mapping[str, Evidence]]
"""Evidence for the first recipe against the second, by objective."""

MARGIN = 0.02
"""A score less than 0.02 away counts as the same (non-inferiority). With SST-2's 872 rows the paired interval
stays inside that while fewer than 8 % of the predictions change; a smaller margin could not be shown."""


TIE_RATIO = 1.10
"""Two latencies or peaks are tied when the whole interval of their ratio lies within 10 %: what a user would
call the same. A wider interval has shown neither a difference nor a likeness, and blocks dominance."""


@dataclass(frozen=True)
class Candidate:
    """One recipe at one device and batch size: p50 and peak memory by round, and bytes on disk."""

    recipe: str
    p50_s: Mapping[int, float]
    peak_bytes: Mapping[int, float]
    disk_bytes: float | None


def by_rounds(mine: Mapping[int, float], other: Mapping[int, float]) -> Evidence:
    """Lower is better: the t interval on the log ratios of shared rounds leaves out 1, or lies near it (a tie).

    One shared round has no interval, so there the two values are compared as they are; no shared round, or a
    value that is not positive, leaves it unresolved.
    """
    shared = sorted(mine.keys() & other.keys())
    if not shared or min(values[r] for values in (mine, other) for r in shared) <= 0:
        return "unresolved"
    if len(shared) == 1:
        return by_value(mine[shared[0]], other[shared[0]])
    ratio = t_ratio([mine[r] for r in shared], [other[r] for r in shared])
    if ratio.low is None or ratio.high is None:
        return "unresolved"
    if ratio.high < 1:
        return "better"
    if ratio.low > 1:
        return "worse"
    return "tie" if ratio.low > 1 / TIE_RATIO and ratio.high < TIE_RATIO else "unresolved"


def by_value(mine: float | None, other: float | None) -> Evidence:
    """Lower is better, exactly."""
    if mine is None or other is None:
        return "unresolved"
    if mine == other:
        return "tie"
    return "better" if mine < other else "worse"


def by_score(delta: Interval | None, margin: float = MARGIN) -> Evidence:
    """`delta` is my score minus the other's on the same examples; inside the margin on both sides: tie."""
    if delta is None or delta.low is None or delta.high is None:
        return "unresolved"
    if delta.low > 0:
        return "better"
    if delta.high < 0:
        return "worse"
    return "tie" if -margin < delta.low and delta.high < margin else "unresolved"


def compare(
    candidates: Sequence[Candidate], deltas: Mapping[tuple[str, str], Interval | None] | None
) -> dict[tuple[str, str], dict[str, Evidence]]:
    """Evidence for every ordered pair; `deltas[a, b]` is a's score minus b's, None where nothing was scored.

    Objectives that no candidate has a number for are left out, so that they block nobody.
    """
    has_peak = any(candidate.peak_bytes for candidate in candidates)
    has_disk = any(candidate.disk_bytes is not None for candidate in candidates)
    pairs: dict[tuple[str, str], dict[str, Evidence]] = {}
    for a in candidates:
        for b in candidates:
            if a is b:
                continue
            evidence: dict[str, Evidence] = {"p50": by_rounds(a.p50_s, b.p50_s)}
            if has_peak:
                evidence["peak"] = by_rounds(a.peak_bytes, b.peak_bytes)
            if has_disk:
                evidence["disk"] = by_value(a.disk_bytes, b.disk_bytes)
            if deltas is not None:
                evidence["score"] = by_score(deltas[a.recipe, b.recipe])
            pairs[a.recipe, b.recipe] = evidence
    return pairs


def dominates(evidence: Mapping[str, Evidence]) -> bool:
    """Better somewhere, and better or tied everywhere; what is unresolved blocks."""
    found = set(evidence.values())
    return "better" in found and found <= {"better", "tie"}


def front(recipes: Sequence[str], pairs: Pairs) -> list[str]:
    """The recipes that nothing dominates, in the given order.

    Ties are not transitive, so dominance can run in a circle (a over b over c over a): a recipe leaves only
    if some other reaches it over dominance and it does not reach that one back.
    """
    below = {a: {b for b in recipes if a != b and dominates(pairs[a, b])} for a in recipes}
    reached = {a: _reachable(a, below) for a in recipes}
    return [a for a in recipes if not any(a in reached[b] and b not in reached[a] for b in recipes)]


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for recipe in edges[ahead.pop()] - found:
            found.add(recipe)
            ahead.append(recipe)
    return found


@dataclass(frozen=True)
class Choice:
    """The recommended recipe, those it cannot be told apart from in p50, and what decided between them."""

    recipe: str
    tied: tuple[str, ...]
    decided_by: Literal["p50", "frontier", "peak", "disk"]


def choose(qualified: Sequence[Candidate], pairs: Pairs, frontier: Sequence[str]) -> Choice:
    """The fastest by p50; among those it cannot be told apart from, the smaller peak memory, then disk.

    Of the tied, those on the frontier go first. Raises ValueError when nothing qualified.
    """
    if not qualified:
        raise ValueError("nothing qualified")
    fastest = min(qualified, key=lambda c: (_middle(c.p50_s), c.recipe))
    tied = [c for c in qualified if c is fastest or _as_fast(c, fastest, pairs)]
    if len(tied) == 1:
        return Choice(fastest.recipe, (), "p50")
    left = [c for c in tied if c.recipe in frontier] or tied
    smallest = min(left, key=lambda c: _middle(c.peak_bytes))
    small = [c for c in left if c is smallest or pairs[smallest.recipe, c.recipe].get("peak") != "better"]
    least = min(small, key=lambda c: (_size(c.disk_bytes), _middle(c.p50_s), c.recipe))
    others = tuple(c.recipe for c in tied if c is not least)
    if len(left) == 1:
        return Choice(least.recipe, others, "frontier")
    if len(small) == 1:
        return Choice(least.recipe, others, "peak")
    same = [c for c in small if _size(c.disk_bytes) == _size(least.disk_bytes)]
    return Choice(least.recipe, others, "disk" if len(same) == 1 else "p50")


def _as_fast(other: Candidate, fastest: Candidate, pairs: Pairs) -> bool:
    """Not told apart and near: a recipe twice as slow in noisy rounds is no tie to choose from."""
    near = _middle(other.p50_s) < TIE_RATIO * _middle(fastest.p50_s)
    return near and pairs[fastest.recipe, other.recipe]["p50"] in ("tie", "unresolved")


def _middle(rounds: Mapping[int, float]) -> float:
    """Median over rounds; infinite where nothing was measured, so that it is never the smallest."""
    return median(rounds.values()) if rounds else math.inf


def _size(disk_bytes: float | None) -> float:
    return math.inf if disk_bytes is None else disk_bytes
