"""Scores as `evaluate` metrics that ship with qtool: one file each, loaded without the hub.

Each file is also a module that `evaluate.load(PATH)` accepts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from qtool.core import QtoolError, did_you_mean

REGRESSION = ("pearson", "spearman")
"""Metrics of a single real-valued output."""


def names() -> list[str]:
    """Every metric that ships with qtool."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check(name: str) -> None:
    """Raises QtoolError with a suggestion when no metric has this name."""
    if name not in names():
        raise QtoolError(f"no metric is called '{name}'.{did_you_mean(name, names())}")


def compute(name: str, predictions: Sequence[Any], references: Sequence[Any]) -> float | None:
    """The metric as a fraction, or None where it is not defined (constant predictions, say)."""
    check(name)
    metric = importlib.import_module(f"qtool.metrics.{name}").Metric(keep_in_memory=True)
    value = float(metric.compute(predictions=predictions, references=references)[name])
    return value if value == value else None
