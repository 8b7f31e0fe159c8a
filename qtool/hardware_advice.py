"""CPU or GPU: the break-even rates of the priced instances, and the sentence that follows from them.

Of one instance the recipe that serves the largest rate is the cheapest at every rate, because all cost the same an
hour: so each device of each side stands for itself with that recipe, among those whose score was shown to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool.break_even import Machine, break_even, machines
from qtool.prices import Price, PriceList
from qtool.units import rounded

NEAR = 1.1
"""Rates within 10 % of the largest are not told apart: the search and the rounds err by a few percent each."""
DIFFER = 1.01


@dataclass(frozen=True)
class Candidate:
    """The best recipe of a device on a side: the price of its instance, and what one machine is taken to serve."""

    entry: Mapping[str, Any]
    price: Mapping[str, Any]
    machine: Machine
    near: tuple[str, ...]

    @property
    def instance(self) -> str:
        return self.price["instance"]

    @property
    def per_million(self) -> float:
        return self.entry["cost_per_million"]["value"]

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "hardware": self.entry["hardware"],
            "device": self.entry["device"],
            "instance": self.instance,
            "recipe": self.entry["recipe"],
            "price_per_hour": self.machine.price_per_hour,
            "usable_rate_per_s": self.machine.rate_per_s,
            "cost_per_million": self.per_million,
            "not_told_apart": list(self.near),
        }


def advise(found: Mapping[str, Any], prices: PriceList | None) -> dict[str, Any]:
    """`candidates`, `break_even` of every CPU with every GPU instance, and the `sentence`, JSON-able."""
    if prices is None:
        return {
            "candidates": [],
            "break_even": [],
            "sentence": "Without a price list there is no cost and no break-even: add --cost prices.yaml.",
        }
    every = _candidates(found, prices.utilization)
    cpus, gpus = ([c for c in every if c.entry["device"] == device] for device in ("cpu", "cuda"))
    pairs = [
        {"cpu": cpu.told(), "gpu": gpu.told(), **break_even(cpu.machine, gpu.machine)}
        for cpu in cpus
        for gpu in gpus
        if cpu.instance != gpu.instance
    ]
    return {
        "candidates": [candidate.told() for candidate in every],
        "break_even": pairs,
        "sentence": _sentence(found, prices, cpus, gpus),
    }


def _candidates(found: Mapping[str, Any], utilization: float) -> list[Candidate]:
    """The best of each side and device that has a price, a rate and a score that was shown to hold."""
    priced = {side["label"]: side["prices"] for side in found["hardware"]}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in found["rows"]:
        able = entry["score_shown"] and entry["cost_per_million"]["value"] is not None
        if able and not entry["repeated_by"]:
            groups.setdefault((entry["hardware"], entry["device"]), []).append(entry)
    best = []
    for (label, device), own in groups.items():
        top = max(own, key=lambda entry: entry["served"]["value"])
        price, most = priced[label][device], top["served"]["value"]
        near = tuple(e["recipe"] for e in own if e is not top and NEAR * e["served"]["value"] >= most)
        machine = Machine(price["price_per_hour"], utilization * most)
        best.append(Candidate(top, price, machine, near))
    return best


def _sentence(
    found: Mapping[str, Any], prices: PriceList, cpus: Sequence[Candidate], gpus: Sequence[Candidate]
) -> str:
    if not cpus and not gpus:
        return _nothing(found)
    cpu, gpu = (min(own, key=lambda c: c.per_million, default=None) for own in (cpus, gpus))
    told = _basis(found, prices)
    if cpu is None or gpu is None:
        only = cpu or gpu
        if only is None:
            return _nothing(found)
        return f"{_alone(only, prices)} {_takes(found, prices, only)} {told}"
    if cpu.instance == gpu.instance:
        better = min((cpu, gpu), key=lambda c: c.per_million)
        return f"CPU and GPU rows are priced as the same instance, {cpu.instance}: {_alone(better, prices)} {told}"
    few = _cheaper_an_hour([*cpus, *gpus], cpu, gpu)
    several = len({c.instance for c in (*cpus, *gpus)}) > 2
    which = "Of the CPU and the GPU that cost least per million: " if several else ""
    return f"{which}{_between(cpu, gpu, prices)}{few} {told}"


def _cheaper_an_hour(every: Sequence[Candidate], cpu: Candidate, gpu: Candidate) -> str:
    """A third instance that is cheaper at low rates: few requests do not fill the two that are compared."""
    least = min(every, key=lambda c: (c.machine.price_per_hour, -c.machine.rate_per_s))
    if least.machine.price_per_hour >= min(each.machine.price_per_hour for each in (cpu, gpu)):
        return ""
    rate = _rate(least.machine.rate_per_s)
    return f" Up to {rate} one {least.instance} with {least.entry['recipe']} costs less an hour than either."


def _nothing(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    reasons = dict.fromkeys(
        entry["cost_per_million"].get("reason")
        if entry["cost_per_million"]["value"] is None
        else "its score is not shown to hold"
        for entry in rows
    )
    why = "; ".join(f"{reason}" for reason in list(reasons)[:3])
    return f"No recipe has both a cost and a score that is shown to hold, so nothing can be advised: {why}."


def _rate(value: float) -> str:
    return f"{rounded(value)}/s"


def _each(candidate: Candidate, prices: PriceList) -> str:
    """What a million costs on it."""
    return f"{rounded(candidate.per_million)} {prices.currency} per million"


def _alone(only: Candidate, prices: PriceList) -> str:
    near = f" (not told apart from {', '.join(only.near)})" if only.near else ""
    return (
        f"Up to {_rate(only.machine.rate_per_s)} one {only.instance} with {only.entry['recipe']}{near} is enough:"
        f" {_each(only, prices)} at that rate."
    )


def _between(cpu: Candidate, gpu: Candidate, prices: PriceList) -> str:
    """Both kinds of machine are there."""
    found = break_even(cpu.machine, gpu.machine)
    rate, first = found["break_even_per_s"], found["first_cheaper_per_s"]
    theirs = f"{gpu.instance} with {gpu.entry['recipe']} ({_each(gpu, prices)})"
    ours = f"{cpu.instance} with {cpu.entry['recipe']} ({_each(cpu, prices)})"
    if rate == 0:
        return f"At every rate {theirs} is cheaper than {ours}: it costs less an hour."
    if first == 0:
        lines = [f"Up to {_rate(gpu.machine.rate_per_s)} one {theirs} is cheapest, ahead of {ours}."]
    else:
        up_to = cpu.machine.rate_per_s if first is None else min(cpu.machine.rate_per_s, first)
        lines = [f"Up to {_rate(up_to)} one {ours} is cheapest."]
        most = first or up_to
        count = machines(most, cpu.machine)
        if count > 1:
            lines.append(f"Up to {_rate(most)} it takes {count} of them.")
    if rate is None:
        some = (
            f", though whole machines make it cheaper at some rates from {_rate(first)} on" if first else ""
        )
        lines.append(f"The GPU, {theirs}, does not pay for good{some}: {found['reason']}.")
        return " ".join(lines)
    if first is not None and first < rate / DIFFER:
        where = f"from {_rate(first)} on " if first else ""
        lines.append(f"Which is cheaper then changes {where}with the number of whole machines.")
    lines.append(f"From {_rate(rate)} on {theirs} is cheaper.")
    ratio = found["ratio_per_s"]
    if not 1 / DIFFER <= ratio / rate <= DIFFER:
        lines.append(
            f"Counted in fractions, CPU machines reach the price of one GPU machine at {_rate(ratio)}."
        )
    return " ".join(lines)


def _takes(found: Mapping[str, Any], prices: PriceList, only: Candidate) -> str:
    """What an instance of the other kind would have to serve to be cheaper."""
    on_cpu = only.entry["device"] == "cpu"
    other = "GPU" if on_cpu else "CPU"
    measured = {side["instance"] for side in found["rows"] if side["instance"]}
    rest = [p for p in prices.prices if _is_gpu(p) == on_cpu and p.instance not in measured]
    within = " within the SLA" if found["sla_s"] is not None else ""
    if not rest:
        return (
            f"No row on a {other} has a cost: k times the price an hour asks for more than k times"
            f" {_rate(only.entry['served']['value'])}{within} on one {other} machine."
        )
    told = []
    for price in rest:
        times = price.price_per_hour / only.machine.price_per_hour
        needed = times * only.entry["served"]["value"]
        told.append(
            f"{price.instance} ({price.price_per_hour:g} {prices.currency} an hour, {times:.3g} times the price) would"
            f" have to serve more than {_rate(needed)}{within}"
        )
    return f"No row on a {other} has a cost; to be cheaper for each request, {'; '.join(told)}."


def _is_gpu(price: Price) -> bool:
    return price.match.gpu is not None or price.match.device == "cuda"


def _basis(found: Mapping[str, Any], prices: PriceList) -> str:
    """What the figures assume."""
    share = f"{100 * prices.utilization:g} %"
    if found["sla_s"] is None:
        return f"(A machine is taken to serve {share} of its full measured throughput; no SLA was given.)"
    return (
        f"(A machine is taken to serve {share} of the largest rate whose p95 stays within"
        f" {rounded(1e3 * found['sla_s'])} ms.)"
    )
