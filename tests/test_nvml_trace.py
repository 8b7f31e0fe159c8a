"""A trace of NVML's answers played to the sampler: units, energy, power, throttling, another process, the row's flags.

`data/nvml_trace.json` is hand-made from the documented units, as it says itself; the expected values are sums by hand.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from qtool import gpu, measure, reload, summary
from qtool.core import Audit, Loaded
from qtool.explain import explain
from tests.run_folder import Made, write_run

TRACE = json.loads((Path(__file__).parent / "data/nvml_trace.json").read_text("utf-8"))
OWN = 4242
CALLS = 400


class Recorded:
    """Answers as pynvml does, record by record."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (NVMLError,), {})
    NVMLError_NoPermission = type("NVMLError_NoPermission", (NVMLError,), {})

    def __init__(self, *silent: str) -> None:
        self.at, self.silent = 0, silent
        self.energies = iter((TRACE["energy_start_mj"], TRACE["energy_end_mj"]))

    def _now(self, name: str) -> Any:
        if name in self.silent:
            raise self.NVMLError_NotSupported
        return TRACE["records"][self.at][name]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._now("power_mw")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return types.SimpleNamespace(gpu=self._now("utilization_percent"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._now("clocks_event_reasons")

    nvmlDeviceGetCurrentClocksThrottleReasons = nvmlDeviceGetCurrentClocksEventReasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [
            types.SimpleNamespace(pid=each["pid"], usedGpuMemory=each["used_bytes"])
            for each in self._now("processes")
        ]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if "energy" in self.silent:
            raise self.NVMLError_NotSupported
        return next(self.energies)


def played(*silent: str) -> dict[str, Any]:
    """The values of the recorded pass, read through the sampler that a measuring child uses."""
    nvml = Recorded(*silent)
    sampler = gpu.Sampler(nvml, "board", every_s=60, clock=lambda: TRACE["records"][nvml.at]["t_s"])
    with sampler:
        for nvml.at in range(1, len(TRACE["records"]) - 1):
            sampler._read()
        nvml.at = len(TRACE["records"]) - 1
    return gpu.summarise(sampler.trace, CALLS, OWN)


def test_energy_and_power_are_those_of_the_counter():
    found = played()
    # 1212 J in 4 s over 400 calls
    assert found["energy_j"] == pytest.approx(3.03)
    assert found["power_w"] == pytest.approx(303.0)
    assert found["energy_source"] == "counter"
    assert found["gpu_samples"] == 9


def test_without_the_counter_they_are_the_area_under_the_power():
    found = played("energy")
    # trapezoids of half a second: 75 + 140 + 5 x 175 + 125 J
    assert found["energy_j"] == pytest.approx((75 + 140 + 5 * 175 + 125) / CALLS)
    assert found["power_w"] == pytest.approx(1215 / 4.0)
    assert found["energy_source"] == "power"


def test_a_counter_that_went_back_is_not_believed():
    trace = gpu.Trace(
        [0.0, 2.0], [100.0, 100.0], [90, 90], [0, 0], [{OWN}, {OWN}], energy_start_j=9e6, energy_end_j=5.0
    )
    found = gpu.summarise(trace, calls=10, own_pid=OWN)
    assert found["energy_j"] == pytest.approx(20.0)
    assert found["energy_source"] == "power"


def test_utilisation_is_the_mean_from_the_second_second_on():
    assert played()["gpu_utilization_ratio"] == pytest.approx((96 + 98 + 98 + 97 + 98 + 98 + 97) / 700)


def test_one_capped_moment_and_one_foreign_process_are_noticed():
    found = played()
    assert (found["throttled"], found["throttle_reasons"]) == (True, ["software power cap"])
    assert found["other_processes"] is True


def test_what_the_board_does_not_tell_is_none_with_its_reason():
    found = played("power_mw", "energy", "processes", "clocks_event_reasons", "utilization_percent")
    for name in ("energy_j", "power_w", "throttled", "other_processes", "gpu_utilization_ratio"):
        assert found[name] is None
        assert found[f"{name}_reason"]


def on_cuda(folder: Path, values: dict[str, Any], contended: bool) -> Path:
    """A run folder of two recipes on cuda, in which the second has `values` in its measurements."""
    answers = [0, 1] * 20
    bf16 = Made((0.004, 0.0041, 0.0042), answers, device="cuda", values=values, contended=contended)
    recipes = {"fp32": Made((0.01, 0.0101, 0.0102), answers, device="cuda"), "bf16": bf16}
    return write_run(folder, recipes, labels=answers)


def test_the_values_reach_the_row_and_the_flags_its_explanation(tmp_path):
    found = played()
    peaks = {"peak_vram_bytes": 1.4e9, "vram_allocated_bytes": 0.9e9, "vram_device_bytes": 1.4e9}
    folder = on_cuda(tmp_path / "run", found | peaks, contended=found["other_processes"])
    whole = summary.summarise(folder)
    rows = {row["recipe"]: row for row in whole["rows"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    value = {name: cell["value"] for name, cell in rows["bf16"]["metrics"].items()}
    assert value["energy_j"] == pytest.approx(3.03)
    assert value["power_w"] == pytest.approx(303.0)
    assert (value["vram_allocated_bytes"], value["vram_device_bytes"]) == (0.9e9, 1.4e9)
    assert rows["bf16"]["throttled_by"] == ["software power cap"]
    assert rows["bf16"]["gpu_shared"] is rows["bf16"]["contended"] is True
    assert rows["fp32"]["throttled_by"] == []
    assert rows["fp32"]["gpu_shared"] is rows["fp32"]["contended"] is False
    why = " ".join(rows["bf16"]["why"])
    assert "Another process computed on this GPU" in why
    assert "slowed its clocks while it worked (software power cap)" in why
    assert "slowed" not in " ".join(rows["fp32"]["why"])


def test_an_old_row_without_these_flags_is_explained_as_before():
    row = {"status": "ok", "recipe": "fp32", "device": "cuda", "batch_size": 1, "metrics": {}}
    row["metrics"] = {"latency_p50_s": {"value": 0.01, "low": None, "high": None}}
    assert explain(row, [row], {}, latency_s={1: [0.01]}) == []


def test_another_process_on_the_gpu_marks_the_measurement_as_contended(monkeypatch, tmp_path):
    """The whole measuring stage, with a model that does nothing and a GPU that was recorded."""
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("torch")
    batch = {"input_ids": numpy.ones((1, 3), numpy.int64), "attention_mask": numpy.ones((1, 3), numpy.int64)}
    monkeypatch.setattr(measure.prepare, "load_ragged", lambda path: ([batch], {}))
    monkeypatch.setattr(measure, "timed_batches", lambda rows, meta, size: [batch])
    monkeypatch.setattr(measure, "_end_to_end", lambda *given: {})
    monkeypatch.setattr(measure, "MIN_TIME_S", 0.01)
    monkeypatch.setattr(reload, "check", lambda *given: 0.0)
    loaded = Loaded(lambda batch: numpy.zeros((1, 2), numpy.float32), Audit, 1)
    monkeypatch.setattr(reload, "open_artifact", lambda spec, recipe: loaded)
    passes: list[int] = []
    monkeypatch.setattr(gpu, "sample", lambda predict, batches, seconds: passes.append(1) or played())
    monkeypatch.setattr(gpu, "peak_vram", lambda: {"peak_vram_bytes": 5, "vram_allocated_bytes": 5})
    (tmp_path / "meta.json").write_text('{"seq_len": null}')
    recipe = {"name": "a", "description": "a", "source": "a", "method": "torch_cast", "runtime": "pytorch"}
    spec = {"recipe": recipe, "data": str(tmp_path), "batch_size": 1, "device": "cuda", "threads": 1}
    values = measure.measure(spec)["values"]
    assert passes == [1]
    assert values["contended"] is True
    assert values["power_w"] == pytest.approx(303.0)
    assert values["peak_vram_bytes"] == 5
