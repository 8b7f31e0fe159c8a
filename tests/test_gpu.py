"""GPU numbers from traces written by hand; the real board only where there is one."""

import contextlib
import types
from collections.abc import Sequence
from typing import Any

import pytest

from qtool import gpu, host

OWN = 4242


def trace(**changes: Any) -> gpu.Trace:
    """Four seconds of a board: ramping up, 300 W while working, one power-capped moment."""
    values: dict[str, Any] = {
        "times_s": [0.0, 1.0, 2.0, 3.0, 4.0],
        "power_w": [100.0, 300.0, 300.0, 300.0, 100.0],
        "utilization_percent": [0, 80, 100, 90, 90],
        "clock_reasons": [0x1, 0x0, 0x4, 0x0, 0x0],
        "pids": [{OWN}] * 5,
        "energy_start_j": 5000.0,
        "energy_end_j": 6100.0,
    }
    return gpu.Trace(**(values | changes))


def test_energy_per_call_comes_from_the_counter_where_there_is_one() -> None:
    found = gpu.summarise(trace(), calls=200, own_pid=OWN)
    assert found["energy_j"] == pytest.approx(5.5)
    assert found["energy_source"] == "counter"


def test_energy_per_call_without_a_counter_is_the_area_under_the_power() -> None:
    found = gpu.summarise(trace(energy_start_j=None, energy_end_j=None), calls=200, own_pid=OWN)
    # trapezoids: 200 + 300 + 300 + 200 J
    assert found["energy_j"] == pytest.approx(5.0)
    assert found["energy_source"] == "power"


def test_a_missing_power_reading_is_bridged_and_uneven_steps_weigh_by_their_length() -> None:
    times_s = [0.0, 1.0, 1.5, 4.0]
    assert gpu.integrate(times_s, [100.0, None, 100.0, 100.0]) == pytest.approx(400.0)
    assert gpu.integrate(times_s, [0.0, 200.0, 200.0, 0.0]) == pytest.approx(100 + 100 + 250)
    assert gpu.integrate(times_s, [None, None, 250.0, None]) is None


def test_utilisation_leaves_the_first_second_out() -> None:
    found = gpu.summarise(trace(), calls=1, own_pid=OWN)
    assert found["gpu_utilization_ratio"] == pytest.approx((80 + 100 + 90 + 90) / 400)


def test_a_pass_shorter_than_the_lag_has_no_utilisation_but_a_reason() -> None:
    short = trace(times_s=[0.0, 0.1, 0.2, 0.3, 0.4])
    found = gpu.summarise(short, calls=1, own_pid=OWN)
    assert found["gpu_utilization_ratio"] is None
    assert "first 1 s" in found["gpu_utilization_ratio_reason"]


@pytest.mark.parametrize(
    ("masks", "names"),
    [
        ([0x0, 0x1], []),  # nothing, idle
        ([0x2, 0x10, 0x100], []),  # clocks set by the user, sync boost, display
        ([0x4], ["software power cap"]),
        ([0x1, 0x20, 0x0, 0x84], ["software power cap", "software thermal slowdown", "hardware power brake"]),
        ([0x48], ["hardware slowdown", "hardware thermal slowdown"]),
    ],
)
def test_clock_event_bits_are_named_as_nvml_documents_them(masks: list[int], names: list[str]) -> None:
    assert gpu.throttle_reasons(masks) == names
    found = gpu.summarise(trace(clock_reasons=masks), calls=1, own_pid=OWN)
    assert found["throttled"] is bool(names)


def test_the_bits_are_those_of_nvmls_own_constants() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert {
        pynvml.nvmlClocksEventReasonSwPowerCap,
        pynvml.nvmlClocksEventReasonHwSlowdown,
        pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    } == set(gpu.SLOWED_BY)


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        (set(), False),
        ({OWN}, False),
        ({7}, False),  # a container's process under the host's number
        ({OWN, 7}, True),
        ({7, 8}, True),
    ],
)
def test_another_process_is_one_that_cannot_be_this_one(pids: set[int], others: bool) -> None:
    assert gpu.has_others(pids, OWN) is others


def process(pid: int, used: int | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)


@pytest.mark.parametrize(
    ("processes", "held"),
    [
        ([], None),
        ([process(OWN, 500), process(7, 900)], 500),
        ([process(7, 900)], 900),
        ([process(7, 900), process(8, 100)], None),
        ([process(OWN, None)], None),
    ],
)
def test_own_memory_is_not_guessed_among_strangers(processes: list[Any], held: int | None) -> None:
    assert gpu.own_bytes(processes, OWN) == held


class FakeNvml:
    """Answers like pynvml: a board that counts energy at 250 W, or one that supports nothing."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_FunctionNotFound(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    def __init__(self, supported: bool) -> None:
        self.supported = supported
        self.millijoules = 1000

    def _answer(self, value: Any) -> Any:
        if not self.supported:
            raise self.NVMLError_NotSupported
        return value

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        return self._answer(250_000)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer(types.SimpleNamespace(gpu=75, memory=10))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> Any:
        raise self.NVMLError_FunctionNotFound

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self._answer(0x40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        return self._answer([process(OWN, 10)])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> Any:
        self.millijoules += 3000
        return self._answer(self.millijoules)


def test_a_sampler_reads_at_both_ends_and_asks_an_older_driver_by_the_older_name() -> None:
    seconds = iter(range(1000))
    with gpu.Sampler(
        FakeNvml(supported=True), "board", every_s=60, clock=lambda: float(next(seconds))
    ) as sampler:
        pass
    assert sampler.trace.times_s == [0.0, 1.0]
    found = gpu.summarise(sampler.trace, calls=10, own_pid=OWN)
    assert found["energy_j"] == pytest.approx(0.3)
    assert found["gpu_utilization_ratio"] == pytest.approx(0.75)
    assert found["throttle_reasons"] == ["hardware thermal slowdown"]
    assert found["other_processes"] is False


def test_a_board_that_supports_nothing_gives_reasons_and_no_zeros() -> None:
    with gpu.Sampler(FakeNvml(supported=False), "board", every_s=60) as sampler:
        pass
    found = gpu.summarise(sampler.trace, calls=10, own_pid=OWN)
    for name in ("gpu_utilization_ratio", "energy_j", "throttled", "other_processes"):
        assert found[name] is None
        assert found[f"{name}_reason"]


def test_a_thread_samples_between_the_ends() -> None:
    nvml = FakeNvml(supported=True)
    with gpu.Sampler(nvml, "board", every_s=0.001) as sampler:
        while len(sampler.trace.times_s) < 5:
            pass
    assert sampler.trace.times_s == sorted(sampler.trace.times_s)
    assert len(sampler.trace.power_w) == len(sampler.trace.pids) == len(sampler.trace.times_s)


def test_without_a_driver_every_value_has_a_reason_and_nothing_raises() -> None:
    if host.gpus():
        pytest.skip("this machine has an NVIDIA GPU")
    found = gpu.sample(lambda batch: None, [0])
    assert found["energy_j"] is None
    assert "NVML" in found["energy_j_reason"]
    assert found["power_w"] is None
    assert "NVML" in found["power_w_reason"]
    peaks = gpu.peak_vram()
    for name in ("peak_vram_bytes", "vram_allocated_bytes", "vram_device_bytes"):
        assert peaks[name] is None
        assert peaks[f"{name}_reason"]
    gpu.reset_peak_vram()


def test_several_gpus_without_a_name_are_an_error_and_a_single_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "_torch", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = types.SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: f"uuid {uuid}",
    )
    nvml.nvmlDeviceGetCount = lambda: 1
    assert gpu._handles(nvml) == ["index 0"]
    nvml.nvmlDeviceGetCount = lambda: 2
    with pytest.raises(gpu.NoGpuCounters, match="several GPUs"):
        gpu._handles(nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc,GPU-def")
    assert gpu._handles(nvml) == ["uuid GPU-abc"]


def board(joules: float | None, used: float, slowed: Sequence[str] = ()) -> dict[str, Any]:
    known = {"energy_j": joules, "power_w": None if joules is None else 100 * joules}
    known |= {"gpu_utilization_ratio": used, "throttled": bool(slowed), "throttle_reasons": list(slowed)}
    why = {"energy_j_reason": "no counter", "power_w_reason": "no counter"} if joules is None else {}
    return known | why | {"energy_source": "counter", "other_processes": False, "gpu_samples": 80}


def test_a_pass_over_two_boards_adds_their_energy_and_means_their_use() -> None:
    found = gpu.together([board(2.0, 0.9), board(3.0, 0.1, ["software power cap"])])
    assert (found["energy_j"], found["power_w"]) == (5.0, 500.0)
    assert found["gpu_utilization_ratio"] == pytest.approx(0.5)
    assert (found["throttled"], found["throttle_reasons"]) == (True, ["software power cap"])
    found = gpu.together([board(2.0, 0.9), board(None, 0.1)])
    assert found["energy_j"] is found["power_w"] is None
    assert found["energy_j_reason"] == "of 2 GPUs one has none: no counter"
    assert gpu.together([board(2.0, 0.9)]) == board(2.0, 0.9)


def test_a_model_on_two_gpus_holds_the_memory_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [300, 0, 500]
    cuda = types.SimpleNamespace(
        device_count=lambda: 3,
        max_memory_allocated=lambda number: sizes[number],
        current_device=lambda: 0,
        get_device_properties=lambda number: types.SimpleNamespace(uuid=f"{number}"),
    )
    nvml = types.SimpleNamespace(
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda uuid: [process(7, 400 if uuid == "GPU-0" else 700)],
    )
    monkeypatch.setattr(gpu, "_torch", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu, "_nvml", lambda: contextlib.nullcontext(nvml))
    assert gpu._handles(nvml) == ["GPU-0", "GPU-2"]
    found = gpu.peak_vram()
    assert (found["vram_allocated_bytes"], found["vram_device_bytes"]) == (800, 1100)
    assert found["peak_vram_bytes"] == 1100


@pytest.mark.gpu
def test_a_real_board_reports_energy_below_its_limit_and_the_memory_that_was_allocated() -> None:
    if not host.cuda_available():
        pytest.skip("no CUDA device")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    pynvml = pytest.importorskip("pynvml")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    calls: list[int] = []

    def predict(batch: int) -> None:
        calls.append(batch)
        (matrix @ matrix).sum().item()

    gpu.reset_peak_vram()
    predict(0)
    peaks = gpu.peak_vram()
    assert peaks["vram_allocated_bytes"] >= 2 * 8192 * 8192 * 2
    # the device's figure has the context beside the tensors; None only where the driver does not tell it
    if peaks["vram_device_bytes"] is not None:
        assert peaks["vram_device_bytes"] > peaks["vram_allocated_bytes"]
    calls.clear()
    found = gpu.sample(predict, range(10))
    pynvml.nvmlInit()
    limit_w = pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3
    assert 0 < found["energy_j"] * len(calls) <= limit_w * gpu.PASS_S * 1.5
    assert found["gpu_utilization_ratio"] > 0.5
    assert found["other_processes"] is False
