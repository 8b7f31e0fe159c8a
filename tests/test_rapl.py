"""Energy of the CPU from trees of counter files written by hand, in the kernel's microjoules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qtool import measure, rapl, timing

ZONES = {
    "intel-rapl:0": ("package-0", 262_143_328_850),
    "intel-rapl:0:0": ("core", 262_143_328_850),
    "intel-rapl:0:1": ("dram", 65_712_999_613),
    "intel-rapl:1": ("package-1", 262_143_328_850),
    "intel-rapl:2": ("psys", 262_143_328_850),
    "intel-rapl-mmio:0": ("package-0", 262_143_328_850),
}


def tree(root: Path, zones: dict[str, tuple[str, int]], energy_uj: int = 1_000_000) -> Path:
    for zone, (name, most) in zones.items():
        folder = root / "sys/class/powercap" / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{most}\n")
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return root


def counter(root: Path, zone: str) -> Path:
    return root / "sys/class/powercap" / zone / "energy_uj"


def test_only_packages_are_summed_and_each_once(tmp_path):
    found = rapl.find(tree(tmp_path, ZONES))
    assert sorted(path.name for path in found) == ["intel-rapl:0", "intel-rapl:1"]
    assert set(found.values()) == {262_143_328_850}


def test_a_die_of_a_package_and_amds_package_count_too(tmp_path):
    zones = {"intel-rapl:0": ("package-0-die-0", 10), "intel-rapl:1": ("package-0-die-1", 10)}
    assert len(rapl.find(tree(tmp_path / "dies", zones))) == 2
    # AMD: one package, its cores below it, the same file names
    amd = {"intel-rapl:0": ("package-0", 65_532_610_987), "intel-rapl:0:0": ("core", 65_532_610_987)}
    assert [path.name for path in rapl.find(tree(tmp_path / "amd", amd))] == ["intel-rapl:0"]


def test_a_counter_that_passed_its_range_has_spent_what_was_left_and_what_it_shows():
    a, b = Path("a"), Path("b")
    ranges = {a: 262_143_328_850, b: 262_143_328_850}
    # a: 5 J up to its range and 3 J behind it; b: 4 J
    before = {a: 262_143_328_850 - 5_000_000, b: 7_000_000}
    after = {a: 3_000_000, b: 11_000_000}
    assert rapl.spent_j(before, after, ranges) == pytest.approx(12.0)
    assert rapl.spent_j(before, before, ranges) == 0.0


def test_energy_per_call_and_mean_power_come_from_the_counters_of_the_pass(tmp_path, monkeypatch):
    root = tree(tmp_path, ZONES)
    clock = iter([100.0, 101.0, 102.0, 102.0])  # start, after each of two passes, the end
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))

    def predict(batch: int) -> None:
        for zone, step in (("intel-rapl:0", 3_000_000), ("intel-rapl:1", 1_000_000), ("intel-rapl:2", 9)):
            file = counter(root, zone)
            file.write_text(str(int(file.read_text()) + step))

    found = rapl.sample(predict, [1, 2, 3], min_time_s=2.0, root=root)
    assert found["energy_j"] == pytest.approx(4.0)  # 3 J and 1 J a call
    assert found["power_w"] == pytest.approx(6 * 4.0 / 2.0)  # six calls in two seconds
    assert found["energy_source"] == "rapl"
    assert found["energy_domains"] == ["package-0", "package-1"]


def test_counters_that_stand_still_are_a_reason_and_no_zero(tmp_path):
    found = rapl.sample(lambda batch: None, [0], 0.01, tree(tmp_path, ZONES))
    assert found["energy_j"] is found["power_w"] is None
    assert "did not move" in found["energy_j_reason"]
    assert "energy_source" not in found


def test_a_container_without_counters_gets_a_reason_and_no_pass(tmp_path):
    found = rapl.sample(lambda batch: pytest.fail("nothing is run for no counter"), [1], root=tmp_path)
    assert found["energy_j"] is None
    assert found["power_w"] is None
    assert "/sys/class/powercap/intel-rapl:0" in found["energy_j_reason"]
    assert "container" in found["energy_j_reason"]


def test_a_counter_of_root_alone_is_named_with_what_allows_it(tmp_path, monkeypatch):
    root = tree(tmp_path, ZONES)
    real = Path.read_text

    def refused(path: Path, *given: object, **named: object) -> str:
        if path.name == "energy_uj":  # as the kernel refuses, which a test run by root would not see
            raise PermissionError(13, "Permission denied")
        return real(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", refused)
    found = rapl.sample(lambda batch: pytest.fail("nothing is run"), [1], root=root)
    assert found["energy_j"] is None
    assert found["energy_j_reason"].startswith(
        "/sys/class/powercap/intel-rapl:0/energy_uj may be read by root"
    )
    assert "chmod a+r" in found["energy_j_reason"]


def test_a_platform_counter_alone_is_no_package(tmp_path):
    root = tree(tmp_path, {"intel-rapl:0": ("psys", 10)})
    with pytest.raises(rapl.NoCounters, match="has psys alone"):
        rapl.find(root)


def test_a_file_that_holds_no_number_is_a_reason(tmp_path):
    root = tree(tmp_path, {"intel-rapl:0": ("package-0", 10)})
    counter(root, "intel-rapl:0").write_text("")
    with pytest.raises(rapl.NoCounters, match="energy_uj cannot be read"):
        rapl.read(rapl.find(root))


def test_a_measured_call_on_a_cpu_has_energy_or_its_reason_and_gpu_reasons(monkeypatch):
    ran = []

    def sample(predict, batches, seconds):
        ran.append(len(batches))
        return {"energy_j": 0.5, "power_w": 20.0, "energy_source": "rapl"}

    monkeypatch.setattr(rapl, "sample", sample)
    batch = {"input_ids": np.zeros((4, 7), int)}
    found = measure.hardware("cpu", lambda batch: None, [batch] * 3)
    assert ran == [3]
    assert (found["energy_j"], found["power_w"]) == (0.5 / 4, 20.0)  # 0.5 J a call of four texts
    for name in ("peak_vram_bytes", "vram_allocated_bytes", "vram_device_bytes", "gpu_utilization_ratio"):
        assert found[name] is None
        assert found[f"{name}_reason"] == "not measured on a CPU"
