"""The page's part on one recipe: what it is, what the audit found, every metric, why it is as fast as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qtool.core import METRICS
from qtool.evidence import Evidence
from qtool.report import text
from qtool.report.text import Row
from qtool.units import between, change, number, unit, with_unit


def part(evidence: Evidence, summary: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Words and tables of the recipe `name` in every group of the run."""
    rows = [row for row in summary["rows"] if row["recipe"] == name]
    ok = [row for row in rows if row["status"] == "ok"]
    recipe = (evidence.run.get("recipes") or {}).get(name) or {}
    frontier = [text.group_title(row) for row in ok if row["on_frontier"]]
    taken = [text.group_title(g) for g in summary["frontier"] if g["recommended"] == name]
    return {
        "name": name,
        "is_baseline": name == summary["baseline"],
        "description": rows[0]["description"] or recipe.get("description") or "",
        "makeup": [
            (key, plain(value))
            for key in (
                "source",
                "method",
                "dtype",
                "quantize",
                "compile",
                "placement",
                "calibration",
                "runtime",
                "runtime_options",
            )
            if (value := recipe.get(key)) not in (None, {}, [], "")
        ],
        "statuses": _counts([row["status"] for row in rows]),
        "ok": len(ok),
        "all": len(rows),
        "frontier": frontier,
        "taken": taken,
        "lead": _lead(summary, ok),
        "audits": _audits(ok),
        "groups": [text.group_title(row) for row in ok],
        "metrics": _metrics(summary["metric"], ok),
        "missing": _missing(ok),
        "why": _why(ok),
        "problems": [
            (text.group_title(row), row["status"], row["cause"] or "no cause was recorded", row["next_step"])
            for row in rows
            if row["status"] != "ok"
        ],
    }


def _counts(statuses: Sequence[str]) -> str:
    return ", ".join(
        status if len(statuses) == 1 else f"{statuses.count(status)} {status}"
        for status in dict.fromkeys(statuses)
        if set(statuses) != {"ok"}
    )


def _lead(summary: Mapping[str, Any], ok: Sequence[Row]) -> list[str]:
    """The figures that a closed part shows, of the first group that finished; '' for one it lacks."""
    if not ok:
        return []
    metrics, metric = ok[0]["metrics"], summary["metric"]
    parts = [with_unit("latency_p50_s", metrics["latency_p50_s"]["value"])]
    is_known = ok[0]["recipe"] != summary["baseline"] and metrics["speedup"]["value"] is not None
    parts.append(with_unit("speedup", metrics["speedup"]["value"]) if is_known else "")
    if metric:
        parts.append(with_unit(metric, metrics[metric]["value"]))
    parts.append(with_unit("disk_bytes", metrics["disk_bytes"]["value"]))
    return [text.group_title(ok[0]) if len(summary["frontier"]) > 1 else "", *parts]


def _audits(ok: Sequence[Row]) -> list[dict[str, Any]]:
    """What the loaded artifact was found to be, once a device: batch sizes share it."""
    found = {}
    for row in ok:
        audit = row["audit"]
        if text.place(row) in found or not audit:
            continue
        held = audit.get("weight_bytes_by_dtype") or {}
        total = sum(held.values()) or 1
        facts = [
            (f"modules changed: {kind}", plain(n)) for kind, n in (audit.get("changed_modules") or {}).items()
        ]
        facts += [(f"engine: {key}", plain(value)) for key, value in (audit.get("engine") or {}).items()]
        linear = audit.get("linear_elements_by_dtype") or {}
        facts += [(f"linear weights in {dtype}", f"{n:,}") for dtype, n in linear.items()]
        for key in ("compiled_graphs", "autocast"):
            if audit.get(key) is not None:
                facts.append((key.replace("_", " "), plain(audit[key])))
        found[text.place(row)] = {
            "device": text.place(row),
            "shares": [
                {
                    "dtype": dtype,
                    "size": f"{size:,} B" if size < 1e4 else f"{number('weight_bytes', size)} MB",
                    "share": 100 * size / total,
                }
                for dtype, size in sorted(held.items(), key=lambda pair: -pair[1])
            ],
            "facts": facts,
        }
    return list(found.values())


def _metrics(metric: str | None, ok: Sequence[Row]) -> list[dict[str, Any]]:
    """A line a metric, a cell a group: value and interval as words."""
    lines = []
    for name in METRICS:
        cells = [row["metrics"].get(name) for row in ok]
        if any(cell and cell["value"] is not None for cell in cells):
            label = (
                f"change of {METRICS[metric].label}"
                if name == "score_delta" and metric
                else METRICS[name].label
            )
            told = "" if name == "score_delta" else unit(name)
            lines.append(
                {"label": f"{label} {told}".strip(), "cells": [_words(metric, name, c) for c in cells]}
            )
    return lines


def _words(metric: str | None, name: str, cell: Mapping[str, Any] | None) -> tuple[str, str]:
    if cell is None or cell["value"] is None:
        return "-", ""

    def write(value: float) -> str:
        return change(metric, value) if name == "score_delta" else number(name, value)

    exact = cell["low"] == cell["high"]
    if name == "score_delta" and cell["low"] == cell["high"] == 0:
        return "0", ""
    return write(cell["value"]), "" if exact else between(dict(cell), write).strip()


def _missing(ok: Sequence[Row]) -> list[tuple[str, str]]:
    """Why numbers are missing: their names, and the reason they share."""
    found: dict[str, list[str]] = {}
    for row in ok:
        for name, cell in row["metrics"].items():
            if cell["value"] is None and METRICS[name].label not in found.setdefault(cell["reason"], []):
                found[cell["reason"]].append(METRICS[name].label)
    return [(", ".join(labels), reason) for reason, labels in found.items()]


def _why(ok: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The sentences on the speed, groups that share them together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in ok:
        if sentences := tuple(row.get("why") or ()):
            found.setdefault(sentences, []).append(text.group_title(row))
    return [(" and ".join(where), list(sentences)) for sentences, where in found.items()]


def plain(value: Any) -> str:
    """A fact as words."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and all(isinstance(entry, str | int) for entry in value):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
