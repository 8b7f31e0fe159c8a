"""The table, titles and lists that every report shares, from `summary.json` alone; draws nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.core import METRICS
from qtool.evidence import group_of
from qtool.units import NONE, PERCENT, between, change, number, peak_name, unit

Row = dict[str, Any]


def printable(words: str) -> str:
    """`words` on one line without control characters: an error's text must not steer the terminal."""
    return " ".join(one_line(words).split())


def one_line(words: str) -> str:
    """As `printable`, but its spaces stay: a table's line, or an indented one."""
    return "".join(c if c.isprintable() else " " for c in words)


@dataclass(frozen=True)
class Cell:
    """What one place of the table says; best of its column, or tied with what it is held against."""

    text: str
    interval: str = ""
    best: bool = False
    tie: bool = False

    def plain(self, intervals: bool) -> str:
        mark = "*" if self.best else ""
        return self.text + mark + ("~" if self.tie else "") + (self.interval if intervals else "")


LEGEND = (
    "* best of its column, ~ not told apart (p50: from the best p50; change: from the baseline), "
    "F on the frontier, ! measured under contention; [low, high] is a 95 % interval"
)


def table(summary: dict[str, Any], rows: list[Row], device: str) -> tuple[list[str], list[list[Cell]]]:
    """Header and cells of the rows of one device and batch size, whatever their status."""
    metric = summary["metric"]
    names = columns(metric, device)
    header = ["", "recipe", "status"]
    for name in names:
        words = [METRICS[name].label, unit(name)]
        if name == "score_delta":
            words = ["Δ", "points" if metric in PERCENT else ""]
        header.append(" ".join(word for word in words if word))
    ok = [row for row in rows if row["status"] == "ok"]
    best = {name: _best(name, ok) for name in names}
    fastest = {row["recipe"] for row in ok if _value(row, "latency_p50_s") == best["latency_p50_s"]}
    lines = []
    for row in rows:
        name = row["recipe"] + (" !" if row["contended"] else "")
        line = [Cell("F" if row["on_frontier"] else ""), Cell(name), Cell(row["status"])]
        for name in names:
            line.append(_cell(summary, row, name, best[name], fastest) if row in ok else Cell(NONE))
        lines.append(line)
    return header, lines


def columns(metric: str | None, device: str) -> list[str]:
    """The metrics that the table shows of a row, after its mark, recipe and status."""
    names = [*([metric, "score_delta"] if metric else []), "speedup", "latency_p50_s", "latency_p95_s"]
    return [*names, peak_name(device), "disk_bytes"]


def _value(row: Row, name: str) -> float | None:
    return row["metrics"][name]["value"]


def _best(name: str, ok: list[Row]) -> float | None:
    values = [value for row in ok if (value := _value(row, name)) is not None]
    if len(ok) < 2 or not values:
        return None
    return max(values) if METRICS[name].better == "higher" else min(values)


def _cell(summary: dict[str, Any], row: Row, name: str, best: float | None, fastest: set[str]) -> Cell:
    cell = row["metrics"][name]
    value = cell["value"]
    if value is None:
        return Cell(NONE)
    is_baseline = row["recipe"] == summary["baseline"]
    if name == "score_delta":
        low, high = cell["low"], cell["high"]
        tie = not is_baseline and low is not None and low <= 0 <= high
        text = "0" if is_baseline else change(summary["metric"], value)
        interval = "" if is_baseline else between(cell, lambda x: change(summary["metric"], x))
        return Cell(text, interval, False, tie)
    has_interval = name in ("speedup", summary["metric"]) and cell["low"] != cell["high"]
    interval = between(cell, lambda x: number(name, x)) if has_interval else ""
    is_best = best is not None and value == best
    tie = name == "latency_p50_s" and not is_best and bool(fastest & set(row["ties"]))
    return Cell(number(name, value), interval, is_best, tie)


def group_title(group: dict[str, Any]) -> str:
    return f"{place(group)}, batch {group['batch_size']}"


def place(group: Mapping[str, Any]) -> str:
    """Device of a row or an entry of the frontier, and its host where that is named by its kind."""
    host = group.get("host") or ""
    return f"{group['device']} of {host}" if "/" in host else group["device"]


def group_rows(summary: dict[str, Any], group: dict[str, Any]) -> list[Row]:
    return [row for row in summary["rows"] if group_of(row) == group_of(group)]


def title(summary: dict[str, Any], run: dict[str, Any]) -> str:
    """What was swept, in one line."""
    rows = (run.get("data") or {}).get("rows")
    task = "no score" if summary["metric"] is None else f"task {summary['task']} ({summary['metric']})"
    texts = "" if rows is None else f", {rows:,} rows"
    rounds, most = run.get("rounds"), summary["harness"].get("most_rounds") or 0
    if isinstance(rounds, int) and most > rounds:
        return f"{summary['model']}: {task}{texts}, {rounds} to {most} rounds"
    return f"{summary['model']}: {task}{texts}, {rounds} {'round' if rounds == 1 else 'rounds'}"


def unstable(rows: list[Row]) -> str:
    """The rows whose rounds differ more than was asked, in one sentence; '' where none does."""
    found = [
        (row["recipe"], row["round_spread"])
        for row in rows
        if (row.get("round_spread") or {}).get("unstable")
    ]
    if not found:
        return ""
    named = ", ".join(f"{recipe} {100 * spread['ratio']:.0f} %" for recipe, spread in found)
    asked = 100 * found[0][1]["asked"]
    return (
        f"unstable, the p50 differs by more than {asked:g} % from process to process: {named}."
        " Leave the machine to the sweep, or add --rounds auto"
    )


def problems(rows: list[Row]) -> list[tuple[str, str]]:
    """Every row that is not ok: recipe and status, and a sentence with its cause and next step."""
    found = []
    for row in rows:
        if row["status"] != "ok":
            why = [row["cause"], row["next_step"] and f"Next: {row['next_step']}"]
            told = ". ".join(words.rstrip(". ") for words in why if words)
            found.append((f"{row['recipe']} {row['status']}", told))
    return found


def placed(rows: list[Row]) -> list[tuple[str, str]]:
    """Every row whose weights were placed, and its verdict."""
    return [(row["recipe"], row["verdict"]["sentence"]) for row in rows if row.get("verdict")]
