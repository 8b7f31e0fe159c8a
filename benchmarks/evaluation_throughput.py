"""Scoring a whole table: qtool's sorted batches against the text-classification pipeline of transformers.

    python benchmarks/evaluation_throughput.py [MODEL] [--data DIR] [--threads N]

Targets: 3 times the pipeline at its default batching (one text a call), 1.5 times the pipeline at our batch
size in file order. One module, one process, the same rows and threads, repeats interleaved; both sides start
from text and end with a class, and must be equally often right.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from qtool import plugins, prepare, recipes, worker
from qtool.tasks._table import Table

TARGETS = {"default batching": 3.0, f"batch size {worker.SCORE_BATCH} in file order": 1.5}
WARM_UP_ROWS = 64


def main() -> None:
    options = common.parser(__doc__, rounds=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = common.prepare_model(options, Path(folder), score=True)
        texts, expected = rows_in_file_order(bench)
        ways = make_ways(bench)
    for way in ways.values():
        way(texts[:WARM_UP_ROWS])
    found = common.alternate(options.rounds, {name: timed(way, texts) for name, way in ways.items()})
    right = {name: count_right(runs[0][1], expected) for name, runs in found.items()}
    for name, runs in found.items():
        seconds = statistics.median(run[0] for run in runs)
        speed = len(texts) / seconds
        print(f"{name}: {seconds:.2f} s, {speed:.1f} texts/s, {right[name]}/{len(texts)} right")
    if len(set(right.values())) > 1:
        raise SystemExit(f"the ways are not equally right, so their times are not comparable: {right}")
    ours = [run[0] for run in found["qtool"]]
    for name, least in TARGETS.items():
        speedups = common.ratios([run[0] for run in found[name]], ours)
        print(common.verdict(f"times as fast as the pipeline, {name}", speedups, least=least))


def rows_in_file_order(bench: common.Bench) -> tuple[list[str], list[int]]:
    """Texts and the model's class of each label, as they stand in the user's file."""
    texts = json.loads((bench.data / "texts.json").read_text())["texts"]
    _, arrays = prepare.load_ragged(bench.data / "inputs.npz")
    order, class_order = arrays["ids"].argsort(), bench.meta["class_order"]
    return [texts[i] for i in order], [class_order[arrays["labels"][i]] for i in order]


def make_ways(bench: common.Bench) -> dict[str, Callable[[list[str]], list[int]]]:
    """Three functions from texts to classes over the same module."""
    import numpy as np
    from transformers import AutoTokenizer, pipeline

    recipe, _ = recipes.find("fp32")
    runtime, meta = plugins.load("runtimes", recipe.runtime), bench.meta
    model = runtime.open_model(bench.model_dir, recipe, "cpu")
    loaded = runtime.wrap(model, recipe, "cpu", bench.threads)
    tokenizer = AutoTokenizer.from_pretrained(bench.model_dir)
    pipe: Any = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")

    def ours(texts: list[str]) -> list[int]:
        made, _ = prepare.tokenise(tokenizer, Table(texts, None, None, ""), meta["max_tokens"])
        rows = [{name: np.asarray([made[name][row]], np.int64) for name in made} for row in range(len(texts))]
        return worker.evaluate(loaded, rows, meta, worker.SCORE_BATCH).argmax(axis=1).tolist()

    def theirs(texts: list[str], **batching: int) -> list[int]:
        return [model.config.label2id[answer["label"]] for answer in pipe(texts, truncation=True, **batching)]

    def theirs_batched(texts: list[str]) -> list[int]:
        return theirs(texts, batch_size=worker.SCORE_BATCH)

    return {"qtool": ours, **dict(zip(TARGETS, (theirs, theirs_batched), strict=True))}


def timed(way: Callable[[list[str]], list[int]], texts: list[str]) -> Callable[[], tuple[float, list[int]]]:
    """`way` over `texts` as a function that also gives its seconds."""

    def run() -> tuple[float, list[int]]:
        started = time.perf_counter()
        classes = way(texts)
        return time.perf_counter() - started, classes

    return run


def count_right(classes: list[int], expected: list[int]) -> int:
    return sum(found == wanted for found, wanted in zip(classes, expected, strict=True))


if __name__ == "__main__":
    main()
