"""The latency distribution of each round, small enough for a page: quantiles, and medians along the round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qtool import stats
from qtool.rows import Trial

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
STRETCHES = 10
LEAST_IN_STRETCH = 5
LEAST_TIMES_OF_A_CALL = 3


def by_round(trial: Trial) -> list[dict[str, Any]]:
    """Of every timed round: number of calls, `QUANTILES` in seconds (None where the calls do not support one),
    medians in seconds of ten consecutive stretches of calls, and whether these are corrected for their texts.
    """
    samples = trial.samples("latency_s")
    calls = next(iter(trial.values("calls_in_pass").values()), None)
    usual = _usual(samples, calls) if isinstance(calls, int) and calls > 0 else None
    found = []
    for number, times in samples.items():
        supported = [len(times) >= stats.least_samples(max(q, 1 - q)) for q in QUANTILES]
        values = np.quantile(times, QUANTILES)
        along = np.asarray(times)
        if usual is not None:
            along = along / np.resize(usual, len(along)) * float(np.median(usual))
        found.append(
            {
                "round": number,
                "calls": len(times),
                "quantiles": [
                    _short(value) if is_supported else None
                    for value, is_supported in zip(values, supported, strict=True)
                ],
                "stretches": stretches(along),
                "corrected": usual is not None,
            }
        )
    return found


def stretches(times: np.ndarray[Any, Any]) -> list[float]:
    """Medians of ten consecutive parts of a round, fewer where a part would hold less than five calls."""
    parts = min(STRETCHES, len(times) // LEAST_IN_STRETCH)
    return [_short(float(np.median(part))) for part in np.array_split(times, parts)] if parts > 1 else []


def _usual(samples: Mapping[int, list[float]], calls: int) -> np.ndarray[Any, Any] | None:
    """What each call of a pass usually takes, (calls,) seconds: the median over all passes of all rounds.

    A stretch of short texts is not a machine that grew faster, so a round is followed against this. None where
    a call was not timed three times.
    """
    passes = [
        np.asarray(times[: len(times) // calls * calls]).reshape(-1, calls) for times in samples.values()
    ]
    every = np.concatenate(passes)
    return np.median(every, axis=0) if len(every) >= LEAST_TIMES_OF_A_CALL else None


def _short(value: float) -> float:
    """Four digits: a pixel is less."""
    return float(f"{value:.4g}")
