"""The user's own table: any CSV, TSV, JSON-lines or Parquet file with a text and a label column."""

from __future__ import annotations

from pathlib import Path

from qtool.core import QtoolError, Task, Unavailable
from qtool.tasks._table import SUFFIXES, Table, read

TASKS = (
    Task(
        name="text",
        description="your own table of texts and labels",
        score="accuracy",
        metrics=["accuracy"],
        text="text",
        label="label",
        source=f"--data FILE ({', '.join(SUFFIXES)}) with --text COLUMN [--text-pair COLUMN] --label COLUMN [--metric NAME]",
    ),
)


def load(task: Task, split: str | None, data: Path | None) -> Table:
    """The whole file. Raises QtoolError when it is missing or wrong, Unavailable for a training split."""
    if data is None:
        raise QtoolError(
            "task text reads your own table: give --data FILE, --text COLUMN and --label COLUMN."
        )
    if split == "train":
        raise Unavailable("a table of one's own has no training split")
    if split is not None:
        raise QtoolError(
            f"a table has no splits, found --split {split}. Give the split's own file with --data."
        )
    return read(data, task.text, task.text_pair, task.label or None)


def reachable(task: Task) -> tuple[bool, str]:
    return True, "read from your disk"
