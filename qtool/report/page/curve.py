"""Latency against throughput over batch sizes, as tables; `curve.js` draws the same from the page's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.report.text import Row, place
from qtool.units import NONE, number


def curves(summary: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each device where a recipe finished at two batch sizes: the sizes, and a line a recipe with its p50 in ms
    and its texts a second at each, '-' where it has none. `names` are the recipes in the order of the page's parts.
    """
    found = []
    for device in dict.fromkeys(place(group) for group in summary["frontier"]):
        rows = {
            (row["recipe"], row["batch_size"]): row
            for row in summary["rows"]
            if place(row) == device and row["status"] == "ok"
        }
        batches = sorted({group["batch_size"] for group in summary["frontier"] if place(group) == device})
        lines = [
            {
                "recipe": name,
                "anchor": f"recipe-{place}",
                "cells": [_cells(rows.get((name, size))) for size in batches],
            }
            for place, name in enumerate(names)
            if any((name, size) in rows for size in batches)
        ]
        if any(sum((name, size) in rows for size in batches) > 1 for name in names):
            found.append({"device": device, "batches": batches, "lines": lines})
    return found


def _cells(row: Row | None) -> tuple[str, str]:
    """p50 and throughput as words."""
    if row is None:
        return NONE, NONE
    p50, rate = (row["metrics"][name]["value"] for name in ("latency_p50_s", "throughput_per_s"))
    return number("latency_p50_s", p50), number("throughput_per_s", rate)
