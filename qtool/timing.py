"""Takes samples of call times in seconds: warm-up, the model alone, and end to end. Knows nothing of models.

The clock is `time.perf_counter_ns`: monotonic, never stepped by NTP, one for all runtimes because every
prediction ends with a host array; `clock_facts` records its resolution. One sample is one call, never a
mean over calls, so that percentiles stay possible. Batches differ in length, so only whole passes over the
same list are comparable, and a batch is only ever compared with itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], int]
"""Nanoseconds from an arbitrary start, never going back."""

# Windows of a quiet process differ by one or two per cent; pyperf accepts 5 % between quartiles.
STABLE_WITHIN_RATIO = 0.05
# Three windows that agree: two can agree by chance on the way down a slope.
WINDOWS_THAT_AGREE = 3
WINDOW_S = 0.25
LEAST_CALLS_IN_WINDOW = 3


@dataclass(frozen=True)
class WarmUp:
    """What warming up took. `spread_ratio`: largest difference between the last windows, None if too few."""

    calls: int
    seconds: float
    stable: bool
    spread_ratio: float | None


def clock_facts() -> dict[str, Any]:
    """Name, resolution (s) and monotonicity of the clock behind every sample, for the record."""
    info = time.get_clock_info("perf_counter")
    return {
        "clock": info.implementation,
        "resolution_s": info.resolution,
        "monotonic": info.monotonic,
        "adjustable": info.adjustable,
    }


def time_calls(
    predict: Callable[[Any], Any],
    batches: Sequence[Any],
    *,
    min_time_s: float,
    min_calls: int,
    max_time_s: float,
    clock: Clock = time.perf_counter_ns,
) -> list[float]:
    """Seconds of every call over whole passes of `batches`: sample i belongs to batch i % len(batches).

    Stops after the first pass that ends with `min_time_s` and `min_calls` both reached (a minimum of queries
    and a minimum of time, as in "LoadGen Operation" of the MLPerf inference rules,
    https://github.com/mlcommons/inference_policies), or with `max_time_s` exceeded, which a run overshoots by
    one pass at most. Raises ValueError for an empty list of batches.
    """
    _refuse_empty(batches)
    # The garbage collector stays as it is in production: its pauses belong to a service's p95, and timeit's
    # habit of switching it off would hide them.
    samples_ns: list[int] = []
    started = clock()
    while True:
        lap = [0] * len(batches)
        for index, batch in enumerate(batches):
            start = clock()
            predict(batch)
            lap[index] = clock() - start
        samples_ns += lap
        if enough(len(samples_ns), (clock() - started) / 1e9, min_time_s, min_calls, max_time_s):
            return [nanoseconds / 1e9 for nanoseconds in samples_ns]


def whole_passes(
    predict: Callable[[Any], Any], batches: Sequence[Any], min_time_s: float
) -> tuple[int, float]:
    """Calls and seconds of whole passes until `min_time_s` are over: for counters, with no clock between calls."""
    calls, started = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - started < min_time_s:
        for batch in batches:
            predict(batch)
        calls += len(batches)
    return calls, time.perf_counter() - started


def time_end_to_end(
    texts_batches: Sequence[Any],
    tokenize: Callable[[Any], Any],
    predict: Callable[[Any], Any],
    finish: Callable[[Any], Any],
    *,
    min_time_s: float,
    min_calls: int,
    max_time_s: float,
    pause_s: float = 0.0,
    clock: Clock = time.perf_counter_ns,
    sleep: Callable[[float], Any] = time.sleep,
) -> dict[str, list[float]]:
    """Seconds from text to answer, each call tokenised anew; passes and errors as in `time_calls`.

    `tokenize_s` is the tokeniser's part of each call, `end_to_end_s` is tokenise + predict + finish. `pause_s` of
    idleness before each call is in no sample.
    """
    _refuse_empty(texts_batches)
    tokenize_ns: list[int] = []
    end_to_end_ns: list[int] = []
    started = clock()
    while True:
        for texts in texts_batches:
            if pause_s:
                sleep(pause_s)
            start = clock()
            batch = tokenize(texts)
            tokenized = clock()
            finish(predict(batch))
            end = clock()
            tokenize_ns.append(tokenized - start)
            end_to_end_ns.append(end - start)
        if enough(len(end_to_end_ns), (clock() - started) / 1e9, min_time_s, min_calls, max_time_s):
            return {
                "tokenize_s": [nanoseconds / 1e9 for nanoseconds in tokenize_ns],
                "end_to_end_s": [nanoseconds / 1e9 for nanoseconds in end_to_end_ns],
            }


def warm_up(
    predict: Callable[[Any], Any],
    batches: Sequence[Any],
    *,
    min_time_s: float = 0.5,
    max_time_s: float = 30.0,
    stable_within_ratio: float = STABLE_WITHIN_RATIO,
    clock: Clock = time.perf_counter_ns,
) -> WarmUp:
    """Call until the time of a call no longer drifts, or until `max_time_s`; says which of the two it was.

    First one whole pass, because a runtime pays once for every new shape (oneDNN primitives, compiled graphs,
    OpenVINO kernels). Then windows over one fixed, evenly spread subset of about `WINDOW_S`; stable means
    the last three agree within `stable_within_ratio` and `min_time_s` is over. Windows are compared text by
    text (median over texts of the ratio of each text's median): neither lengths nor one late call decide.

    A fixed number of calls or seconds (Google Benchmark's `MinWarmUpTime`) is a guess about code it has not
    seen; pyperf (`_worker.py`, `test_calibrate_warmups`) compares halves of its warm-up samples and gives up
    with an error; Barrett et al. 2017, "Virtual machine warmup blows hot and cold",
    https://arxiv.org/abs/1602.00602, show that many programs never become steady. So the verdict is recorded
    beside the samples, not assumed. The bound is overshot by one call at most.
    Raises ValueError for an empty list of batches.
    """
    _refuse_empty(batches)
    started = clock()
    deadline = started + int(max_time_s * 1e9)
    first: list[int] = []
    for batch in batches:
        start = clock()
        predict(batch)
        first.append(clock() - start)
        if clock() >= deadline:
            return WarmUp(len(first), (clock() - started) / 1e9, False, None)
    calls = len(first)
    chosen, repeats = _window(statistics.median(first), len(batches))
    windows: list[list[float]] = []
    while True:
        laps: list[list[int]] = [[] for _ in chosen]
        window_started = clock()
        for _ in range(repeats):
            for lap, index in zip(laps, chosen, strict=True):
                start = clock()
                predict(batches[index])
                lap.append(clock() - start)
                calls += 1
                if clock() >= deadline:
                    return WarmUp(calls, (clock() - started) / 1e9, False, _spread(windows))
        took_ns = clock() - window_started
        longer = _window(took_ns / len(chosen) / repeats, len(batches))
        if took_ns < WINDOW_S / 2 * 1e9 and longer != (chosen, repeats):
            # Calls have become much faster than the first: in so short a window a slope looks flat.
            (chosen, repeats), windows = longer, []
            continue
        windows = [*windows, [statistics.median(lap) for lap in laps]][-WINDOWS_THAT_AGREE:]
        elapsed_s = (clock() - started) / 1e9
        spread = _spread(windows)
        if elapsed_s >= min_time_s and spread is not None and spread <= stable_within_ratio:
            return WarmUp(calls, elapsed_s, True, spread)


def _window(per_call_ns: float, count: int) -> tuple[list[int], int]:
    """Indices of evenly spread batches that take about `WINDOW_S`, and how often to run them."""
    wanted = max(LEAST_CALLS_IN_WINDOW, round(WINDOW_S * 1e9 / max(per_call_ns, 1.0)))
    size = min(count, wanted)
    # A predict that costs next to nothing must not turn one window into millions of calls.
    return [i * count // size for i in range(size)], min(-(-wanted // size), 1000)


def _spread(windows: list[list[float]]) -> float | None:
    """Largest relative difference between the last windows; None until there are enough of them."""
    if len(windows) < WINDOWS_THAT_AGREE:
        return None
    last = windows[-1]
    levels = [statistics.median(_ratio(was, now) for was, now in zip(w, last, strict=True)) for w in windows]
    return max(levels) / min(levels) - 1.0


def _ratio(was_ns: float, now_ns: float) -> float:
    # A clock too coarse for the call reads 0: one nanosecond keeps the ratio finite and says "no difference".
    return max(was_ns, 1.0) / max(now_ns, 1.0)


def enough(calls: int, elapsed_s: float, min_time_s: float, min_calls: int, max_time_s: float) -> bool:
    """Whether a pass was the last: both minima are reached, or the bound is exceeded."""
    return elapsed_s > max_time_s or (elapsed_s >= min_time_s and calls >= min_calls)


def _refuse_empty(batches: Sequence[Any]) -> None:
    if not batches:
        raise ValueError("nothing to time: the list of batches is empty, at least one is needed")
