"""What `qtool recipes` and `qtool tasks` print: plain lines that a pipe or a narrow terminal can take."""

from __future__ import annotations

import json

from qtool import recipes as book
from qtool import tasks as task_files
from qtool.core import Recipe, Task


def schema() -> str:
    """The JSON Schema of a recipe file, for editors."""
    content = Recipe.model_json_schema()
    content |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "qtool recipe"}
    return json.dumps(content, indent=1)


def recipes() -> str:
    """One paragraph a recipe: what it does, runtime, devices, needs, and whether it can run here."""
    return "\n\n".join(_paragraph(recipe) for recipe in book.load_all())


def recipe(name: str) -> str:
    """One recipe with its file's text. Raises QtoolError with a suggestion for an unknown name."""
    found, path = book.find(name)
    return f"{_paragraph(found)}\n  source   {found.source}\n\n{path.read_text('utf-8').rstrip()}"


def tasks() -> str:
    """One paragraph a task: metric, columns, where its data comes from and whether it is reachable now."""
    return "\n\n".join(task(name) for name in sorted(task_files.find_all()))


def task(name: str) -> str:
    """One task. Raises QtoolError with a suggestion for an unknown name."""
    found, file = task_files.find(name)
    reachable, sentence = file.reachable(found)
    return "\n".join(
        [
            f"{found.name}: {found.description}",
            f"  metric   {found.score}",
            f"  columns  {_columns(found)}",
            f"  labels   {', '.join(found.labels) if found.labels else 'your own, matched by name with the model'}",
            f"  data     {found.source}",
            f"  now      {'reachable' if reachable else 'not reachable'}: {sentence}",
        ]
    )


def _columns(task: Task) -> str:
    if task.name == "text":
        return "yours, named by --text, --text-pair and --label"
    return ", ".join(name for name in (task.text, task.text_pair, task.label) if name)


def _paragraph(recipe: Recipe) -> str:
    states = {device: book.why_not(recipe, device) for device in recipe.devices}
    runnable = [device for device, why in states.items() if why is None]
    here = f"yes, on {' and '.join(runnable)}" if runnable else f"no: {states[recipe.devices[0]]}"
    needs = [*recipe.requires.cpu_flags, *recipe.requires.packages]
    if recipe.requires.capability:
        needs.append(f"CUDA capability {recipe.requires.capability}")
    if recipe.calibration:
        needs.append(f"{recipe.calibration.rows} calibration rows")
    return "\n".join(
        [
            f"{recipe.name}: {recipe.description}",
            f"  runs     {recipe.runtime} on {', '.join(recipe.devices)} (method {recipe.method}, {recipe.dtype})",
            f"  needs    {', '.join(needs) or 'nothing more'}",
            f"  here     {here}",
        ]
    )
