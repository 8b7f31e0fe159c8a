"""Finds a task by name in the files of this folder. A file holds `TASKS`, `load(task, split, data)` and
`reachable(task)`; also `read_texts(task, path)` where the columns of its tables have more names than the task's."""

from __future__ import annotations

from types import ModuleType

from qtool import plugins
from qtool.core import QtoolError, Task, did_you_mean


def find_all() -> dict[str, tuple[Task, ModuleType]]:
    """Every task by name, with the file that loads it."""
    files = [plugins.load("tasks", name) for name in plugins.names("tasks")]
    return {task.name: (task, file) for file in files for task in file.TASKS}


def find(name: str) -> tuple[Task, ModuleType]:
    """One task. Raises QtoolError with a suggestion when there is none of that name."""
    known = find_all()
    if name not in known:
        raise QtoolError(f"no task is called '{name}'.{did_you_mean(name, known)}")
    return known[name]
