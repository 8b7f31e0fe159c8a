"""How the GPUs of this machine are joined: NVLink, PCIe and NUMA, as the driver (NVML) tells it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.procfs import ROOT, text

ANCESTORS = {
    0: "on one board",
    10: "over one PCIe switch",
    20: "over several PCIe switches",
    30: "over a PCIe host bridge",
    40: "over PCIe between host bridges of a NUMA node",
    50: "over PCIe and the link between NUMA nodes",
}
"""nvmlGpuTopologyLevel_t, the nearest first.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"""
SWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH"""
MOST_LINKS = 36


def read(root: Path = ROOT) -> dict[str, Any]:
    """`of` the driver; {} where fewer than two GPUs or no driver answer."""
    with _nvml() as nvml:
        return of(nvml, root) if nvml else {}


def numbers(uuids: Sequence[str]) -> list[int] | None:
    """NVML's numbers of the GPUs called `uuids`; None where the driver does not answer."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        known = [nvml.nvmlDeviceGetUUID(handle) for handle in _handles(nvml)]
    return [known.index(uuid) for uuid in uuids] if set(uuids) <= set(known) else None


def of(nvml: Any, root: Path = ROOT) -> dict[str, Any]:
    """`gpus`: PCIe generation and width at most, and NUMA node; `pairs`: of each two GPUs their NVLinks (to each
    other, or where both hang on an NVSwitch) and their nearest common ancestor. What a board does not tell is None.

    `nvml` is the initialised pynvml module, or a stand-in.
    """
    handles = _handles(nvml)
    if len(handles) < 2:
        return {}
    ask = _asker(nvml)
    buses = [str(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    links = [list(_links(nvml, ask, handle)) for handle in handles]
    gpus = [
        {
            "pcie_generation": ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            "pcie_width": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            "numa_node": _numa_node(root, bus),
        }
        for handle, bus in zip(handles, buses, strict=True)
    ]
    pairs = []
    for a, b in itertools.combinations(range(len(handles)), 2):
        direct = sum(remote == buses[b] for remote in links[a])
        switched = min(links[a].count("switch"), links[b].count("switch"))
        pairs.append(
            {
                "gpus": [a, b],
                "nvlinks": direct or switched,
                "nvswitch": not direct and switched > 0,
                "ancestor": ask(nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]),
            }
        )
    return {"gpus": gpus, "pairs": pairs}


def joined(topology: Mapping[str, Any], gpus: Sequence[int] | None, count: int) -> str:
    """'across 2 GPUs joined by NVLink', or the longest way that PCIe takes between two of them.

    `gpus` as NVML numbers them; None: all that there are, if they are as many.
    """
    across = f"across {count} GPUs"
    pairs = topology.get("pairs") or []
    if gpus is None and len(topology.get("gpus") or []) == count:
        gpus = range(count)
    if gpus is None:
        return across
    between = [pair for pair in pairs if set(pair["gpus"]) <= set(gpus)]
    if between and all(pair["nvlinks"] for pair in between):
        return (
            f"{across} joined by NVLink{' through NVSwitch' if any(p['nvswitch'] for p in between) else ''}"
        )
    ways = [pair["ancestor"] for pair in between if not pair["nvlinks"]]
    if not ways or any(way not in ANCESTORS for way in ways):
        return across
    return f"{across} {ANCESTORS[max(ways)]}"


def lines(topology: Mapping[str, Any]) -> list[str]:
    """The topology for people, a line each GPU and each pair; none where there are no two GPUs."""
    found = []
    for number, gpu in enumerate(topology.get("gpus") or []):
        told = {
            "PCIe generation": gpu["pcie_generation"],
            "width": gpu["pcie_width"],
            "NUMA node": gpu["numa_node"],
        }
        known = ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)
        found.append(f"GPU {number}: {known or 'the driver does not tell its PCIe link'}")
    for pair in topology.get("pairs") or []:
        a, b = pair["gpus"]
        kind = f"{pair['nvlinks']} NVLinks{' to an NVSwitch' if pair['nvswitch'] else ''}"
        way = (
            kind
            if pair["nvlinks"]
            else ANCESTORS.get(pair["ancestor"], "in a way that the driver does not tell")
        )
        found.append(f"GPU {a} and {b}: {way}")
    return found


def _links(nvml: Any, ask: Callable[..., Any], handle: Any) -> Iterator[str]:
    """What is at the other end of each active NVLink: a bus id, or 'switch'."""
    for link in range(MOST_LINKS):
        if not ask(nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        if ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == SWITCH:
            yield "switch"
        elif (remote := ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) is not None:
            yield str(remote.busId)


def _numa_node(root: Path, bus: str) -> int | None:
    """/sys calls a device by its lower-case id with four digits of domain, NVML has eight; -1 is no node."""
    domain, _, rest = bus.lower().partition(":")
    node = text(root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return int(node) if node and node.isdecimal() else None


def _asker(nvml: Any) -> Callable[..., Any]:
    def ask(question: Callable[..., Any], *about: Any) -> Any:
        """None where this board, driver or permission has no answer."""
        try:
            return question(*about)
        except nvml.NVMLError:
            return None

    return ask


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised pynvml, or None without it or its driver."""
    try:
        import pynvml as nvml
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()
