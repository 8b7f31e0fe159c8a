"""Numbers as people read them: milliseconds, megabytes (powers of 1000) and percent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qtool.core import METRICS

PERCENT = ("accuracy", "f1", "agreement", "tokenize_share", "gpu_utilization_ratio")
NONE = "-"


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits without an exponent: 0.0271, 2.71, 27.1, 271, 2,714."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def rounded(value: float) -> str:
    """As `significant`, of a figure that was computed: 0.9999999 is 1.00 and not 1.000."""
    return significant(float(f"{value:.3g}"))


def number(name: str, value: float | None) -> str:
    """A metric's value in the unit of `unit(name)`."""
    if value is None:
        return NONE
    if name.endswith("_s") and name != "throughput_per_s":
        return significant(value * 1e3)
    if name.endswith("_bytes"):
        return significant(value / 1e6)
    if name in PERCENT:
        return f"{100 * value:.2f}"
    if name == "speedup" and not 0.01 <= value <= 1000:
        return "<0.01" if value < 0.01 else ">1000"  # bounds of two noisy rounds run to millions
    if name in ("speedup", "throughput_per_s", "energy_j", "power_w"):
        return significant(value)
    return f"{value:.4f}"


def unit(name: str) -> str:
    """The unit that `number` writes in, '' for a bare number."""
    if name.endswith("_s") and name != "throughput_per_s":
        return "ms"
    if name.endswith("_bytes"):
        return "MB"
    if name in PERCENT:
        return "%"
    if name == "throughput_per_s":
        return ""  # its label says it
    return "x" if name == "speedup" else METRICS[name].unit


def with_unit(name: str, value: float | None) -> str:
    if value is None:
        return "not known"
    space = "" if unit(name) in ("", "x") else " "
    return f"{number(name, value)}{space}{unit(name)}"


def change(metric: str | None, value: float) -> str:
    """A score's change: percentage points for shares, the plain difference for correlations."""
    return f"{100 * value:+.2f}" if metric in PERCENT else f"{value:+.4f}"


def between(cell: dict[str, Any], write: Callable[[float], str]) -> str:
    """' [low, high]' of a metric, '' where it has no interval."""
    return "" if cell["low"] is None else f" [{write(cell['low'])}, {write(cell['high'])}]"


def peak_name(device: str) -> str:
    """The memory that is an objective on a device."""
    return "peak_vram_bytes" if device == "cuda" else "peak_rss_bytes"
