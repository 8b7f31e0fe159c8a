"""The frontier over any metrics by their exact names: evidence, how firmly a member stands, hypervolume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtool import evidence, frontier
from qtool.core import METRICS, SCORES, QtoolError, did_you_mean
from qtool.evidence import Evidence
from qtool.frontier import SCORE, Numbers
from qtool.rows import Trial, speedup_by_round
from qtool.stats import Array, Interval
from qtool.units import peak_name

Row = dict[str, Any]
RESAMPLES = 500
FIRM = 0.95
"""A place on the frontier, or off it, that holds in fewer resamples is near the edge."""
WORSE_COST, WORSE_SCORE = 1.25, 0.05
"""The reference point of the hypervolume: a quarter dearer than the baseline, and five points worse."""


Delta = Callable[[str, str], Interval | None]


@dataclass(frozen=True)
class Option:
    """One way to deploy: a row of the summary and its trial. The name is unique in the run."""

    name: str
    row: Row
    trial: Trial
    baseline: Trial | None = None

    @property
    def device(self) -> str:
        return self.row["device"]

    @property
    def scored(self) -> tuple[str, str]:
        return self.trial.group.scored

    def value(self, metric: str) -> float | None:
        return self.row["metrics"].get(metric, {}).get("value")

    def numbers(self, metric: str) -> Numbers:
        if metric == "speedup" and self.baseline is not None and self.trial.recipe != self.baseline.recipe:
            # lower is better everywhere: the inverse, by round
            return {r: 1 / x for r, x in speedup_by_round(self.trial, self.baseline).items()}
        if metric == "speedup":
            return dict.fromkeys(self.trial.rounds, 1.0)
        return evidence.numbers(self.trial, metric, self.value(metric))


def options(found: Evidence, rows: Sequence[Row]) -> list[Option]:
    """The rows that are ok, named by recipe, and by host, device and batch size where the run has several."""
    ok = [row for row in rows if row["status"] == "ok"]
    devices, batches = {row["device"] for row in ok}, {row["batch_size"] for row in ok}
    hosts = {row["host"] for row in ok}
    made = []
    for row in ok:
        name = row["recipe"]
        name += f" on {row['device']}" if len(devices) > 1 else ""
        name += f" at {row['host']}" if len(hosts) > 1 else ""
        name += f" batch {row['batch_size']}" if len(batches) > 1 else ""
        trial = found.row_trial(row)
        if trial is not None:
            made.append(Option(name, row, trial, found.trial(found.baseline, trial.group)))
    return made


def check(names: Sequence[str], every: Sequence[Option], found: Evidence) -> list[str]:
    """The objectives as given, or score, p50, peak memory and disk. Raises QtoolError for one that has no values."""
    if not names:
        return default(every, found.run["metric"])
    for name in names:
        if name != SCORE and name not in METRICS:
            raise QtoolError(
                f"--objectives: there is no metric '{name}'.{did_you_mean(name, [SCORE, *METRICS])}"
            )
        metric = found.run["metric"] if name == SCORE else name
        if metric is None or all(option.value(metric) is None for option in every):
            raise QtoolError(
                f"--objectives: no recipe of {found.run_dir} has a value of '{name}'. Leave it out, or measure it."
            )
    # the task's own metric is the score: it has paired evidence, and is not an exact number
    return list(dict.fromkeys(SCORE if name == found.run["metric"] else name for name in names))


def default(every: Sequence[Option], metric: str | None) -> list[str]:
    """What a sweep's own frontier is over; the memory is that of the first device."""
    return [*([SCORE] if metric else []), "latency_p50_s", peak_name(every[0].device), "disk_bytes"]


def only(pairs: frontier.Pairs, names: Sequence[str]) -> frontier.Pairs:
    """The evidence on some objectives alone."""
    return {pair: {name: told[name] for name in names if name in told} for pair, told in pairs.items()}


def delta_of(found: Evidence, every: Sequence[Option]) -> Delta:
    """Score of the first option less that of the second, by name; None across hosts and devices, whose rows are
    not paired.
    """
    by_name = {option.name: option for option in every}
    told = {scored: evidence.delta_of(scores, found.baseline) for scored, scores in found.scores.items()}

    def delta(a: str, b: str) -> Interval | None:
        one, two = by_name[a], by_name[b]
        here = told.get(one.scored)
        if one.scored != two.scored or here is None:
            return None
        if one.row["recipe"] == two.row["recipe"]:
            return Interval(0.0, 0.0, 0.0)
        return here(one.row["recipe"], two.row["recipe"])

    return delta


def describe(
    found: Evidence, every: Sequence[Option], names: Sequence[str], pairs: frontier.Pairs
) -> dict[str, Any]:
    """Members, the share of resamples in which each option is on the frontier, and the hypervolume, JSON-able."""
    members = frontier.front([option.name for option in every], pairs)
    shares: dict[str, float] = {}
    for host in dict.fromkeys(option.trial.group.host for option in every):
        # the rounds of two hosts were not paired: each host's options stand or fall among themselves
        shares |= standing(found, [o for o in every if o.trial.group.host == host], names)
    value, reason = hypervolume_of(found, every, names)
    return {
        "objectives": list(names),
        "members": members,
        "probability": shares,
        "near_the_edge": [
            o.name
            for o in every
            if (shares[o.name] < FIRM) == (o.name in members) or 1 - FIRM < shares[o.name] < FIRM
        ],
        "hypervolume": value,
        "hypervolume_reason": reason,
    }


def standing(
    found: Evidence, every: Sequence[Option], names: Sequence[str], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, float]:
    """Share of bootstrap resamples in which nothing dominates an option's values, ties as the frontier has them.

    Rounds and examples are drawn with replacement, the same for all, so that pairs stay pairs (Efron &
    Tibshirani 1993, 8.6 and 16.2). Three rounds have ten distinct resamples: read the shares as coarse.
    """
    rng = np.random.default_rng(seed)
    # rounds that all have: those who went on through a slow hour must not look slower
    rounds = sorted(set.intersection(*(set(option.trial.rounds) for option in every)))
    drawn = rng.integers(0, len(rounds), (resamples, len(rounds)))
    costs = np.full((resamples, len(every), len(names)), np.inf)
    tied = np.zeros(len(names))
    for column, name in enumerate(names):
        if name == SCORE:
            tied[column] = frontier.MARGIN
            _score_costs(found, every, costs[:, :, column], resamples, seed)
            continue
        for row, option in enumerate(every):
            numbers = option.numbers(name)
            if isinstance(numbers, Mapping):
                tied[column] = math.log(frontier.TIE_RATIO)
                logs = np.array([math.log(numbers[r]) if numbers.get(r, 0) > 0 else np.nan for r in rounds])
                chosen = logs[drawn]
                known = np.isfinite(chosen)
                count = known.sum(axis=1)
                total = np.where(known, chosen, 0.0).sum(axis=1)
                costs[:, row, column] = np.where(count > 0, total / np.maximum(count, 1), np.inf)
            elif numbers is not None:
                costs[:, row, column] = numbers
    return dict(zip([o.name for o in every], map(float, _undominated(costs, tied).mean(axis=0)), strict=True))


def _score_costs(found: Evidence, every: Sequence[Option], costs: Array, resamples: int, seed: int) -> None:
    for scored, scores in found.scores.items():
        recipes = [
            r
            for r in dict.fromkeys(o.row["recipe"] for o in every if o.scored == scored)
            if r in scores.predictions
        ]
        if not recipes:
            continue
        drawn = scores.drawn(recipes, resamples, seed)
        for row, option in enumerate(every):
            if option.scored == scored and option.row["recipe"] in recipes:
                costs[:, row] = -drawn[recipes.index(option.row["recipe"])]


def _undominated(costs: Array, tied: Array | float = 0.0) -> Array:
    """Whether no other is lower by more than `tied` somewhere and higher by more nowhere: (resamples, options)."""
    dominated = np.zeros(costs.shape[:2], bool)
    columns = [np.ascontiguousarray(column) for column in np.moveaxis(costs, 2, 0)]
    limits = np.broadcast_to(tied, len(columns))
    for other in range(costs.shape[1]):
        nowhere_higher, somewhere_lower = np.ones_like(dominated), np.zeros_like(dominated)
        for column, limit in zip(columns, limits, strict=True):
            rival = column[:, other : other + 1]
            nowhere_higher &= rival <= column + limit
            somewhere_lower |= rival < column - limit
        dominated |= nowhere_higher & somewhere_lower
    return ~dominated


def hypervolume_of(
    found: Evidence, every: Sequence[Option], names: Sequence[str]
) -> tuple[float | None, str | None]:
    """Hypervolume of the options from a point a quarter dearer and five points worse than the baseline.

    Zitzler & Thiele 1999 (IEEE Trans. Evol. Comput. 3:257-271). Each objective is scaled to 0 at the reference
    point and 1 at no cost (or a perfect score), so 1 is the most and runs on one task can be set side by side.
    None with a reason where the baseline has no positive value.
    """
    if len({option.trial.group.host for option in every}) > 1:
        return None, "the run holds several hosts"
    base = next((o for o in every if o.row["recipe"] == found.baseline), None)
    if base is None:
        return None, f"{found.baseline} did not finish"
    gains = np.zeros((len(every), len(names)))
    for column, name in enumerate(names):
        metric = found.run["metric"] if name == SCORE else name
        against = base.value(metric)
        bounded = metric in (*SCORES, "agreement")
        if against is None or (against <= 0 and not bounded):
            return None, f"{base.name} has no positive {metric}"
        for row, option in enumerate(every):
            value = option.value(metric)
            if value is None:
                continue
            if bounded:
                worst = against - WORSE_SCORE
                gain = (value - worst) / (1 - worst)
            else:
                ratio = against / value if METRICS[metric].better == "higher" else value / against
                gain = 1 - ratio / WORSE_COST
            gains[row, column] = max(0.0, gain)
    return hypervolume(gains), None


def hypervolume(gains: Array) -> float:
    """Volume of the union of the boxes between the origin and each row of `gains` (points, objectives) >= 0.

    Sweeps the last objective from the best down, and measures the slice of the points so far in the others.
    """
    gains = gains[(gains > 0).all(axis=1)]
    if not len(gains):
        return 0.0
    gains = gains[_undominated(-gains[None])[0]]
    if gains.shape[1] == 1:
        return float(gains.max())
    gains = gains[np.argsort(-gains[:, -1], kind="stable")]
    ends = [*gains[1:, -1], 0.0]
    return float(
        sum(
            (height - end) * hypervolume(gains[: number + 1, :-1])
            for number, (height, end) in enumerate(zip(gains[:, -1], ends, strict=True))
            if height > end
        )
    )
