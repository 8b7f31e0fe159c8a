"""The built-in demo table: 1,000 movie-review snippets, as an ordinary table that ships with qtool."""

from __future__ import annotations

from pathlib import Path

from qtool import demo
from qtool.core import QtoolError, Task
from qtool.tasks._table import Table, read

TASKS = (
    Task(
        name="demo",
        description="balanced movie-review snippets (VADER, MIT licence): negative or positive",
        score="accuracy",
        metrics=["accuracy"],
        text="sentence",
        label="label",
        labels=["negative", "positive"],
        source="ships with qtool",
    ),
)


def load(task: Task, split: str | None, data: Path | None) -> Table:
    """The evaluation table, or the calibration rows for the training split."""
    if data is not None:
        raise QtoolError(
            "task demo ships with qtool and takes no --data. Use --task text for your own table."
        )
    if split not in (None, "train", "validation", "dev"):
        raise QtoolError(f"task demo has no split '{split}'. Known: train, validation.")
    path = demo.CALIBRATION_TABLE if split == "train" else demo.EVAL_TABLE
    return read(path, task.text, task.text_pair, task.label)


def reachable(task: Task) -> tuple[bool, str]:
    return True, "ships with qtool"
