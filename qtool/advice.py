"""The paragraph of a recommendation: what to take, what it gains, what it costs, what the numbers do not say.

Works on rows of `summary.json` and never claims more than their intervals carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.core import BASELINE, METRICS
from qtool.frontier import MARGIN, Choice
from qtool.units import PERCENT, between, change, number, peak_name, with_unit

Row = dict[str, Any]


def advice(
    rows: Sequence[Row],
    choice: Choice | None,
    *,
    qualified: Sequence[str],
    metric: str | None,
    examples: int,
    provisional: bool,
    baseline: str = BASELINE,
) -> str:
    """One paragraph on `choice`, made among `qualified` of the `rows` of one device and batch size.

    `metric` is None where nothing was scored; `examples` is how many were.
    """
    ok = {row["recipe"]: row for row in rows if row["status"] == "ok"}
    if choice is None:
        failed = next((row for row in rows if row["recipe"] == baseline and row["status"] != "ok"), None)
        near = f"no score was shown to stay within {MARGIN} of {baseline}'s"
        why = near if ok else "no recipe finished"
        cause = f"; {baseline} {failed['status']}: {failed['cause']}" if failed else ""
        return f"Nothing can be recommended: {why}{cause}."
    row, base = ok[choice.name], ok.get(baseline)
    sentences = [_lead(row, base, ok, qualified, metric, examples, baseline)]
    if metric and row is not base:
        sentences.append(_cost(row, base, metric, examples))
    sentences.append(_sizes(row, None if row is base else base))
    if choice.tied:
        sentences.append(_tied(choice))
    if metric and (faster := _faster(row, ok, qualified)):
        sentences.append(f"A lower p50, but not shown to keep the score: {', '.join(faster)}.")
    if not row["on_frontier"]:
        sentences.append(
            "It is not on the frontier: what dominates it was not shown to keep the score of the baseline."
        )
    if metric is None:
        sentences.append("Nothing was scored: whether its answers are still right was not checked.")
    if provisional:
        sentences.append(
            "Provisional: one round has no interval, so speed and memory are compared as they came."
        )
    contended = [name for name in (choice.name, baseline) if name in ok and ok[name]["contended"]]
    if contended:
        named = " and ".join(dict.fromkeys(contended))
        used = "GPU" if any(ok[name].get("gpu_shared") for name in contended) else "CPUs"
        sentences.append(f"Other work used the {used} while {named} ran: sweep again on an idle machine.")
    return " ".join(sentences)


def _lead(
    row: Row,
    base: Row | None,
    ok: Mapping[str, Row],
    qualified: Sequence[str],
    metric: str | None,
    examples: int,
    baseline: str,
) -> str:
    metrics, recipe = row["metrics"], row["recipe"]
    p50 = f"p50 {with_unit('latency_p50_s', metrics['latency_p50_s']['value'])}"
    if base is None:
        return (
            f"Take {recipe}, the fastest that qualifies ({p50}); {baseline} did not finish to compare with."
        )
    if row is not base:
        against = with_unit("latency_p50_s", base["metrics"]["latency_p50_s"]["value"])
        speedup = metrics["speedup"]
        times = f"{number('speedup', speedup['value'])}x"
        interval = between(speedup, lambda x: number("speedup", x))
        if speedup["low"] is not None and speedup["low"] <= 1 <= speedup["high"]:
            speed = f"speed not told apart from {baseline}'s, {times}{interval}"
        else:
            speed = f"{times}{interval} as fast as {baseline}"
        return f"Take {recipe}: {speed}, {p50} against {against}."
    if len(ok) == 1:
        return f"Take {baseline}, the only recipe that finished ({p50})."
    if len(qualified) > 1 or metric is None:
        return f"Take {baseline}, the baseline: nothing that qualifies is faster ({p50})."
    return f"Take {baseline}, the baseline ({p50}). {_closest(ok, metric, examples, baseline)}"


def _faster(row: Row, ok: Mapping[str, Row], qualified: Sequence[str]) -> list[str]:
    """Recipes with a lower p50 than the chosen one's that did not qualify."""

    def p50_s(name: str) -> float:
        return ok[name]["metrics"]["latency_p50_s"]["value"]

    return [name for name in ok if name not in qualified and p50_s(name) < p50_s(row["recipe"])]


def _closest(ok: Mapping[str, Row], metric: str, examples: int, baseline: str) -> str:
    """Why nothing qualified beside the baseline, with the recipe that came nearest."""
    others = [row for name, row in ok.items() if name != baseline]
    known = [row for row in others if row["metrics"]["score_delta"]["low"] is not None]
    margin = f"{100 * MARGIN:g} points" if metric in PERCENT else f"{MARGIN:g}"
    start = f"No other recipe's {METRICS[metric].label} was shown to stay within {margin} of it"
    if not known:
        return f"{start}: none could be compared."
    nearest = max(known, key=lambda row: row["metrics"]["score_delta"]["low"])
    cell = nearest["metrics"]["score_delta"]
    interval = between(cell, lambda x: change(metric, x))
    more = " More rows would narrow that." if cell["high"] > -MARGIN else ""
    return (
        f"{start} on these {examples:,} examples; nearest is {nearest['recipe']} at"
        f" {change(metric, cell['value'])}{interval}.{more}"
    )


def _cost(row: Row, base: Row | None, metric: str, examples: int) -> str:
    score, delta, flips = row["metrics"][metric], row["metrics"]["score_delta"], row["flips"]
    against = f" against {with_unit(metric, base['metrics'][metric]['value'])}" if base else ""
    points = " points" if metric in PERCENT else ""
    interval = between(delta, lambda x: change(metric, x))
    flipped = ""
    if flips:
        p = f"McNemar p = {flips['mcnemar_p']:.2g}"
        flipped = f" ({flips['gained']} answers gained, {flips['lost']} lost, {p})"
    return (
        f"Its {METRICS[metric].label} is {with_unit(metric, score['value'])}{against}, a change of"
        f" {change(metric, delta['value'])}{points}{interval} on the same {examples:,} examples{flipped}."
    )


def _sizes(row: Row, base: Row | None) -> str:
    parts = []
    for name in (peak_name(row["device"]), "disk_bytes"):
        if row["metrics"][name]["value"] is None:
            continue
        against = ""
        if base and base["metrics"][name]["value"] is not None:
            against = f" against {with_unit(name, base['metrics'][name]['value'])}"
        parts.append(f"{METRICS[name].label} {with_unit(name, row['metrics'][name]['value'])}{against}")
    text = ", ".join(parts) or "no memory or disk size was recorded"
    return f"{text[0].upper()}{text[1:]}."


def _tied(choice: Choice) -> str:
    why = {
        "peak_rss_bytes": "for its smaller peak memory",
        "peak_vram_bytes": "for its smaller peak memory",
        "disk_bytes": "for its smaller size on disk, as peak memory does not tell them apart either",
        "frontier": "because it alone of them is on the frontier",
        "latency_p50_s": "by its p50 alone, as memory and disk do not tell them apart either",
    }[choice.decided_by]
    return f"In p50 it cannot be told apart from {', '.join(choice.tied)}; it was taken {why}."
