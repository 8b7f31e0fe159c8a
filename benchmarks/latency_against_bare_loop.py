"""Our p50 and p95 of fp32 against a bare PyTorch loop that shares no code with qtool.

    python benchmarks/latency_against_bare_loop.py [MODEL] [--data DIR] [--rounds 5]
    python benchmarks/latency_against_bare_loop.py [MODEL] --peer optimum-benchmark [--env DIR]

Target: the p50 ratio between 0.95 and 1.05. Ours is a measuring child under its isolating parent, as in a
sweep; the bare loop is a process of its own over the same tokenised texts. Processes alternate.

`--peer optimum-benchmark` also runs that tool's isolating launcher, from an environment of its own, on the
same weights at one fixed length (`--seq-len`, random token ids), and says how far it is from the bare loop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import common

from qtool import measure, stats

TARGET = (0.95, 1.05)
PEER_PINS = ("optimum-benchmark==0.6.0", "transformers<5", "torch==2.13.0")
PEER_SEQ_LEN = 32
BARE = "bare loop"

BARE_LOOP = """
import json, sys, time
import numpy as np, torch
from transformers import AutoModelForSequenceClassification
folder, path, threads, least_s, least_calls = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
file = np.load(path)
batches = {}
for key in file.files:
    name, _, index = key.rpartition(".")
    batches.setdefault(int(index), {})[name] = torch.from_numpy(file[key])
batches = [batches[index] for index in sorted(batches)]
samples = []
with torch.inference_mode():
    for _ in range(2):
        for batch in batches:
            model(**batch)
    began = time.perf_counter()
    while len(samples) < int(least_calls) or time.perf_counter() - began < float(least_s):
        for batch in batches:
            start = time.perf_counter_ns()
            model(**batch)
            samples.append(time.perf_counter_ns() - start)
print(json.dumps([nanoseconds / 1e9 for nanoseconds in samples]))
"""

OPTIMUM_BENCHMARK = """
import json, sys
from optimum_benchmark import Benchmark, BenchmarkConfig, InferenceConfig, ProcessConfig, PyTorchConfig
folder, length, threads, least_s, least_calls = sys.argv[1:]
report = Benchmark.launch(BenchmarkConfig(
    name="latency",
    launcher=ProcessConfig(),
    scenario=InferenceConfig(
        latency=True, iterations=int(least_calls), duration=int(float(least_s)),
        input_shapes={"batch_size": 1, "sequence_length": int(length)},
    ),
    backend=PyTorchConfig(
        model=folder, task="text-classification", library="transformers", device="cpu",
        intra_op_num_threads=int(threads),
    ),
    log_report=False,
))
print(json.dumps(report.forward.latency.values))
"""


def main() -> None:
    made = common.parser(__doc__)
    add = made.add_argument
    add("--seq-len", metavar="N", type=common.positive, help="pad every text to N tokens; default its length")
    add("--peer", choices=("optimum-benchmark",), help="a second tool to hold against the loop")
    add("--env", metavar="DIR", type=Path, help="keep the peer's environment here; default thrown away")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = None
        if options.peer:
            options.seq_len = options.seq_len or PEER_SEQ_LEN
            python = make_environment((options.env or Path(folder) / "env").absolute())
            if python is None:
                print(f"{options.peer} cannot be installed here, so it was not compared")
                return
        samples = run(options, Path(folder), python)
    p50s, p95s = (
        {name: [stats.percentile(each, share) for each in rounds] for name, rounds in samples.items()}
        for share in (0.5, 0.95)
    )
    for name in samples:
        print(f"{name}: p50 {spread_ms(p50s[name])}, p95 {spread_ms(p95s[name])}")
    for name in list(samples)[1:]:
        low, high = TARGET if name == "qtool" else (None, None)
        print(common.verdict(f"{name} p95 over the bare loop's", common.ratios(p95s[name], p95s[BARE])))
        over = common.ratios(p50s[name], p50s[BARE])
        print(common.verdict(f"{name} p50 over the bare loop's", over, least=low, most=high))


def run(options: argparse.Namespace, scratch: Path, python: Path | None) -> dict[str, list[list[float]]]:
    """Seconds of every call by tool, one list a process; `python` is the peer's interpreter, if any."""
    bench = common.prepare_model(options, scratch, seq_len=options.seq_len)
    bench.build("fp32")
    batches, effort = bench.save_batches(), (measure.MIN_TIME_S, measure.CALLS)
    peers: dict[str, Callable[[], list[float]]] = {
        BARE: lambda: common.run_script(
            BARE_LOOP, bench.model_dir, batches, bench.threads, *effort, threads=bench.threads
        ),
    }
    if python is not None:
        peers[options.peer] = lambda: common.run_script(
            OPTIMUM_BENCHMARK,
            *(bench.model_dir, options.seq_len, bench.threads, *effort),
            threads=bench.threads,
            python=python,
            folder=scratch,  # it leaves a log where it runs
        )
    peers["qtool"] = lambda: bench.measure("fp32")
    return common.alternate(options.rounds, peers)


def make_environment(folder: Path) -> Path | None:
    """The interpreter of an environment with the peer in it; None, pip's reason printed, if it cannot be."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *PEER_PINS]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        print((done.stderr.strip().splitlines() or ["pip gave no reason"])[-1])
        return None
    return python


def spread_ms(seconds: list[float]) -> str:
    low, middle, high = (stats.percentile(seconds, share) * 1e3 for share in (0.0, 0.5, 1.0))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
