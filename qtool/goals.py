"""Goals as people write them: `50ms`, `100/s`, `500MB`, `1%`. A number without its unit is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qtool.core import QtoolError, did_you_mean

# both letters that look like it: the micro sign and the Greek mu
SECONDS = {"us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0}
MINUTES = {"s": 1.0, "min": 60.0, "h": 3600.0}
RATES = {"/s": 1.0}
BYTES = {
    **{"KB": 1e3, "MB": 1e6, "GB": 1e9},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
}
LEAST, MOST = 1e-9, 1e15
"""In base units: a nanosecond, a petabyte."""
NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


@dataclass(frozen=True)
class Drop:
    """How much a score may fall: a share of the baseline's score, or an absolute difference."""

    amount: float
    relative: bool

    def margin(self, baseline_score: float) -> float:
        """The largest allowed fall as an absolute difference."""
        return self.amount * abs(baseline_score) if self.relative else self.amount

    def __str__(self) -> str:
        return f"{100 * self.amount:g}%" if self.relative else f"{self.amount:g}"


def quantity(text: object, units: dict[str, float], where: str) -> float:
    """A number and its unit, in the base unit. Raises QtoolError naming `where` and the units that would work."""
    plain = [unit for unit in units if unit.isascii()]
    example = f"expected a number with {' or '.join(plain)}, such as 50{plain[0]}"
    match = NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        missing = ": the unit is missing" if isinstance(text, int | float) else ""
        raise QtoolError(f"{where}: '{text}'{missing}, {example}.")
    number, unit = float(match[1]), match[2]
    if not unit:
        raise QtoolError(f"{where}: '{text}': the unit is missing, {example}.")
    if unit not in units:
        near = next((known for known in units if known.lower() == unit.lower()), None)
        hint = f" Did you mean '{near}'?" if near else did_you_mean(unit, units)
        raise QtoolError(f"{where}: '{text}': unknown unit '{unit}'.{hint}")
    value = number * units[unit]
    if not LEAST <= value <= MOST:
        raise QtoolError(
            f"{where}: '{text}' is out of range, expected more than 0 and nothing beyond reason."
        )
    return value


def drop(text: object, where: str) -> Drop:
    """`1%` is relative to the baseline's score, `0.005` absolute. Raises QtoolError outside 0 to 1 (100 %)."""
    match = NUMBER.fullmatch(str(text)) if isinstance(text, str | int | float) else None
    if isinstance(text, bool) or match is None or match[2] not in ("", "%"):
        raise QtoolError(
            f"{where}: '{text}', expected a share of the baseline's score such as 1%, or a difference such as 0.005."
        )
    amount = float(match[1]) / (100 if match[2] else 1)
    if not LEAST <= amount < 1:
        raise QtoolError(f"{where}: '{text}' is out of range, expected more than 0 and less than 1 (100%).")
    return Drop(amount, bool(match[2]))


def share(text: object, where: str) -> float:
    """A percentage as a fraction, more than 0 and at most 1."""
    match = NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] != "%":
        raise QtoolError(f"{where}: '{text}', expected a percentage such as 10%.")
    if not 0 < float(match[1]) <= 100:
        raise QtoolError(f"{where}: '{text}' is out of range, expected more than 0%, at most 100%.")
    return float(match[1]) / 100
