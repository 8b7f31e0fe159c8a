"""GLUE tasks, from the hub's `nyu-mll/glue` or from a folder or file in GLUE's own TSV form.

Wang et al. 2018, "GLUE", https://arxiv.org/abs/1804.07461: the tasks, their metrics and their rows. Labels come
out as class numbers in the hub copy's order (STS-B: as ratings from 0 to 5), whatever form they were read from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtool import host
from qtool.core import QtoolError, Task, Unavailable, did_you_mean
from qtool.tasks._labels import find, number_of
from qtool.tasks._table import Table, read

HUB = "nyu-mll/glue"
NLI = ["entailment", "not_entailment"]
HIGHEST_RATING = 5.0


@dataclass(frozen=True)
class _Form:
    """How GLUE lays a task out: `text`, `pair` and `label` are the columns' names in its files where they differ
    from the hub copy's, `train` and `dev` the number of rows of the official splits."""

    folder: str
    train: int
    dev: int
    text: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    headerless: tuple[str, ...] = ()
    file: str = "dev.tsv"
    hub: str | None = None
    hub_dev: str = "validation"


_MNLI = _Form(
    "MNLI",
    392_702,
    9_815,
    text=("sentence1",),
    pair=("sentence2",),
    label=("gold_label",),
    file="dev_matched.tsv",
    hub="mnli",
    hub_dev="validation_matched",
)
FORMS = {
    "sst2": _Form("SST-2", 67_349, 872),
    "mrpc": _Form("MRPC", 3_668, 408, text=("#1 String",), pair=("#2 String",), label=("Quality",)),
    "cola": _Form("CoLA", 8_551, 1_043, headerless=("source", "label", "mark", "sentence")),
    "rte": _Form("RTE", 2_490, 277),
    "wnli": _Form("WNLI", 635, 71),
    "qnli": _Form("QNLI", 104_743, 5_463),
    "qqp": _Form("QQP", 363_846, 40_430, label=("is_duplicate",)),
    "mnli": _MNLI,
    "mnli-mismatched": replace(_MNLI, dev=9_832, file="dev_mismatched.tsv", hub_dev="validation_mismatched"),
    "stsb": _Form("STS-B", 5_749, 1_500, label=("score",)),
}


def _task(
    name: str,
    description: str,
    metrics: tuple[str, ...],
    columns: tuple[str, ...],
    labels: list[str] | None,
) -> Task:
    form = FORMS[name]
    return Task(
        name=name,
        description=description,
        score=metrics[0],
        metrics=list(metrics),
        text=columns[0],
        text_pair=columns[1] if len(columns) > 1 else None,
        label="label",
        labels=labels,
        source=f"hub {HUB} ({form.hub or name}), --data DIR with {form.folder}/{form.file}, or --data FILE in that form",
    )


TASKS = (
    _task(
        "sst2",
        "Stanford Sentiment Treebank: is a movie-review sentence negative or positive",
        ("accuracy",),
        ("sentence",),
        ["negative", "positive"],
    ),
    _task(
        "mrpc",
        "Microsoft Research Paraphrase Corpus: do two news sentences say the same",
        ("f1", "accuracy"),
        ("sentence1", "sentence2"),
        ["not_equivalent", "equivalent"],
    ),
    _task(
        "cola",
        "Corpus of Linguistic Acceptability: is a sentence grammatical English",
        ("matthews_correlation",),
        ("sentence",),
        ["unacceptable", "acceptable"],
    ),
    _task(
        "rte",
        "Recognizing Textual Entailment: does the first text entail the second",
        ("accuracy",),
        ("sentence1", "sentence2"),
        NLI,
    ),
    _task(
        "wnli",
        "Winograd NLI: is the sentence with its pronoun replaced entailed",
        ("accuracy",),
        ("sentence1", "sentence2"),
        NLI[::-1],
    ),
    _task(
        "qnli",
        "Question NLI: does the sentence hold the answer to the question",
        ("accuracy",),
        ("question", "sentence"),
        NLI,
    ),
    _task(
        "qqp",
        "Quora Question Pairs: do two questions ask the same",
        ("f1", "accuracy"),
        ("question1", "question2"),
        ["not_duplicate", "duplicate"],
    ),
    *(
        _task(
            name,
            f"Multi-Genre NLI, {genres}: entailment, neutral or contradiction",
            ("accuracy",),
            ("premise", "hypothesis"),
            ["entailment", "neutral", "contradiction"],
        )
        for name, genres in (
            ("mnli", "genres of the training data"),
            ("mnli-mismatched", "genres not in the training data"),
        )
    ),
    _task(
        "stsb",
        "Semantic Textual Similarity Benchmark: how alike are two sentences, from 0 to 5",
        ("spearman", "pearson"),
        ("sentence1", "sentence2"),
        None,
    ),
)


def load(task: Task, split: str | None, data: Path | None) -> Table:
    """The examples of a split (validation unless named); `data` is a GLUE folder or one file, else the hub is asked.

    Another number of rows than the official split's is a note of the table.
    Raises QtoolError for a split, folder or row that is wrong, Unavailable when there is no such split in `data`.
    """
    form = FORMS[task.name]
    if data is not None and data.is_file():
        if split == "train":
            raise Unavailable(f"--data {data} is one file, without a training split")
        if split is not None:
            raise QtoolError(f"one file has no splits, found --split {split}. Give the split's own file.")
        return _counted(_read(task, data, labelled=True), "validation", form.dev)
    train = _split(task, split) == "train"
    table = _from_folder(task, train, data) if data is not None else _from_hub(task, train)
    return _counted(table, "training" if train else "validation", form.train if train else form.dev)


def read_texts(task: Task, path: Path) -> Table:
    """Only the texts of one file, whose columns have GLUE's names or the hub copy's."""
    return _read(task, path, labelled=False)


def reachable(task: Task) -> tuple[bool, str]:
    """Whether the hub can be asked now, and a sentence saying so."""
    return host.hub_status()


def _split(task: Task, split: str | None) -> str:
    form = FORMS[task.name]
    known = {
        "train": "train",
        "validation": "validation",
        "dev": "validation",
        form.hub_dev: "validation",
        form.file.removesuffix(".tsv"): "validation",
    }
    if split is None or split in known:
        return known[split or "validation"]
    if split.startswith("test"):
        raise QtoolError("GLUE's test splits have no labels. Use --split validation or --split train.")
    if form.hub and split in ("validation_matched", "validation_mismatched"):
        other = "mnli" if split == "validation_matched" else "mnli-mismatched"
        raise QtoolError(f"split {split} belongs to another task. Use --task {other}.")
    raise QtoolError(f"task {task.name} has no split '{split}'.{did_you_mean(split, known)}")


def _counted(table: Table, split: str, expected: int) -> Table:
    if len(table) == expected:
        return table
    note = (
        f"{table.source} has {len(table)} rows, the official {split} split {expected}:"
        " scores are not comparable with published ones"
    )
    return replace(table, notes=(*table.notes, note))


def _read(task: Task, path: Path, *, labelled: bool, leave_out_broken: bool = False) -> Table:
    form = FORMS[task.name]
    return read(
        path,
        (*form.text, task.text),
        (*form.pair, task.text_pair) if task.text_pair else None,
        (*form.label, task.label) if labelled else None,
        headerless=form.headerless,
        parse=_parser(task),
        # the questions that Quora released hold empty ones, and the hub's copy keeps them
        empty_texts=task.name == "qqp",
        leave_out_broken=leave_out_broken,
    )


def _parser(task: Task) -> Callable[[Any], Any]:
    """What turns a label as written into a class number, or into a rating for STS-B."""
    names = task.labels

    def rating(label: Any) -> float:
        try:
            value = float(label)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value <= HIGHEST_RATING:
            raise ValueError("a rating from 0 to 5")
        # three decimals are written; the hub's float32 column gives 3.799999952316284 for 3.800
        return round(value, 3)

    def class_number(label: Any) -> int:
        assert names is not None
        number = number_of(label)
        place = find(str(label), names) if number is None else number
        if place is None or not 0 <= place < len(names):
            raise ValueError(" or ".join(f"{index} ({name})" for index, name in enumerate(names)))
        return place

    return rating if names is None else class_number


def _from_folder(task: Task, train: bool, data: Path) -> Table:
    form = FORMS[task.name]
    if not data.is_dir():
        raise QtoolError(
            f"there is no {data}; --data of task {task.name} is a folder or a file in GLUE's TSV form."
        )
    other = next((f.folder for f in FORMS.values() if f.folder == data.resolve().name), form.folder)
    folder = next((f for f in (data / form.folder, data) if (f / form.file).is_file()), None)
    if folder is None or (folder == data and other != form.folder):
        raise QtoolError(
            f"no {form.folder}/{form.file} in {data}. Give the folder that holds {form.folder}/, or the file."
        )
    path = folder / ("train.tsv" if train else form.file)
    if not path.is_file():
        raise Unavailable(f"{path} does not exist")
    # some questions of QQP's own training file are broken over two lines; the hub's copy leaves them out too
    return _read(task, path, labelled=True, leave_out_broken=train and task.name == "qqp")


def _from_hub(task: Task, train: bool) -> Table:
    import datasets
    from datasets.exceptions import DatasetsError

    form = FORMS[task.name]
    name, split = form.hub or task.name, "train" if train else form.hub_dev
    if not host.hub_switched_off():
        up, sentence = host.hub_status()
        if not up:
            raise QtoolError(
                f"task {task.name} comes from the hub, {sentence}. Give --data DIR with {form.folder}/{form.file}."
            )
    try:
        rows = datasets.load_dataset(HUB, name, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # RuntimeError: huggingface_hub 1.16
        first = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise QtoolError(
            f"cannot load {HUB} ({name}, {split}): {first}. Give --data DIR with {form.folder}/{form.file}."
        ) from None
    parse, labels = _parser(task), []
    for row, label in enumerate(rows[task.label]):
        try:
            labels.append(parse(label))
        except ValueError as error:
            raise QtoolError(
                f"{HUB} ({name}, {split}) row {row}: label {label!r}, expected {error}."
            ) from None
    pairs = list(rows[task.text_pair]) if task.text_pair else None
    return Table(list(rows[task.text]), pairs, labels, f"{HUB} {name} {split}")
