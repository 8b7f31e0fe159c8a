"""The part of a call's time that does not grow with its text, and the work that its linear layers must do.

Pure functions over samples and an audit. Roofline: Williams et al. 2009, CACM 52(4):65.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from qtool import precision

LEAST_CALLS = 10
# A line through texts of nearly one length says nothing of its value at length zero.
LEAST_SPREAD = 1.5
# Models that run one set of weights several times: counted once, it says nothing of a call's work.
SHARED_LAYERS = ("albert",)


@dataclass(frozen=True)
class Line:
    """`constant_s` + `per_token_s` x tokens, least squares over `calls` of `fewest` to `most` padded tokens."""

    constant_s: float
    per_token_s: float
    constant_error_s: float
    calls: int
    fewest: int
    most: int


@dataclass(frozen=True)
class Work:
    """What the linear layers of a call of `tokens` padded tokens need at the ceilings; attention's own
    products, embedding tables and activations are left out.
    """

    weight_bytes: float
    flop: float
    tokens: float
    reading_s: float
    products_s: float


def fit(tokens: Sequence[int], latency_s: Mapping[int, Sequence[float]]) -> Line | None:
    """Ordinary least squares of each call's latency (median over passes, then over rounds) on its padded tokens.

    `latency_s` by round: sample i belongs to call i % len(tokens). `constant_error_s` is the standard error of
    the intercept (Draper & Smith 1998, Applied Regression Analysis, section 1.4). None where there are too few
    calls, lengths too alike, or samples that are no whole passes.
    """
    count = len(tokens)
    rounds = [times for times in latency_s.values() if times]
    if count < LEAST_CALLS or not rounds or any(len(times) % count for times in rounds):
        return None
    if max(tokens) < LEAST_SPREAD * min(tokens):
        return None
    y = [median(median(times[call::count]) for times in rounds) for call in range(count)]
    x_mean, y_mean = sum(tokens) / count, sum(y) / count
    spread = sum((x - x_mean) ** 2 for x in tokens)
    slope = sum((x - x_mean) * (z - y_mean) for x, z in zip(tokens, y, strict=True)) / spread
    constant = y_mean - slope * x_mean
    residual = sum((z - constant - slope * x) ** 2 for x, z in zip(tokens, y, strict=True)) / (count - 2)
    error = (residual * (1 / count + x_mean**2 / spread)) ** 0.5
    return Line(constant, slope, error, count, min(tokens), max(tokens))


def work(
    audit: Mapping[str, Any],
    tokens: float,
    ceilings: Mapping[str, Any],
    model: Mapping[str, Any],
) -> Work | None:
    """Reading each linear weight once, and two operations a weight and token. `model` is run.json's model_info.

    None where the audit does not hold what a call computes: shared layers, or products that are no linear
    layers (GPT-2 keeps them in its own Conv1D), so that next to no parameters are linear.
    """
    size, elements = precision.linear_bytes(audit), precision.linear_elements(audit)
    if not size or model.get("model_type") in SHARED_LAYERS:
        return None
    if elements < 0.1 * (model.get("parameters") or 0):
        return None
    flop = 2.0 * elements * tokens
    return Work(size, flop, tokens, size / ceilings["copy_bytes_per_s"], flop / ceilings["fp32_flop_per_s"])
