"""The command line: verbs and their flags, one-line errors and exit codes. Knows nothing of how things are done.

Exit codes: 0 done, 1 nothing satisfies the goals or the policy is violated, 2 the user's mistake, 3 some trial
failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from qtool import (
    __version__,
    flags_of_fit,
    flags_of_load,
    flags_of_pick,
    flags_of_profile,
    flags_of_report,
    flags_of_sweep,
)
from qtool.core import QtoolError, did_you_mean

VERBS = (
    "sweep",
    "pick",
    "compare",
    "gate",
    "report",
    "profile",
    "load",
    "fit",
    "export",
    "recipes",
    "tasks",
    "doctor",
)


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
    flags_of_sweep.add(
        verbs.add_parser("sweep", help="apply recipes to a model, score and measure each", allow_abbrev=False)
    )
    flags_of_pick.add(
        verbs.add_parser("pick", help="choose a recipe of a run under your constraints", allow_abbrev=False)
    )

    compare = verbs.add_parser("compare", help="set two runs side by side", allow_abbrev=False)
    compare.add_argument("run_a", metavar="RUN_A", type=Path)
    compare.add_argument("run_b", metavar="RUN_B", type=Path)
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(carry_out=_compare)

    gate = verbs.add_parser(
        "gate", help="hold a run against a policy; exit 1 on violation", allow_abbrev=False
    )
    gate.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    gate.add_argument("--policy", metavar="FILE", type=Path, required=True, help="what is demanded, in YAML")
    gate.add_argument("--reference", metavar="RUN", type=Path, help="a stored run to be no worse than")
    gate.add_argument("--json", action="store_true", help="print JSON")
    gate.set_defaults(carry_out=_gate)

    listing = verbs.add_parser("recipes", help="list the recipes, or show one", allow_abbrev=False)
    listing.add_argument("name", nargs="?", metavar="NAME", help="a recipe's name or a YAML file")
    listing.add_argument("--schema", action="store_true", help="print the JSON Schema of a recipe file")
    listing.set_defaults(carry_out=_recipes)

    tasks = verbs.add_parser("tasks", help="list the tasks, or show one", allow_abbrev=False)
    tasks.add_argument("name", nargs="?", metavar="NAME")
    tasks.set_defaults(carry_out=_tasks)

    doctor = verbs.add_parser("doctor", help="what this machine is and what that means", allow_abbrev=False)
    doctor.add_argument(
        "--measure", action="store_true", help="take the ceilings: a copy and a matrix product"
    )
    doctor.set_defaults(carry_out=_doctor)

    flags_of_report.add(
        verbs.add_parser("report", help="print, write or serve the report of a run", allow_abbrev=False)
    )
    flags_of_profile.add(
        verbs.add_parser("profile", help="where the time of a request goes", allow_abbrev=False)
    )
    flags_of_load.add(
        verbs.add_parser("load", help="what a run's recipes do under traffic", allow_abbrev=False)
    )

    flags_of_fit.add(
        verbs.add_parser("fit", help="which recipes fit where, before anything is loaded", allow_abbrev=False)
    )

    export = verbs.add_parser("export", help="copy out an artifact, ready to deploy", allow_abbrev=False)
    export.add_argument("run", metavar="RUN", type=Path)
    export.add_argument("recipe", metavar="RECIPE")
    export.add_argument("to", metavar="DIR", type=Path)
    export.set_defaults(carry_out=_export)
    return parser


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

    print(doctor.report(recipes.load_all(), measure=options.measure))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from qtool import compare
    from qtool.report import to_json, two_runs

    found = compare.compare(options.run_a, options.run_b)
    print(to_json(found) if options.json else two_runs.render(found))
    return 0


def _gate(options: argparse.Namespace) -> int:
    from qtool.report import to_json, verdict

    found = verdict.hold(options.run, options.policy, options.reference)
    print(to_json(found) if options.json else verdict.render(found))
    return found["exit_code"]


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
