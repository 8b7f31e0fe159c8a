"""Sweeps of several models, each on its own task, and the GLUE table that sets a recipe's scores side by side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from qtool import asking, strict_yaml, summary, sweep, tasks
from qtool.aliases import ALIASES
from qtool.core import SCORES, QtoolError, did_you_mean
from qtool.plan import Options, Plan, describe

KEYS = ("model", "task")


def read(path: Path) -> list[tuple[str, str]]:
    """(model, task) of every entry of a models file, a YAML list of `{model, task}`.

    An alias brings its own task. Raises QtoolError naming the entry and what is wrong with it.
    """
    try:
        content = strict_yaml.load(path.read_text("utf-8"))
    except OSError as error:
        raise QtoolError(f"cannot read --models {path}: {error.strerror}. Give a YAML file.") from None
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise QtoolError(
            f"--models {path} is not valid YAML: {' '.join(str(error).split())[:160]}."
        ) from None
    if not isinstance(content, list) or not content:
        raise QtoolError(
            f"--models {path} holds {type(content).__name__}, expected a list of {{model: ..., task: ...}}."
        )
    return [_entry(entry, f"--models {path}, entry {number}") for number, entry in enumerate(content, 1)]


def _entry(entry: Any, where: str) -> tuple[str, str]:
    if not isinstance(entry, dict):
        raise QtoolError(f"{where} is {type(entry).__name__}, expected {{model: ..., task: ...}}.")
    for key in entry:
        if key not in KEYS:
            raise QtoolError(f"{where}: unknown key '{key}'.{did_you_mean(str(key), KEYS)}")
    model = entry.get("model")
    if not isinstance(model, str) or not model:
        raise QtoolError(f"{where}: model is {model!r}, expected a folder, a hub id or an alias.")
    task = entry.get("task", ALIASES[model].task if model in ALIASES else None)
    if not isinstance(task, str):
        raise QtoolError(f"{where}: task is {task!r}, expected a name (see qtool tasks).")
    tasks.find(task)
    return model, task


def run(options: Options, entries: Sequence[tuple[str, str]]) -> int:
    """Check every entry, then sweep each into its own folder under `--out`, and print the GLUE table.

    Exit code: 130 when interrupted, else 1 when a policy is violated, else 3 when a trial failed in any, else 0.
    Raises QtoolError for a mistake in any entry before the first is measured.
    """
    if options.resume and (options.out is None or not any(options.out.glob("*/run.json"))):
        raise QtoolError(
            f"nothing to resume in {options.out or '--out'}: give the --out of the earlier call."
        )
    if options.revision is not None:
        raise QtoolError("--revision belongs to one model. Leave it out with --models.")
    whole = options.out or Path("reports") / f"glue-{datetime.now():%Y%m%d-%H%M%S}"
    plans = []
    for (model, task), folder in zip(entries, _folders(entries), strict=True):
        out = whole / folder
        own = replace(
            options,
            turn=len(plans),
            model=model,
            task=task,
            out=out,
            resume=options.resume and (out / "run.json").exists(),
        )
        try:
            plans.append(sweep.check(own))
        except QtoolError as error:
            raise QtoolError(f"{model} on {task}: {error}") from None
    if options.dry_run:
        print("\n\n".join(describe(plan) for plan in plans))
        return 0
    codes = _all_at_once(plans) if options.executor == "ray" else _in_turn(plans)
    if 130 in codes:
        return 130
    print(f"\n{table([summary.summarise(plan.options.out) for plan in plans if plan.options.out])}")
    # a violated policy says more than a failed trial
    return 1 if 1 in codes else max(codes)


def _in_turn(plans: Sequence[Plan]) -> list[int]:
    """The exit code of each, until one is interrupted."""
    codes = [0]
    for plan in plans:
        codes.append(sweep.carry_out(plan))
        if codes[-1] == 130:
            break
    return codes


def _all_at_once(plans: Sequence[Plan]) -> list[int]:
    """The exit code of each; Ray keeps apart what must not run side by side."""
    with ThreadPoolExecutor(len(plans)) as pool:
        running = [pool.submit(sweep.carry_out, plan) for plan in plans]
        try:
            return [done.result() for done in running]
        except BaseException as error:
            for plan in plans:
                plan.cluster.cluster.stop()
            if isinstance(error, KeyboardInterrupt):
                return [130]
            raise


def _folders(entries: Sequence[tuple[str, str]]) -> list[str]:
    """One folder's name an entry, `TASK-MODEL`, numbered where two would be the same."""
    names: list[str] = []
    for model, task in entries:
        name = f"{task}-{asking.folder_name(model)}"
        again = sum(other == name or other.startswith(f"{name}~") for other in names)
        names.append(f"{name}~{again + 1}" if again else name)
    return names


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """Score of every recipe on every task, and its average where it has a score on all of them.

    A task of two metrics counts with their mean, and the two MNLI sets as one task, as GLUE averages
    (Wang et al. 2018, https://arxiv.org/abs/1804.07461, section 3.4 and the leaderboard). Times 100, as GLUE prints them.
    """
    columns = [f"{found['task']} ({found['metric']})" for found in summaries]
    recipes = list(dict.fromkeys(row["recipe"] for found in summaries for row in found["rows"]))
    lines = [["recipe", *columns, "average"]]
    for recipe in recipes:
        shown, means = [], {}
        for position, found in enumerate(summaries):
            scores = _scores(found, recipe)
            shown.append("-" if scores is None else _percent(scores[0]))
            if scores is not None:
                name = "mnli" if str(found["task"]).startswith("mnli") else f"{position}"
                means.setdefault(name, []).append(mean(scores))
        complete = "-" not in shown
        lines.append([recipe, *shown, _percent(mean(map(mean, means.values()))) if complete else "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *rest = widths
    return "\n".join(
        "  ".join(
            [line[0].ljust(first), *(word.rjust(width) for word, width in zip(line[1:], rest, strict=True))]
        )
        for line in lines
    )


def _scores(found: dict[str, Any], recipe: str) -> list[float] | None:
    """The primary score and the task's others; None where one is missing. Any device: the first that is ok."""
    row = next((r for r in found["rows"] if r["recipe"] == recipe and r["status"] == "ok"), None)
    if row is None or found["metric"] is None:
        return None
    names = [found["metric"], *(name for name in SCORES if name != found["metric"])]
    values = [row["metrics"][name]["value"] for name in names if name in row["metrics"]]
    return None if None in values else values


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"
