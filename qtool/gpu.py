"""GPU-side numbers of a measuring process: peak memory, utilisation, energy per call, throttling.

Read through NVML in a pass of its own after the timed one, because a sampling thread would disturb the clock.
The arithmetic is pure functions over a `Trace`. What the board does not tell is None with a reason, never 0.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from qtool.timing import whole_passes

SAMPLE_EVERY_S = 0.05
# NVML's utilisation is a mean over up to a second before the reading, so the first second is not ours.
UTILIZATION_LAG_S = 1.0
# Long enough for that lag and for the steps of the energy counter.
PASS_S = 4.0

SLOWED_BY = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean slower than asked for; idle, user-set clocks, sync
boost and display clock are not throttling.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


@dataclass
class Trace:
    """What a sampler read. Lists are aligned with `times_s`; None stands where the board did not answer."""

    times_s: list[float] = field(default_factory=list)
    power_w: list[float | None] = field(default_factory=list)
    utilization_percent: list[float | None] = field(default_factory=list)
    clock_reasons: list[int | None] = field(default_factory=list)
    pids: list[set[int] | None] = field(default_factory=list)
    energy_start_j: float | None = None
    energy_end_j: float | None = None


def summarise(trace: Trace, calls: int, own_pid: int) -> dict[str, Any]:
    """The values of one sampled pass of `calls` predictions; a `NAME_reason` stands beside every None.

    `gpu_utilization_ratio` is the share of time in which any kernel ran, not the share of the chip in use.
    `energy_j` is the whole board's energy per call and `power_w` its mean over the pass, idle power included.
    """
    utilization = utilization_ratio(trace.times_s, trace.utilization_percent)
    counted_j = None
    if trace.energy_start_j is not None and trace.energy_end_j is not None:
        counted_j = trace.energy_end_j - trace.energy_start_j
        # a driver that was loaded anew in between starts from 0: https://docs.nvidia.com/deploy/nvml-api/
        counted_j = counted_j if counted_j >= 0 else None
    total_j = counted_j if counted_j is not None else integrate(trace.times_s, trace.power_w)
    lasted_s = trace.times_s[-1] - trace.times_s[0] if trace.times_s else 0.0
    slowed = throttle_reasons(mask for mask in trace.clock_reasons if mask is not None)
    seen = [pids for pids in trace.pids if pids is not None]
    values: dict[str, Any] = {
        "gpu_utilization_ratio": utilization,
        "energy_j": total_j / calls if total_j is not None and calls else None,
        "energy_source": "counter" if counted_j is not None else "power",
        "power_w": total_j / lasted_s if total_j is not None and lasted_s > 0 else None,
        "throttled": bool(slowed) if any(mask is not None for mask in trace.clock_reasons) else None,
        "throttle_reasons": slowed,
        "other_processes": any(has_others(pids, own_pid) for pids in seen) if seen else None,
        "gpu_samples": len(trace.times_s),
    }
    reasons = {
        "gpu_utilization_ratio": f"no utilisation was read after the first {UTILIZATION_LAG_S:g} s",
        "energy_j": "the board reports neither an energy counter nor power",
        "power_w": "the board reports neither an energy counter nor power",
        "throttled": "the board does not report clock event reasons",
        "other_processes": "the driver does not list the processes on this GPU",
    }
    return values | {f"{name}_reason": why for name, why in reasons.items() if values[name] is None}


def together(boards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`summarise`'s values of one pass over several boards: joules and watts are added, a use is their mean.

    What one of them does not tell is not known of all; a flag of one is a flag of all.
    """
    if len(boards) == 1:
        return boards[0]
    found: dict[str, Any] = {
        "energy_source": " and ".join(sorted({board["energy_source"] for board in boards})),
        "throttle_reasons": list(dict.fromkeys(name for each in boards for name in each["throttle_reasons"])),
        "gpu_samples": sum(board["gpu_samples"] for board in boards),
    }
    for name in (*COUNTERS, "throttled", "other_processes"):
        told = [board[name] for board in boards]
        if any(value is None for value in told):
            found[name] = True if True in told else None
        elif name in ("throttled", "other_processes"):
            found[name] = any(told)
        else:
            found[name] = sum(told) / (len(told) if name == "gpu_utilization_ratio" else 1)
        if found[name] is None:
            reason = next(board[f"{name}_reason"] for board in boards if board[name] is None)
            found[f"{name}_reason"] = f"of {len(boards)} GPUs one has none: {reason}"
    return found


COUNTERS = ("gpu_utilization_ratio", "energy_j", "power_w")


def utilization_ratio(times_s: Sequence[float], percents: Sequence[float | None]) -> float | None:
    """Mean utilisation as a fraction, the first `UTILIZATION_LAG_S` left out; None without such a reading."""
    if not times_s:
        return None
    begin = times_s[0] + UTILIZATION_LAG_S
    used = [p for t, p in zip(times_s, percents, strict=True) if t >= begin and p is not None]
    return sum(used) / len(used) / 100.0 if used else None


def integrate(times_s: Sequence[float], power_w: Sequence[float | None]) -> float | None:
    """Energy in joules under a power trace by the trapezoid rule; None with fewer than two readings.

    On A100 and H100 the power sensor sees a quarter of the time (Yang et al. 2024, "Part-time Power
    Measurements", https://arxiv.org/abs/2312.02741), so this is the fallback of the energy counter.
    """
    points = [(t, p) for t, p in zip(times_s, power_w, strict=True) if p is not None]
    if len(points) < 2:
        return None
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(points))


def throttle_reasons(masks: Iterable[int]) -> list[str]:
    """Names of everything in `SLOWED_BY` that was set in any of the masks."""
    seen = 0
    for mask in masks:
        seen |= mask
    return [name for bit, name in SLOWED_BY.items() if seen & bit]


def has_others(pids: set[int], own_pid: int) -> bool:
    """Whether somebody else computes on the GPU.

    In a container NVML lists the host's numbers, so a single process under an unknown number is this one.
    """
    return len(pids - {own_pid}) > (0 if own_pid in pids else 1)


class Sampler:
    """Samples one GPU in a thread while its `with` block runs; `trace` holds what was read.

    `nvml` is the initialised pynvml module (or a stand-in), `handle` one of its devices.
    """

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        every_s: float = SAMPLE_EVERY_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.trace = Trace()
        self._nvml, self._handle, self._every_s, self._clock = nvml, handle, every_s, clock
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self.trace.energy_start_j = self._energy_j()
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.trace.energy_end_j = self._energy_j()
        self._done.set()
        self._thread.join()
        self._read()

    def _run(self) -> None:
        while not self._done.wait(self._every_s):
            self._read()

    def _read(self) -> None:
        nvml, trace = self._nvml, self.trace
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        # The newer name is missing from older drivers, the older one goes away with CUDA 14.
        mask = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if mask is None:
            mask = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses)
        trace.times_s.append(self._clock())
        trace.power_w.append(None if milliwatts is None else milliwatts / 1e3)
        trace.utilization_percent.append(None if rates is None else rates.gpu)
        trace.clock_reasons.append(mask)
        trace.pids.append(None if processes is None else {process.pid for process in processes})

    def _energy_j(self) -> float | None:
        millijoules = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1e3

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """None where this board, driver or permission has no answer; a GPU that fell off the bus raises."""
        nvml = self._nvml
        try:
            return question(self._handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
            return None


def sample(
    predict: Callable[[Any], Any], batches: Sequence[Any], min_time_s: float = PASS_S
) -> dict[str, Any]:
    """Run whole passes for `min_time_s` under a sampler: `summarise`'s values, all None without NVML.

    The caller has warmed up and timed before; this pass is for the GPU's counters only.
    """
    try:
        with _nvml() as nvml, ExitStack() as stack:
            samplers = [stack.enter_context(Sampler(nvml, handle)) for handle in _handles(nvml)]
            calls, _ = whole_passes(predict, batches, min_time_s)
    except NoGpuCounters as error:
        names = (*COUNTERS, "throttled", "other_processes")
        return dict.fromkeys(names) | {f"{name}_reason": str(error) for name in names}
    return together([summarise(sampler.trace, calls, os.getpid()) for sampler in samplers])


def reset_peak_vram() -> None:
    """Forget torch's peak; a no-op in a process where torch has not touched a GPU."""
    if torch := _torch():
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)


def peak_vram() -> dict[str, Any]:
    """Peaks in bytes: the allocator's and the device's, and their larger, which a deployment must find room for.

    `vram_allocated_bytes` is torch's peak of tensors since the reset. `vram_device_bytes` is what NVML says that
    this process holds now: it also sees the CUDA context, cached blocks, CUDA graphs' pools and the engines that
    bypass torch; those grow and do not shrink, so the last reading is the peak. A model on several GPUs has the
    sum of theirs. None with a reason each.
    """
    found: dict[str, Any] = dict.fromkeys(("peak_vram_bytes", "vram_allocated_bytes", "vram_device_bytes"))
    if torch := _torch():
        found["vram_allocated_bytes"] = sum(
            int(torch.cuda.max_memory_allocated(number)) for number in range(torch.cuda.device_count())
        )
    else:
        found["vram_allocated_bytes_reason"] = (
            "the engine allocates without PyTorch and does not tell how much"
        )
    try:
        with _nvml() as nvml:
            listed = [nvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in _handles(nvml)]
        sizes = [own_bytes(processes, os.getpid()) for processes in listed]
        held = None if None in sizes else sum(size for size in sizes if size is not None)
        found["vram_device_bytes"] = held
        if held is None:
            found["vram_device_bytes_reason"] = "NVML does not tell this process's memory"
    except NoGpuCounters as error:
        found["vram_device_bytes_reason"] = str(error)
    known = [found[name] for name in ("vram_allocated_bytes", "vram_device_bytes") if found[name] is not None]
    if known:
        found["peak_vram_bytes"] = max(known)
    else:
        found["peak_vram_bytes_reason"] = (
            "neither the engine's allocator nor NVML tells this process's memory"
        )
    return found


def own_bytes(processes: Sequence[Any], own_pid: int) -> int | None:
    """`usedGpuMemory` of this process among NVML's; None where it is not listed or not told (WDDM, MIG)."""
    mine = [process for process in processes if process.pid == own_pid]
    if not mine and len(processes) == 1:
        mine = list(processes)
    return mine[0].usedGpuMemory if mine else None


class NoGpuCounters(Exception):
    """NVML cannot be asked; the message says why and what would help."""


@contextmanager
def _nvml() -> Any:
    try:
        import pynvml as nvml
    except ImportError:
        raise NoGpuCounters("NVML's bindings are missing: pip install 'qtool[cuda]'") from None
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NoGpuCounters(f"NVML does not answer: {error}") from None


def _torch() -> Any:
    """The torch module if this process computes with it on a GPU; asking an idle one would make a context."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _handles(nvml: Any) -> list[Any]:
    """The NVML devices this process computes on. CUDA and NVML number GPUs differently: the UUID is sure."""
    torch = _torch()
    if not torch:
        return [_named_handle(nvml)]
    numbers = [n for n in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(n)]
    uuids = [torch.cuda.get_device_properties(n).uuid for n in numbers or [torch.cuda.current_device()]]
    return [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]


def _named_handle(nvml: Any) -> Any:
    """The one GPU that this machine has or the environment names, for an engine that does not tell its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if visible.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(visible)
    if nvml.nvmlDeviceGetCount() == 1:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    if visible.isdigit() and os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return nvml.nvmlDeviceGetHandleByIndex(int(visible))
    raise NoGpuCounters(
        "several GPUs and none is named: set CUDA_VISIBLE_DEVICES to one GPU's UUID (nvidia-smi -L)"
    )
