"""The child process: one stage a process (probe, build, score, measure, harness), its answer on a private pipe.

Started by `isolate` as `python -m qtool.worker STAGE FD`; the job is one JSON line on standard input, and the
end of that stream means that the parent is gone: the whole process group then ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qtool import contention, memory, models, plugins, prepare, timing
from qtool.core import Batch, BuildJob, Loaded, QtoolError, Recipe, Unavailable, file_hash, unmet

CALLS = 130
"""Calls of a timed pass: the least that supports a p95 within one process (see `stats.least_samples`)."""
E2E_CALLS = 64
MIN_TIME_S = 2.0
MAX_TIME_S = 60.0
# A noisy machine never becomes steady: then the measurement goes on and says so.
WARM_UP_MAX_S = 10.0
SCORE_BATCH = 32
CHECK_ROWS = 4
# Float sums differ by kernel and device; a wrongly reloaded model differs by whole logits.
EXACT_TOLERANCE = 1e-4
CHANGED_KERNEL_TOLERANCE = 0.05


def probe(spec: dict[str, Any]) -> dict[str, Any]:
    """Resolve and check the model, the task, the labels and the data: the user's mistakes surface here."""
    task = prepare.make_task(spec)
    folder, revision = models.resolve(spec["model"], spec["revision"])
    tables = prepare.read_tables(spec, task)  # before the model: a wrong table is found without loading one
    model = models.check(folder, revision)
    facts = prepare.prepare(spec, task, model, tables, Path(spec["data_out"]))
    return {"model": _plain(asdict(model)), "task": task.model_dump(), "data": asdict(facts)}


def build(spec: dict[str, Any]) -> dict[str, Any]:
    """Make the artifact in `spec["out"]`, then let the built model answer the check batch for later comparison."""
    import numpy as np

    recipe, out = Recipe(**spec["recipe"]), Path(spec["out"])
    method, runtime = plugins.load("methods", recipe.method), plugins.load("runtimes", recipe.runtime)
    calibration: list[Batch] = []
    if recipe.calibration is not None:
        calibration = prepare.load_ragged(Path(spec["data"]) / "calibration.npz")[0][
            : recipe.calibration.rows
        ]
    artifact = out / "model"
    artifact.mkdir(parents=True)
    started = time.perf_counter()
    built = method.build(BuildJob(Path(spec["model_dir"]), artifact, recipe, calibration, spec["threads"]))
    build_s = time.perf_counter() - started
    eager = recipe.model_copy(update={"compile": {}})
    loaded = runtime.wrap(built, eager, "cpu", spec["threads"])
    rows, _ = prepare.load_ragged(Path(spec["data"]) / "inputs.npz")
    batch = prepare.collate(rows[:CHECK_ROWS], json.loads((Path(spec["data"]) / "meta.json").read_text()))
    np.savez(
        out / "check.npz", **{"logits": loaded.predict(batch), **{f"input.{k}": v for k, v in batch.items()}}
    )
    models.copy_tokenizer(Path(spec["model_dir"]), out / "tokenizer")
    return {"build_s": build_s, "files": _hashes(artifact)}


def score(spec: dict[str, Any]) -> dict[str, Any]:
    """Reload the artifact, hold it against the built model and its recipe's expectations, then score it."""
    import numpy as np

    recipe, data = Recipe(**spec["recipe"]), Path(spec["data"])
    loaded = _open(spec, recipe)
    difference = _check(loaded, spec, recipe)
    audit = loaded.audit()
    problems = unmet(recipe.expect, audit)
    if loaded.threads not in (None, spec["threads"]):
        problems.append(f"the engine runs {loaded.threads} threads, asked for {spec['threads']}")
    if problems:
        raise RuntimeError("the artifact is not what the recipe says: " + "; ".join(problems))
    values: dict[str, Any] = {
        "audit": asdict(audit),
        "weight_bytes": sum(audit.weight_bytes_by_dtype.values()),
        "check_max_abs_diff": difference,
        "predictions": None,
        "metrics": {},
    }
    if not spec["score"]:
        return values
    rows, arrays = prepare.load_ragged(data / "inputs.npz")
    meta = json.loads((data / "meta.json").read_text())
    started = time.perf_counter()
    logits = evaluate(loaded, rows, meta, SCORE_BATCH)[:, meta["class_order"]]
    values["score_s"] = time.perf_counter() - started
    if not np.isfinite(logits).all():
        raise RuntimeError(
            f"{int((~np.isfinite(logits)).any(axis=1).sum())} of {len(logits)} texts have logits that are not finite"
        )
    order = np.argsort(arrays["ids"])
    path = Path(spec["predictions"])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, logits=logits[order], labels=arrays["labels"][order], ids=arrays["ids"][order])
    values |= {
        "predictions": f"predictions/{path.name}",
        "predictions_sha256": file_hash(path),
        "rows": len(logits),
    }
    from qtool import metrics

    regression = logits.shape[1] == 1
    predicted = logits[:, 0] if regression else logits.argmax(axis=1)
    labels = arrays["labels"]
    values["metrics"] = {
        name: metrics.compute(name, predicted.tolist(), labels.tolist()) for name in spec["metrics"]
    }
    return values


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Load, first call, warm up, reset the peak, time, read memory, and last of all end to end."""
    recipe, data, size = Recipe(**spec["recipe"]), Path(spec["data"]), spec["batch_size"]
    rows, _ = prepare.load_ragged(data / "inputs.npz")
    meta = json.loads((data / "meta.json").read_text())
    batches = timed_batches(rows, meta, size)
    started = time.perf_counter()
    for package in plugins.load("runtimes", recipe.runtime).PACKAGES:
        importlib.import_module(package)
    import_s = time.perf_counter() - started
    reset_failed = memory.reset_peak()
    started = time.perf_counter()
    loaded = _open(spec, recipe)
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
        **timing.clock_facts(),
    }
    for name in ("load_peak_rss_bytes", "peak_rss_bytes", "steady_rss_bytes"):
        if values[name] is None:
            values[f"{name}_reason"] = usage.reason
    values |= _gpu_values(gpu, loaded, batches)
    values["check_max_abs_diff"] = _check(loaded, spec, recipe)
    samples = {"latency_s": latency_s, **_end_to_end(spec, loaded, data, meta, size, len(batches))}
    return {"values": values, "samples": samples}


def harness(spec: dict[str, Any]) -> dict[str, Any]:
    """The same timing of a runtime that does nothing: what the harness adds to every sample."""
    rows, _ = prepare.load_ragged(Path(spec["data"]) / "inputs.npz")
    meta = json.loads((Path(spec["data"]) / "meta.json").read_text())
    batches = timed_batches(rows, meta, 1)
    loaded = plugins.load("runtimes", "null").wrap(None, Recipe(**spec["recipe"]), "cpu", 1)
    timing.warm_up(loaded.predict, batches)
    samples = timing.time_calls(loaded.predict, batches, min_time_s=0.2, min_calls=10_000, max_time_s=5.0)
    return {"values": timing.clock_facts(), "samples": {"latency_s": samples[-10_000:]}}


def timed_batches(rows: list[Batch], meta: dict[str, Any], size: int) -> list[Batch]:
    """The fixed list of batches every recipe is timed on: consecutive texts, each batch full.

    Fewer rows than one batch needs are repeated. Padded to the longest of the batch, or to `--seq-len`.
    """
    while len(rows) < size:
        rows = rows + rows
    count = min(CALLS, len(rows) // size)
    return [prepare.collate(rows[i * size : (i + 1) * size], meta, meta["seq_len"]) for i in range(count)]


def evaluate(loaded: Loaded, rows: list[Batch], meta: dict[str, Any], size: int) -> Any:
    """Logits (rows, classes) of every row in its given order, computed in batches sorted by length.

    Texts of like length waste no padding; the longest come first so that a memory fault comes at once.
    """
    import numpy as np

    order = sorted(range(len(rows)), key=lambda row: -rows[row]["input_ids"].shape[1])
    found: list[Any] = [None] * len(rows)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        logits = loaded.predict(prepare.collate([rows[row] for row in chosen], meta))
        for row, values in zip(chosen, logits, strict=True):
            found[row] = values
    return np.stack(found)


def _open(spec: dict[str, Any], recipe: Recipe) -> Loaded:
    runtime = plugins.load("runtimes", recipe.runtime)
    model = runtime.open_model(Path(spec["artifact"]) / "model", recipe, spec["device"])
    return runtime.wrap(model, recipe, spec["device"], spec["threads"])


def _check(loaded: Loaded, spec: dict[str, Any], recipe: Recipe) -> float:
    """Largest difference between this process's logits and the built model's on the check batch.

    Raises RuntimeError when they are not the same model's.
    """
    import numpy as np

    with np.load(Path(spec["artifact"]) / "check.npz", allow_pickle=False) as file:
        expected = file["logits"]
        batch = {name.removeprefix("input."): file[name] for name in file.files if name != "logits"}
    found = loaded.predict(batch)
    if found.shape != expected.shape or found.dtype != np.float32:
        raise RuntimeError(
            f"logits have shape {found.shape} and type {found.dtype}, the built model's {expected.shape}"
        )
    same_kernels = spec["device"] == "cpu" and not recipe.compile
    scale = max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(found - expected).max())
    if not difference <= (EXACT_TOLERANCE if same_kernels else CHANGED_KERNEL_TOLERANCE) * scale:
        raise RuntimeError(
            f"the reloaded artifact's logits differ from the built model's by {difference:.4g}"
        )
    return difference


def _end_to_end(
    spec: dict[str, Any], loaded: Loaded, data: Path, meta: dict[str, Any], size: int, count: int
) -> dict[str, list[float]]:
    """From text to class, tokenised at every call, over the same texts in the same batches."""
    from transformers import AutoTokenizer

    content = json.loads((data / "texts.json").read_text())
    texts, pairs = content["texts"], content["pairs"]
    while len(texts) < size:
        texts, pairs = texts + texts, pairs + pairs if pairs else None
    tokenizer = AutoTokenizer.from_pretrained(spec["model_dir"])
    names = set(tokenizer.model_input_names)
    if tokenizer.pad_token is None and (size > 1 or meta["seq_len"]):
        return {}  # the tokenizer cannot pad: the summary says why these values are missing
    padding = "max_length" if meta["seq_len"] else size > 1

    def tokenize(batch: tuple[list[str], list[str] | None]) -> Batch:
        made = tokenizer(
            batch[0],
            batch[1],
            padding=padding,
            truncation=True,
            max_length=meta["max_tokens"],
            return_tensors="np",
        )
        return {name: made[name] for name in names & made.keys()}

    cuts = [slice(index * size, (index + 1) * size) for index in range(count)]
    batches = [(texts[cut], pairs[cut] if pairs else None) for cut in cuts]
    return timing.time_end_to_end(
        batches,
        tokenize,
        loaded.predict,
        lambda logits: logits.argmax(axis=1),
        min_time_s=MIN_TIME_S / 2,
        min_calls=E2E_CALLS,
        max_time_s=MAX_TIME_S,
    )


def _gpu(device: str) -> Any:
    if device != "cuda":
        return None
    from qtool import gpu

    return gpu


def _gpu_values(gpu: Any, loaded: Loaded, batches: list[Batch]) -> dict[str, Any]:
    if gpu is None:
        names = ("peak_vram_bytes", "gpu_utilization_ratio", "energy_j")
        return {name: None for name in names} | {f"{name}_reason": "not measured on a CPU" for name in names}
    found = {"peak_vram_bytes": gpu.peak_vram_bytes(), **gpu.sample(loaded.predict, batches)}
    if found["peak_vram_bytes"] is None:
        found["peak_vram_bytes_reason"] = (
            "neither the engine's allocator nor NVML tells this process's memory"
        )
    return found


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): file_hash(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


STAGES = {"probe": probe, "build": build, "score": score, "measure": measure, "harness": harness}


def _die_with_parent(stream: Any) -> None:
    stream.read()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    stage, descriptor = sys.argv[1], int(sys.argv[2])
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_parent, args=(sys.stdin,), daemon=True).start()
    answer: dict[str, Any]
    try:
        answer = {"status": "ok", "values": STAGES[stage](spec)}
    except QtoolError as error:
        answer = {"status": "user_error", "error": str(error)}
    except Unavailable as error:
        answer = {"status": "unavailable", "error": str(error)}
    except MemoryError:
        traceback.print_exc()
        answer = _oom("Python ran out of memory")
    # whatever a library raises ends this trial, not the sweep; the traceback is in the log
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        answer = _oom(message) if _is_oom(error) else {"status": "failed", "error": message}
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(json.dumps(answer, allow_nan=False).encode())
    # interpreter shutdown of engine libraries can hang or crash, and there is nothing left to save
    os._exit(0)


def _oom(message: str) -> dict[str, Any]:
    return {
        "status": "oom",
        "error": message,
        "next_step": "use a smaller batch or a machine with more memory",
    }


def _is_oom(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(
        sign in text
        for sign in ("outofmemory", "out of memory", "can't allocate memory", "bad_alloc", "bad allocation")
    )


if __name__ == "__main__":
    main()
