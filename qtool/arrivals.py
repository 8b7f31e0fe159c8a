"""When requests come: at random, in bursts, or as they did in a recorded trace. Knows nothing of servers.

A pattern is drawn at one request a second on average; dividing its times by a rate gives that rate, so that two
rates or two policies see the same requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.core import QtoolError

Array = NDArray[Any]
ON_SHARE = 0.2
BURST_REQUESTS = 20.0
"""A burst lasts as long as 20 requests take to come on average, at five times the mean rate; then silence."""
MOST_LINES = 200_000


@dataclass(frozen=True)
class Pattern:
    """`poisson`, `burst` or `trace`; only a trace has times, in seconds from its first request."""

    name: str
    trace_s: Array | None = None

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of a trace as it was recorded; the other patterns have none of their own."""
        return None if self.trace_s is None else (len(self.trace_s) - 1) / float(self.trace_s[-1])

    def draw(self, requests: int, rng: np.random.Generator, *, whole: bool = True) -> Array:
        """(requests,) times at one request a second; a trace is whole, and repeated until it is as long.

        Without `whole` a longer trace is cut to its first `requests`, at the pace that they have in it.
        """
        if self.trace_s is not None:
            own = repeat(self.trace_s, requests)
            return own if whole or len(own) > len(self.trace_s) else own[:requests]
        return (burst if self.name == "burst" else poisson)(requests, rng)

    def told(self) -> str:
        """The pattern in words."""
        if self.name == "burst":
            return (
                f"bursts of {BURST_REQUESTS:g} requests on average at {1 / ON_SHARE:g} times the mean rate,"
                " silence between them (interrupted Poisson)"
            )
        if self.trace_s is None:
            return "independent requests (Poisson)"
        return f"a trace of {len(self.trace_s):,} requests, repeated where it is short"


def poisson(requests: int, rng: np.random.Generator) -> Array:
    """Independent requests: exponential gaps of mean 1."""
    return np.cumsum(rng.exponential(size=requests))


def burst(requests: int, rng: np.random.Generator) -> Array:
    """An interrupted Poisson process: Poisson at 1 / ON_SHARE while on, nothing while off.

    Kuczura 1973 (Bell System Technical Journal 52:437-448). On and off periods are exponential; an on period has
    BURST_REQUESTS requests on average. Seen from a request, the time to the next is a sum: with probability
    off / (on + off rates) the source first goes silent and comes back, any number of times.
    """
    on, to_off, to_on = ipp_rates()
    silences = rng.geometric(on / (on + to_off), size=requests) - 1
    gaps = rng.standard_gamma(silences + 1) / (on + to_off) + rng.standard_gamma(silences) / to_on
    return np.cumsum(gaps)


def ipp_rates() -> tuple[float, float, float]:
    """Arrival rate while on, rate of going off, rate of coming on, at a mean of one request a second."""
    on = 1 / ON_SHARE
    to_off = on / BURST_REQUESTS
    return on, to_off, to_off * ON_SHARE / (1 - ON_SHARE)


def repeat(trace_s: Array, requests: int) -> Array:
    """A trace at unit rate, one time after the other with its mean gap between, until it has `requests`."""
    own = trace_s * (len(trace_s) - 1) / trace_s[-1]
    times = math.ceil(requests / len(own))
    return (own + len(own) * np.arange(times)[:, None]).ravel()


def read_trace(path: Path) -> Pattern:
    """Arrival times in seconds, one a line or in the first column of a CSV; a CSV's first line may be names.

    Raises QtoolError for a file that cannot be read, and for the first line that is no time or goes back.
    """
    times: list[float] = []
    try:
        # spreadsheets begin a table with a byte order mark
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(file, 1):
                cell = line.split(",")[0].strip().strip('"')
                if not line.strip():
                    continue
                value = _time(cell)
                if value is None and number == 1 and "," in line:
                    continue
                if value is None:
                    raise QtoolError(
                        f"{path} line {number}: '{cell[:40]}' is no time. Give seconds from 0 on, one a line."
                    )
                if times and value < times[-1]:
                    raise QtoolError(
                        f"{path} line {number}: {value:g} s is before the line above ({times[-1]:g} s). Sort the file."
                    )
                if len(times) == MOST_LINES:
                    raise QtoolError(
                        f"{path} has more than {MOST_LINES:,} arrivals. Give the part that matters, the busiest hour."
                    )
                times.append(value)
    except OSError as error:
        raise QtoolError(f"cannot read the trace {path}: {error.strerror}. Check the path.") from None
    if len(times) < 2 or times[-1] == times[0]:
        raise QtoolError(
            f"{path} has {len(times)} arrivals over no time, which is no rate. Give two or more that differ."
        )
    return Pattern("trace", np.asarray(times) - times[0])


def _time(cell: str) -> float | None:
    """Seconds as a finite number from 0 on; None for anything else."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
