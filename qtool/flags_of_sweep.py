"""The flags of `qtool sweep`, and the options that they mean."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from qtool.core import QtoolError

GROUP = "glue"
"""The task name under which `--models` runs each model on its own task."""
AUTO = "auto"
LEAST_ROUNDS, CAREFUL_ROUNDS = 3, 5
"""A gate takes five: with three, a slowdown of 30 % at a spread of 5 % is missed in one run of eight. `auto` starts
with five: looking again after each round costs coverage, and from three it fell to 90 % (see `claims.Rounds`)."""


def add(sweep: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    add = sweep.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder, a hub id or an alias (demo, distilbert)")
    add(
        "--models",
        metavar="FILE",
        type=Path,
        help="a YAML list of {model, task}: sweep each, with --task glue",
    )
    add_inputs(sweep)
    add("--metric", metavar="NAME", help="score your table by this metric instead of accuracy")
    add(
        "--recipe",
        metavar="NAME|GLOB|FILE",
        action="append",
        default=[],
        help="which recipes; repeat; default all",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        action="append",
        default=[],
        help="where to run; repeat; default cpu",
    )
    add(
        "--batch-size",
        metavar="N",
        type=positive,
        action="append",
        default=[],
        help="texts a call; repeat; default 1",
    )
    add(
        "--rounds",
        metavar="N|auto",
        type=_rounds,
        help="processes a latency, interleaved; default 3, with --policy 5; auto: 5, then more until"
        " --speedup-within",
    )
    add(
        "--speedup-within",
        metavar="P%",
        default="10%",
        help="how narrow --rounds auto makes a speed-up's interval, and what counts as stable; default 10%%",
    )
    add("--time-budget", metavar="T", default="30min", help="when --rounds auto stops anyway; default 30min")
    add("--policy", metavar="FILE", type=Path, help="gate the run when it is done; exit 1 on violation")
    add("--track", choices=("mlflow",), help="log the finished run to MLflow, as qtool report --track does")
    add("--no-score", action="store_true", help="latency, size and memory only; needs no task")
    add_executor(sweep)
    add("--out", metavar="DIR", type=Path, help="the run folder; default reports/MODEL-TASK-TIME")
    add("--resume", action="store_true", help="finish what is missing in --out")
    add("--dry-run", action="store_true", help="print the plan, the skips and an estimate; measure nothing")
    sweep.set_defaults(carry_out=_sweep)


def add_executor(sweep: argparse.ArgumentParser) -> None:
    """Declare where the stages run."""
    add = sweep.add_argument
    add(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="run here, or on the nodes of a Ray cluster",
    )
    add(
        "--address",
        metavar="A",
        help="of the cluster: ray://HOST:10001, HOST:6379 or auto; default RAY_ADDRESS, a local one, or a new one",
    )
    add(
        "--on",
        metavar="NAME,NAME",
        help="kinds of node, by Ray resource or label: each is measured by itself",
    )
    add("--shared", metavar="URL", help="where artifacts and data travel: a folder or any fsspec URL")


def kinds_of(text: str | None) -> list[str]:
    """The names of --on. Raises QtoolError."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise QtoolError(f"--on '{text}' has an empty name. Give names like cpu-avx512,l4.")
    return list(dict.fromkeys(names))


def add_inputs(verb: argparse.ArgumentParser) -> None:
    """Declare what every verb that runs a model takes: its texts, their length, and how it is run."""
    add = verb.add_argument
    add("--task", metavar="NAME", help="what to score on (see qtool tasks)")
    add("--data", metavar="PATH", help="a folder in GLUE's TSV form, or your own table")
    add("--text", metavar="COLUMN", help="the text column of your table (--task text)")
    add("--text-pair", metavar="COLUMN", help="the second text column, for pairs")
    add("--label", metavar="COLUMN", help="the label column of your table")
    add("--limit", metavar="N", type=_rows, help="use only N rows, the same for every recipe")
    add("--split", metavar="NAME", help="the split to score; default validation")
    add("--calibration", metavar="PATH", help="a table with rows for static quantisation")
    add("--seq-len", metavar="N|real", default="real", help="fixed length in tokens; default the texts' own")
    add("--threads", metavar="N", type=positive, help="threads of every runtime; default the physical cores")
    add(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=900.0,
        help="longest time of one child process; default 900",
    )
    add("--revision", metavar="R", help="revision of a hub model")


def positive(text: str) -> int:
    """A number of texts or threads, as argparse's type."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if not 1 <= number <= 65536:
        raise argparse.ArgumentTypeError(f"{text} is out of range, expected 1 or more, at most 65536")
    return number


def _rounds(text: str) -> int | str:
    """A number, or AUTO itself."""
    try:
        return AUTO if text == AUTO else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {AUTO}") from None


def _rows(text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        if text.isdecimal() and 65536 < int(text) < 2**63:  # tables may be long, calls may not
            return int(text)
        raise


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds") from None
    if not (0 < number <= 7 * 86400 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} is out of range, expected more than 0, at most a week")
    return number


def _sweep(options: argparse.Namespace) -> int:
    from qtool import goals, group, host, sweep, tasks
    from qtool.aliases import ALIASES

    if options.models is not None:
        if options.model is not None or options.task not in (None, GROUP):
            raise QtoolError(
                f"--models names the models and their tasks: leave MODEL out and give --task {GROUP}."
            )
    elif options.model is None:
        raise QtoolError("which model? Give MODEL (a folder, a hub id or an alias), or --models FILE.")
    elif options.task == GROUP:
        raise QtoolError(
            f"--task {GROUP} scores several models: give --models FILE, or one task by its name."
        )
    elif options.task is None and options.model in ALIASES:
        options.task = ALIASES[options.model].task
    if options.models is None and options.task is not None:
        tasks.find(options.task)
    elif options.models is None and not options.no_score:
        raise QtoolError("which task is it scored on? Give --task NAME (see qtool tasks), or --no-score.")
    if options.executor == "local":
        for flag in ("address", "on", "shared"):
            if getattr(options, flag) is not None:
                raise QtoolError(f"--{flag} is for a cluster: add --executor ray, or leave it out.")
    seq_len = length(options.seq_len)
    cores = host.physical_cores()
    careful = options.policy or options.rounds == AUTO
    rounds = (
        options.rounds if isinstance(options.rounds, int) else CAREFUL_ROUNDS if careful else LEAST_ROUNDS
    )
    wanted = sweep.Options(
        model=options.model or "",
        revision=options.revision,
        task=options.task,
        data=options.data,
        text=options.text,
        text_pair=options.text_pair,
        label=options.label,
        metric=options.metric,
        patterns=options.recipe,
        devices=list(dict.fromkeys(options.device)) or ["cpu"],
        batch_sizes=list(dict.fromkeys(options.batch_size)) or [1],
        seq_len=seq_len,
        rounds=rounds,
        auto_rounds=options.rounds == AUTO,
        speedup_within=goals.share(options.speedup_within, "--speedup-within"),
        time_budget_s=goals.quantity(options.time_budget, goals.MINUTES, "--time-budget"),
        policy=options.policy,
        track=options.track,
        limit=options.limit,
        split=options.split,
        calibration=options.calibration,
        score=not options.no_score,
        # of a cluster the nodes' cores count, which are not known yet
        threads=options.threads or (cores if options.executor == "local" else 0),
        timeout_s=options.timeout,
        out=options.out,
        resume=options.resume,
        dry_run=options.dry_run,
        executor=options.executor,
        address=options.address,
        on=kinds_of(options.on),
        shared=options.shared,
    )
    return sweep.run(wanted) if options.models is None else group.run(wanted, group.read(options.models))


def length(text: str) -> int | None:
    """What --seq-len means: tokens, None for the texts' own. Raises QtoolError."""
    try:
        return None if text == "real" else positive(text)
    except argparse.ArgumentTypeError as error:
        raise QtoolError(f"--seq-len: {error}, or 'real'.") from None
