"""`qtool compare`: two runs side by side, each column compared only where the runs allow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qtool import comparability, evidence, objectives, rows, stats
from qtool.claims import Rounds
from qtool.core import METRICS, QtoolError
from qtool.evidence import Evidence
from qtool.frontier import OPPOSITE, by_ratio, by_score
from qtool.objectives import Option
from qtool.paired import PairedScores
from qtool.rows import Trial
from qtool.units import peak_name


@dataclass(frozen=True)
class Side:
    """A trial in its run."""

    run: Evidence
    trial: Trial

    @cached_property
    def metrics(self) -> dict[str, Any]:
        if self.trial.status != "ok":
            return {}
        baseline = self.run.trial(self.run.baseline, self.trial.group)
        baseline = baseline if baseline and baseline.status == "ok" else None
        return rows.times_and_sizes(self.trial, baseline, self.run.baseline)

    def value(self, column: str) -> float | None:
        if column == "score":
            told = self.trial.score.values.get("metrics") if self.trial.score else None
            return (told or {}).get(self.run.run["metric"]) if self.trial.status == "ok" else None
        return self.metrics.get(column, {}).get("value")

    def by_round(self, column: str) -> list[float]:
        if column == "speedup":
            estimate = rows.speedup(self.trial, self.run.trial(self.run.baseline, self.trial.group))
            return list(estimate.values) if isinstance(estimate, Rounds) else []
        return [value for value in (self.trial.series(column) or {}).values() if value > 0]


def compare(run_a: Path, run_b: Path, keep: bool = True) -> dict[str, Any]:
    """Both runs' values with the change from A to B, JSON-able. A change that cannot be told is null with its reason.

    Times and memory of two runs were not paired, so their ratio has Welch's interval over the processes; scores
    are paired by example. `keep` is as in `evidence.load`.
    Raises QtoolError when a folder holds no run or the two share no row.
    """
    a, b = evidence.load_times(run_a), evidence.load_times(run_b)
    differ = comparability.differences(a.run, b.run)
    several = len(a.hosts) > 1 or len(b.hosts) > 1
    in_a, in_b = ({_key(t, several): t for t in found.trials} for found in (a, b))
    shared = [key for key in in_a if key in in_b]
    if not shared:
        raise QtoolError(
            f"{run_a} and {run_b} share no recipe at the same device and batch size. Sweep them alike."
        )
    scored = a.run["metric"] is not None and comparability.spoiled(differ, "score") is None
    places = dict.fromkeys((device, host) for _, device, _, host in shared)
    scores = {place: _scores(a, b, place, keep) for place in places} if scored else {}
    found = []
    for key in shared:
        one, two = Side(a, in_a[key]), Side(b, in_b[key])
        found.append(
            {
                **dict(zip(("recipe", "device", "batch_size", "host"), key, strict=True)),
                "status_a": one.trial.status,
                "status_b": two.trial.status,
                "columns": {
                    column: _column(column, differ, one, two, scores.get((key[1], key[3])))
                    for column in _columns(a, b, key[1])
                },
            }
        )
    return {
        "a": _told(a) | _hypervolume(a),
        "b": _told(b) | _hypervolume(b),
        "differences": differ,
        "notes": _notes(a, b),
        "rows": found,
        "only_in_a": [_named(key) for key in in_a if key not in in_b],
        "only_in_b": [_named(key) for key in in_b if key not in in_a],
    }


Key = tuple[str, str, int, str]


def _key(trial: Trial, several: bool) -> Key:
    """Recipe, device, batch size, and the machine where one of the runs has several; two of one each are compared."""
    group = trial.group
    return trial.recipe, group.device, group.batch_size, evidence.machine(group.host) if several else ""


def _named(key: Key) -> list[Any]:
    recipe, device, batch_size, host = key
    return [recipe, f"{device} at {host}" if host else device, batch_size]


def _scores(a: Evidence, b: Evidence, place: tuple[str, str], keep: bool) -> PairedScores:
    """The predictions of both runs on the same examples, named by run and recipe."""
    files = {
        f"{side} {recipe}": path
        for side, found in (("a", a), ("b", b))
        for recipe, path in evidence.prediction_files(
            found.run_dir, [t for t in found.trials if _at(t, place)]
        ).items()
    }
    return PairedScores(a.run["metric"], files, f"a {a.baseline}", keep)


def _at(trial: Trial, place: tuple[str, str]) -> bool:
    device, host = place
    return trial.group.device == device and host in ("", evidence.machine(trial.group.host))


def _columns(a: Evidence, b: Evidence, device: str) -> list[str]:
    score = ["score"] if a.run["metric"] and b.run["metric"] else []
    times = ["speedup", "latency_p50_s", "latency_p95_s", "throughput_per_s"]
    return [*score, *times, peak_name(device), "disk_bytes"]


def _told(found: Evidence) -> dict[str, Any]:
    keys = ("model", "task", "metric", "started_at")
    return {"run": str(found.run_dir), **{key: found.run.get(key) for key in keys}}


def _hypervolume(found: Evidence) -> dict[str, Any]:
    """Of all finished trials, over what both runs measured: a single figure of how good the offer is."""
    every = []
    for trial in found.trials:
        side = Side(found, trial)
        if trial.status == "ok":
            values = side.metrics | {found.run["metric"]: {"value": side.value("score")}}
            row = {"recipe": trial.recipe, "device": trial.group.device, "metrics": values}
            every.append(Option(trial.recipe, row, trial))
    if not every:
        return {"hypervolume": None, "hypervolume_reason": "nothing finished"}
    names = objectives.default(every, found.run["metric"])
    value, reason = objectives.hypervolume_of(found, every, names)
    return {"hypervolume": value, "hypervolume_reason": reason, "objectives": names}


def _column(
    column: str, differ: Sequence[Mapping[str, Any]], one: Side, two: Side, scores: PairedScores | None
) -> dict[str, Any]:
    """Both values and, where it may be told, the change: a ratio B / A, or B - A for a score."""
    before, after = one.value(column), two.value(column)
    cell: dict[str, Any] = {
        "a": before,
        "b": after,
        "change": None,
        "low": None,
        "high": None,
        "verdict": None,
    }
    cell["reason"] = comparability.spoiled(differ, column)
    if cell["reason"] is None and (before is None or after is None):
        cell["reason"] = "one of the two has no value"
    if cell["reason"] is not None or before is None or after is None:
        return cell
    if column == "score":
        return cell | _score(scores, one.trial.recipe)
    if column == "disk_bytes":
        ratio = after / before
        verdict = "tie" if ratio == 1 else "better" if ratio < 1 else "worse"
        return cell | {"change": ratio, "low": ratio, "high": ratio, "verdict": verdict}
    if column == "speedup" and one.trial.recipe == one.run.baseline:
        return cell | {"change": 1.0, "low": 1.0, "high": 1.0, "verdict": "tie"}
    rounds_a, rounds_b = one.by_round(column), two.by_round(column)
    if not rounds_a or not rounds_b:
        return cell | {"reason": "it was not measured in every round"}
    ratio = stats.welch_ratio(rounds_b, rounds_a)
    told = {"change": ratio.value, "low": ratio.low, "high": ratio.high}
    outcome = by_ratio(ratio)
    return cell | told | {"verdict": OPPOSITE[outcome] if METRICS[column].better == "higher" else outcome}


def _score(scores: PairedScores | None, recipe: str) -> dict[str, Any]:
    if scores is None:
        return {"reason": "one of the two was not scored"}
    missing = [name for name in (f"a {recipe}", f"b {recipe}") if name not in scores.predictions]
    if missing:
        return {"reason": scores.problems.get(missing[0], "its predictions were not stored")}
    delta = scores.delta(f"b {recipe}", f"a {recipe}")
    return {"change": delta.value, "low": delta.low, "high": delta.high, "verdict": by_score(delta)}


def _notes(a: Evidence, b: Evidence) -> list[str]:
    """What may be compared, and yet may differ for a reason outside the recipe."""
    flags = [set((found.run.get("host") or {}).get("cpu_flags") or []) for found in (a, b)]
    notes = []
    if flags[0] != flags[1] and a.run["metric"]:
        only = ", ".join(sorted(flags[0] ^ flags[1]))
        notes.append(
            f"the CPUs' instruction sets differ ({only}): scores of INT8 and half precision may depend on it"
        )
    old, new = (found.run.get("recipes") or {} for found in (a, b))
    changed = [name for name in old if name in new and old[name] != new[name]]
    if changed:
        notes.append(f"recipes that were changed in between: {', '.join(changed)}")
    return notes
