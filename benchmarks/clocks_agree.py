"""The host's clock around a call against CUDA's own events in the stream, on one GPU.

    python benchmarks/clocks_agree.py [MODEL] [--rounds 5]

Target: p50 by the host over p50 by events between 0.95 and 1.05. A call ends with logits on the host, so the device is
synchronised and one clock serves all runtimes; where both agree, no event is needed to time it. The event before a
call is recorded into an empty stream, and the one behind it when the copy of the logits is over.
Without a GPU it says "not run on a GPU" and ends with 0.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common

from qtool import host, stats

TARGET = (0.95, 1.05)
RECIPE = "fp32"
PASSES = 3


def main() -> None:
    options = common.parser(__doc__).parse_args()
    if not host.cuda_available():
        print("no CUDA GPU is visible\nnot run on a GPU")
        return
    import torch

    from qtool import plugins, recipes, timing

    recipe = recipes.find(RECIPE)[0]
    runtime = plugins.load("runtimes", recipe.runtime)
    with tempfile.TemporaryDirectory() as folder:
        bench = common.prepare_model(options, Path(folder))
        batches = bench.batches()
        model = runtime.open_model(bench.build(RECIPE) / "model", recipe, "cuda")
        predict = runtime.wrap(model, recipe, "cuda", options.threads).predict
    timing.warm_up(predict, batches)
    rounds = [
        both(predict, batches, lambda: torch.cuda.Event(enable_timing=True)) for _ in range(options.rounds)
    ]
    p50 = [
        (stats.percentile(by_host, 0.5), stats.percentile(by_events, 0.5)) for by_host, by_events in rounds
    ]
    print("p50 by the host  " + ", ".join(f"{ours * 1e3:.4f}" for ours, _ in p50) + " ms")
    print("p50 by events    " + ", ".join(f"{theirs * 1e3:.4f}" for _, theirs in p50) + " ms")
    least, most = TARGET
    over = common.ratios(*zip(*p50, strict=True))
    print(common.verdict("host clock over CUDA events", over, least=least, most=most))


def both(
    predict: Callable[[Any], Any], batches: Sequence[Any], event: Callable[[], Any]
) -> tuple[list[float], list[float]]:
    """Seconds of every call of `PASSES` passes: by the host's clock, and by two events around it."""
    by_host, events = [], []
    for _ in range(PASSES):
        for batch in batches:
            before, after = event(), event()
            before.record()
            start = time.perf_counter_ns()
            predict(batch)
            by_host.append((time.perf_counter_ns() - start) / 1e9)
            after.record()
            after.synchronize()
            events.append((before, after))
    # milliseconds: https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html
    return by_host, [before.elapsed_time(after) / 1e3 for before, after in events]


if __name__ == "__main__":
    main()
