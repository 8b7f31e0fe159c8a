"""Which recipes are worth having and which one to take: dominance that respects intervals, as pure functions.

Knows nothing of files, units or wording. Everything is decided from pairwise evidence: in each objective one
recipe is better than another, worse, tied with it, or the evidence does not say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from qtool.stats import Interval, t_bounds

Outcome = Literal["better", "worse", "tie", "unresolved"]
OPPOSITE: dict[Outcome, Outcome] = {
    "better": "worse",
    "worse": "better",
    "tie": "tie",
    "unresolved": "unresolved",
}
Pairs = Mapping[tuple[str, str], Mapping[str, Outcome]]
"""Evidence for the first recipe against the second, by objective."""

SCORE = "score"
MARGIN = 0.02
"""A score less than 0.02 away counts as the same (non-inferiority). With SST-2's 872 rows the paired interval
stays inside that while fewer than 8 % of the predictions change; a smaller margin could not be shown."""


TIE_RATIO = 1.10
"""Two latencies or peaks are tied when the whole interval of their ratio lies within 10 %: what a user would
call the same. A wider interval has shown neither a difference nor a likeness, and blocks dominance."""
_TIE_LOG = math.log(TIE_RATIO)


Numbers = Mapping[int, float] | float | None
"""A value by round, or an exact one, or nothing; lower is better, so what is not is negated or inverted."""


@dataclass(frozen=True)
class Candidate:
    """A name and its numbers by objective."""

    name: str
    values: Mapping[str, Numbers]


def by_rounds(mine: Mapping[int, float], other: Mapping[int, float]) -> Outcome:
    """Lower is better: the t interval on the log ratios of shared rounds leaves out 1, or lies near it (a tie).

    One shared round has no interval, so there the two values are compared as they are; no shared round, or a
    value that is not positive, leaves it unresolved.
    """
    shared = sorted(mine.keys() & other.keys())
    if not shared or min(values[r] for values in (mine, other) for r in shared) <= 0:
        return "unresolved"
    if len(shared) == 1:
        return by_value(mine[shared[0]], other[shared[0]])
    # a large run has thousands of pairs: logarithms are compared as they are
    low, high = t_bounds([math.log(mine[r] / other[r]) for r in shared])
    return _by_logs(low, high)


def by_ratio(ratio: Interval) -> Outcome:
    """Lower is better: the interval of mine over the other's leaves out 1, or lies near it (a tie)."""
    if ratio.low is None or ratio.high is None:
        return "unresolved"
    return _by_logs(math.log(ratio.low), math.log(ratio.high))


def _by_logs(low: float, high: float) -> Outcome:
    """Lower is better: the interval of the logarithm of mine over the other's leaves out 0, or lies near it (a tie)."""
    if high < 0:
        return "better"
    if low > 0:
        return "worse"
    return "tie" if low > -_TIE_LOG and high < _TIE_LOG else "unresolved"


def by_value(mine: float | None, other: float | None) -> Outcome:
    """Lower is better, exactly."""
    if mine is None or other is None:
        return "unresolved"
    if mine == other:
        return "tie"
    return "better" if mine < other else "worse"


def by_score(delta: Interval | None, margin: float = MARGIN) -> Outcome:
    """`delta` is my score minus the other's on the same examples; inside the margin on both sides: tie."""
    if delta is None or delta.low is None or delta.high is None:
        return "unresolved"
    if delta.low > 0:
        return "better"
    if delta.high < 0:
        return "worse"
    return "tie" if -margin < delta.low and delta.high < margin else "unresolved"


def compare(
    candidates: Sequence[Candidate],
    delta: Callable[[str, str], Interval | None] | None,
    *,
    margin: float = MARGIN,
    every_score: bool = False,
) -> dict[tuple[str, str], dict[str, Outcome]]:
    """Evidence for every ordered pair; `delta(a, b)` is a's score minus b's, None where nothing was scored.

    Objectives that no candidate has a number for are left out, so that they block nobody. A score that cannot
    decide, because the other objectives contradict each other already, is left unresolved unless `every_score`:
    bootstraps of hundreds of pairs take seconds.
    """
    names = dict.fromkeys(name for candidate in candidates for name in candidate.values)
    known = [name for name in names if any(c.values.get(name) not in (None, {}) for c in candidates)]
    pairs: dict[tuple[str, str], dict[str, Outcome]] = {}
    for number, a in enumerate(candidates):
        for b in candidates[number + 1 :]:
            evidence: dict[str, Outcome] = {
                name: by_numbers(a.values.get(name), b.values.get(name)) for name in known
            }
            if delta is not None:
                others = {outcome for name, outcome in evidence.items() if name != SCORE}
                open_ = others <= {"better", "tie"} or others <= {"worse", "tie"}
                decides = every_score or open_
                evidence[SCORE] = by_score(delta(a.name, b.name), margin) if decides else "unresolved"
            pairs[a.name, b.name] = evidence
            pairs[b.name, a.name] = {name: OPPOSITE[found] for name, found in evidence.items()}
    return pairs


def by_numbers(mine: Numbers, other: Numbers) -> Outcome:
    """Lower is better: by rounds where both have them, else by value."""
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        return by_rounds(mine, other)
    if isinstance(mine, Mapping) or isinstance(other, Mapping):
        return "unresolved"
    return by_value(mine, other)


def dominates(evidence: Mapping[str, Outcome]) -> bool:
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
    """The recommended candidate, those it cannot be told apart from in what is preferred, and what decided.

    `decided_by` is an objective, or "frontier" where it alone of the tied is on it.
    """

    name: str
    tied: tuple[str, ...]
    decided_by: str


def choose(
    qualified: Sequence[Candidate],
    pairs: Pairs,
    frontier: Sequence[str],
    order: Sequence[str],
    baseline: str | None = None,
) -> Choice:
    """The best in the first objective of `order`; among those it cannot be told apart from, in the next ones.

    Candidates shown to be better than `baseline` in the first objective go before those that are not: a low
    median of noisy rounds is no gain yet. Of the tied, those on the frontier go first. Raises ValueError when
    nothing qualified.
    """
    if not qualified:
        raise ValueError("nothing qualified")
    first = order[0]
    middle = _middles(qualified, order)
    shown = [c for c in qualified if pairs.get((c.name, baseline or ""), {}).get(first) == "better"]
    pool = shown or list(qualified)
    best = min(pool, key=lambda c: (middle[c.name, first], c.name))
    tied = [c for c in pool if c is best or _as_good(c, best, pairs, first, middle)]
    if len(tied) == 1:
        return Choice(best.name, (), first)
    left = [c for c in tied if c.name in frontier] or tied
    decided_by = "frontier" if len(left) == 1 else ""
    for objective in order[1:]:
        least = min(left, key=lambda c: middle[c.name, objective])
        left = [c for c in left if c is least or pairs[least.name, c.name].get(objective) != "better"]
        if len(left) == 1:
            decided_by = decided_by or objective
    taken = min(left, key=lambda c: (middle[c.name, first], c.name))
    others = tuple(c.name for c in tied if c is not taken)
    return Choice(taken.name, others, decided_by or first)


def _as_good(
    other: Candidate, best: Candidate, pairs: Pairs, objective: str, middle: Mapping[tuple[str, str], float]
) -> bool:
    """Not told apart and near: a recipe twice as slow in noisy rounds is no tie to choose from."""
    mine, its = middle[best.name, objective], middle[other.name, objective]
    near = its <= mine + MARGIN if objective == SCORE else its <= TIE_RATIO * mine
    return near and pairs[best.name, other.name].get(objective) in ("tie", "unresolved")


def _middles(candidates: Sequence[Candidate], order: Sequence[str]) -> dict[tuple[str, str], float]:
    """Median over the rounds that all have, or the exact value; infinite where there is none.

    Over each one's own rounds, those that went on through a slow hour would look slower than they are.
    """
    found = {}
    for objective in order:
        values = {c.name: c.values.get(objective) for c in candidates}
        rounds = [set(value) for value in values.values() if isinstance(value, Mapping) and value]
        shared = set.intersection(*rounds) if rounds else set()
        for name, value in values.items():
            if isinstance(value, Mapping):
                value = median(value[r] for r in (shared or value)) if value else None
            found[name, objective] = math.inf if value is None else value
    return found
