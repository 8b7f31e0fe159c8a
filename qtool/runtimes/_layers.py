"""Where a call's time goes, as each engine tells it: parts of a call, and the time of operators and layers.

An operator's time is its own, without what it called. Profilers cost time themselves: shares are what to read.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.core import Batch, Part, Recipe
from qtool.runtimes import _graph

_WHOLE = contextlib.nullcontext()
PYTHON = "Python between operators"


@dataclass(frozen=True)
class Job:
    """What is watched: one pass over `batches`. An engine that writes a Chrome trace puts it in `trace`."""

    artifact: Path
    recipe: Recipe
    device: str
    threads: int
    batches: list[Batch]
    trace: Path


@dataclass(frozen=True)
class Layer:
    """`calls` and `total_s` (seconds) over the watched pass; `layer` is None where the engine counts operators."""

    layer: str | None
    operator: str
    calls: int
    total_s: float


def whole(name: str) -> Any:
    """The `Part` of a call that nobody takes apart."""
    return _WHOLE


def synchronised(part: Part) -> Part:
    """`part`, left only when the GPU has finished: its work is queued and goes on behind the call."""
    import torch

    @contextlib.contextmanager
    def finished(name: str) -> Iterator[None]:
        with part(name):
            yield
            torch.cuda.synchronize()

    return finished


def torch_operators(run: Callable[[Batch, Part], Any], job: Job) -> list[Layer]:
    """Own time by operator, on the GPU that of its kernels. The trace shows the parts of each call as ranges.

    What no operator explains of the model's part is `PYTHON`: modules, hooks and dispatch.
    https://docs.pytorch.org/docs/stable/profiler.html
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    gpu = job.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities):  # the first use starts the profiler, and that is slow
        run(job.batches[0], record_function)
    with profile(activities=activities) as watched:
        for batch in job.batches:
            run(batch, record_function)
    watched.export_chrome_trace(str(job.trace))
    layers = []
    for event in watched.key_averages():
        if event.device_type.name != "CPU":
            continue  # a kernel: its time is that of the operator that started it
        seconds = (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e6
        name = PYTHON if event.key == "model" else event.key
        if seconds > 0 and name not in ("make_tensors", "copy_in", "copy_out"):
            layers.append(Layer(None, name, event.count, seconds))
    return layers


def onnxruntime_nodes(model: Path, options: Any, provider: str, job: Job) -> list[Layer]:
    """Time by node. The engine's Chrome trace is written to `job.trace`, with the pass that warms up in it.

    https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html
    """
    import onnxruntime as ort

    options.enable_profiling = True
    options.profile_file_prefix = str(job.trace.with_suffix(""))
    session = ort.InferenceSession(str(model), options, providers=[provider], enable_fallback=0)
    session.disable_fallback()
    names = [value.name for value in session.get_inputs()]
    for batch in [*job.batches, *job.batches]:
        session.run(["logits"], _graph.pick(batch, names))
    Path(session.end_profiling()).replace(job.trace)
    return nodes_of(json.loads(job.trace.read_text("utf-8")), skip=len(job.batches))


def nodes_of(events: list[dict[str, Any]], skip: int) -> list[Layer]:
    """The kernels' times in ONNX Runtime's trace, by node, behind its first `skip` runs."""
    runs = sorted(event["ts"] for event in events if event.get("name") == "model_run")
    calls: Counter[tuple[str, str]] = Counter()
    spent_us: Counter[tuple[str, str]] = Counter()
    for event in events:
        name = event.get("name", "")
        if event.get("cat") != "Node" or not name.endswith("_kernel_time") or event["ts"] < runs[skip]:
            continue
        node = (name.removesuffix("_kernel_time"), event["args"]["op_name"])
        calls[node] += 1
        spent_us[node] += event["dur"]
    return [Layer(*node, calls[node], spent_us[node] / 1e6) for node in calls]


def openvino_layers(model: Any, options: dict[str, Any], job: Job) -> list[Layer]:
    """Time by layer, by PERF_COUNT. The engine writes no trace.

    https://docs.openvino.ai/2025/openvino-workflow/running-inference/optimize-inference.html
    """
    import openvino as ov

    compiled = ov.Core().compile_model(model, "CPU", options | {"PERF_COUNT": True})
    request = compiled.create_infer_request()
    names = [port.get_any_name() for port in compiled.inputs]
    passes = []
    for _ in range(2):  # the first warms up
        for batch in job.batches:
            request.infer(_graph.pick(batch, names))
        passes.append({i.node_name: i for i in request.get_profiling_info() if i.status == i.EXECUTED})
    layers = []
    for name, info in passes[1].items():
        before_s = passes[0][name].real_time.total_seconds() if name in passes[0] else 0.0
        seconds = behind_average(before_s, info.real_time.total_seconds(), len(job.batches))
        layers.append(Layer(name, f"{info.node_type} ({info.exec_type})", len(job.batches), seconds))
    return layers


def behind_average(first_s: float, both_s: float, calls: int) -> float:
    """Seconds of the second `calls` calls, from the means over the first `calls` and over both.

    The CPU plugin's counters are means over all calls since compilation, in whole microseconds.
    """
    return max(0.0, 2 * calls * both_s - calls * first_s)
