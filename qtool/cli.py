"""The command line: verbs and their flags, one-line errors and exit codes. Knows nothing of how things are done.

Exit codes: 0 done, 2 the user's mistake, 3 some trial failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from qtool import __version__
from qtool.core import QtoolError, did_you_mean

GROUP = "glue"
"""The task name under which `--models` runs each model on its own task."""
VERBS = ("sweep", "recipes", "tasks", "doctor", "report", "export")


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with a suggestion for a near miss."""

    def error(self, message: str) -> NoReturn:
        raise QtoolError(f"{message[:300]}. See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its code."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without a letter costs that letter alone
    try:
        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except QtoolError as error:
        print("qtool: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # the reader of a listing has seen enough; a sweep goes on by itself
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(
            f"qtool: cannot use{where}: {error.strerror or error}. Check the path, its rights and the disk.",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("qtool: interrupted", file=sys.stderr)
        sys.exit(130)


def run(arguments: Sequence[str]) -> int:
    """Parse and carry out; the exit code. Raises QtoolError for the user's mistakes."""
    parser = build_parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        raise QtoolError(f"there is no verb '{arguments[0]}'.{did_you_mean(arguments[0], VERBS)}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = _flags(parser, options.verb)
        hint = did_you_mean(unknown[0].partition("=")[0], flags) if unknown[0].startswith("-") else ""
        raise QtoolError(f"unknown argument '{unknown[0]}' for {options.verb}.{hint}")
    return options.carry_out(options)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; a test freezes its flags."""
    parser = _Parser(
        prog="qtool", description=__doc__ and "Which precision, on which hardware, to deploy a model."
    )
    parser.add_argument("--version", action="version", version=f"qtool {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    _add_sweep(
        verbs.add_parser("sweep", help="apply recipes to a model, score and measure each", allow_abbrev=False)
    )

    listing = verbs.add_parser("recipes", help="list the recipes, or show one", allow_abbrev=False)
    listing.add_argument("name", nargs="?", metavar="NAME", help="a recipe's name or a YAML file")
    listing.add_argument("--schema", action="store_true", help="print the JSON Schema of a recipe file")
    listing.set_defaults(carry_out=_recipes)

    tasks = verbs.add_parser("tasks", help="list the tasks, or show one", allow_abbrev=False)
    tasks.add_argument("name", nargs="?", metavar="NAME")
    tasks.set_defaults(carry_out=_tasks)

    verbs.add_parser("doctor", help="what this machine is and what that means").set_defaults(
        carry_out=_doctor
    )

    report = verbs.add_parser("report", help="print the report of a run", allow_abbrev=False)
    report.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    report.add_argument("--format", choices=("table", "md", "json"), default="table")
    report.set_defaults(carry_out=_report)

    export = verbs.add_parser("export", help="copy out an artifact, ready to deploy", allow_abbrev=False)
    export.add_argument("run", metavar="RUN", type=Path)
    export.add_argument("recipe", metavar="RECIPE")
    export.add_argument("to", metavar="DIR", type=Path)
    export.set_defaults(carry_out=_export)
    return parser


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    add = sweep.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder, a hub id or an alias (demo, distilbert)")
    add(
        "--models",
        metavar="FILE",
        type=Path,
        help="a YAML list of {model, task}: sweep each, with --task glue",
    )
    add("--task", metavar="NAME", help="what to score on (see qtool tasks)")
    add("--data", metavar="PATH", help="a folder in GLUE's TSV form, or your own table")
    add("--text", metavar="COLUMN", help="the text column of your table (--task text)")
    add("--text-pair", metavar="COLUMN", help="the second text column, for pairs")
    add("--label", metavar="COLUMN", help="the label column of your table")
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
        type=_positive,
        action="append",
        default=[],
        help="texts a call; repeat; default 1",
    )
    add("--seq-len", metavar="N|real", default="real", help="fixed length in tokens; default the texts' own")
    add(
        "--rounds", metavar="N", type=_positive, default=3, help="processes a latency, interleaved; default 3"
    )
    add("--limit", metavar="N", type=_rows, help="use only N rows, the same for every recipe")
    add("--split", metavar="NAME", help="the split to score; default validation")
    add("--calibration", metavar="PATH", help="a table with rows for static quantisation")
    add("--no-score", action="store_true", help="latency, size and memory only; needs no task")
    add("--threads", metavar="N", type=_positive, help="threads of every runtime; default the physical cores")
    add(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=900.0,
        help="longest time of one child process; default 900",
    )
    add("--out", metavar="DIR", type=Path, help="the run folder; default reports/MODEL-TASK-TIME")
    add("--resume", action="store_true", help="finish what is missing in --out")
    add("--dry-run", action="store_true", help="print the plan, the skips and an estimate; measure nothing")
    add("--revision", metavar="R", help="revision of a hub model")
    sweep.set_defaults(carry_out=_sweep)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if not 1 <= number <= 65536:
        raise argparse.ArgumentTypeError(f"{text} is out of range, expected 1 or more, at most 65536")
    return number


def _rows(text: str) -> int:
    try:
        return _positive(text)
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
    from qtool import group, host, sweep, tasks
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
    seq_len = None if options.seq_len == "real" else _length(options.seq_len)
    cores = host.physical_cores()
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
        rounds=options.rounds,
        limit=options.limit,
        split=options.split,
        calibration=options.calibration,
        score=not options.no_score,
        threads=options.threads or cores,
        timeout_s=options.timeout,
        out=options.out,
        resume=options.resume,
        dry_run=options.dry_run,
    )
    return sweep.run(wanted) if options.models is None else group.run(wanted, group.read(options.models))


def _length(text: str) -> int:
    try:
        return _positive(text)
    except argparse.ArgumentTypeError as error:
        raise QtoolError(f"--seq-len: {error}, or 'real'.") from None


def _recipes(options: argparse.Namespace) -> int:
    from qtool import listing

    print(
        listing.schema()
        if options.schema
        else listing.recipe(options.name)
        if options.name
        else listing.recipes()
    )
    return 0


def _tasks(options: argparse.Namespace) -> int:
    from qtool import listing

    print(listing.task(options.name) if options.name else listing.tasks())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from qtool import doctor, recipes

    print(doctor.report(recipes.load_all()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from qtool import report

    print(report.render(options.run, options.format))
    return 0


def _export(options: argparse.Namespace) -> int:
    from qtool import export

    print(export.export(options.run, options.recipe, options.to))
    return 0


def _flags(parser: argparse.ArgumentParser, verb: str) -> list[str]:
    chosen = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[verb]
    return [flag for action in chosen._actions for flag in action.option_strings]


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
