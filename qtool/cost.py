"""What a million inferences cost: a price an hour over the requests that a machine serves in it.

Pure arithmetic on stored figures: cells are those of `rows` (value, low, high, reason), prices those of `prices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qtool.core import QtoolError
from qtool.evidence import Evidence
from qtool.frontier import Candidate, Outcome, outcomes
from qtool.objectives import Option
from qtool.prices import Price, PriceList

COST = "cost"
PER_HOUR = 3600.0
MILLION = 1e6
Cell = dict[str, Any]


def per_million(price_per_hour: float, rate_per_s: float) -> float:
    """price / 3600 / rate x 10^6: at one unit an hour, 100 requests a second cost 2.78 a million."""
    return price_per_hour / PER_HOUR / rate_per_s * MILLION


def none(reason: str) -> Cell:
    return {"value": None, "low": None, "high": None, "reason": reason}


def of_rate(price: Price | None, why_no_price: str | None, rate: Cell, utilization: float) -> Cell:
    """Cost per million at `utilization` times a rate a second; its interval is the rate's, turned round."""
    if price is None:
        return none(why_no_price or "it has no price")
    if rate["value"] is None:
        return none(rate.get("reason") or "its rate is not known")

    def at(rate_per_s: float | None) -> float | None:
        return None if not rate_per_s else per_million(price.price_per_hour, utilization * rate_per_s)

    found = {"value": at(rate["value"]), "low": at(rate["high"]), "high": at(rate["low"])}
    if found["low"] is None or found["high"] is None:
        found |= {"low": None, "high": None, "reason": rate.get("reason") or "the rate has no interval"}
    return found


def of_options(
    found: Evidence, every: Sequence[Option], prices: PriceList, needed: bool
) -> dict[str, tuple[Cell, Mapping[int, float]]]:
    """Cost at the full measured throughput times the utilisation by option name: its cell, and a value a round.

    Raises QtoolError where it is `needed` and no option has a price.
    """
    costs: dict[str, tuple[Cell, Mapping[int, float]]] = {}
    for option in every:
        price, why = prices.find(host_of(found.run, option.row), option.device)
        cell = of_rate(price, why, option.row["metrics"]["throughput_per_s"], prices.utilization)
        seconds = option.numbers("throughput_per_s")  # by round and inverted: lower is better
        by_round: dict[int, float] = {}
        if price is not None and isinstance(seconds, Mapping):
            own = price.price_per_hour / PER_HOUR / prices.utilization * MILLION
            by_round = {number: own * each for number, each in seconds.items()}
        costs[option.name] = (cell | {"instance": price.instance if price else None}, by_round)
    if needed and not any(by_round for _, by_round in costs.values()):
        reason = next(cell["reason"] for cell, _ in costs.values())
        raise QtoolError(f"--prefer cost: no option of {found.run_dir} has a cost: {reason}.")
    return costs


def host_of(run: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts of the host that a row was measured on: the run's own, or one of its `hosts` by their name."""
    own = run.get("host") or {}
    name = row.get("host")
    if not name or name == own.get("hash"):
        return own
    hosts = run.get("hosts")
    several = hosts if isinstance(hosts, Mapping) else {}
    told = several.get(name)
    return {"hash": name, **told} if isinstance(told, Mapping) else {"hash": name}


def weigh(
    candidates: Sequence[Candidate],
    pairs: dict[tuple[str, str], dict[str, Outcome]],
    costs: Mapping[str, tuple[Cell, Mapping[int, float]]],
) -> list[Candidate]:
    """The candidates with their cost by round, and its evidence put beside the other objectives' in `pairs`.

    Beside and not among them: `frontier.compare` weighs a score only where the other objectives leave it open, and
    a price must not move the frontier.
    """
    told = outcomes([costs[c.name][1] for c in candidates])
    for a, row in zip(candidates, told, strict=True):
        for b, outcome in zip(candidates, row, strict=True):
            if a is not b:
                pairs[a.name, b.name][COST] = outcome
    return [replace(c, values={**c.values, COST: costs[c.name][1] or None}) for c in candidates]
