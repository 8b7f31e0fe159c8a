"""From a run folder to `summary.json`: one row a trial, a frontier and a recommendation a group.

A group is a host, a device and a batch size. Every statistic is computed here when reading; none was stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from qtool import estimate, frontier, stats, transfer
from qtool.advice import advice
from qtool.core import Measurement
from qtool.evidence import Evidence, candidate, delta_of, group_of, load, machine
from qtool.explain import explain
from qtool.paired import PairedScores
from qtool.rows import Group, Key, Trial, make_metrics
from qtool.units import peak_name

SCHEMA = 1
DEFAULT_WITHIN = 0.10
"""Rounds may differ by so much unless the sweep asked otherwise: what a user would call the same."""
ALPHA = 0.025
"""One-sided level of a claim: the lower end of a two-sided 95 % interval."""
Row = dict[str, Any]


def summarise(run_dir: Path) -> dict[str, Any]:
    """The content of `summary.json` for a run folder.

    Raises QtoolError when the folder holds no readable run or measurements of more than one host.
    """
    return of(load(run_dir))


def of(evidence: Evidence) -> dict[str, Any]:
    """The summary of a run that was read already."""
    run = evidence.run
    rows: list[Row] = []
    groups: list[dict[str, Any]] = []
    for group in evidence.groups:
        found, entry = _group(evidence, group)
        rows += found
        groups.append(entry)
    harness = _harness(evidence.lines, run)
    _explain(evidence, rows, harness)
    _judge(evidence, rows, harness)
    return {
        "schema": SCHEMA,
        "model": run["model"],
        "task": run["task"],
        "metric": run["metric"],
        "baseline": evidence.baseline,
        "rows": rows,
        "frontier": groups,
        "harness": harness,
        "notes": [*(run.get("notes") or []), *_lost(run), *_suspicions(evidence.trials, evidence.baseline)],
    }


def _group(evidence: Evidence, group: Group) -> tuple[list[Row], dict[str, Any]]:
    """Rows and the frontier entry of one host, device and batch size."""
    against, scores = evidence.baseline, evidence.scores.get(group.scored)
    trials = [trial for trial in evidence.trials if trial.group == group]
    ok = [trial for trial in trials if trial.status == "ok"]
    objectives = ["latency_p50_s", peak_name(group.device), "disk_bytes"]
    candidates = [candidate(trial, objectives[:2]) for trial in ok]
    pairs = frontier.compare(candidates, delta_of(scores, against))
    members = frontier.front([t.recipe for t in ok], pairs)
    provisional = any(len(trial.rounds) < 2 for trial in ok)
    rows = make_rows(evidence, group)
    for row in rows:
        # With one round nothing was told apart and nothing was shown to tie.
        others = [t.recipe for t in ok if t.recipe != row["recipe"]] if row["status"] == "ok" else []
        row["on_frontier"] = row["recipe"] in members
        row["ties"] = [
            other
            for other in others
            if not provisional and pairs[row["recipe"], other]["latency_p50_s"] in ("tie", "unresolved")
        ]
    shown = [row["recipe"] for row in rows if row["status"] == "ok" and _qualifies(row, scores, against)]
    qualified = [each for each in candidates if each.name in shown]
    choice = frontier.choose(qualified, pairs, members, objectives, against) if qualified else None
    return rows, {
        "host": group.host or None,
        "device": group.device,
        "batch_size": group.batch_size,
        "recipes": members,
        "recommended": choice.name if choice else None,
        "provisional": provisional,
        "reason": advice(
            rows,
            choice,
            qualified=[each.name for each in qualified],
            metric=scores.metric if scores else None,
            examples=len(scores.labels) if scores else 0,
            provisional=provisional,
            baseline=against,
        ),
    }


def make_rows(evidence: Evidence, group: Group) -> list[Row]:
    """The rows of one host, device and batch size, without what compares them with each other."""
    against, scores = evidence.baseline, evidence.scores.get(group.scored)
    claims = scores.not_worse(against, frontier.MARGIN) if scores else {}
    baseline = evidence.trial(against, group)
    baseline = baseline if baseline and baseline.status == "ok" else None
    names = evidence.run.get("metrics") or []
    rows: list[Row] = []
    for trial in evidence.trials:
        if trial.group != group:
            continue
        good = trial.status == "ok"
        rows.append(
            {
                "recipe": trial.recipe,
                "host": group.host or None,
                "device": group.device,
                "batch_size": group.batch_size,
                "status": trial.status,
                "cause": trial.cause,
                "next_step": trial.next_step,
                "description": trial.entry.get("description") or "",
                "metrics": make_metrics(trial, baseline, scores, names, against) if good else {},
                "flips": _flips(trial.recipe, scores, against) if good else None,
                "not_worse": _claim(trial.recipe, claims) if good else None,
                "round_spread": _spread(trial, evidence.run) if good else None,
                "contended": trial.contended,
                "throttled_by": trial.throttled_by,
                "gpu_shared": trial.gpu_shared,
                "audit": (trial.score.values.get("audit") if trial.score else None) or {},
                "placement": None,
                "verdict": None,
                "fit": _fit(trial, evidence.run),
            }
        )
    return rows


def _fit(trial: Trial, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The estimate of its weights beside what was found; None for a run that has no estimates."""
    told = run.get("fit")
    measured = trial.score.values.get("weight_bytes") if trial.score else None
    peaks = trial.values(peak_name(trial.group.device)).values()
    return estimate.error(told.get(trial.recipe), measured, max(peaks, default=None)) if told else None


def _qualifies(row: Row, scores: PairedScores | None, baseline: str) -> bool:
    """Whether the score is shown not to be worse than the baseline's by more than the margin."""
    if scores is None or row["recipe"] == baseline:
        return True
    return bool(row["not_worse"] and row["not_worse"]["shown"])


def _claim(recipe: str, claims: Mapping[str, float]) -> dict[str, Any] | None:
    """The claim that the score is not worse than the baseline's by the margin; p is adjusted for the others."""
    if recipe not in claims:
        return None
    return {"margin": frontier.MARGIN, "p_holm": claims[recipe], "shown": claims[recipe] <= ALPHA}


def _spread(trial: Trial, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """How much the rounds' p50 differ from process to process, and whether that is more than was asked."""
    found = stats.spread(list(trial.p50_s().values()))
    if found is None:
        return None
    asked = (run.get("args") or {}).get("speedup_within") or DEFAULT_WITHIN
    return {"ratio": found, "asked": asked, "unstable": found > asked}


def _explain(evidence: Evidence, rows: Sequence[Row], harness: Mapping[str, Any]) -> None:
    """Puts into every ok row the sentences on why it is as fast as it is."""
    for row in rows:
        trial = evidence.row_trial(row)
        if trial is None or row["status"] != "ok":
            continue
        tokens = [line.values.get("tokens_by_call") for line in trial.rounds.values()]
        row["why"] = explain(
            row,
            [other for other in rows if group_of(other).host == group_of(row).host],
            _of_host(evidence.run, row),
            latency_s=trial.samples("latency_s"),
            tokens_by_call=next(filter(None, tokens), None),
            ceilings=harness["ceilings_by_host"].get(machine(group_of(row).host), harness["ceilings"]),
            overhead_s=harness["overhead_by_host"].get(
                machine(group_of(row).host), harness["overhead_per_call_s"]
            ),
        )


def _of_host(run: Mapping[str, Any], row: Row) -> Mapping[str, Any]:
    """The run as one of the row's host alone."""
    host = (run.get("hosts") or {}).get(group_of(row).host)
    return {**run, "host": host} if host else run


def _judge(evidence: Evidence, rows: Sequence[Row], harness: Mapping[str, Any]) -> None:
    """Puts into every placed row where its weights are and what that is worth, and says so first of all."""
    for row in rows:
        group = group_of(row)
        others = {trial.recipe: trial for trial in evidence.trials if trial.group == group}
        ceilings = harness["ceilings_by_host"].get(machine(group.host), harness["ceilings"])
        placement, verdict = transfer.judge(
            others[row["recipe"]], others, _of_host(evidence.run, row), evidence.baseline, ceilings
        )
        row["placement"], row["verdict"] = placement, verdict
        if verdict and row["status"] == "ok":
            # what explains a call by reading weights from memory does not hold where they come over a link
            also = [] if placement and placement["moved_bytes"] else row["why"]
            row["why"] = [verdict["sentence"], *also]


def _flips(recipe: str, scores: PairedScores | None, baseline: str) -> dict[str, Any] | None:
    """Answers a classifier gained and lost against the baseline; None where there is nothing to compare."""
    if scores is None or scores.classes is None or recipe == baseline:
        return None
    if recipe not in scores.predictions or baseline not in scores.predictions:
        return None
    gained, lost = scores.flips(recipe, baseline)
    return {"gained": gained, "lost": lost, "mcnemar_p": stats.mcnemar(gained, lost)}


def _lost(run: Mapping[str, Any]) -> list[str]:
    """What became of nodes that a sweep over several lost."""
    return [
        f"{lost['cause']}: the trials of {lost['host']} began again on another"
        for lost in run.get("lost") or []
    ]


def _suspicions(trials: Sequence[Trial], baseline: str) -> list[str]:
    """What scoring the baseline found odd about the order of the classes; once, whatever the device."""
    scores = [trial.score for trial in trials if trial.recipe == baseline and trial.score is not None]
    found = [score.values.get("suspicion") for score in scores]
    return list(dict.fromkeys(note for note in found if note))


def _harness(lines: Mapping[Key, Measurement], run: Mapping[str, Any]) -> dict[str, Any]:
    """What the harness adds to a call, as the median of its rounds' medians, and where the run was made."""
    null = [m.samples.get("latency_s") for m in lines.values() if m.stage == "harness"]
    overhead = {
        m.host: stats.percentile(m.samples["latency_s"], 0.5)
        for m in lines.values()
        if m.stage == "harness" and m.samples.get("latency_s")
    }
    ceilings = {m.host: m.values["ceilings"] for m in lines.values() if m.values.get("ceilings")}
    contended = [m for m in lines.values() if m.stage == "measure" and m.values.get("contended")]
    return {
        "overhead_per_call_s": median(stats.percentile(times, 0.5) for times in null if times)
        if any(null)
        else None,
        "rounds": run["rounds"],
        "most_rounds": max((key[2] or 0 for key in lines if key[1] == "measure"), default=0),
        "overhead_by_host": overhead,
        "ceilings": next(iter(ceilings.values()), None),
        "ceilings_by_host": ceilings,
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
