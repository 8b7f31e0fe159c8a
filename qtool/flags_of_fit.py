"""The flags of `qtool fit`, and the question that they mean."""

from __future__ import annotations

import argparse

from qtool import goals


def add(fit: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    flag = fit.add_argument
    flag("model", metavar="MODEL", help="a folder, a hub id or an alias (demo, distilbert)")
    flag(
        "--device-memory",
        metavar="8GB",
        help="memory of the device in question; default the GPUs of this machine",
    )
    flag(
        "--recipe",
        metavar="NAME|GLOB|FILE",
        action="append",
        default=[],
        help="which recipes; repeat; default all",
    )
    flag("--revision", metavar="R", help="revision of a hub model")
    flag("--json", action="store_true", help="print JSON")
    fit.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Estimate and print."""
    from qtool.fit import Question, answer
    from qtool.report import fit, to_json

    size = options.device_memory
    wanted = Question(
        model=options.model,
        revision=options.revision,
        patterns=tuple(options.recipe),
        device_bytes=None if size is None else int(goals.quantity(size, goals.BYTES, "--device-memory")),
    )
    found = answer(wanted)
    print(to_json(found) if options.json else fit.render(found))
    return 0
