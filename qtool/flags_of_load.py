"""The flags of `qtool load`, and the question that they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.core import QtoolError, did_you_mean

if TYPE_CHECKING:
    from qtool.arrivals import Pattern

PATTERNS = ("poisson", "burst", "trace")
MOST_BATCH = 65536


def add(load: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    flag = load.add_argument
    flag("run", metavar="RUN", type=Path, help="a run folder")
    flag("--arrival", metavar="R", help="requests a second, such as 50/s; a trace has its own")
    flag("--sla", metavar="T", required=True, help="largest p95 from arrival to answer, such as 50ms")
    flag(
        "--pattern",
        metavar="NAME",
        nargs="+",
        default=["poisson"],
        help="poisson (default), burst, or trace FILE: arrival times in seconds, one a line",
    )
    flag("--max-batch", metavar="N", help="largest batch; default the best that was measured")
    flag("--max-wait", metavar="T", help="longest wait for a batch to fill, such as 5ms; default the best")
    flag(
        "--recipe", metavar="NAME", action="append", default=[], help="which recipes; repeat; default all ok"
    )
    flag("--device", choices=("cpu", "cuda"), help="default the run's first")
    flag("--seed", metavar="N", default="0", help="of the simulated traffic; default 0")
    flag("--real", action="store_true", help="drive the artifact itself beside the prediction (one --recipe)")
    flag("--duration", metavar="T", default="30s", help="how long --real drives it; default 30s")
    flag("--json", action="store_true", help="print JSON")
    load.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Print the answer; exit code 1 where no recipe meets the SLA on one replica, or the real one broke it."""
    from qtool import goals
    from qtool.load import Question, answer
    from qtool.report import sla, to_json

    pattern = _pattern(options.pattern)
    if options.arrival is None and pattern.rate_per_s is None:
        raise QtoolError(
            f"--arrival is missing: a {pattern.name} pattern has no rate of its own. Try --arrival 50/s."
        )
    question = Question(
        rate_per_s=pattern.rate_per_s
        if options.arrival is None and pattern.rate_per_s is not None
        else goals.quantity(options.arrival, goals.RATES, "--arrival"),
        pattern=pattern,
        sla_s=goals.quantity(options.sla, goals.SECONDS, "--sla"),
        max_batch=None
        if options.max_batch is None
        else _whole(options.max_batch, "--max-batch", 1, MOST_BATCH),
        max_wait_s=None if options.max_wait is None else _wait(options.max_wait),
        recipes=tuple(dict.fromkeys(options.recipe)),
        device=options.device,
        seed=_whole(options.seed, "--seed", 0, 2**32),
    )
    if options.real:
        from qtool import real_load

        duration_s = goals.quantity(options.duration, goals.MINUTES, "--duration")
        driven = real_load.drive(options.run, question, duration_s)
        print(to_json(driven) if options.json else sla.render_real(driven))
        return 0 if driven["meets"] else 1
    found = answer(options.run, question)
    print(to_json(found) if options.json else sla.render(found))
    return 0 if any(row["meets"] for row in found["rows"]) else 1


def _pattern(words: list[str]) -> Pattern:
    from qtool.arrivals import Pattern, read_trace

    name, *rest = words
    if name not in PATTERNS:
        raise QtoolError(f"--pattern {name}: there is no such pattern.{did_you_mean(name, PATTERNS)}")
    if name == "trace":
        if len(rest) != 1:
            raise QtoolError(f"--pattern trace needs one FILE of arrival times, found {len(rest)}.")
        return read_trace(Path(rest[0]))
    if rest:
        raise QtoolError(f"--pattern {name} takes no file, found '{rest[0]}'. Use --pattern trace FILE.")
    return Pattern(name)


def _whole(text: str, where: str, least: int, most: int) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
    if not least <= number <= most:
        raise QtoolError(f"{where}: '{text}', expected a whole number from {least} to {most}.")
    return number


def _wait(text: str) -> float:
    """Seconds; no waiting at all is allowed, with or without a unit."""
    from qtool import goals

    return 0.0 if text in ("0", "0s", "0ms") else goals.quantity(text, goals.SECONDS, "--max-wait")
