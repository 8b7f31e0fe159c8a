"""`qtool compare` as a table: A, B and the change, and why a change is not given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qtool.comparability import SPOILED
from qtool.core import METRICS
from qtool.report.text import one_line
from qtool.units import NONE, between, change, number, unit

MARKS = {"better": "+", "worse": "-", "tie": "=", "unresolved": "~", None: ""}
LEGEND = (
    "change is B over A (score: B less A) with its 95 % interval; + better, - worse, = tied, ~ not told apart"
)


def render(found: Mapping[str, Any]) -> str:
    """Lines for a terminal or a log, never cut to a width."""
    lines = []
    for side in "ab":
        run, volume = found[side], found[side]["hypervolume"]
        told = run["hypervolume_reason"] if volume is None else f"{volume:.4f}"
        lines.append(
            f"{side.upper()}  {run['run']}: {run['model']}, {run['task'] or 'no task'}, hypervolume {told}"
        )
    lines += notes(found)
    lines_of_table = table(found)
    widths = [max(map(len, column)) for column in zip(*lines_of_table, strict=True)]
    lines.append("")
    for line in lines_of_table:
        lines.append(
            "  ".join(
                word.ljust(width) if n < 2 else word.rjust(width)
                for n, (word, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )
    lines += [*only_in_one(found), "", LEGEND, *reasons(found)]
    return "\n".join(map(one_line, lines))


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """A header and a line a shared trial: A, B and the change of every column."""
    columns = _columns(found)
    header = ["recipe", "on", "batch"]
    for column in columns:
        header += [f"{_label(found, column)} A", "B", "change"]
    lines = [header]
    for row in found["rows"]:
        device = f"{row['device']} at {row['host']}" if row.get("host") else row["device"]
        line = [row["recipe"], device, str(row["batch_size"])]
        for column in columns:
            line += _cells(found, column, row["columns"].get(column))
        lines.append(line)
    return lines


def notes(found: Mapping[str, Any]) -> list[str]:
    """What differs between the runs, which columns that spoils, and what else to know."""
    lines = []
    for difference in found["differences"]:
        one, two = (short(difference[side]) for side in "ab")
        spoils = ", ".join(difference["spoils"])
        lines.append(f"not the same {difference['what']}: A {one}, B {two}; not compared: {spoils}")
    return [*lines, *(f"note: {note}" for note in found["notes"])]


def only_in_one(found: Mapping[str, Any]) -> list[str]:
    """Trials that the other run does not have."""
    lines = []
    for side in "ab":
        if only := found[f"only_in_{side}"]:
            named = ", ".join(f"{recipe} {device} batch {size}" for recipe, device, size in only)
            lines.append(f"only in {side.upper()}: {named}")
    return lines


def reasons(found: Mapping[str, Any]) -> list[str]:
    """Why a change is missing, once for all recipes that share the reason."""
    lines = []
    for column in _columns(found):
        by_reason: dict[str, list[str]] = {}
        for row in found["rows"]:
            reason = (row["columns"].get(column) or {}).get("reason")
            if reason:
                by_reason.setdefault(reason, []).append(row["recipe"])
        for reason, recipes in by_reason.items():
            who = "" if len(recipes) == len(found["rows"]) else f" of {', '.join(dict.fromkeys(recipes))}"
            lines.append(f"no change of {_label(found, column)}{who}: {reason}")
    return lines


def _columns(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(column for row in found["rows"] for column in row["columns"]))


def _label(found: Mapping[str, Any], column: str) -> str:
    metric = found["a"]["metric"] if column == "score" else column
    return f"{METRICS[metric].label} {unit(metric)}".strip()


def short(value: Any) -> str:
    """A fact in few letters: of a content hash the first twelve tell runs apart."""
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    return json.dumps(value, ensure_ascii=False)


def _cells(found: Mapping[str, Any], column: str, cell: Mapping[str, Any] | None) -> list[str]:
    if cell is None or str(cell["reason"]).startswith(SPOILED):
        return [NONE] * 3
    metric = {side: found[side]["metric"] if column == "score" else column for side in "ab"}
    values = [number(metric[side], cell[side]) for side in "ab"]
    if cell["change"] is None:
        return [*values, NONE]
    if column == "score":
        told = change(metric["a"], cell["change"]) + between(dict(cell), lambda x: change(metric["a"], x))
    else:
        exact = cell["low"] == cell["high"]
        told = f"{cell['change']:.3g}x" + ("" if exact else between(dict(cell), lambda x: f"{x:.3g}"))
    return [*values, told + MARKS[cell["verdict"]]]
