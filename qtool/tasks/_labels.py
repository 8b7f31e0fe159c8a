"""Matches a table's labels with the classes of a checkpoint, by name and never by luck."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qtool.core import QtoolError


def match(
    found: Sequence[Any], documented: Sequence[str] | None, id2label: dict[int, str]
) -> tuple[list[int], list[str]]:
    """Class index of the model for each label of the table, and notes on what was assumed.

    `found` are the table's labels as written, `documented` the task's names in the order of its class numbers.
    Whole numbers are class numbers (in a table without documented names only where 0 is among them, with a
    note); words are matched with `id2label` whatever their case. A checkpoint that
    names its classes LABEL_0, LABEL_1, ... is taken in the task's documented order, with a note.
    Raises QtoolError showing both lists when a label has no class in the model.
    """
    notes: list[str] = []
    classes = {_plain(name): index for index, name in id2label.items()}
    nameless = all(re.fullmatch(r"label_\d+", _plain(name)) for name in id2label.values())
    numbers = {label: _number(label) for label in dict.fromkeys(found)}
    # numbers from 1 are ratings or other codes, not class numbers: those would be off by one
    from_zero = 0 in numbers.values()
    mapping: dict[Any, int] = {}
    for label, number in numbers.items():
        name = str(label)
        if number is not None and documented is not None:
            if not 0 <= number < len(documented):
                _refuse(label, documented, id2label)
            name = documented[number]
        if documented is not None and nameless and _plain(name) in map(_plain, documented):
            mapping[label] = [_plain(known) for known in documented].index(_plain(name))
        elif _plain(name) in classes:
            mapping[label] = classes[_plain(name)]
        elif number is not None and documented is None and from_zero:
            mapping[label] = number
        else:
            _refuse(label, documented or list(numbers), id2label)
        if mapping[label] not in id2label:
            _refuse(label, documented or list(numbers), id2label)
    if documented is None and all(_plain(label) not in classes for label in numbers):
        order = ", ".join(f"{index}={name}" for index, name in id2label.items())
        notes.append(
            f"the table's labels are numbers: they were taken as the model's class numbers ({order})"
        )
    if documented is not None and nameless:
        order = ", ".join(f"{index}={name}" for index, name in enumerate(documented))
        notes.append(
            f"the checkpoint does not name its classes: the task's documented order was taken ({order})"
        )
    return [mapping[label] for label in found], notes


def _refuse(label: Any, table: Sequence[Any], id2label: dict[int, str]) -> None:
    raise QtoolError(
        f"label {label!r} has no class in the model. The task's labels: {', '.join(map(str, table))[:200]}."
        f" The model's: {', '.join(id2label.values())[:200]}. Rename one side or choose another --task."
    )


def _plain(name: Any) -> str:
    return str(name).strip().casefold()


def _number(label: Any) -> int | None:
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, int):
        return label
    if isinstance(label, float) and label.is_integer():
        return int(label)
    return int(label) if isinstance(label, str) and re.fullmatch(r"\d+", label.strip()) else None
