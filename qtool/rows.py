"""One trial's row: its status from its lines, and every metric from its stored samples.

Knows nothing of other trials but the baseline. A number that does not apply or that its samples do not
support is null with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from qtool import stats
from qtool.claims import Exact, Rounds
from qtool.core import BASELINE, METRICS, SCORES, Measurement
from qtool.metrics import REGRESSION
from qtool.paired import LEAST_PAIRS, PairedScores
from qtool.stats import Interval

Key = tuple[str, str, int | None]
ONE_ROUND = "one round has no interval"
PER_ROUND = (
    "peak_rss_bytes",
    "load_peak_rss_bytes",
    "steady_rss_bytes",
    "peak_vram_bytes",
    "vram_allocated_bytes",
    "vram_device_bytes",
    "gpu_utilization_ratio",
    "energy_j",
    "power_w",
    "load_s",
    "first_call_s",
)
SHIFT = ("mean_kl", "max_logit_difference", "calibration_error")
# The child's score and ours are one formula on the same float32 logits: only the order of sums may differ.
SAME_SCORE = 1e-6


def cell(interval: Interval | None, reason: str | None = None) -> dict[str, Any]:
    """A metric as JSON; `reason` says why it, or its interval, is missing."""
    if interval is None or not math.isfinite(interval.value):
        return {"value": None, "low": None, "high": None, "reason": reason or "it is not defined here"}
    found: dict[str, Any] = {"value": interval.value, "low": interval.low, "high": interval.high}
    return found if interval.low is not None else found | {"reason": reason or ONE_ROUND}


def exact(value: float | None) -> dict[str, Any]:
    """A number without any spread."""
    return cell(None if value is None else Interval(value, value, value), "it was not recorded")


class Group(NamedTuple):
    """Trials whose times and memory may be held against each other. `host` is '' where a run does not tell it."""

    host: str
    device: str
    batch_size: int

    @property
    def scored(self) -> tuple[str, str]:
        """Where its score was made: host and device, whatever the batch size."""
        return self.host, self.device


@dataclass(frozen=True)
class Trial:
    """A planned trial and its lines; ok only if its build, its score and all its rounds are."""

    entry: Mapping[str, Any]
    status: str
    cause: str | None
    next_step: str | None
    build: Measurement | None
    score: Measurement | None
    rounds: Mapping[int, Measurement]
    unfinished: bool = False
    """Whether nothing went wrong, but the sweep was left before it was done."""

    @property
    def recipe(self) -> str:
        return self.entry["recipe"]

    @cached_property
    def group(self) -> Group:
        return Group(self.entry.get("host") or "", self.entry["device"], self.entry["batch_size"])

    @property
    def contended(self) -> bool:
        return any(line.values.get("contended") for line in self.rounds.values())

    @property
    def throttled_by(self) -> list[str]:
        """What made the GPU slow its clocks in any round, each named once."""
        told = (line.values.get("throttle_reasons") or [] for line in self.rounds.values())
        return list(dict.fromkeys(name for names in told for name in names))

    @property
    def gpu_shared(self) -> bool:
        return any(line.values.get("other_processes") for line in self.rounds.values())

    @property
    def disk_bytes(self) -> float | None:
        return self.build.values.get("disk_bytes") if self.build else None

    def samples(self, name: str) -> dict[int, list[float]]:
        """Samples by round, of the rounds that have any."""
        return {r: line.samples[name] for r, line in self.rounds.items() if line.samples.get(name)}

    def values(self, name: str) -> dict[int, float]:
        """A value by round, of the rounds that have it."""
        return {r: line.values[name] for r, line in self.rounds.items() if line.values.get(name) is not None}

    def p50_s(self) -> dict[int, float]:
        return self.series("latency_p50_s") or {}

    def series(self, name: str) -> dict[int, float] | None:
        """A metric by round; None for one that rounds do not have, such as a size on disk."""
        if name not in self._series:
            self._series[name] = self._by_round(name)
        return self._series[name]

    @cached_property
    def _series(self) -> dict[str, dict[int, float] | None]:
        return {}

    def _by_round(self, name: str) -> dict[int, float] | None:
        if name == "latency_p50_s":
            return {r: stats.percentile(x, 0.5) for r, x in self.samples("latency_s").items()}
        if name in ("latency_p95_s", "throughput_per_s"):
            timed = self.samples("latency_s").items()
            if name == "latency_p95_s":
                least = stats.least_samples(0.95)
                return {r: stats.percentile(x, 0.95) for r, x in timed if len(x) >= least}
            return {r: self.entry["batch_size"] * len(x) / sum(x) for r, x in timed}
        if name == "end_to_end_p50_s":
            return {r: stats.percentile(x, 0.5) for r, x in self.samples("end_to_end_s").items()}
        return self.values(name) if name in PER_ROUND else None


def make_trial(entry: Mapping[str, Any], lines: Mapping[Key, Measurement], rounds: int) -> Trial:
    """The trial that `run.json` planned as `entry`, from the last line of each of its stages."""
    trial_id, fingerprint = entry["trial_id"], entry.get("fingerprint") or ""
    plan = lines.get((trial_id, "plan", None))
    build = lines.get((fingerprint, "build", None))
    score = lines.get((score_id(fingerprint, entry["device"], entry.get("kind")), "score", None))
    own = (m for m in lines.values() if m.trial_id == trial_id and m.stage == "measure")
    measured = sorted(own, key=_round)
    timed = sum(bool(m.samples.get("latency_s")) for m in measured)
    status, cause, next_step = "ok", None, None
    bad = next((m for m in (plan, build, score, *measured) if m is not None and m.status != "ok"), None)
    if bad is not None:
        status, cause, next_step = bad.status, bad.error or "no cause was recorded", bad.next_step
    elif build is None or score is None or timed < rounds:
        missing = "not built" if build is None else "not scored or audited" if score is None else ""
        missing = missing or f"{timed} of {rounds} rounds measured"
        status, cause, next_step = "failed", f"unfinished: {missing}", "add --resume to the same command"
    unfinished = bad is None and status != "ok"
    return Trial(entry, status, cause, next_step, build, score, {_round(m): m for m in measured}, unfinished)


def score_id(fingerprint: str, device: str, kind: str | None) -> str:
    """What the line of a score is filed under: an artifact is scored once on each device of each kind of node."""
    return "-".join(filter(None, (fingerprint, device, kind)))


def _round(measurement: Measurement) -> int:
    return measurement.round or 0


def make_metrics(
    trial: Trial,
    baseline: Trial | None,
    scores: PairedScores | None,
    names: Sequence[str],
    against: str = BASELINE,
) -> dict[str, dict[str, Any]]:
    """Every metric of an ok row, in the order of `core.METRICS`; `against` is the baseline's name."""
    found = _score_metrics(trial, scores, names, against) | times_and_sizes(trial, baseline, against)
    return {name: found[name] for name in METRICS if name in found}


def times_and_sizes(
    trial: Trial, baseline: Trial | None, against: str = BASELINE
) -> dict[str, dict[str, Any]]:
    """The metrics of an ok row that need no scores."""
    found = {name: _per_round(trial, name) for name in PER_ROUND}
    found["latency_p50_s"] = _p50(trial.samples("latency_s"))
    found["end_to_end_p50_s"] = _p50(trial.samples("end_to_end_s"))
    found["latency_p95_s"] = _p95(trial.samples("latency_s"))
    found["throughput_per_s"] = _throughput(trial)
    found["speedup"] = _speedup(trial, baseline, against)
    found["tokenize_share"] = _tokenize_share(trial)
    found["disk_bytes"] = exact(trial.disk_bytes)
    found["weight_bytes"] = exact(trial.score.values.get("weight_bytes") if trial.score else None)
    return found


def _score_metrics(
    trial: Trial, scores: PairedScores | None, names: Sequence[str], against: str
) -> dict[str, dict[str, Any]]:
    if scores is None:
        return {
            name: cell(None, "nothing was scored") for name in (*SCORES, "score_delta", "agreement", *SHIFT)
        }
    recipe, few = trial.recipe, f"no interval: a correlation needs {LEAST_PAIRS} examples"
    told = (trial.score.values.get("metrics") if trial.score else None) or {}
    known = recipe in scores.predictions
    problem = scores.problems.get(recipe, "")
    found = {}
    for name in names:
        value = told.get(name)
        if value is None:
            found[name] = cell(None, "it is not defined for these predictions, constant ones for example")
        elif not known:
            found[name] = cell(Interval(value), f"no interval: {problem}")
        else:
            own = scores.single(recipe, name)
            same = abs(own.value - value) <= SAME_SCORE
            differs = f"no interval: the stored predictions give {own.value:.6f}, scoring gave {value:.6f}"
            found[name] = cell(
                own if same else Interval(value), few if same and scores.too_few() else differs
            )
    found |= _shift(recipe, scores, against)
    regression = scores.metric in REGRESSION
    if recipe == against and not regression:
        return found | {"score_delta": exact(0.0), "agreement": exact(1.0)}
    if not known or against not in scores.predictions:
        reason = problem or scores.problems.get(against) or f"{against} was not scored on this device"
        return found | {name: cell(None, reason) for name in ("score_delta", "agreement")}
    undefined = "the score is not defined for one of the two"
    found["score_delta"] = cell(scores.delta(recipe, against), few if scores.too_few() else undefined)
    agreement = None if regression else scores.agreement(recipe, against)
    found["agreement"] = cell(agreement, "a regression has no classes to agree on")
    return found


def _shift(recipe: str, scores: PairedScores, against: str) -> dict[str, dict[str, Any]]:
    """How far the outputs are from the baseline's; point values, they have no interval."""
    if recipe not in scores.predictions or against not in scores.predictions:
        return {name: cell(None, "its outputs cannot be set beside the baseline's") for name in SHIFT}
    told = scores.shift(recipe, against)
    return {
        name: cell(Interval(told[name]), "a value without an interval")
        if name in told
        else cell(None, "a regression has no probabilities")
        for name in SHIFT
    }


def _p50(samples: Mapping[int, list[float]]) -> dict[str, Any]:
    """Median over rounds of each round's median; t interval on the logs of the rounds' medians."""
    if not samples:
        return cell(None, "it was not timed")
    medians = [stats.percentile(times, 0.5) for times in samples.values()]
    return cell(stats.t_log(medians, median(medians)))


def _p95(samples: Mapping[int, list[float]]) -> dict[str, Any]:
    """As the p50 where every round supports a p95; else of the pooled samples of rounds that agree."""
    if not samples:
        return cell(None, "it was not timed")
    rounds, least = list(samples.values()), stats.least_samples(0.95)
    fewest, pooled = min(len(times) for times in rounds), [time for times in rounds for time in times]
    if fewest >= least:
        tails = [stats.percentile(times, 0.95) for times in rounds]
        return cell(stats.t_log(tails, median(tails)))
    if len(pooled) < least:
        return cell(None, f"a p95 needs {least} samples, there are {len(pooled)}")
    if not stats.rounds_agree(rounds):
        spread = f"a round has {fewest} and the rounds' p50 differ too much to pool them"
        return cell(None, f"a p95 needs {least} samples, {spread}")
    return cell(stats.percentile_interval(pooled, 0.95), f"{len(pooled)} samples do not bound it")


def _throughput(trial: Trial) -> dict[str, Any]:
    """Texts over summed seconds of all rounds; t interval on the logs of the rounds' own."""
    samples = trial.samples("latency_s")
    if not samples:
        return cell(None, "it was not timed")
    size = trial.entry["batch_size"]
    each = [size * len(times) / sum(times) for times in samples.values()]
    whole = size * sum(map(len, samples.values())) / sum(map(sum, samples.values()))
    return cell(stats.t_log(each, whole))


def speedup(trial: Trial, baseline: Trial | None) -> Rounds | Exact | None:
    """The baseline's p50 over the trial's in each shared round; None without such a round."""
    if baseline is None:
        return None
    if trial.recipe == baseline.recipe:
        return Exact(1.0)
    ratios = speedup_by_round(trial, baseline)
    return Rounds(list(ratios.values())) if ratios else None


def speedup_by_round(trial: Trial, baseline: Trial) -> dict[int, float]:
    base, own = baseline.p50_s(), trial.p50_s()
    return {r: base[r] / own[r] for r in sorted(base.keys() & own.keys())}


def _speedup(trial: Trial, baseline: Trial | None, against: str) -> dict[str, Any]:
    """Geometric mean over rounds of the baseline's p50 over the recipe's in the same round."""
    if trial.recipe == against:
        return exact(1.0)
    if baseline is None:
        return cell(None, f"the baseline {against} is not ok on this device at this batch size")
    found = speedup(trial, baseline)
    return cell(
        found.interval() if found else None, f"it shares no timed round with {against}" if not found else None
    )


def _tokenize_share(trial: Trial) -> dict[str, Any]:
    """Summed tokenising over summed end-to-end seconds; t interval of the rounds' mean share."""
    parts, wholes = trial.samples("tokenize_s"), trial.samples("end_to_end_s")
    shared = sorted(parts.keys() & wholes.keys())
    if not shared:
        return cell(None, "end-to-end time was not measured")
    each = stats.t_mean([sum(parts[r]) / sum(wholes[r]) for r in shared])
    value = sum(sum(parts[r]) for r in shared) / sum(sum(wholes[r]) for r in shared)
    if each.low is None or each.high is None:
        return cell(Interval(value))
    return cell(Interval(value, max(0.0, min(each.low, value)), min(1.0, max(each.high, value))))


def _per_round(trial: Trial, name: str) -> dict[str, Any]:
    """Mean of the rounds' values with its t interval, never below zero; null unless every round has one."""
    values = trial.values(name)
    if len(values) < len(trial.rounds):
        reasons = [line.values.get(f"{name}_reason") for line in trial.rounds.values()]
        return cell(None, next(filter(None, reasons), "it was not measured"))
    mean = stats.t_mean(list(values.values()))
    return cell(mean if mean.low is None else Interval(mean.value, max(0.0, mean.low), mean.high))
