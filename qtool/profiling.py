"""The profiling stages of a child: a request in its parts, texts in bulk, operators; and the tokenizer alone.

A request begins with texts and ends with classes. Gives samples only; what they mean is the parent's to say.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qtool import contention, measure, parts, plugins, prepare, reload, timing
from qtool.core import Batch, Loaded, Part, QtoolError, Recipe

MIN_TIME_S = 2.0
MAX_TIME_S = 60.0
PLAIN_CALLS = 64
BULK_TEXTS = 256
TRACED_CALLS = 10
"""A trace of more calls of a large model is too long to look at."""


def profile(spec: dict[str, Any]) -> dict[str, Any]:
    """Requests of each batch size, all texts in bulk, and the operators of some calls of the first size."""
    from transformers import AutoTokenizer

    recipe, data, sizes = Recipe(**spec["recipe"]), Path(spec["data"]), spec["batch_sizes"]
    rows, _ = prepare.load_ragged(data / "inputs.npz")
    meta = json.loads((data / "meta.json").read_text("utf-8"))
    loaded = reload.open_artifact(spec, recipe)
    run, absent = _parts_of(loaded)
    tokenizer = AutoTokenizer.from_pretrained(spec["model_dir"])
    if all(measure.tokenize_as_served(tokenizer, meta, size) is None for size in sizes):
        raise QtoolError(
            "its tokenizer has no padding token, which these batch sizes and --seq-len need: profile with"
            " --batch-size 1 at the texts' own lengths"
        )
    annotate = _nvtx(spec["device"])
    splits, before = [], contention.snapshot()
    for size in sizes:
        batches = measure.timed_batches(rows, meta, size)
        warm = timing.warm_up(loaded.predict, batches, max_time_s=measure.WARM_UP_MAX_S)
        found = {"batch_size": size, "stable": warm.stable, "tokens_by_call": _tokens(batches)}
        tokenize = measure.tokenize_as_served(tokenizer, meta, size)
        if tokenize is None:
            found["reason"] = "the tokenizer has no padding token"
        else:
            texts = measure.timed_texts(data, size, len(batches))
            found |= _requests(loaded, run, texts, tokenize, annotate)
        splits.append(found)
    disturbance = contention.between(before, contention.snapshot())
    bulk = _bulk(run, tokenizer, data, meta, max(sizes))
    layers = _layers(spec, recipe, loaded, measure.timed_batches(rows, meta, sizes[0])[:TRACED_CALLS])
    reload.audit(loaded, spec, recipe)
    reload.check(loaded, {**spec, "batch_size": sizes[0]}, recipe)
    return {
        "splits": splits,
        "absent": absent,
        "bulk": bulk,
        "lengths": [row["input_ids"].shape[1] for row in rows],
        "layers": layers,
        "contention": disturbance,
        "threads": loaded.threads,
        **timing.clock_facts(),
    }


def _parts_of(loaded: Loaded) -> tuple[Callable[[Batch, Part], Any], dict[str, str]]:
    """The call in its parts, and why some are missing; an undivided runtime's call is its model's part."""
    if loaded.split is not None:
        return loaded.split.run, loaded.split.absent

    def run(batch: Batch, part: Part) -> Any:
        with part("model"):
            return loaded.predict(batch)

    why = "this runtime does not tell the parts of its call"
    return run, dict.fromkeys(("make_tensors", "copy_in", "copy_out"), why)


def _requests(
    loaded: Loaded,
    run: Callable[[Batch, Part], Any],
    texts: Sequence[measure.Texts],
    tokenize: Callable[[measure.Texts], Batch],
    annotate: Part | None,
) -> dict[str, Any]:
    """Samples (s) of each part and of the whole, and of whole requests that nobody takes apart.

    The latter say what looking costs; half of them come first and half last, so that a drift falls on both.
    """
    window = {"min_time_s": MIN_TIME_S / 4, "min_calls": PLAIN_CALLS // 2, "max_time_s": MAX_TIME_S}
    whole = functools.partial(
        timing.time_end_to_end,
        texts,
        tokenize,
        loaded.predict,
        lambda logits: logits.argmax(axis=1),
        **window,
    )
    plain = whole()["end_to_end_s"]
    samples = parts.time_requests(
        texts,
        tokenize,
        run,
        annotate,
        min_time_s=MIN_TIME_S,
        min_calls=measure.CALLS,
        max_time_s=MAX_TIME_S,
    )
    return {"samples": samples, "plain_s": plain + whole()["end_to_end_s"]}


def _bulk(
    run: Callable[[Batch, Part], Any], tokenizer: Any, data: Path, meta: dict[str, Any], size: int
) -> dict[str, Any]:
    """Seconds by part for all texts at once: one call of the tokenizer, then batches in order and sorted."""
    content = json.loads((data / "texts.json").read_text("utf-8"))
    texts = content["texts"][:BULK_TEXTS]
    pairs = content["pairs"][:BULK_TEXTS] if content["pairs"] else None
    encode = functools.partial(_encode, tokenizer, texts, pairs, meta)
    found: dict[str, Any] = {"texts": len(texts), "batch_size": size, "order": {}}
    for order in ("as they come", "by length"):
        passes = parts.time_bulk(
            encode,
            lambda rows: prepare.collate(rows, meta, meta["seq_len"]),
            run,
            size,
            by_length=order == "by length",
            min_time_s=MIN_TIME_S,
            max_time_s=MAX_TIME_S / 4,
        )
        found["order"][order] = passes
    return found


def _encode(tokenizer: Any, texts: list[str], pairs: list[str] | None, meta: dict[str, Any]) -> list[Batch]:
    """Rows (1, tokens) of all texts, tokenised in one call."""
    import numpy as np

    made = tokenizer(texts, pairs, truncation=True, max_length=meta["max_tokens"])
    names = set(tokenizer.model_input_names) & made.keys()
    return [
        {name: np.asarray([made[name][index]], np.int64) for name in names} for index in range(len(texts))
    ]


def _layers(spec: dict[str, Any], recipe: Recipe, loaded: Loaded, batches: list[Batch]) -> dict[str, Any]:
    """The engine's own count of where one pass over `batches` goes, longest first."""
    from qtool.runtimes._layers import Job

    operators = getattr(plugins.load("runtimes", recipe.runtime), "operators", None)
    if operators is None:
        return {"calls": 0, "rows": [], "reason": f"runtime {recipe.runtime} counts no operators"}
    trace = Path(spec["trace"])
    artifact = Path(spec["artifact"]) / "model"
    job = Job(artifact, recipe, spec["device"], spec["threads"], batches, trace)
    found = sorted(operators(loaded, job), key=lambda layer: -layer.total_s)
    return {"calls": len(batches), "rows": [vars(layer) for layer in found], "trace": trace.is_file()}


def _nvtx(device: str) -> Part | None:
    """Ranges that Nsight Systems shows (`nsys profile --trace=cuda,nvtx`); only on CUDA, and with PyTorch."""
    if device != "cuda" or importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.nvtx.range


def _tokens(batches: list[Batch]) -> list[int]:
    return [int(batch["input_ids"].size) for batch in batches]


def tokenise(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of passes over the texts: each text in a call of its own, and all of them in one call.

    The tokenizer's threads are a pool that a process makes once, so each number of threads needs a process.
    With `slow`, the Python tokenizer of the same checkpoint is timed as well.
    """
    os.environ["RAYON_NUM_THREADS"] = str(spec["tokenizer_threads"])
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if spec["tokenizer_threads"] > 1 else "false"
    from transformers import AutoTokenizer

    meta = json.loads((Path(spec["data"]) / "meta.json").read_text("utf-8"))
    content = json.loads((Path(spec["data"]) / "texts.json").read_text("utf-8"))
    texts = content["texts"][:BULK_TEXTS]
    pairs = content["pairs"][:BULK_TEXTS] if content["pairs"] else None
    tokenizer = AutoTokenizer.from_pretrained(spec["model_dir"])
    kind = "fast" if tokenizer.is_fast else "slow"
    found: dict[str, Any] = {
        "texts": len(texts),
        "used": kind,
        "class": type(tokenizer).__name__,
        "passes": {kind: _tokenise_passes(tokenizer, texts, pairs, meta)},
    }
    if spec["slow"] and tokenizer.is_fast:
        slow, why = slow_twin(tokenizer, Path(spec["model_dir"]))
        found["slow_reason"] = why
        if slow is not None:
            own = _ids(tokenizer, texts, pairs, meta)
            other = _ids(slow, texts, pairs, meta)
            found["differing_texts"] = sum(a != b for a, b in zip(own, other, strict=True))
            found["passes"]["slow"] = _tokenise_passes(slow, texts, pairs, meta)
    return found


def slow_twin(tokenizer: Any, folder: Path) -> tuple[Any, str | None]:
    """The Python tokenizer of a fast one's checkpoint; None, and why, where it has the fast one alone.

    transformers 5 keeps few of them, in modules called after the fast one's with `_legacy` behind it.
    """
    kind = type(tokenizer)
    module = f"{kind.__module__}_legacy"
    if not kind.__module__.startswith("transformers.models.") or importlib.util.find_spec(module) is None:
        return None, f"transformers has {kind.__name__} as a fast tokenizer only"
    twin = getattr(importlib.import_module(module), f"{kind.__name__}Legacy")
    for name in twin.vocab_files_names.values():
        if not (folder / name).is_file():
            return (
                None,
                f"the checkpoint has a fast tokenizer only: the slow one reads {name}, and there is none",
            )
    return twin.from_pretrained(folder, local_files_only=True), None


def _ids(tokenizer: Any, texts: list[str], pairs: list[str] | None, meta: dict[str, Any]) -> list[Any]:
    return tokenizer(texts, pairs, truncation=True, max_length=meta["max_tokens"])["input_ids"]


def _tokenise_passes(
    tokenizer: Any, texts: list[str], pairs: list[str] | None, meta: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of each pass over all texts: `one` text a call, and `all` in one call."""
    both = list(zip(texts, pairs or [None] * len(texts), strict=True))
    encode = functools.partial(tokenizer, truncation=True, max_length=meta["max_tokens"])

    def one_by_one(_: Any) -> None:
        for text, pair in both:
            encode(text, pair)

    def at_once(_: Any) -> None:
        encode(texts, pairs)

    found = {}
    for name, work in (("one", one_by_one), ("all", at_once)):
        work(None)  # the first pass fills caches and starts the threads
        found[name] = timing.time_calls(
            work, [None], min_time_s=MIN_TIME_S / 4, min_calls=5, max_time_s=MAX_TIME_S / 4
        )
    return found
