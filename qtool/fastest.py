"""The shortest time that a piece of work takes: what a ceiling is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REPEATS = 5
# After this long the best of what was taken has to do: a slow machine needs a second for one product.
ENOUGH_S = 1.0


def best_s(
    work: Callable[[], Any], clock: Callable[[], float], prepare: Callable[[], Any] = lambda: None
) -> float:
    """Seconds of the fastest of `REPEATS` runs, or of at least two within `ENOUGH_S`; `prepare` is not timed.

    The fastest, because whatever disturbs a run can only make it slower.
    """
    took: list[float] = []
    while len(took) < REPEATS and (len(took) < 2 or sum(took) < ENOUGH_S):
        prepare()
        started = clock()
        work()
        took.append(clock() - started)
    return min(took)
