"""Our p50 of two engines against clocks that share no code with qtool.

    python benchmarks/latency_against_other_clocks.py [MODEL] [--data DIR] [--seq-len 32] [--rounds 5]

Target: both ratios between 0.95 and 1.05. For openvino-int8 the other clock is OpenVINO's benchmark_app in
sync mode, with the same arithmetic, shape, threads, streams and inputs; for onnx-int8-dynamic it is a bare
loop over onnxruntime in a process of its own. Both run the very artifact that our measuring child runs, and
processes alternate. benchmark_app reads the engine's own clock, without setting inputs and copying logits.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import common

from qtool import measure, recipes, stats
from qtool.runtimes import openvino

TARGET = (0.95, 1.05)
OPENVINO, ONNX = "openvino-int8", "onnx-int8-dynamic"
BENCHMARK_APP_S = 3

BARE_LOOP = """
import json, os, sys, time
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import numpy as np, onnxruntime as ort
model, path, threads, least_s, least_calls = sys.argv[1:]
options = ort.SessionOptions()
options.intra_op_num_threads, options.inter_op_num_threads = int(threads), 1
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
wanted = {value.name for value in session.get_inputs()}
file = np.load(path)
batches = {}
for key in file.files:
    name, _, index = key.rpartition(".")
    if name in wanted:
        batches.setdefault(int(index), {})[name] = file[key]
batches = [batches[index] for index in sorted(batches)]
for _ in range(2):
    for batch in batches:
        session.run(None, batch)
samples, began = [], time.perf_counter()
while len(samples) < int(least_calls) or time.perf_counter() - began < float(least_s):
    for batch in batches:
        start = time.perf_counter_ns()
        session.run(None, batch)
        samples.append(time.perf_counter_ns() - start)
print(json.dumps([nanoseconds / 1e9 for nanoseconds in samples]))
"""


def main() -> None:
    made = common.parser(__doc__)
    add = made.add_argument
    add("--seq-len", metavar="N", type=common.positive, default=32, help="tokens of every text; default 32")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calibration = recipes.find(OPENVINO)[0].calibration
        rows = calibration.rows if calibration else 0
        bench = common.prepare_model(options, Path(folder), seq_len=options.seq_len, calibration_rows=rows)
        ir, onnx = bench.build(OPENVINO) / "model", bench.build(ONNX) / "model" / "model.onnx"
        inputs, batches = save_inputs(bench), bench.save_batches()
        shape = f"[1,{options.seq_len}]"
        found = common.alternate(
            options.rounds,
            {
                f"{OPENVINO}, benchmark_app": lambda: benchmark_app(ir, inputs, shape, bench),
                f"{OPENVINO}, qtool": lambda: stats.percentile(bench.measure(OPENVINO), 0.5),
                f"{ONNX}, bare loop": lambda: stats.percentile(bare_loop(onnx, batches, bench), 0.5),
                f"{ONNX}, qtool": lambda: stats.percentile(bench.measure(ONNX), 0.5),
            },
        )
    for name, p50s in found.items():
        print(f"{name}: p50 " + ", ".join(f"{p50_s * 1e3:.3f}" for p50_s in p50s) + " ms")
    low, high = TARGET
    for recipe, clock in ((OPENVINO, "benchmark_app"), (ONNX, "bare loop")):
        over = common.ratios(found[f"{recipe}, qtool"], found[f"{recipe}, {clock}"])
        print(common.verdict(f"{recipe} p50 over {clock}'s", over, least=low, most=high))


def bare_loop(onnx: Path, batches: Path, bench: common.Bench) -> list[float]:
    """Seconds of every call of a session that this process never sees."""
    effort = (measure.MIN_TIME_S, measure.CALLS)
    return common.run_script(BARE_LOOP, onnx, batches, bench.threads, *effort, threads=bench.threads)


def save_inputs(bench: common.Bench) -> dict[str, Path]:
    """One folder of .npy files for each input of the model, as benchmark_app reads them."""
    import numpy as np

    folders: dict[str, Path] = {}
    for index, batch in enumerate(bench.batches()):
        for name, array in batch.items():
            folders[name] = bench.logs / "inputs" / name
            folders[name].mkdir(parents=True, exist_ok=True)
            np.save(folders[name] / f"{index:04}.npy", array)
    return folders


def benchmark_app(ir: Path, inputs: dict[str, Path], shape: str, bench: common.Bench) -> float:
    """Median seconds of benchmark_app over `inputs`. Raises SystemExit with the end of its output."""
    options = openvino.Options(**recipes.find(OPENVINO)[0].runtime_options)
    # these have no flag of their own: given here, and left alone by `-hint none`
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(options.dynamic_quantization_group_size),
    }
    settings = bench.logs / "benchmark_app.json"
    settings.write_text(json.dumps({"CPU": config}))
    xml = ir / "openvino_model.xml"
    names = [name for name in inputs if f'names="{name}"' in xml.read_text()]
    command = [Path(sys.executable).with_name("benchmark_app"), "-m", xml, "-d", "CPU", "-api", "sync"]
    command += ["-hint", "none", "-nstreams", "1", "-nthreads", bench.threads, "-load_config", settings]
    command += ["-infer_precision", options.inference_precision, "-t", BENCHMARK_APP_S]
    command += ["-data_shape", ",".join(name + shape for name in names)]
    command += ["-i", *(f"{name}:{inputs[name]}" for name in names)]
    env = {**os.environ, "OMP_NUM_THREADS": str(bench.threads)}
    done = common.run_apart(list(map(str, command)), env)
    median_s = read_median(done.stdout)
    if done.returncode or median_s is None:
        raise SystemExit(f"benchmark_app ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
    return median_s


def read_median(output: str) -> float | None:
    """Seconds of benchmark_app's line 'Median: 5.23 ms' (or us, below a millisecond); None without one."""
    found = re.search(r"Median:\s+([\d.]+) (ms|us)", output)
    return float(found[1]) * {"ms": 1e-3, "us": 1e-6}[found[2]] if found else None


if __name__ == "__main__":
    main()
