"""A run against a stored reference of the same recipes: what may be compared, as checks of a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qtool import comparability, evidence, stats
from qtool.claims import Exact, Rounds, rounds_needed
from qtool.core import QtoolError
from qtool.evidence import Evidence
from qtool.paired import PairedScores
from qtool.policy import Policy
from qtool.rows import Trial, speedup
from qtool.stats import Interval
from qtool.units import peak_name

UNSCORED = "it was not scored"


@dataclass(frozen=True)
class Groups:
    """`claims.Estimate` of the ratio of two runs' geometric means: their processes were not paired (Welch)."""

    tops: Sequence[float]
    bottoms: Sequence[float]

    @property
    def value(self) -> float:
        return self.interval().value

    def interval(self, confidence: float = 0.95) -> Interval:
        return stats.welch_ratio(self.tops, self.bottoms, confidence)

    def p_above(self, limit: float) -> float:
        from scipy.special import stdtr

        error, freedom = stats.welch_error(self.tops, self.bottoms)
        distance = math.log(self.value / limit)
        if error is None:
            return 1.0
        return float(stdtr(freedom, -distance / error)) if error else float(distance <= 0)

    def p_below(self, limit: float) -> float:
        return 1.0 if stats.welch_error(self.tops, self.bottoms)[0] is None else 1 - self.p_above(limit)

    def needed(self, limit: float, alpha: float) -> int | None:
        """Rounds in each of the two runs, by the spread of both."""
        error, _ = stats.welch_error(self.tops, self.bottoms)
        if error is None:
            return 3
        each = error * math.sqrt(min(len(self.tops), len(self.bottoms)))
        return rounds_needed(abs(math.log(self.value / limit)), each, alpha)


def against(found: Evidence, stored: Evidence, policy: Policy) -> tuple[list[dict[str, Any]], list[str]]:
    """Fields of `gate.Check` for every trial both runs have, and notes on what could not be compared.

    Speed-ups are held against each other rather than times: each was measured against its own baseline in the
    same minutes. A fall is allowed up to the policy's tolerance. Raises QtoolError when nothing is shared.
    """
    if policy.reference_drop and None in (found.run["metric"], stored.run["metric"]):
        raise QtoolError(
            "reference: max_drop: one of the two runs was swept with --no-score. Leave max_drop out, or sweep with --task."
        )
    differ = comparability.differences(stored.run, found.run)
    notes = [
        f"against {stored.run_dir}: not compared: {', '.join(d['spoils'])}, not the same {d['what']}"
        for d in differ
        if d["spoils"]
    ]
    checks: list[dict[str, Any]] = []
    shared = 0
    scored: set[tuple[str, ...]] = set()

    def comparable(column: str) -> bool:
        return comparability.spoiled(differ, column) is None

    for trial in found.trials:
        old = stored.counterpart(found, trial)
        if old is None or old.status != "ok" or trial.recipe == found.baseline:
            continue
        shared += 1
        if trial.status != "ok":
            if policy.expected(trial.recipe) is None:
                worse: dict[str, Any] = {"verdict": "inconclusive" if trial.unfinished else "fail"}
                worse["why"] = f"{trial.status}: {trial.cause}; it finished in {stored.run_dir}"
                checks.append(_check(trial, "reference_finished", None, 0.0, True, None, policy) | worse)
            continue
        if comparable("speedup"):
            checks.append(_speedup(found, stored, trial, old, policy))
        memory = peak_name(trial.group.device)
        if comparable(memory):
            new, before = (list((t.series(memory) or {}).values()) for t in (trial, old))
            if new and before:
                most = 1 + policy.tolerance
                checks.append(
                    _check(trial, "reference_memory", memory, most, False, Groups(new, before), policy)
                )
        if comparable("disk_bytes") and trial.disk_bytes and old.disk_bytes:
            ratio = Exact(trial.disk_bytes / old.disk_bytes)
            checks.append(
                _check(trial, "reference_disk", "disk_bytes", 1 + policy.tolerance, False, ratio, policy)
            )
        key = (trial.recipe, *trial.group.scored)
        if policy.reference_drop and comparable("score") and key not in scored:
            scored.add(key)
            checks.append(_score(found, stored, trial, old, policy))
    if not shared:
        raise QtoolError(
            f"--reference {stored.run_dir} shares no finished recipe with {found.run_dir}. Give a run of the same recipes."
        )
    return checks, notes


def _speedup(found: Evidence, stored: Evidence, trial: Trial, old: Trial, policy: Policy) -> dict[str, Any]:
    new = speedup(trial, found.trial(found.baseline, trial.group))
    before = speedup(old, stored.trial(stored.baseline, trial.group))
    ratio = why = None
    if isinstance(new, Rounds) and isinstance(before, Rounds):
        ratio = Groups(new.values, before.values)
    else:
        why = "a baseline is missing in one of the two runs"
    made = _check(trial, "reference_speedup", "speedup", 1 - policy.tolerance, True, ratio, policy)
    return made | {"why": why}


def _score(found: Evidence, stored: Evidence, trial: Trial, old: Trial, policy: Policy) -> dict[str, Any]:
    """The change of score since the reference on the same examples; without an estimate it says why."""
    files = {
        "now": evidence.prediction_files(found.run_dir, [trial]).get(trial.recipe, UNSCORED),
        "then": evidence.prediction_files(stored.run_dir, [old]).get(old.recipe, UNSCORED),
    }
    assert policy.reference_drop is not None
    made = {"unit_of_need": "examples"} | _check(
        trial, "reference_drop", "score_delta", 0.0, True, None, policy
    )
    scores = PairedScores(found.run["metric"], files, "then")
    if len(scores.predictions) < 2:
        return made | {"why": "; ".join(scores.problems.values())}
    margin = policy.reference_drop.margin(scores.single("then", scores.metric).value)
    change = scores.change("now", "then")
    if change is None or not margin > 0:
        return made | {"why": "the score is not defined for one of the two, or 0 then"}
    return made | {"estimate": change, "limit": -margin}


def _check(
    trial: Trial, name: str, metric: str | None, limit: float, higher: bool, estimate: Any, policy: Policy
) -> dict[str, Any]:
    facts = {"trial": trial, "name": name, "metric": metric, "limit": limit, "higher": higher}
    return facts | {"estimate": estimate, "confidence": policy.confidence}
