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

import numpy as np

from qtool.stats import Interval, t_quantile

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


def outcomes(values: Sequence[Numbers]) -> list[list[Outcome]]:
    """Each against each, lower is better: by rounds where both have them, exactly where neither has, else unresolved.

    The t interval on the log ratios of shared rounds leaves out 1, or lies near it (a tie). One shared round has no
    interval, so there the two values are compared as they are; no shared round, or a value in one that is not
    positive, leaves it unresolved.
    """
    # tables of all pairs at a time: a large run has thousands
    exact = np.array([math.nan if v is None or isinstance(v, Mapping) else v for v in values], float)
    rounds = sorted({r for v in values if isinstance(v, Mapping) for r in v})
    table = np.full((len(values), len(rounds)), math.nan)
    for row, value in enumerate(values):
        if isinstance(value, Mapping):
            table[row] = [value.get(r, math.nan) for r in rounds]
    shared = ~np.isnan(table[:, None] - table)
    count = shared.sum(axis=2)
    positive = ~(shared & (np.minimum(table[:, None], table) <= 0)).any(axis=2)
    logs = np.log(np.where(table > 0, table, 1.0))
    gaps = np.where(shared, logs[:, None] - logs, 0.0)
    mean = gaps.sum(axis=2) / np.maximum(count, 1)
    squares = (np.where(shared, gaps - mean[:, :, None], 0.0) ** 2).sum(axis=2)
    quantiles = np.array([t_quantile(n - 1) if n > 1 else 0.0 for n in range(len(rounds) + 1)])
    half = quantiles[count] * np.sqrt(squares / np.maximum(count * (count - 1), 1))
    low, high = mean - half, mean + half
    several = positive & (count > 1)
    single = np.where(shared, table[:, None] - table, 0.0).sum(axis=2)
    gap = np.where(positive & (count == 1), single, exact[:, None] - exact)
    found = np.full(mean.shape, "unresolved", object)
    found[(several & (low > -_TIE_LOG) & (high < _TIE_LOG)) | (gap == 0)] = "tie"
    found[(several & (high < 0)) | (gap < 0)] = "better"
    found[(several & (low > 0)) | (gap > 0)] = "worse"
    return found.tolist()


def by_ratio(ratio: Interval) -> Outcome:
    """Lower is better: the interval of mine over the other's leaves out 1, or lies near it (a tie)."""
    if ratio.low is None or ratio.high is None:
        return "unresolved"
    if ratio.high < 1:
        return "better"
    if ratio.low > 1:
        return "worse"
    return "tie" if ratio.low > 1 / TIE_RATIO and ratio.high < TIE_RATIO else "unresolved"


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
    told = {name: outcomes([candidate.values.get(name) for candidate in candidates]) for name in known}
    pairs: dict[tuple[str, str], dict[str, Outcome]] = {}
    for i, a in enumerate(candidates):
        for j, b in enumerate(candidates[i + 1 :], i + 1):
            mine: dict[str, Outcome] = {name: table[i][j] for name, table in told.items()}
            its: dict[str, Outcome] = {name: table[j][i] for name, table in told.items()}
            if delta is not None:
                others = {outcome for name, outcome in mine.items() if name != SCORE}
                open_ = others <= {"better", "tie"} or others <= {"worse", "tie"}
                mine[SCORE] = (
                    by_score(delta(a.name, b.name), margin) if every_score or open_ else "unresolved"
                )
                its[SCORE] = OPPOSITE[mine[SCORE]]
            pairs[a.name, b.name], pairs[b.name, a.name] = mine, its
    return pairs


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
