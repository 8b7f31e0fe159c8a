"""The child process: one stage a process (see `STAGES`), its answer on a private pipe.

Started by `isolate` as `python -m qtool.worker STAGE FD`; the job is one JSON line on standard input, and the
end of that stream means that the parent is gone: the whole process group then ends.
"""

from __future__ import annotations

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

from qtool import (
    ceilings,
    checkpoint,
    fitting,
    graphs,
    measure,
    models,
    plugins,
    prepare,
    profiling,
    reload,
    resolve,
)
from qtool.core import Batch, BuildJob, Loaded, QtoolError, Recipe, Unavailable, file_hash, hashes
from qtool.tasks._labels import permutation_suspicion

SCORE_BATCH = 32
CHECK_ROWS = 4


def probe(spec: dict[str, Any]) -> dict[str, Any]:
    """Resolve and check the model, the task, the labels and the data: the user's mistakes surface here."""
    task = prepare.make_task(spec)
    folder, revision = resolve.resolve(spec["model"], spec["revision"])
    prepare.check_task(spec, task, folder)
    tables = prepare.read_tables(spec, task)  # before the model: a wrong table is found without loading one
    kind = graphs.kind(folder)
    model = graphs.check(folder, revision, kind) if kind else models.check(folder, revision)
    facts = prepare.prepare(spec, task, model, tables, Path(spec["data_out"]))
    chosen = [] if kind else [Recipe(**content) for content in spec.get("recipes") or []]
    fit = fitting.totals(folder, chosen) if chosen else {}
    return {"model": _plain(asdict(model)), "task": task.model_dump(), "data": asdict(facts), "fit": fit}


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
    # what a CPU cannot compute is made, and answers the check batch, where it will run
    device = "cuda" if getattr(method, "needs_gpu", lambda recipe: False)(recipe) else "cpu"
    started = time.perf_counter()
    built = method.build(
        BuildJob(Path(spec["model_dir"]), artifact, recipe, calibration, spec["threads"], device)
    )
    build_s = time.perf_counter() - started
    checkpoint.copy_sentence(Path(spec["model_dir"]), artifact)
    eager = recipe.model_copy(update={"compile": {}})
    loaded = runtime.wrap(built, eager, device, spec["threads"])
    rows, _ = prepare.load_ragged(Path(spec["data"]) / "inputs.npz")
    batch = prepare.collate(
        rows[:CHECK_ROWS], json.loads((Path(spec["data"]) / "meta.json").read_text("utf-8"))
    )
    np.savez(
        out / "check.npz", **{"logits": loaded.predict(batch), **{f"input.{k}": v for k, v in batch.items()}}
    )
    models.copy_tokenizer(Path(spec["model_dir"]), out / "tokenizer")
    return {"build_s": build_s, "files": hashes(out)}


def score(spec: dict[str, Any]) -> dict[str, Any]:
    """Reload the artifact, hold it against the built model and its recipe's expectations, then score it."""
    import numpy as np

    recipe, data = Recipe(**spec["recipe"]), Path(spec["data"])
    loaded = reload.open_artifact(spec, recipe)
    difference = reload.check(loaded, spec, recipe)
    audit = reload.audit(loaded, spec, recipe)
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
    meta = json.loads((data / "meta.json").read_text("utf-8"))
    started = time.perf_counter()
    second = data / "second.npz"
    if second.is_file():
        logits = similarity(loaded, rows, prepare.load_ragged(second)[0], meta)
    else:
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
    if not regression:
        values["suspicion"] = permutation_suspicion(logits, labels, meta["class_names"])
    return values


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


def similarity(loaded: Loaded, first: list[Batch], second: list[Batch], meta: dict[str, Any]) -> Any:
    """Cosine (rows, 1) of the embeddings of each row's two texts; not a number where an embedding is zero."""
    import numpy as np

    vectors = evaluate(loaded, first + second, meta, SCORE_BATCH)
    with np.errstate(invalid="ignore"):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.sum(vectors[: len(first)] * vectors[len(first) :], axis=1, keepdims=True)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _open_loop(spec: dict[str, Any]) -> dict[str, Any]:
    from qtool import open_loop  # imports numpy, whose time belongs to the import_s of a measuring child

    return open_loop.open_loop(spec)


STAGES = {
    "probe": probe,
    "fit": fitting.fit,
    "build": build,
    "score": score,
    "measure": measure.measure,
    "harness": measure.harness,
    "profile": profiling.profile,
    "tokenise": profiling.tokenise,
    "ceilings": lambda spec: ceilings.take(spec["threads"]),
    "open_loop": _open_loop,
}


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
        answer = _oom("Python ran out of memory", spec.get("device"))
    # whatever a library raises ends this trial, not the sweep; the traceback is in the log
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        answer = {"status": "failed", "error": message}
        if _is_oom(error):
            answer = _oom(message, spec.get("device"))
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(json.dumps(answer, allow_nan=False).encode())
    # interpreter shutdown of engine libraries can hang or crash, and there is nothing left to save
    os._exit(0)


def _oom(message: str, device: str | None) -> dict[str, Any]:
    # ONNX Runtime's arena has the same words for both kinds of memory
    signs = ("cuda", "cublas", "cudnn", "gpu", *(["bfcarena"] if device == "cuda" else []))
    on_gpu = any(sign in message.lower() for sign in signs)
    return {
        "status": "oom",
        "error": message,
        "next_step": "use a smaller batch, a recipe with smaller weights or a GPU with more memory; nvidia-smi shows"
        " who else holds it"
        if on_gpu
        else "use a smaller batch or a machine with more memory",
    }


OOM_SIGNS = (
    *("outofmemory", "out of memory", "can't allocate memory", "bad_alloc", "bad allocation"),
    *("cublas_status_alloc_failed", "cudnn_status_alloc_failed", "failed to allocate memory"),
)
"""PyTorch's and Python's own, and those of cuBLAS, cuDNN and ONNX Runtime's BFCArena, which have no class of theirs
(https://github.com/microsoft/onnxruntime/issues/16307)."""


def _is_oom(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(sign in text for sign in OOM_SIGNS)


if __name__ == "__main__":
    main()
