"""`qtool pick` in words: the choice, its evidence, the runner-up, what removed the others, the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qtool.core import METRICS
from qtool.report.text import one_line
from qtool.units import between, change, number, rounded, with_unit

WORDS = {
    "cost": "cost",
    "latency_p50_s": "p50",
    "peak": "peak memory",
    "disk_bytes": "size on disk",
    "score": "score",
}
VERDICTS = {
    "better": "shown to be better",
    "worse": "shown to be worse",
    "tie": "the same within the tie margin",
    "unresolved": "not told apart",
}


def render(found: Mapping[str, Any]) -> str:
    """Lines for a terminal or a log."""
    lines = _lead(found)
    chosen = next((o for o in found["options"] if o["name"] == found["chosen"]), None)
    if chosen:
        lines += _facts(found, chosen)
    if found["runner_up"]:
        lines += _runner_up(found)
    removed = [option for option in found["options"] if option["removed_by"]]
    if removed:
        lines += ["", "removed by a goal"]
        for option in removed:
            told = [_check(found, check) for check in option["checks"] if not check["met"]]
            lines.append(f"  {option['name']}: {'; '.join(told)}")
    if found["not_ok"]:
        lines += ["", "not measured"]
        for row in found["not_ok"]:
            lines.append(
                f"  {row['recipe']} on {row['device']} batch {row['batch_size']}: {row['status']}: {row['cause']}"
            )
    lines += ["", *_costs(found)] if found["prices"] else []
    lines += ["", *_frontier(found["frontier"])]
    return "\n".join(map(one_line, lines))


def _lead(found: Mapping[str, Any]) -> list[str]:
    if found["chosen"]:
        provisional = ", provisional: one round has no interval" if found["provisional"] else ""
        return [f"take {found['chosen']} ({found['model']}, preferring {found['prefer']}{provisional})"]
    lines = ["no recipe satisfies every goal"]
    for entry in found["relax"]:
        parts = []
        for goal in entry["goals"]:
            was = goal["typed"] or typed(goal["metric"], goal["limit"])
            now = typed(goal["metric"], goal["to"])
            if str(goal["typed"]).endswith("%"):
                now = f"{_outward(float(goal['typed'][:-1]) * goal['to'] / goal['limit'], up=True):.12g}%"
            parts.append(f"{goal['goal']} from {was} to {now}")
        lines.append(f"  relax {' and '.join(parts)}: then {entry['name']} satisfies")
    if not found["relax"]:
        lines.append("  no goal can be relaxed so far that a recipe satisfies: see what removed each")
    return lines


def _facts(found: Mapping[str, Any], option: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, cell in option["metrics"].items():
        if cell["value"] is None:
            continue
        if name == "score_delta":
            told = change(found["metric"], cell["value"]) + between(
                cell, lambda x: change(found["metric"], x)
            )
            flips = option["flips"]
            more = f", {flips['gained']} answers gained, {flips['lost']} lost" if flips else ""
            lines.append(f"  change of score {told}{more}")
            continue
        exact = cell["low"] == cell["high"]
        interval = "" if exact else between(cell, lambda x, name=name: number(name, x))
        lines.append(f"  {METRICS[name].label} {with_unit(name, cell['value'])}{interval}")
    for check in option["checks"]:
        lines.append(f"  {_check(found, check)}")
    if option["contended"]:
        used = "GPU" if option["gpu_shared"] else "CPUs"
        lines.append(f"  other work used the {used} while it ran: sweep again on an idle machine")
    return lines


def _check(found: Mapping[str, Any], check: Mapping[str, Any]) -> str:
    metric, goal = check["metric"], check["goal"]
    if check["limit"] is None or check["value"] is None:
        return f"{goal}: {check['why']}"
    limit = check.get("typed") or typed(metric, check["limit"])
    if metric == "score_delta":
        value = change(found["metric"], check["value"])
        interval = between(dict(check), lambda x: change(found["metric"], x))
    else:
        value = with_unit(metric, check["value"])
        interval = "" if check["low"] == check["high"] else between(dict(check), lambda x: number(metric, x))
    verdict = "met" if check["met"] else "not met"
    close = ", a close call" if check["close"] else ""
    why = f", {check['why']}" if check["why"] else ""
    return f"{goal} {limit} {verdict}: {value}{interval}{close}{why}"


def typed(metric: str, value: float) -> str:
    """A limit as it is typed, four digits, rounded so that `value` still meets it."""
    if metric == "score_delta":
        return f"{_outward(-value, up=True):g}"
    scale, words = {
        "latency_p50_s": (1e3, "ms"),
        "latency_p95_s": (1e3, "ms"),
        "throughput_per_s": (1.0, "/s"),
    }.get(metric, (1e-6, "MB"))
    return f"{_outward(scale * value, up=METRICS[metric].better == 'lower'):.12g}{words}"


def _outward(value: float, up: bool) -> float:
    """Rounded up or down to four significant digits."""
    if value == 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    # a value that has four digits already must not gain a step by the error of a division
    return round((math.ceil(value / step - 1e-9) if up else math.floor(value / step + 1e-9)) * step, 12)


def _runner_up(found: Mapping[str, Any]) -> list[str]:
    lines = ["", f"runner-up {found['runner_up']}; against it {found['chosen']} has"]
    for line in found["evidence"]:
        name = line["objective"]
        if line.get("difference") is not None:
            size = change(found["metric"], line["difference"]) + between(
                dict(line), lambda x: change(found["metric"], x)
            )
        elif line["ratio"] is not None:
            exact = line["low"] == line["high"]
            size = f"{line['ratio']:.2f}x" + ("" if exact else between(dict(line), lambda x: f"{x:.2f}"))
        else:
            continue
        # one round has no interval: the values were compared as they came
        one = found["provisional"] and name in ("cost", "latency_p50_s", "peak")
        lines.append(
            f"  {WORDS[name]} {size}: {'one round shows nothing' if one else VERDICTS[line['verdict']]}"
        )
    if found["tied"]:
        by = "its place on the frontier" if found["decided_by"] == "frontier" else WORDS[found["decided_by"]]
        tied = ", ".join(found["tied"])
        preferred = {"latency": "p50", "memory": "peak memory", "disk": "size"}.get(
            found["prefer"], found["prefer"]
        )
        lines.append(
            f"  the evidence cannot separate it in {preferred} from {tied}; the tie was broken by {by}"
        )
    return lines


def _costs(found: Mapping[str, Any]) -> list[str]:
    """Every option's cost, the cheapest first, and what it assumes."""
    prices = found["prices"]
    told = [(option["name"], option["cost_per_million"]) for option in found["options"]]
    known = sorted((pair for pair in told if pair[1]["value"] is not None), key=lambda pair: pair[1]["value"])
    lines = [
        f"cost per million in {prices['currency']}, at {100 * prices['utilization']:g} % of the full measured"
        " throughput (qtool report --cost FILE --sla T counts it within an SLA)"
    ]
    for name, cell in known:
        exact = cell["low"] == cell["high"]
        interval = "" if exact else between(cell, rounded)
        lines.append(f"  {name}: {rounded(cell['value'])}{interval} on {cell['instance']}")
    missing = dict.fromkeys(cell["reason"] for _, cell in told if cell["value"] is None)
    for reason in missing:
        names = [name for name, cell in told if cell["value"] is None and cell["reason"] == reason]
        lines.append(f"  no cost of {', '.join(names)}: {reason}")
    return lines


def _frontier(pareto: Mapping[str, Any]) -> list[str]:
    lines = [f"frontier over {', '.join(pareto['objectives'])}: {', '.join(pareto['members'])}"]
    if pareto["near_the_edge"]:
        shares = [f"{name} {100 * pareto['probability'][name]:.0f} %" for name in pareto["near_the_edge"]]
        lines.append(
            "  a member leaves only when another is shown to beat it; by resampled values alone, ties aside, these"
            f" would be on it in: {', '.join(shares)}"
        )
    value = pareto["hypervolume"]
    told = f"{value:.4f}" if value is not None else f"not given: {pareto['hypervolume_reason']}"
    lines.append(f"  hypervolume {told}")
    return lines
