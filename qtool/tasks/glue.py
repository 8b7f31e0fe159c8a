"""GLUE tasks, from the hub's `nyu-mll/glue` or from a folder in GLUE's own TSV form.

Wang et al. 2018, "GLUE", https://arxiv.org/abs/1804.07461.
"""

from __future__ import annotations

from pathlib import Path

from qtool import host
from qtool.core import QtoolError, Task, Unavailable, did_you_mean
from qtool.tasks._table import Table, read

HUB = "nyu-mll/glue"
FOLDERS = {"sst2": "SST-2"}
FILES = {"train": "train.tsv", "validation": "dev.tsv"}

TASKS = (
    Task(
        name="sst2",
        description="Stanford Sentiment Treebank: is a movie-review sentence negative or positive",
        score="accuracy",
        metrics=["accuracy"],
        text="sentence",
        label="label",
        labels=["negative", "positive"],
        source=f"hub {HUB} (sst2), or --data DIR with SST-2/dev.tsv",
    ),
)


def load(task: Task, split: str | None, data: Path | None) -> Table:
    """The examples of a split (validation unless named); `data` is a GLUE folder, else the hub is asked.

    Raises QtoolError for a split, folder or row that is wrong, Unavailable when a folder lacks the split.
    """
    split = {"dev": "validation", None: "validation"}.get(split, split)
    if split == "test":
        raise QtoolError("GLUE's test splits have no labels. Use --split validation or --split train.")
    if split not in FILES:
        raise QtoolError(f"task {task.name} has no split '{split}'.{did_you_mean(str(split), FILES)}")
    return _from_folder(task, split, data) if data is not None else _from_hub(task, split)


def reachable(task: Task) -> tuple[bool, str]:
    """Whether the hub can be asked now, and a sentence saying so."""
    return host.hub_status()


def _from_folder(task: Task, split: str, data: Path) -> Table:
    if not data.is_dir():
        raise QtoolError(
            f"--data {data} is not a folder; task {task.name} reads a folder in GLUE's TSV form, or use --task text for a table."
        )
    folder = next((f for f in (data / FOLDERS[task.name], data) if (f / FILES["validation"]).is_file()), None)
    if folder is None:
        raise QtoolError(
            f"no {FOLDERS[task.name]}/dev.tsv in {data}. Give the folder that holds {FOLDERS[task.name]}/."
        )
    path = folder / FILES[split]
    if not path.is_file():
        raise Unavailable(f"{path} does not exist")
    return read(path, task.text, task.text_pair, task.label)


def _from_hub(task: Task, split: str) -> Table:
    import datasets
    from datasets.exceptions import DatasetsError

    if not host.hub_switched_off():
        up, sentence = host.hub_status()
        if not up:
            raise QtoolError(
                f"task {task.name} comes from the hub, {sentence}. Give --data DIR with {FOLDERS[task.name]}/dev.tsv."
            )
    try:
        rows = datasets.load_dataset(HUB, task.name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        first = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise QtoolError(
            f"cannot load {HUB} ({task.name}, {split}): {first}. Give --data DIR with {FOLDERS[task.name]}/dev.tsv."
        ) from None
    pairs = list(rows[task.text_pair]) if task.text_pair else None
    return Table(list(rows[task.text]), pairs, list(rows[task.label]), f"{HUB} {task.name} {split}")
