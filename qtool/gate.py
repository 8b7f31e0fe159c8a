"""`qtool gate`: every limit of a policy against a run, with a verdict that noise seldom makes.

A check passes where it is shown that the limit is kept, fails where it is shown that it is not, and is
inconclusive in between. The claims "it is broken" are one family (Holm), so that a run in which nothing is
wrong fails with at most the level's chance. The claims "the score is not worse" are a family too. Other limits
pass by themselves: a gate passes only if all of them do, which needs no correction (Berger 1982, Technometrics
24:295-300, intersection-union).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qtool import evidence, host
from qtool.claims import Estimate, Exact, Rounds, holm
from qtool.core import METRICS, QtoolError, Recipe
from qtool.evidence import Evidence
from qtool.policy import Limits, Policy
from qtool.reference import Groups, against
from qtool.rows import Trial, speedup
from qtool.stats import least_samples
from qtool.traits import TRAITS, formats
from qtool.units import peak_name

Verdict = Literal["pass", "fail", "inconclusive"]
SCORE = "max_drop"
FINISHED = "finished"
UNDEFINED = "the score is not defined for one of the two, or there are too few examples"


@dataclass(frozen=True)
class Check:
    """One limit of one trial. `estimate` is None where there is nothing to judge, and `why` says so."""

    trial: Trial
    name: str
    metric: str | None
    limit: float
    higher: bool
    """Whether the value has to be above the limit."""
    estimate: Estimate | None
    confidence: float
    unit_of_need: str = "rounds"
    why: str | None = None
    verdict: Verdict = "inconclusive"
    """What it is where there is no estimate."""

    @property
    def alpha(self) -> float:
        return (1 - self.confidence) / 2


def gate(run_dir: Path, policy: Policy, reference: Path | None = None) -> dict[str, Any]:
    """The verdict of `policy` on a run, JSON-able: `exit_code` 1 on a violation, else 0.

    Raises QtoolError for a policy that does not fit the run, an empty run or one without its baseline.
    """
    found = evidence.load(run_dir)
    recipes = list(dict.fromkeys(trial.recipe for trial in found.trials))
    if not any(line.stage == "measure" for line in found.lines.values()):
        raise QtoolError(
            f"{run_dir} is empty: nothing was measured. Sweep again, or finish it with --resume."
        )
    policy.check_names(recipes, found.baseline)
    entries: list[dict[str, Any]] = []
    checks: list[Check] = []
    notes = _target_warnings(found, policy)
    for trial in found.trials:
        limits = policy.limits(trial.recipe)
        if trial.recipe == found.baseline and not policy.named(trial.recipe):
            continue
        expected = policy.expected(trial.recipe)
        if trial.status != "ok":
            entry = _absent(found, trial, policy, limits, expected)
            entries += [entry] if entry else []
            continue
        if expected is not None:
            notes.append(
                f"{trial.recipe} on {trial.group.device} batch {trial.group.batch_size} succeeded unexpectedly: {expected}"
            )
        if limits is not None:
            checks += _checks(found, trial, limits, policy)
    if reference is not None:
        more, told = against(found, evidence.load(reference), policy)
        checks += [Check(**each) for each in more]
        notes += told
    entries += _judge(checks)
    if not entries:
        told = (
            "; ".join(notes) or "its recipes are the baseline, were skipped, or are not named by the policy"
        )
        raise QtoolError(f"{policy.path}: nothing in {run_dir} can be held against it: {told}.")
    return _whole(run_dir, found, policy, entries, notes)


def _whole(
    run_dir: Path, found: Evidence, policy: Policy, entries: Sequence[dict[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    verdicts = {entry["verdict"] for entry in entries}
    verdict = "fail" if "fail" in verdicts else "inconclusive" if "inconclusive" in verdicts else "pass"
    broken = verdict == "fail" or (verdict == "inconclusive" and policy.inconclusive == "fail")
    return {
        "run": str(run_dir),
        "policy": str(policy.path),
        "model": found.run["model"],
        "task": found.run["task"],
        "metric": found.run["metric"],
        "baseline": found.baseline,
        "confidence": (policy.everywhere and policy.everywhere.confidence) or policy.confidence,
        "own_confidence": any(limits.confidence for limits in policy.recipes.values()),
        "inconclusive": policy.inconclusive,
        "verdict": verdict,
        "exit_code": 1 if broken else 0,
        "expected_failures": sorted({t.recipe for t in found.trials if policy.expected(t.recipe)}),
        "checks": list(entries),
        "notes": list(notes),
    }


def _absent(
    found: Evidence, trial: Trial, policy: Policy, limits: Limits | None, expected: str | None
) -> dict[str, Any] | None:
    """What a trial without a result means: a violation, an expected failure, or nothing the policy speaks of."""
    entry = _entry(trial, FINISHED) | {"why": f"{trial.status}: {trial.cause}"}
    if expected is not None:
        return entry | {"verdict": "pass", "why": f"{trial.status} as expected: {expected}"}
    if trial.status == "skipped":
        # a recipe of one device only is skipped on the others by its nature
        ran = any(t.status == "ok" for t in found.trials if t.recipe == trial.recipe)
        return entry | {"verdict": "fail"} if policy.named(trial.recipe) and not ran else None
    if limits is None:
        return None
    return entry | {"verdict": "inconclusive" if trial.unfinished else "fail"}


def _entry(trial: Trial, name: str) -> dict[str, Any]:
    facts = {"recipe": trial.recipe, **trial.group._asdict(), "limit_name": name}
    return facts | dict.fromkeys(
        ("metric", "limit", "value", "low", "high", "p_broken", "p_kept", "needed", "why")
    )


def _checks(found: Evidence, trial: Trial, limits: Limits, policy: Policy) -> Iterator[Check]:
    confidence = limits.confidence or policy.confidence
    device, batch_size = trial.group.device, trial.group.batch_size
    is_baseline = trial.recipe == found.baseline
    if limits.max_drop is not None and not is_baseline and batch_size == _first_batch(found, trial):
        yield _drop(found, trial, limits, confidence)
    if limits.min_speedup is not None and not is_baseline:
        baseline = found.trial(found.baseline, trial.group)
        if baseline is None or baseline.status != "ok":
            raise QtoolError(
                f"{policy.path}: min_speedup needs {found.baseline} on {device} at batch {batch_size}, which is not"
                " in the run or did not finish. Sweep again, or leave min_speedup out."
            )
        ratio = speedup(trial, baseline)
        why = None if ratio else f"it shares no timed round with {found.baseline}"
        yield Check(trial, "min_speedup", "speedup", limits.min_speedup, True, ratio, confidence, why=why)
    for name, metric, limit in (
        ("max_p50", "latency_p50_s", limits.max_p50_s),
        ("max_p95", "latency_p95_s", limits.max_p95_s),
        ("min_throughput", "throughput_per_s", limits.min_throughput_per_s),
        ("max_memory", peak_name(device), limits.max_memory_bytes),
    ):
        if limit is not None:
            series = trial.series(metric) or {}
            whole = len(series) == len(trial.rounds) and all(x > 0 for x in series.values())
            estimate = Rounds(list(series.values())) if whole and series else None
            least = (
                f", for which a round needs {least_samples(0.95)} calls" if metric == "latency_p95_s" else ""
            )
            why = None if estimate else f"not every round has a {METRICS[metric].label}{least}"
            higher = METRICS[metric].better == "higher"
            yield Check(trial, name, metric, limit, higher, estimate, confidence, why=why)
    if limits.max_disk_bytes is not None:
        size = None if trial.disk_bytes is None else Exact(trial.disk_bytes)
        why = None if size else "its size was not recorded"
        yield Check(trial, "max_disk", "disk_bytes", limits.max_disk_bytes, False, size, confidence, why=why)


def _first_batch(found: Evidence, trial: Trial) -> int:
    """A score belongs to the artifact, not to a batch size: it is judged once on each device, at the first that ran."""
    same = (t for t in found.trials if (t.recipe, t.group.scored) == (trial.recipe, trial.group.scored))
    return next(t.group.batch_size for t in same if t.status == "ok")


def _drop(found: Evidence, trial: Trial, limits: Limits, confidence: float) -> Check:
    scores = found.scores.get(trial.group.scored)
    assert limits.max_drop is not None
    if scores is None:
        raise QtoolError(
            f"max_drop: {found.run_dir} was swept with --no-score. Leave max_drop out, or sweep with --task."
        )
    if found.baseline not in scores.predictions:
        why = scores.problems.get(found.baseline, "it did not finish")
        raise QtoolError(
            f"max_drop needs the score of {found.baseline}: {why}. Sweep again, or leave max_drop out."
        )
    margin = limits.max_drop.margin(scores.single(found.baseline, scores.metric).value)
    if not margin > 0:
        raise QtoolError(f"max_drop {limits.max_drop}: {found.baseline} scores 0, a share of it is no limit.")
    estimate = scores.change(trial.recipe, found.baseline) if trial.recipe in scores.predictions else None
    why = None if estimate else scores.problems.get(trial.recipe, UNDEFINED)
    return Check(trial, SCORE, "score_delta", -margin, True, estimate, confidence, "examples", why)


def _judge(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """A verdict for each check; exact values take no part in the families, they cannot be wrong by chance."""
    open_ = [c for c in checks if c.estimate is not None and not isinstance(c.estimate, Exact)]
    broken = dict(zip(map(id, open_), holm([_p_broken(c) for c in open_]), strict=True))
    scored = [c for c in open_ if c.name == SCORE]
    kept = {id(c): _p_kept(c) for c in open_}
    kept |= dict(zip(map(id, scored), holm([_p_kept(c) for c in scored]), strict=True))
    entries = []
    for check in checks:
        entry = _entry(check.trial, check.name) | {
            "metric": check.metric,
            "limit": check.limit,
            "why": check.why,
        }
        if check.estimate is None:
            entries.append(entry | {"verdict": check.verdict})
            continue
        interval = check.estimate.interval(check.confidence)
        entry |= {"value": interval.value, "low": interval.low, "high": interval.high}
        if isinstance(check.estimate, Exact):
            good = interval.value >= check.limit if check.higher else interval.value <= check.limit
            entries.append(entry | {"verdict": "pass" if good else "fail"})
            continue
        entry |= {"p_broken": broken[id(check)], "p_kept": kept[id(check)]}
        verdict: Verdict = "inconclusive"
        if kept[id(check)] <= check.alpha:
            verdict = "pass"
        elif broken[id(check)] <= check.alpha:
            verdict = "fail"
        else:
            entry |= _need(check, len(open_), len(scored))
        entries.append(entry | {"verdict": verdict})
    return entries


def _p_kept(check: Check) -> float:
    assert check.estimate is not None
    return check.estimate.p_above(check.limit) if check.higher else check.estimate.p_below(check.limit)


def _p_broken(check: Check) -> float:
    assert check.estimate is not None
    return check.estimate.p_below(check.limit) if check.higher else check.estimate.p_above(check.limit)


def _need(check: Check, family: int, scored: int) -> dict[str, Any]:
    """How much evidence would settle it: on the side where the value lies, corrected for the others there."""
    assert check.estimate is not None
    good = (check.estimate.value > check.limit) == check.higher
    others = (scored if check.name == SCORE else 1) if good else family
    needed = check.estimate.needed(check.limit, check.alpha / max(1, others))
    what = check.unit_of_need + (" in both runs" if isinstance(check.estimate, Groups) else "")
    if isinstance(check.estimate, Rounds) and len(check.estimate.values) < 2:
        why = f"one round has no interval: at least {needed} are needed to judge"
    elif needed is None:
        why = f"the value lies so near the limit that no practical number of {what} would settle it"
    else:
        why = f"about {needed:,} {what} would settle it"
    if _p_broken(check) <= check.alpha:
        why = f"broken by itself, but not shown among {family} claims at once; {why}"
    elif _p_kept(check) <= check.alpha:
        why = f"kept by itself, but not shown among {scored} claims at once; {why}"
    return {"needed": needed, "why": why}


def _target_warnings(found: Evidence, policy: Policy) -> list[str]:
    """Scores that were made on a CPU with other instructions than the ones they will be served with."""
    here, there = set((found.run.get("host") or {}).get("cpu_flags") or []), set(policy.target_cpu_flags)
    if not there or not here:
        return []
    family = max(host.FLAGS, key=lambda name: len(here & set(host.FLAGS[name])))
    scored = (
        {t.recipe for t in found.trials if t.status == "ok" and t.group.device == "cpu"}
        if found.scores
        else set()
    )
    warnings = []
    for name, content in (found.run.get("recipes") or {}).items():
        used = formats(Recipe(**content)) if name in scored else frozenset()
        for trait in TRAITS:
            flags = set(trait.flags.get(family, ()))
            if trait.formats & used and trait.formats != {"float32"} and (here & flags) != (there & flags):
                warnings.append(
                    f"the score of {name} was measured with {', '.join(sorted(here & flags)) or 'none'} for"
                    f" {trait.name}, the target has {', '.join(sorted(there & flags)) or 'none'}: score it there too"
                )
    return warnings
