"""`qtool fit` as a table, and one sentence on how far a run's estimates were off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.report.text import one_line, printable
from qtool.units import NONE, number

HEADER = ("recipe", "weights MB", "of fp32 %", "largest MB", "on CPU", "on device", "spilled", "MB a pass")
SHOWN = 4
"""Modules named of what is spilled; --json has all."""


def render(found: Mapping[str, Any]) -> str:
    """Lines for a terminal or a log: what each recipe takes and where it fits, then what follows from it."""
    lines = [
        f"{found['model']}: {found['model_type']}, {found['parameters'] / 1e6:.1f} M parameters,"
        f" {number('weight_bytes', found['float32_bytes'])} MB in fp32; nothing was loaded",
        "",
        *_table([HEADER, *(_cells(row) for row in found["recipes"])]),
        "",
        *found["conclusion"],
    ]
    told: dict[str, list[str]] = {}
    for row in found["recipes"]:
        if words := _remarks(row):
            told.setdefault(words, []).append(row["recipe"])
    lines += [f"  {', '.join(names)}: {words}" for words, names in told.items()]
    return "\n".join(map(one_line, [*lines, "", *(f"note: {words}" for words in found["assumptions"])]))


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The first column set left, the others right, two spaces apart."""
    shown = [[printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[n]) for line in shown) for n in range(len(HEADER))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(line[n].rjust(widths[n]) for n in range(1, len(HEADER)))])
        for line in shown
    ]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    share, layer = row["float32_share"], row["largest_layer"]
    place = _spilled(row)
    return (
        row["recipe"],
        number("weight_bytes", row["weight_bytes"]),
        NONE if share is None else f"{100 * share:.1f}",
        NONE if layer is None else number("weight_bytes", layer["bytes"]),
        _fits(row["cpu"]),
        _fits(row["device"]),
        " ".join(f"{where} {len(names)}" for where, names in place["modules"].items()) if place else NONE,
        number("weight_bytes", place["moved_bytes"]) if place else NONE,
    )


def _spilled(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The place that does not hold it all, the device's before the CPU's."""
    places = [row[place] for place in ("device", "cpu") if row[place] and row[place]["moved_bytes"]]
    return places[0] if places else None


def _fits(place: Mapping[str, Any] | None) -> str:
    if place is None:
        return NONE
    return "whole" if place["fits"] else "offload" if place["moved_bytes"] else "no"


def _remarks(row: Mapping[str, Any]) -> str:
    """What the table cannot say of a recipe: a missing estimate, what is spilled, why it does not run here."""
    found = []
    if row["weight_bytes"] is None:
        found.append(row["weight_bytes_reason"])
    for where, name in (("device", "device"), ("cpu", "CPU")):
        place = row[where]
        if place and place["moved_bytes"]:
            for to, modules in place["modules"].items():
                rest = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
                size = number("weight_bytes", place[f"{to}_bytes"])
                found.append(f"beside the {name}, {size} MB on {to}: {', '.join(modules[:SHOWN])}{rest}")
        elif place and not place["fits"]:
            found.append(f"not on the {name}: {place['moved_bytes_reason']}")
    if row["not_here"]:
        found.append(f"does not run here: {row['not_here']}")
    return "; ".join(found)


def compared(rows: Sequence[Mapping[str, Any]]) -> str:
    """How far the weights estimated before the sweep were from those audited; '' for a run without estimates."""
    told = {
        row["recipe"]: row["fit"] for row in rows if (row.get("fit") or {}).get("error_ratio") is not None
    }
    if not told:
        return ""
    worst = max(told, key=lambda name: abs(told[name]["error_ratio"]))
    entry = told[worst]
    many = f"{len(told)} recipes" if len(told) > 1 else "1 recipe"
    peak = entry.get("peak_bytes")
    beside = (
        f"; its process peaked at {number('peak_rss_bytes', peak)} MB, libraries included" if peak else ""
    )
    return (
        f"Weights were estimated from shapes before anything was built (as qtool fit does) for {many}: off by at most"
        f" {100 * abs(entry['error_ratio']):.1f} %, {worst} with {number('weight_bytes', entry['weight_bytes'])} MB"
        f" estimated and {number('weight_bytes', entry['measured_bytes'])} MB measured{beside}."
    )
