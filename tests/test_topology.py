"""How GPUs are joined, from drivers made up here."""

from __future__ import annotations

import types
from typing import Any

import pytest

from qtool import topology


class FakeNvml:
    """Answers like pynvml for boards on given buses. `links`: of each board, the other end of every active NVLink,
    a bus id or 'switch'; `ancestors`: the level of each pair. What is not given is not supported.
    """

    class NVMLError(Exception):
        pass

    def __init__(
        self, buses: list[str], links: dict[int, list[str]], ancestors: dict[tuple[int, int], int]
    ) -> None:
        self.buses, self.links, self.ancestors = buses, links, ancestors

    def nvmlDeviceGetCount(self) -> int:
        return len(self.buses)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=self.buses[handle])

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= len(self.links.get(handle, [])):
            raise self.NVMLError
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.links[handle][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return types.SimpleNamespace(busId=self.links[handle][link])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        if (first, second) not in self.ancestors:
            raise self.NVMLError
        return self.ancestors[first, second]


A, B, C = "00000000:17:00.0", "00000000:65:00.0", "00000000:B3:00.0"


def test_two_boards_on_a_bridge_are_joined_by_their_links_and_have_a_numa_node_by_their_bus(tmp_path):
    for bus, node in (("0000:17:00.0", "0"), ("0000:65:00.0", "-1")):
        place = tmp_path / "sys/bus/pci/devices" / bus
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    found = topology.of(FakeNvml([A, B], {0: [B, B, B, B], 1: [A, A, A, A]}, {(0, 1): 30}), tmp_path)
    assert found["pairs"] == [{"gpus": [0, 1], "nvlinks": 4, "nvswitch": False, "ancestor": 30}]
    assert [gpu["numa_node"] for gpu in found["gpus"]] == [0, None]
    assert found["gpus"][0] | {"numa_node": None} == {
        "pcie_generation": 4,
        "pcie_width": 16,
        "numa_node": None,
    }
    assert topology.joined(found, [0, 1], 2) == "across 2 GPUs joined by NVLink"
    assert topology.lines(found)[-1] == "GPU 0 and 1: 4 NVLinks"


def test_without_nvlink_the_verdict_names_the_longest_way_over_pcie(tmp_path):
    ancestors = {(0, 1): 30, (0, 2): 50, (1, 2): 50}
    found = topology.of(FakeNvml([A, B, C], {}, ancestors), tmp_path)
    assert topology.joined(found, [0, 1], 2) == "across 2 GPUs over a PCIe host bridge"
    assert topology.joined(found, None, 3) == "across 3 GPUs over PCIe and the link between NUMA nodes"


def test_a_third_board_without_links_is_named_and_two_with_them_are_not_slowed_by_it(tmp_path):
    ancestors = {(0, 1): 30, (0, 2): 50, (1, 2): 50}
    found = topology.of(FakeNvml([A, B, C], {0: [B], 1: [A]}, ancestors), tmp_path)
    assert topology.joined(found, [0, 1], 2) == "across 2 GPUs joined by NVLink"
    assert topology.joined(found, [0, 1, 2], 3) == "across 3 GPUs over PCIe and the link between NUMA nodes"


def test_boards_on_a_switch_are_joined_by_as_many_links_as_the_fewer_have(tmp_path):
    found = topology.of(FakeNvml([A, B], {0: ["switch"] * 18, 1: ["switch"] * 12}, {(0, 1): 50}), tmp_path)
    assert found["pairs"] == [{"gpus": [0, 1], "nvlinks": 12, "nvswitch": True, "ancestor": 50}]
    assert topology.joined(found, None, 2) == "across 2 GPUs joined by NVLink through NVSwitch"


def test_one_board_has_no_topology_and_what_is_not_told_is_not_made_up(tmp_path):
    assert topology.of(FakeNvml([A], {}, {}), tmp_path) == {}
    assert topology.lines({}) == []
    found = topology.of(FakeNvml([A, B], {}, {}), tmp_path)
    assert topology.joined(found, [0, 1], 2) == "across 2 GPUs"
    assert topology.joined({}, None, 2) == "across 2 GPUs"


def test_the_levels_are_those_of_nvmls_own_constants():
    pynvml = pytest.importorskip("pynvml")
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert list(topology.ANCESTORS) == [getattr(pynvml, f"NVML_TOPOLOGY_{level}") for level in levels]
    assert pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH == topology.SWITCH
    assert pynvml.NVML_NVLINK_MAX_LINKS == topology.MOST_LINKS
