"""`qtool pick`: which recipe, on which device, at which batch size meets the goals, and how close it was.

Times, memory and size meet a goal by their value, and a goal inside the value's interval is called close. The
score must be shown: a fall larger than allowed has to be ruled out, for all recipes together (Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import cost, evidence, frontier, objectives, summary
from qtool.claims import Estimate, Rounds, holm
from qtool.core import METRICS, QtoolError
from qtool.cost import COST
from qtool.evidence import Evidence
from qtool.frontier import MARGIN, SCORE, Candidate
from qtool.goals import Drop
from qtool.objectives import Option
from qtool.prices import PriceList
from qtool.units import peak_name

ALPHA = summary.ALPHA
UNDEFINED = "the score is not defined for it or for the baseline, or there are too few examples"
PEAK = "peak"
WEIGHED = (COST, "latency_p50_s", PEAK, "disk_bytes", SCORE)
PREFERENCES = {"latency": "latency_p50_s", "memory": PEAK, "disk": "disk_bytes", "score": SCORE, COST: COST}


@dataclass(frozen=True)
class Goals:
    """Limits in base units (seconds, texts per second, bytes); None where there is none."""

    max_drop: Drop | None = None
    p95_s: float | None = None
    p50_s: float | None = None
    throughput_per_s: float | None = None
    memory_bytes: float | None = None
    disk_bytes: float | None = None
    prefer: str = "latency"
    objectives: Sequence[str] = ()
    prices: PriceList | None = None

    def limits(self, device: str) -> dict[str, tuple[str, float]]:
        """Flag and limit of each metric that has one, with the memory that counts on a device."""
        named = {
            "latency_p50_s": ("--p50", self.p50_s),
            "latency_p95_s": ("--p95", self.p95_s),
            "throughput_per_s": ("--throughput", self.throughput_per_s),
            peak_name(device): ("--memory", self.memory_bytes),
            "disk_bytes": ("--disk", self.disk_bytes),
        }
        return {name: (flag, limit) for name, (flag, limit) in named.items() if limit is not None}


def pick(run_dir: Path, goals: Goals) -> dict[str, Any]:
    """The choice with its evidence, JSON-able. Raises QtoolError for a run that cannot be read or judged."""
    found = evidence.load(run_dir)
    for flag, needs in (("--max-drop", goals.max_drop), ("--prefer score", goals.prefer == "score")):
        if needs and not found.scores:
            raise QtoolError(
                f"{flag}: {run_dir} was swept with --no-score. Leave it out, or sweep with --task."
            )
    rows = [row for group in found.groups for row in summary.make_rows(found, group)]
    every = objectives.options(found, rows)
    if not every:
        raise QtoolError(f"{run_dir} has no recipe that finished. See qtool report {run_dir}.")
    if found.scores and not any(found.baseline in scores.predictions for scores in found.scores.values()):
        why = (
            next((s.problems.get(found.baseline) for s in found.scores.values()), None) or "it did not finish"
        )
        raise QtoolError(f"the score of {found.baseline} in {run_dir} cannot be used: {why}. Sweep again.")
    names = objectives.check(goals.objectives, every, found)
    checks = _checks(found, every, goals)
    candidates = [_candidate(found, option, names) for option in every]
    delta = objectives.delta_of(found, every) if found.scores else None
    pairs = frontier.compare(candidates, delta, every_score=goals.prefer == "score")
    _part(every, pairs)
    costs = cost.of_options(found, every, goals.prices, goals.prefer == "cost") if goals.prices else {}
    candidates = cost.weigh(candidates, pairs, costs) if costs else candidates
    pareto = objectives.describe(found, every, names, objectives.only(pairs, names))
    qualified = [c for c in candidates if all(check["met"] for check in checks[c.name])]
    result: dict[str, Any] = {
        "run": str(run_dir),
        **{key: found.run[key] for key in ("model", "task", "metric")},
        "baseline": found.baseline,
        "prefer": goals.prefer,
        "provisional": any(len(option.trial.rounds) < 2 for option in every),
        "chosen": None,
        "decided_by": None,
        "tied": [],
        "runner_up": None,
        "evidence": [],
        "prices": goals.prices.told() if goals.prices else None,
        "options": [
            _told(option, checks[option.name], found.run["metric"])
            | {"cost_per_million": costs[option.name][0] if costs else None}
            for option in every
        ],
        "not_ok": [
            {key: row[key] for key in ("recipe", "host", "device", "batch_size", "status", "cause")}
            for row in rows
            if row["status"] != "ok"
        ],
        "relax": [],
        "frontier": pareto,
    }
    if not qualified:
        return result | {"relax": _relax(checks)}
    order = [PREFERENCES[goals.prefer]]
    order += [name for name in ("latency_p50_s", PEAK, "disk_bytes") if name not in order]
    members = pareto["members"]
    choice = frontier.choose(qualified, pairs, members, order, _baseline(found, every))
    rest = [c for c in qualified if c.name != choice.name]
    second = frontier.choose(rest, pairs, members, order, _baseline(found, every)) if rest else None
    result |= {"chosen": choice.name, "decided_by": choice.decided_by, "tied": list(choice.tied)}
    if second:
        by_name = {c.name: c for c in candidates}
        result["runner_up"] = second.name
        result["evidence"] = _between(by_name[choice.name], by_name[second.name], pairs, delta)
    return result


def _part(every: Sequence[Option], pairs: Mapping[tuple[str, str], dict[str, frontier.Outcome]]) -> None:
    """The memory of a CPU and that of a GPU are different things: neither is better than the other.

    Nor are times and memory of two hosts: their rounds were not paired.
    """
    for a in every:
        for b in every:
            if a.trial.group.host != b.trial.group.host:
                evidence_of = pairs[a.name, b.name]
                evidence_of.update(dict.fromkeys(evidence_of.keys() - {SCORE, "disk_bytes"}, "unresolved"))
            elif a.device != b.device:
                pairs[a.name, b.name][PEAK] = "unresolved"


def _baseline(found: Evidence, every: Sequence[Option]) -> str | None:
    """The baseline's own best place: what a recipe must be shown to better."""
    own = [option for option in every if option.row["recipe"] == found.baseline]
    return min(own, key=lambda o: o.value("latency_p50_s") or 0).name if own else None


def _candidate(found: Evidence, option: Option, names: Sequence[str]) -> Candidate:
    score = option.value(found.run["metric"]) if found.run["metric"] else None
    values: dict[str, frontier.Numbers] = {name: option.numbers(name) for name in names if name != SCORE} | {
        "latency_p50_s": option.numbers("latency_p50_s"),
        PEAK: option.numbers(peak_name(option.device)),
        "disk_bytes": option.numbers("disk_bytes"),
    }
    return Candidate(option.name, values | ({} if score is None else {SCORE: -score}))


def _checks(found: Evidence, every: Sequence[Option], goals: Goals) -> dict[str, list[dict[str, Any]]]:
    """Every goal against every option: limit, value, interval, whether it is met and how close that was."""
    drops = _drops(found, every, goals) if found.scores else {}
    return {
        option.name: [
            *([drops[option.row["recipe"], option.scored]] if drops else []),
            *(_limit(option, name, flag, x) for name, (flag, x) in goals.limits(option.device).items()),
        ]
        for option in every
    }


def _limit(option: Option, name: str, flag: str, limit: float) -> dict[str, Any]:
    cell, higher = option.row["metrics"][name], METRICS[name].better == "higher"
    told = {"goal": flag, "metric": name, "limit": limit, **{k: cell[k] for k in ("value", "low", "high")}}
    if cell["value"] is None:
        return told | {"met": False, "close": False, "why": cell.get("reason") or "not known"}
    met = cell["value"] >= limit if higher else cell["value"] <= limit
    low, high = cell["low"], cell["high"]
    close = low is None or high is None or low <= limit <= high
    # an exact value is never close, even where it equals the limit
    return told | {"met": met, "close": close and low != high, "why": None}


def _drops(
    found: Evidence, every: Sequence[Option], goals: Goals
) -> dict[tuple[str, tuple[str, str]], dict[str, Any]]:
    """The score's check of every recipe on its device; a margin of 0.02 where no --max-drop is given.

    The claims of all recipes on all devices are one family, because the choice is made among all.
    """
    checks: dict[tuple[str, tuple[str, str]], dict[str, Any]] = {}
    claims: dict[tuple[str, tuple[str, str]], tuple[Estimate, float]] = {}
    for recipe, scored in dict.fromkeys((option.row["recipe"], option.scored) for option in every):
        scores, key = found.scores[scored], (recipe, scored)
        if found.baseline not in scores.predictions:
            checks[key] = _no_drop(f"{found.baseline} was not scored on {scored[1]}")
            continue
        base = scores.single(found.baseline, scores.metric).value
        margin = goals.max_drop.margin(base) if goals.max_drop else MARGIN
        if not margin > 0:
            raise QtoolError(
                f"--max-drop {goals.max_drop}: {found.baseline} scores {base:g}, a share of it is no limit."
            )
        change = scores.change(recipe, found.baseline) if recipe in scores.predictions else None
        if recipe == found.baseline:
            exact = {"limit": -margin, "value": 0.0, "low": 0.0, "high": 0.0, "met": True}
            checks[key] = _no_drop("") | exact | {"why": None}
        elif change is None:
            checks[key] = _no_drop(scores.problems.get(recipe, UNDEFINED))
        else:
            claims[key] = (change, margin)
    adjusted = holm([change.p_above(-margin) for change, margin in claims.values()])
    for (key, (change, margin)), p in zip(claims.items(), adjusted, strict=True):
        checks[key] = _drop(change, margin, p, ALPHA / len(claims))
    typed = str(goals.max_drop) if goals.max_drop else f"{MARGIN:g}"
    return {key: check | {"typed": typed} for key, check in checks.items()}


def _no_drop(why: str) -> dict[str, Any]:
    empty = dict.fromkeys(("limit", "value", "low", "high", "p_holm", "bound"))
    return {"goal": "--max-drop", "metric": "score_delta", **empty, "met": False, "close": False, "why": why}


def _drop(change: Estimate, margin: float, p: float, alone: float) -> dict[str, Any]:
    """`alone` is the level of one claim among all: Bonferroni's, which Holm's procedure is never stricter than."""
    interval, met, why = change.interval(), p <= ALPHA, None
    if not met:
        needed = change.needed(-margin, alone)
        more = (
            f"about {needed:,} examples would settle it" if needed else "no number of examples settles a tie"
        )
        why = (
            "it lost more" if interval.high is not None and interval.high < -margin else f"not shown: {more}"
        )
    return _no_drop("") | {
        "limit": -margin,
        "value": interval.value,
        "low": interval.low,
        "high": interval.high,
        "p_holm": p,
        "bound": change.interval(1 - 2 * alone).low,
        "met": met,
        "close": ALPHA / 5 < p <= 5 * ALPHA,
        "why": why,
    }


def _told(option: Option, checks: list[dict[str, Any]], metric: str | None) -> dict[str, Any]:
    names = [
        "latency_p50_s",
        "latency_p95_s",
        "throughput_per_s",
        "speedup",
        peak_name(option.device),
        "disk_bytes",
    ]
    names = ([metric, "score_delta"] if metric else []) + names
    return {
        "name": option.name,
        **{key: option.row[key] for key in ("recipe", "host", "device", "batch_size")},
        **{key: option.row[key] for key in ("flips", "contended", "gpu_shared")},
        "metrics": {name: option.row["metrics"][name] for name in names},
        "checks": checks,
        "removed_by": [check["goal"] for check in checks if not check["met"]],
    }


def _between(
    chosen: Candidate, second: Candidate, pairs: frontier.Pairs, delta: objectives.Delta | None
) -> list[dict[str, Any]]:
    """What separates the chosen from the runner-up: the ratio of each objective, and the change of score."""
    lines: list[dict[str, Any]] = []
    for name in WEIGHED:
        verdict = pairs[chosen.name, second.name].get(name)
        if verdict is None:
            continue
        mine, its = chosen.values.get(name), second.values.get(name)
        line: dict[str, Any] = {
            "objective": name,
            "verdict": verdict,
            "ratio": None,
            "low": None,
            "high": None,
        }
        if isinstance(mine, Mapping) and isinstance(its, Mapping):
            shared = sorted(r for r in mine.keys() & its.keys() if mine[r] > 0 and its[r] > 0)
            interval = Rounds([mine[r] / its[r] for r in shared]).interval() if shared else None
            if interval:
                line |= {"ratio": interval.value, "low": interval.low, "high": interval.high}
        elif name == SCORE:
            change = delta(chosen.name, second.name) if delta else None
            line["verdict"] = frontier.by_score(change)
            line |= {"difference": change.value, "low": change.low, "high": change.high} if change else {}
        elif isinstance(mine, float | int) and isinstance(its, float | int) and its:
            line |= dict.fromkeys(("ratio", "low", "high"), mine / its)
        lines.append(line)
    return lines


def _relax(checks: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The smallest change of one goal that lets something through; of all its unmet ones where one is not enough."""
    ways: list[tuple[str, list[tuple[dict[str, Any], float]]]] = []
    for name, own in checks.items():
        wanted = [(check, _relaxed(check)) for check in own if not check["met"]]
        if all(to is not None for _, to in wanted):
            ways.append((name, [(check, to) for check, to in wanted if to is not None]))
    fewest = min((len(wanted) for _, wanted in ways), default=0)
    found: dict[str, dict[str, Any]] = {}
    for name, wanted in ways:
        if len(wanted) != fewest:
            continue
        entry = {
            "name": name,
            "goals": [
                {key: c.get(key) for key in ("goal", "metric", "limit", "typed")} | {"to": to}
                for c, to in wanted
            ],
            "excess": max(_excess(c["limit"], to) for c, to in wanted),
        }
        key = " ".join(check["goal"] for check, _ in wanted)
        if key not in found or entry["excess"] < found[key]["excess"]:
            found[key] = entry
    return sorted(found.values(), key=lambda entry: entry["excess"])


def _relaxed(check: Mapping[str, Any]) -> float | None:
    """The limit that this option would meet; for a score the one that its bound, corrected for all, would show."""
    if check["metric"] == "score_delta":
        return check.get("bound")
    return check["value"]


def _excess(limit: float, to: float) -> float:
    """By which factor a limit has to give way."""
    return max(to / limit, limit / to) if limit and to and limit * to > 0 else float("inf")
