"""Takes samples of the parts of a request, from texts to classes, on one clock. Knows nothing of models.

What a request took beside its parts (the clock's own calls, entering and leaving) is never hidden: the whole
has samples of its own, and the difference is the residual.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from qtool.core import Batch, Part
from qtool.timing import Clock, enough

PARTS = {
    "tokenise": "tokenise",
    "collate": "pad and stack",
    "make_tensors": "make tensors",
    "copy_in": "copy to the device",
    "model": "model",
    "copy_out": "copy back",
    "post_process": "post-process",
}
"""The parts in the order in which they run, as people call them. Only texts in bulk have `collate`."""
WHOLE = "request"


class _Timed:
    """Adds the nanoseconds spent inside to `spent[name]`; `annotate` draws the same range elsewhere."""

    __slots__ = ("_clock", "_name", "_range", "_spent", "_start")

    def __init__(self, spent: dict[str, int], clock: Clock, annotate: Part | None, name: str) -> None:
        self._spent, self._clock, self._name = spent, clock, name
        self._range: AbstractContextManager[Any] | None = annotate(name) if annotate else None

    def __enter__(self) -> None:
        if self._range:
            self._range.__enter__()
        self._start = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took = self._clock() - self._start
        # a model that takes one text at a time runs a part several times in a request
        self._spent[self._name] = self._spent.get(self._name, 0) + took
        if self._range:
            self._range.__exit__(kind, error, trace)


def time_requests(
    texts: Sequence[Any],
    tokenize: Callable[[Any], Batch],
    run: Callable[[Batch, Part], Any],
    annotate: Part | None = None,
    *,
    min_time_s: float,
    min_calls: int,
    max_time_s: float,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Seconds of every part of every request, and of the whole (`WHOLE`); passes as in `timing.time_calls`.

    Raises ValueError for an empty list of texts.
    """
    if not texts:
        raise ValueError("nothing to time: the list of texts is empty, at least one is needed")
    samples_ns: dict[str, list[int]] = {}
    started = clock()
    while True:
        for each in texts:
            spent: dict[str, int] = {}
            part = functools.partial(_Timed, spent, clock, annotate)
            start = clock()
            with part("tokenise"):
                batch = tokenize(each)
            logits = run(batch, part)
            with part("post_process"):
                logits.argmax(axis=1)
            spent[WHOLE] = clock() - start
            for name, took in spent.items():
                samples_ns.setdefault(name, []).append(took)
        if enough(len(samples_ns[WHOLE]), (clock() - started) / 1e9, min_time_s, min_calls, max_time_s):
            return {name: [ns / 1e9 for ns in found] for name, found in samples_ns.items()}


def time_bulk(
    encode: Callable[[], list[Batch]],
    collate: Callable[[list[Batch]], Batch],
    run: Callable[[Batch, Part], Any],
    size: int,
    *,
    by_length: bool,
    min_time_s: float,
    max_time_s: float,
    clock: Clock = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Seconds by part of whole passes: all texts tokenised at once, then run in batches of `size`.

    The batches are consecutive rows, or with `by_length` rows of like length, longest first. A pass that is not
    timed comes first: it has other shapes than what ran before, and engines pay once for each.
    """
    samples_ns: dict[str, list[int]] = {}
    warm = False
    started = clock()
    while True:
        spent: dict[str, int] = {}
        part = functools.partial(_Timed, spent, clock, None)
        start = clock()
        with part("tokenise"):
            rows = encode()
        with part("collate"):
            if by_length:
                rows = sorted(rows, key=lambda row: -row["input_ids"].shape[1])
        for at in range(0, len(rows), size):
            with part("collate"):
                batch = collate(rows[at : at + size])
            logits = run(batch, part)
            with part("post_process"):
                logits.argmax(axis=1)
        spent[WHOLE] = clock() - start
        if not warm:
            warm, started = True, clock()
            continue
        for name, took in spent.items():
            samples_ns.setdefault(name, []).append(took)
        if enough(len(samples_ns[WHOLE]), (clock() - started) / 1e9, min_time_s, 1, max_time_s):
            return {name: [ns / 1e9 for ns in found] for name, found in samples_ns.items()}
