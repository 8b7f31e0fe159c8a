"""Turns a task's examples into the tokenised inputs that every later child reads as plain arrays.

Done once a sweep, in the probe child, so that a measuring process holds its engine and nothing else.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtool import checkpoint, metrics, tasks
from qtool.core import Batch, QtoolError, Task, Unavailable, content_hash
from qtool.models import Model
from qtool.tasks import _labels
from qtool.tasks._table import Table, read


@dataclass(frozen=True)
class Facts:
    """What `meta.json` says of prepared data; `class_order[i]` is the model's class of the task's class i."""

    rows: int
    truncated: int
    longest: int
    mean_tokens: float
    data_hash: str
    source: str
    notes: list[str]
    class_order: list[int]
    class_names: list[str]
    pad: dict[str, int]
    padding_side: str
    max_tokens: int
    seq_len: int | None
    calibration_rows: int
    calibration_hash: str | None


def make_task(options: dict[str, Any]) -> Task:
    """The task the command line names, with a user's own columns and metric filled in.

    Raises QtoolError for an unknown task or metric and for columns given to a task that has its own.
    """
    task, _ = tasks.find(options["task"])
    own = {key: options.get(key) for key in ("text", "text_pair", "label") if options.get(key)}
    if own and task.name != "text":
        raise QtoolError(
            f"task {task.name} knows its columns; --{next(iter(own)).replace('_', '-')} is for --task text."
        )
    if (
        task.name == "text"
        and options.get("data")
        and not (own.get("text") and (own.get("label") or not options["score"]))
    ):
        raise QtoolError("task text needs --text COLUMN and --label COLUMN to know your table's columns.")
    if len(set(own.values())) < len(own):
        twice = next(name for name in own.values() if list(own.values()).count(name) > 1)
        raise QtoolError(
            f"column '{twice}' is named twice among --text, --text-pair and --label. Name another."
        )
    if options.get("metric"):
        metrics.check(options["metric"])
        own |= {"score": options["metric"], "metrics": [options["metric"]]}
    if task.name == "text" and not options["score"]:
        own.setdefault("label", "")
    return task.model_copy(update=own)


def read_tables(options: dict[str, Any], task: Task) -> tuple[Table, list[int], Table | None]:
    """The scored rows in seeded random order, their numbers in the file, and the rows to calibrate on.

    The rows are shuffled with the seed before `limit` cuts them, the same for every recipe. Calibration rows
    never are among the scored ones; None when no recipe asks for them or there are none.
    Raises QtoolError for anything wrong with the files. Loads no model and no tokenizer.
    """
    _, file = tasks.find(task.name)
    data = Path(options["data"]) if options.get("data") else None
    try:
        whole = file.load(task, options.get("split"), data)
    except Unavailable as error:
        raise QtoolError(
            f"task {task.name} cannot be scored: {error}. Choose another --split or --data."
        ) from None
    rows = list(range(len(whole)))
    random.Random(options["seed"]).shuffle(rows)
    rows = rows[: options["limit"]]
    table = whole.take(rows)
    return table, rows, _calibration(options, task, file, table)


def check_task(options: dict[str, Any], task: Task, folder: Path) -> None:
    """Raises QtoolError where `folder` holds a sentence-embedding model and the task's answer is no similarity."""
    if not options["score"] or checkpoint.read_sentence(folder) is None:
        return
    if task.text_pair is None or task.score not in metrics.REGRESSION:
        raise QtoolError(
            f"the model embeds sentences (it has {checkpoint.MODULES}), and task {task.name} does not rate the"
            " similarity of two texts. Use --task stsb, or --no-score."
        )


def prepare(
    options: dict[str, Any],
    task: Task,
    model: Model,
    tables: tuple[Table, list[int], Table | None],
    out: Path,
) -> Facts:
    """Match labels and tokenise; write `inputs.npz`, `calibration.npz`, `texts.json` and `meta.json` into `out`.

    A sentence-embedding model reads the two texts of a pair apart: the second ones go to `second.npz`, only the
    first ones are timed and calibrate.
    Raises QtoolError for labels the model does not have and lengths it does not take.
    """
    import numpy as np
    from transformers import AutoTokenizer

    table, rows, calibration_table = tables
    notes = list(table.notes)
    class_order = list(range(len(model.id2label)))
    labels = None
    if options["score"]:
        labels, class_order, assumed = _labels_of(table, task, model)
        notes += assumed
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    max_tokens = min(options["seq_len"] or model.max_tokens, model.max_tokens)
    if options["seq_len"] and options["seq_len"] > model.max_tokens:
        raise QtoolError(
            f"--seq-len {options['seq_len']} is longer than the model takes ({model.max_tokens} tokens)."
        )
    pairs, second = table.pairs, None
    if model.embeds:
        table, second, calibration_table = _apart(table, calibration_table)
    inputs, truncated = tokenise(tokenizer, table, max_tokens)
    calibration = tokenise(tokenizer, calibration_table, max_tokens)[0] if calibration_table else None
    lengths = [len(row) for row in inputs["input_ids"]]
    second_inputs, cut = tokenise(tokenizer, second, max_tokens) if second else ({}, 0)
    facts = Facts(
        rows=len(table),
        truncated=truncated + cut,
        longest=max(lengths),
        mean_tokens=sum(lengths) / len(lengths),
        data_hash=content_hash([table.texts, pairs, [str(label) for label in table.labels or []], rows]),
        source=table.source,
        notes=notes,
        class_order=class_order,
        class_names=list(task.labels or [model.id2label[index] for index in class_order]),
        pad={
            "input_ids": next((i for i in (tokenizer.pad_token_id, model.pad_id) if i is not None), 0),
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        },
        padding_side=tokenizer.padding_side,
        max_tokens=max_tokens,
        seq_len=options["seq_len"],
        calibration_rows=len(calibration_table) if calibration_table else 0,
        calibration_hash=content_hash(calibration) if calibration else None,
    )
    if facts.truncated:
        texts = len(table) + (len(second) if second else 0)
        notes.append(f"{facts.truncated} of {texts} texts were cut to {max_tokens} tokens")
    out.mkdir(parents=True, exist_ok=True)
    extra = {"ids": np.asarray(rows, np.int64)}
    if labels is not None:
        extra["labels"] = np.asarray(labels)
    save_ragged(out / "inputs.npz", inputs, extra)
    if second_inputs:
        save_ragged(out / "second.npz", second_inputs, {})
    if calibration:
        save_ragged(out / "calibration.npz", calibration, {})
    content = {"texts": table.texts, "pairs": table.pairs} | ({"second": second.texts} if second else {})
    (out / "texts.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    (out / "meta.json").write_text(json.dumps(asdict(facts), ensure_ascii=False), "utf-8")
    return facts


def _labels_of(table: Table, task: Task, model: Model) -> tuple[list[Any], list[int], list[str]]:
    """Labels in the task's class order (numbers for a regression), that order, and notes."""
    assert table.labels is not None
    regression = task.score in metrics.REGRESSION
    outputs = len(model.id2label)
    if regression != (outputs == 1):
        needs = "one real-valued output (num_labels 1)" if regression else "classes"
        found = (
            "a single output"
            if outputs == 1
            else f"{outputs} classes ({', '.join(model.id2label.values())[:120]})"
        )
        remedy = "--metric" if task.name == "text" else "model or --task"
        raise QtoolError(
            f"task {task.name}: metric {task.score} needs a model with {needs}; this one has {found}. Choose another {remedy}."
        )
    if regression:
        return [_rating(label, task) for label in table.labels], [0], []
    mapped, notes = _labels.match(table.labels, task.labels, model.id2label, table.kinds)
    order = list(range(outputs))
    if task.labels is not None:
        first, _ = _labels.match(list(task.labels), task.labels, model.id2label)
        rest = [index for index in order if index not in first]
        order = first + rest
        if rest:
            names = ", ".join(model.id2label[index] for index in rest)
            notes.append(f"the task has no class like the model's {names}: answering so counts as wrong")
    if task.score == "f1" and outputs != 2:
        raise QtoolError(f"metric f1 needs two classes; the model has {outputs}. Use --metric accuracy.")
    return [order.index(index) for index in mapped], order, notes


def _rating(label: Any, task: Task) -> float:
    try:
        value = float(label)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise QtoolError(
            f"metric {task.score} needs numbers as labels, found {label!r}. Choose another --label or --metric."
        )
    return value


def _calibration(options: dict[str, Any], task: Task, file: Any, scored: Table) -> Table | None:
    wanted = options["calibration_rows"]
    if options.get("calibration"):
        path = Path(options["calibration"])
        if hasattr(file, "read_texts"):
            pool = file.read_texts(task, path)
        else:
            pool = read(path, task.text, task.text_pair, None)
    elif not wanted:
        return None
    else:
        try:
            pool = file.load(task, "train", Path(options["data"]) if options.get("data") else None)
        except Unavailable:
            return None
    taken = set(zip(scored.texts, scored.pairs or scored.texts, strict=True))
    free = [
        row for row in range(len(pool)) if (pool.texts[row], (pool.pairs or pool.texts)[row]) not in taken
    ]
    if not free and options.get("calibration"):
        raise QtoolError(
            f"every row of --calibration {options['calibration']} is among the scored rows. Give other rows."
        )
    random.Random(options["seed"]).shuffle(free)
    return pool.take(free[:wanted]) if free and wanted else None


def _apart(table: Table, calibration: Table | None) -> tuple[Table, Table | None, Table | None]:
    """The rows' first texts, their second ones, and the calibration rows' first ones that are neither of them."""
    second = replace(table, texts=table.pairs, pairs=None) if table.pairs is not None else None
    if calibration is not None:
        scored = {*table.texts, *(table.pairs or [])}
        free = [row for row, text in enumerate(calibration.texts) if text not in scored]
        calibration = replace(calibration.take(free), pairs=None) if free else None
    return replace(table, pairs=None), second, calibration


def tokenise(tokenizer: Any, table: Table, max_tokens: int) -> tuple[dict[str, list[Any]], int]:
    """Token ids by input name at real length, and how many texts were longer than `max_tokens`."""
    pairs = table.pairs
    free = tokenizer(table.texts, pairs, truncation=False, add_special_tokens=True, verbose=False)
    truncated = sum(len(ids) > max_tokens for ids in free["input_ids"])
    if not truncated:
        return {name: list(rows) for name, rows in free.items()}, 0
    cut = tokenizer(table.texts, pairs, truncation=True, max_length=max_tokens)
    return {name: list(rows) for name, rows in cut.items()}, truncated


def save_ragged(path: Path, inputs: dict[str, list[Any]], extra: dict[str, Any]) -> None:
    """Rows of different lengths as one flat array a name, with the rows' lengths."""
    import numpy as np

    lengths = np.asarray([len(row) for row in inputs["input_ids"]], np.int64)
    flat = {
        name: np.concatenate([np.asarray(row, np.int64) for row in rows]) for name, rows in inputs.items()
    }
    np.savez(path, lengths=lengths, **{f"input.{name}": array for name, array in flat.items()}, **extra)


def load_ragged(path: Path) -> tuple[list[Batch], dict[str, Any]]:
    """One batch of a single row for each example, and the other arrays by name."""
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    ends = np.cumsum(arrays.pop("lengths"))
    flat = {
        name.removeprefix("input."): arrays.pop(name) for name in list(arrays) if name.startswith("input.")
    }
    split = {name: np.split(array, ends[:-1]) for name, array in flat.items()}
    rows = [{name: split[name][row][None, :] for name in split} for row in range(len(ends))]
    return rows, arrays


def collate(rows: list[Batch], meta: dict[str, Any], length: int | None = None) -> Batch:
    """Pad rows of shape (1, tokens) to the longest, or to `length`, as the tokenizer would: (rows, tokens)."""
    import numpy as np

    longest = length or max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for name in rows[0]:
        out = np.full((len(rows), longest), meta["pad"].get(name, 0), np.int64)
        for index, row in enumerate(rows):
            size = row[name].shape[1]
            start = longest - size if meta["padding_side"] == "left" else 0
            out[index, start : start + size] = row[name][0]
        batch[name] = out
    return batch
