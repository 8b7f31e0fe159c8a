"""The measuring stage of a child: load, first call, warm up, time, memory, and the harness's own overhead."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qtool import ceilings, contention, memory, plugins, prepare, rapl, reload, timing
from qtool.core import Batch, Loaded, Recipe

CALLS = 130
"""Calls of a timed pass: the least that supports a p95 within one process (see `stats.least_samples`)."""
E2E_CALLS = 64
MIN_TIME_S = 2.0
MAX_TIME_S = 60.0
PAUSE_S = 0.01
"""Idleness before a call, as under light traffic: after it calls of a few
milliseconds took 1.2 to 2 times as long as back to back (2 shared cores)."""
Texts = tuple[list[str], list[str] | None]
"""Texts of one call, and the second text of each pair."""
# A noisy machine never becomes steady: then the measurement goes on and says so.
WARM_UP_MAX_S = 10.0


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Load, first call, warm up, reset the peak, time, read memory, and last of all end to end."""
    recipe, data, size = Recipe(**spec["recipe"]), Path(spec["data"]), spec["batch_size"]
    rows, _ = prepare.load_ragged(data / "inputs.npz")
    meta = json.loads((data / "meta.json").read_text("utf-8"))
    batches = timed_batches(rows, meta, size)
    started = time.perf_counter()
    for package in plugins.load("runtimes", recipe.runtime).PACKAGES:
        importlib.import_module(package)
    import_s = time.perf_counter() - started
    reset_failed = memory.reset_peak()
    started = time.perf_counter()
    loaded = reload.open_artifact(spec, recipe)
    load_s = time.perf_counter() - started
    started = time.perf_counter()
    loaded.predict(batches[0])
    first_call_s = time.perf_counter() - started
    after_load = memory.read(reset_failed)
    warm = timing.warm_up(loaded.predict, batches, max_time_s=WARM_UP_MAX_S)
    reset_failed = memory.reset_peak()
    gpu = _gpu(spec["device"])
    if gpu:
        gpu.reset_peak_vram()
    # the reset gave memory back: fault it in again outside the timed pass
    for batch in batches[: max(3, len(batches) // 10)]:
        loaded.predict(batch)
    before = contention.snapshot()
    latency_s = timing.time_calls(
        loaded.predict, batches, min_time_s=MIN_TIME_S, min_calls=CALLS, max_time_s=MAX_TIME_S
    )
    disturbance = contention.between(before, contention.snapshot())
    usage = memory.read(reset_failed)
    values: dict[str, Any] = {
        "import_s": import_s,
        "load_s": load_s,
        "first_call_s": first_call_s,
        "load_peak_rss_bytes": after_load.peak_rss_bytes,
        "peak_rss_bytes": usage.peak_rss_bytes,
        "steady_rss_bytes": usage.rss_bytes,
        "memory": usage.to_dict(),
        "warm_up": asdict(warm),
        "contention": disturbance,
        "contended": disturbance["contended"],
        "threads": loaded.threads,
        "waiting_policy": {
            name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
        },
        "calls_in_pass": len(batches),
        "tokens_by_call": [int(batch["input_ids"].size) for batch in batches],
        **timing.clock_facts(),
    }
    for name in ("load_peak_rss_bytes", "peak_rss_bytes", "steady_rss_bytes"):
        if values[name] is None:
            values[f"{name}_reason"] = usage.reason
    if recipe.compile:  # whether the first call compiled or found its kernels in the cache
        values["engine"] = loaded.audit().engine
    values |= hardware(spec["device"], loaded.predict, batches)
    if values.get("other_processes"):  # its kernels and ours took turns, as processes do on a core
        values["contended"] = True
    if recipe.placement and loaded.placement:
        values["placement"] = loaded.placement(batches[0])
    values["check_max_abs_diff"] = reload.check(loaded, spec, recipe)
    samples = {"latency_s": latency_s, **_end_to_end(spec, loaded, data, meta, size, len(batches))}
    return {"values": values, "samples": samples}


def harness(spec: dict[str, Any]) -> dict[str, Any]:
    """The same timing of a runtime that does nothing, which is what the harness adds to every sample; then the
    ceilings of this machine.
    """
    rows, _ = prepare.load_ragged(Path(spec["data"]) / "inputs.npz")
    meta = json.loads((Path(spec["data"]) / "meta.json").read_text("utf-8"))
    batches = timed_batches(rows, meta, 1)
    loaded = plugins.load("runtimes", "null").wrap(None, Recipe(**spec["recipe"]), "cpu", 1)
    timing.warm_up(loaded.predict, batches)
    samples = timing.time_calls(loaded.predict, batches, min_time_s=0.2, min_calls=10_000, max_time_s=5.0)
    values = {**timing.clock_facts(), "ceilings": ceilings.take(spec["threads"])}
    return {"values": values, "samples": {"latency_s": samples[-10_000:]}}


def timed_batches(rows: list[Batch], meta: dict[str, Any], size: int) -> list[Batch]:
    """The fixed list of batches every recipe is timed on: consecutive texts, each batch full.

    Fewer rows than one batch needs are repeated. Padded to the longest of the batch, or to `--seq-len`.
    """
    while len(rows) < size:
        rows = rows + rows
    count = min(CALLS, len(rows) // size)
    return [prepare.collate(rows[i * size : (i + 1) * size], meta, meta["seq_len"]) for i in range(count)]


def _end_to_end(
    spec: dict[str, Any], loaded: Loaded, data: Path, meta: dict[str, Any], size: int, count: int
) -> dict[str, list[float]]:
    """From text to class, tokenised at every call, over the same texts in the same batches; then again with a pause
    before each call, which is how a request that finds the server idle is served.
    """
    from transformers import AutoTokenizer

    tokenize = tokenize_as_served(AutoTokenizer.from_pretrained(spec["model_dir"]), meta, size)
    if tokenize is None:
        return {}  # the tokenizer cannot pad: the summary says why these values are missing
    texts = timed_texts(data, size, count)
    found = back_to_back(texts, tokenize, loaded)
    paced = timing.time_end_to_end(
        texts,
        tokenize,
        loaded.predict,
        _answer,
        min_time_s=0.0,
        min_calls=E2E_CALLS,
        max_time_s=MAX_TIME_S / 4,
        pause_s=PAUSE_S,
    )
    return {**found, "after_pause_s": paced["end_to_end_s"]}


def back_to_back(
    texts: list[Texts], tokenize: Callable[[Texts], Batch], loaded: Loaded
) -> dict[str, list[float]]:
    """`timing.time_end_to_end` of requests that follow each other at once, for as long as a measurement takes."""
    return timing.time_end_to_end(
        texts,
        tokenize,
        loaded.predict,
        _answer,
        min_time_s=MIN_TIME_S / 2,
        min_calls=E2E_CALLS,
        max_time_s=MAX_TIME_S,
    )


def _answer(logits: Any) -> Any:
    return logits.argmax(axis=1)


def timed_texts(data: Path, size: int, count: int) -> list[Texts]:
    """The texts of the first `count` batches of `timed_batches`, and their pairs where there are any."""
    content = json.loads((data / "texts.json").read_text("utf-8"))
    texts, pairs = content["texts"], content["pairs"]
    while len(texts) < size:
        texts, pairs = texts + texts, pairs + pairs if pairs else None
    cuts = [slice(index * size, (index + 1) * size) for index in range(count)]
    return [(texts[cut], pairs[cut] if pairs else None) for cut in cuts]


def tokenize_as_served(tokenizer: Any, meta: dict[str, Any], size: int) -> Callable[[Texts], Batch] | None:
    """A function from `size` texts to the model's inputs; None where the tokenizer would have to pad and cannot."""
    names = set(tokenizer.model_input_names)
    if tokenizer.pad_token is None and (size > 1 or meta["seq_len"]):
        return None
    padding = "max_length" if meta["seq_len"] else size > 1

    def tokenize(batch: Texts) -> Batch:
        made = tokenizer(
            batch[0],
            batch[1],
            padding=padding,
            truncation=True,
            max_length=meta["max_tokens"],
            return_tensors="np",
        )
        return {name: made[name] for name in names & made.keys()}

    return tokenize


def _gpu(device: str) -> Any:
    if device != "cuda":
        return None
    from qtool import gpu

    return gpu


def hardware(device: str, predict: Callable[[Batch], Any], batches: list[Batch]) -> dict[str, Any]:
    """Memory, use, power and energy of the device, from a pass of its own: reading counters disturbs a clock."""
    gpu = _gpu(device)
    found: dict[str, Any]
    if gpu is not None:
        found = gpu.peak_vram() | gpu.sample(predict, batches, gpu.PASS_S)
    else:
        names = ("peak_vram_bytes", "vram_allocated_bytes", "vram_device_bytes", "gpu_utilization_ratio")
        reasons = {f"{name}_reason": "not measured on a CPU" for name in names}
        found = dict.fromkeys(names) | reasons | rapl.sample(predict, batches, rapl.PASS_S)
    if found["energy_j"] is not None:
        # an inference is one text, so that batch sizes can be set side by side
        found["energy_j"] /= len(batches[0]["input_ids"])
    return found
