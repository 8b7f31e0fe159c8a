"""What `qtool recipes` and `qtool tasks` print: plain lines that a pipe or a narrow terminal can take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from qtool import plugins
from qtool import recipes as book
from qtool import tasks as task_files
from qtool.core import Recipe, Task
from qtool.metrics import REGRESSION

MARKS = ("<!-- recipes -->", "<!-- /recipes -->")


def schema() -> str:
    """The JSON Schema of a recipe file, for editors."""
    content = Recipe.model_json_schema()
    content |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "qtool recipe"}
    return json.dumps(content, indent=1)


def recipes() -> str:
    """By family, one paragraph a recipe: what it does, runtime, devices, needs, and whether it can run here."""
    parts = []
    for title, members in families().items():
        parts += [f"== {title}", *(_paragraph(recipe) for recipe in members)]
    return "\n\n".join(parts)


def families() -> dict[str, list[Recipe]]:
    """The book's recipes by the title of their method, the baseline's family first."""
    found: dict[str, list[Recipe]] = {}
    for recipe in book.load_all():
        method = plugins.load("methods", recipe.method)
        found.setdefault(getattr(method, "TITLE", recipe.method), []).append(recipe)
    return found


def markdown_table() -> str:
    """The README's table of recipes."""
    lines = ["| recipe | what it does | runs on | needs |", "|---|---|---|---|"]
    for title, members in families().items():
        lines.append(f"| **{title}** | | | |")
        for recipe in members:
            devices = ", ".join({"cpu": "CPU", "cuda": "CUDA"}[device] for device in recipe.devices)
            needs = ", ".join(_needs(recipe))
            lines.append(
                f"| [`{recipe.name}`](recipes/{recipe.name}.yaml) | {recipe.description} | {devices} | {needs} |"
            )
    return "\n".join(lines)


def rewrite(readme: Path) -> None:
    """Put the table of today's recipes between the README's two marks."""
    before, rest = readme.read_text("utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    readme.write_text(f"{before}{MARKS[0]}\n{markdown_table()}\n{MARKS[1]}{after}", "utf-8")


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
            f"  metric   {', '.join(dict.fromkeys([found.score, *found.metrics]))}",
            f"  columns  {_columns(found)}",
            f"  labels   {_classes(found)}",
            f"  data     {found.source}",
            f"  now      {'reachable' if reachable else 'not reachable'}: {sentence}",
        ]
    )


def _columns(task: Task) -> str:
    if task.name == "text":
        return "yours, named by --text, --text-pair and --label"
    return ", ".join(name for name in (task.text, task.text_pair, task.label) if name)


def _classes(task: Task) -> str:
    if task.labels:
        return ", ".join(task.labels)
    if task.score in REGRESSION:
        return "numbers, against a model with one output"
    return "your own, matched by name with the model"


def _paragraph(recipe: Recipe) -> str:
    states = {device: book.why_not(recipe, device) for device in recipe.devices}
    runnable = [device for device, why in states.items() if why is None]
    here = f"yes, on {' and '.join(runnable)}" if runnable else f"no: {states[recipe.devices[0]]}"
    return "\n".join(
        [
            f"{recipe.name}: {recipe.description}",
            f"  runs     {recipe.runtime} on {', '.join(recipe.devices)} (method {recipe.method}, {recipe.dtype})",
            f"  needs    {', '.join(_needs(recipe)) or 'nothing more'}",
            f"  here     {here}",
        ]
    )


def _needs(recipe: Recipe) -> list[str]:
    """What a recipe asks of machine and data, in words."""
    flags = recipe.requires.cpu_flags
    needs = [*recipe.requires.packages, *([f"a CPU with {' or '.join(flags)}"] if flags else [])]
    if recipe.requires.capability:
        needs.append(f"CUDA capability {recipe.requires.capability}")
    if recipe.calibration:
        needs.append(f"{recipe.calibration.rows} calibration rows")
    return needs


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
