"""From a run folder to `summary.json`: one row a trial, a frontier and a recommendation a group.

A group is a device and a batch size. Every statistic is computed here when reading; none was stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from qtool import frontier, stats, store
from qtool.advice import advice
from qtool.core import BASELINE, Measurement, QtoolError
from qtool.frontier import Candidate
from qtool.paired import PairedScores
from qtool.rows import Key, Trial, make_metrics, make_trial
from qtool.stats import Interval
from qtool.units import peak_name

SCHEMA = 1
Row = dict[str, Any]


def summarise(run_dir: Path) -> dict[str, Any]:
    """The content of `summary.json` for a run folder.

    Raises QtoolError when the folder holds no readable run or measurements of more than one host.
    """
    run = store.read_run(run_dir)
    baseline = run.get("baseline", BASELINE)
    lines = store.latest(store.read(run_dir))
    _refuse_mixed_hosts(run_dir, lines)
    trials = [make_trial(entry, lines, run["rounds"]) for entry in run["plan"]]
    scores = _scores(run_dir, run["metric"], trials, baseline)
    rows: list[Row] = []
    groups: list[dict[str, Any]] = []
    for group in dict.fromkeys(trial.group for trial in trials):
        own = [trial for trial in trials if trial.group == group]
        found, entry = _group(own, scores.get(group[0]), run.get("metrics") or [], baseline)
        rows += found
        groups.append(entry)
    return {
        "schema": SCHEMA,
        "model": run["model"],
        "task": run["task"],
        "metric": run["metric"],
        "baseline": baseline,
        "rows": rows,
        "frontier": groups,
        "harness": _harness(lines, run),
        "notes": [*(run.get("notes") or []), *_suspicions(trials, baseline)],
    }


def _refuse_mixed_hosts(run_dir: Path, lines: Mapping[Key, Measurement]) -> None:
    hosts = sorted({m.host for m in lines.values() if m.stage in ("measure", "harness") and m.host})
    if len(hosts) > 1:
        raise QtoolError(
            f"{run_dir} holds measurements of {len(hosts)} hosts ({', '.join(hosts)}), and no statistic pools"
            " hosts. Sweep on each host into its own --out."
        )


def _scores(
    run_dir: Path, metric: str | None, trials: Sequence[Trial], baseline: str
) -> dict[str, PairedScores]:
    """Paired scores by device, of every recipe that was scored there, whatever became of its timing."""
    if metric is None:
        return {}
    found = {}
    for device in dict.fromkeys(trial.group[0] for trial in trials):
        files: dict[str, Path | None] = {}
        for trial in trials:
            if trial.group[0] == device and trial.score is not None and trial.score.status == "ok":
                name = trial.score.values.get("predictions")
                files[trial.recipe] = run_dir / name if name else None
        found[device] = PairedScores(metric, files, baseline)
    return found


def _group(
    trials: Sequence[Trial], scores: PairedScores | None, metrics: Sequence[str], against: str
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and the frontier entry of one device and batch size."""
    device, batch_size = trials[0].group
    ok = [trial for trial in trials if trial.status == "ok"]
    baseline = next((trial for trial in ok if trial.recipe == against), None)
    candidates = [Candidate(t.recipe, t.p50_s(), t.values(peak_name(device)), t.disk_bytes) for t in ok]
    pairs = frontier.compare(candidates, _deltas([t.recipe for t in ok], scores, against))
    members = frontier.front([t.recipe for t in ok], pairs)
    provisional = any(len(trial.rounds) < 2 for trial in ok)
    rows: list[Row] = []
    for trial in trials:
        good = trial.status == "ok"
        # With one round nothing was told apart and nothing was shown to tie.
        others = [t.recipe for t in ok if t is not trial] if good and not provisional else []
        rows.append(
            {
                "recipe": trial.recipe,
                "device": device,
                "batch_size": batch_size,
                "status": trial.status,
                "cause": trial.cause,
                "next_step": trial.next_step,
                "description": trial.entry.get("description") or "",
                "metrics": make_metrics(trial, baseline, scores, metrics, against) if good else {},
                "on_frontier": trial.recipe in members,
                "ties": [
                    other for other in others if pairs[trial.recipe, other]["p50"] in ("tie", "unresolved")
                ],
                "flips": _flips(trial.recipe, scores, against) if good else None,
                "contended": trial.contended,
                "audit": (trial.score.values.get("audit") if trial.score else None) or {},
            }
        )
    shown = {row["recipe"] for row in rows if row["status"] == "ok" and _not_worse(row, scores, against)}
    qualified = [candidate for candidate in candidates if candidate.recipe in shown]
    choice = frontier.choose(qualified, pairs, members) if qualified else None
    return rows, {
        "device": device,
        "batch_size": batch_size,
        "recipes": members,
        "recommended": choice.recipe if choice else None,
        "provisional": provisional,
        "reason": advice(
            rows,
            choice,
            qualified=[candidate.recipe for candidate in qualified],
            metric=scores.metric if scores else None,
            examples=len(scores.labels) if scores else 0,
            provisional=provisional,
            baseline=against,
        ),
    }


def _not_worse(row: Row, scores: PairedScores | None, baseline: str) -> bool:
    """Whether the score is shown not to be worse than the baseline's by more than the margin."""
    if scores is None or row["recipe"] == baseline:
        return True
    low = row["metrics"]["score_delta"]["low"]
    return low is not None and low > -frontier.MARGIN


def _deltas(
    recipes: Sequence[str], scores: PairedScores | None, baseline: str
) -> dict[tuple[str, str], Interval | None] | None:
    if scores is None:
        return None
    found: dict[tuple[str, str], Interval | None] = {}
    # The baseline last, so that it is the reference here as it is in score_delta.
    names = sorted(recipes, key=lambda name: (name == baseline, name))
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            both = first in scores.predictions and second in scores.predictions
            delta = scores.delta(first, second) if both else None
            found[first, second] = delta
            found[second, first] = _negative(delta)
    return found


def _negative(delta: Interval | None) -> Interval | None:
    if delta is None or delta.low is None or delta.high is None:
        return None
    return Interval(-delta.value, -delta.high, -delta.low)


def _flips(recipe: str, scores: PairedScores | None, baseline: str) -> dict[str, Any] | None:
    """Answers a classifier gained and lost against the baseline; None where there is nothing to compare."""
    if scores is None or scores.classes is None or recipe == baseline:
        return None
    if recipe not in scores.predictions or baseline not in scores.predictions:
        return None
    gained, lost = scores.flips(recipe, baseline)
    return {"gained": gained, "lost": lost, "mcnemar_p": stats.mcnemar(gained, lost)}


def _suspicions(trials: Sequence[Trial], baseline: str) -> list[str]:
    """What scoring the baseline found odd about the order of the classes; once, whatever the device."""
    scores = [trial.score for trial in trials if trial.recipe == baseline and trial.score is not None]
    found = [score.values.get("suspicion") for score in scores]
    return list(dict.fromkeys(note for note in found if note))


def _harness(lines: Mapping[Key, Measurement], run: Mapping[str, Any]) -> dict[str, Any]:
    """What the harness adds to a call, as the median of its rounds' medians, and where the run was made."""
    null = [m.samples.get("latency_s") for m in lines.values() if m.stage == "harness"]
    contended = [m for m in lines.values() if m.stage == "measure" and m.values.get("contended")]
    return {
        "overhead_per_call_s": median(stats.percentile(times, 0.5) for times in null if times)
        if any(null)
        else None,
        "rounds": run["rounds"],
        "contended_measurements": len(contended),
        "stage_wall_s": _stage_wall_s(lines),
        "host": run.get("host"),
        "versions": run.get("versions"),
    }


def _stage_wall_s(lines: Mapping[Key, Measurement]) -> dict[str, float]:
    """Seconds of all child processes by stage: where a sweep's time went. Builds and scores overlap."""
    found: dict[str, float] = {}
    for line in lines.values():
        if line.values.get("wall_s") is not None:
            found[line.stage] = found.get(line.stage, 0.0) + line.values["wall_s"]
    return found
