"""The flags of `qtool pick`, and the goals that they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

PREFER = ("latency", "memory", "disk", "score", "cost")


def add(pick: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    flag = pick.add_argument
    flag("run", metavar="RUN", type=Path, help="a run folder")
    flag(
        "--max-drop",
        metavar="D",
        help="largest fall of the score: 1%% of the baseline's, or 0.005 absolute; default 0.02",
    )
    flag("--p95", metavar="T", help="largest p95 of a call, such as 50ms")
    flag("--p50", metavar="T", help="largest p50 of a call")
    flag("--throughput", metavar="R", help="least texts a second, such as 100/s")
    flag("--memory", metavar="S", help="largest peak memory, such as 500MB")
    flag("--disk", metavar="S", help="largest size on disk, such as 100MB")
    flag("--prefer", choices=PREFER, default="latency", help="what the best of the rest is; default latency")
    flag("--cost", metavar="FILE", type=Path, help="prices.yaml: shows the cost per million of each option")
    flag("--objectives", metavar="M,M", help="metrics of the frontier; default score, p50, peak memory, disk")
    flag("--json", action="store_true", help="print JSON")
    pick.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Print the choice; exit code 1 where no recipe satisfies."""
    from qtool import goals, pick, prices
    from qtool.core import QtoolError
    from qtool.report import choice, to_json

    def amount(text: str | None, units: dict[str, float], name: str) -> float | None:
        return None if text is None else goals.quantity(text, units, name)

    if options.prefer == "cost" and options.cost is None:
        raise QtoolError("--prefer cost needs prices. Add --cost prices.yaml.")
    wanted = pick.Goals(
        max_drop=None if options.max_drop is None else goals.drop(options.max_drop, "--max-drop"),
        p95_s=amount(options.p95, goals.SECONDS, "--p95"),
        p50_s=amount(options.p50, goals.SECONDS, "--p50"),
        throughput_per_s=amount(options.throughput, goals.RATES, "--throughput"),
        memory_bytes=amount(options.memory, goals.BYTES, "--memory"),
        disk_bytes=amount(options.disk, goals.BYTES, "--disk"),
        prefer=options.prefer,
        prices=None if options.cost is None else prices.read(options.cost),
        objectives=[name.strip() for name in (options.objectives or "").split(",") if name.strip()],
    )
    found = pick.pick(options.run, wanted)
    print(to_json(found) if options.json else choice.render(found))
    return 0 if found["chosen"] else 1
