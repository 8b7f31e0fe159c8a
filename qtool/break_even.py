"""From which arrival rate on one kind of machine is cheaper than another, where machines are rented whole.

Pure arithmetic: a price an hour, and the rate a second that one machine serves within its limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_STEPS = 200_000
MOST_MACHINES = 50
SAME = 1e-9
"""Two costs an hour whose ratio is nearer to 1 are the same: prices have few digits, their sums as floats do not."""


@dataclass(frozen=True)
class Machine:
    """What one costs an hour, and the rate a second that it is taken to serve."""

    price_per_hour: float
    rate_per_s: float

    @property
    def per_request(self) -> float:
        """Price over rate: proportional to the cost of a request on a machine that is used to its rate."""
        return self.price_per_hour / self.rate_per_s


def break_even(cpu: Machine, gpu: Machine) -> dict[str, Any]:
    """Rates a second at which the GPU's cost an hour falls below the CPU machines', JSON-able.

    At a rate x whole machines cost c ceil(x / r) an hour on CPUs of price c that serve r each, and g ceil(x / s) on
    GPUs of price g that serve s each.

    - `first_cheaper_per_s`: the rate just above which the GPU is cheaper for the first time; None where it is not
      with up to 50 machines of a kind.
    - `break_even_per_s`: the rate above which it is cheaper at every rate. While one GPU is enough this is
      r floor(g / c): that many CPU machines cost no more than the GPU, one more costs more. None where a request on
      fully used GPUs costs as much or more (g / s >= c / r): then ever larger fleets of CPUs win again.
    - `ratio_per_s`: r g / c, where CPUs counted in fractions cost as much as one GPU.

    Between its steps the difference of costs is constant, and beyond g / (c / r - g / s) it is positive because
    c ceil(x / r) >= c x / r and g ceil(x / s) < g x / s + g: the steps up to there are looked at one by one.
    """
    c, r, g, s = cpu.price_per_hour, cpu.rate_per_s, gpu.price_per_hour, gpu.rate_per_s
    found: dict[str, Any] = {
        "break_even_per_s": None,
        "first_cheaper_per_s": None,
        "ratio_per_s": r * g / c,
        "reason": None,
    }
    gain = cpu.per_request - gpu.per_request
    pays = gain > SAME * cpu.per_request
    end = g / gain if pays else MOST_MACHINES * min(r, s)
    if end / r + end / s > MOST_STEPS:
        return found | {"reason": "at full use a request costs nearly the same on both: no rate parts them"}
    by_cpu, by_gpu = _multiples(r, end), _multiples(s, end)
    steps = np.unique(np.concatenate([[0.0], by_cpu, by_gpu]))
    steps = steps[steps <= min(by_cpu[-1], by_gpu[-1])]
    # two multiples that only rounding parts are one step
    steps = steps[np.concatenate([[True], np.diff(steps) > SAME * steps[1:]])]
    middles = (steps[:-1] + steps[1:]) / 2
    cheaper = c * np.ceil(middles / r) - g * np.ceil(middles / s) > SAME * g
    if cheaper.any():
        found["first_cheaper_per_s"] = float(steps[int(np.argmax(cheaper))])
    if not pays:
        return found | {
            "reason": "a request on a fully used GPU costs as much as on fully used CPUs, or more"
        }
    dearer = np.flatnonzero(~cheaper)
    found["break_even_per_s"] = float(steps[int(dearer[-1]) + 1]) if len(dearer) else 0.0
    return found


def _multiples(rate: float, end: float) -> np.ndarray[Any, Any]:
    """The rate once, twice and so on, one of them at or beyond `end`."""
    return rate * np.arange(1, math.ceil(end / rate) + 2)


def machines(rate_per_s: float, machine: Machine) -> int:
    """How many whole machines serve a rate; at its very multiple none is rented for a rounding error."""
    return max(1, math.ceil(rate_per_s / machine.rate_per_s * (1 - SAME)))
