"""The flags of `qtool profile`, and the options that they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from qtool import flags_of_sweep
from qtool.core import QtoolError

BATCH_SIZES = (1, 8)


def add(profile: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    flag = profile.add_argument
    flag("model", metavar="MODEL", help="a folder, a hub id or an alias (demo, distilbert)")
    flag("--recipe", metavar="NAME|FILE", required=True, help="the recipe to profile")
    flag("--device", choices=("cpu", "cuda"), default="cpu", help="where to run; default cpu")
    flag(
        "--batch-size",
        metavar="N",
        type=flags_of_sweep.positive,
        action="append",
        default=[],
        help="texts a request; repeat; default 1 and 8",
    )
    flags_of_sweep.add_inputs(profile)
    flag("--out", metavar="DIR", type=Path, help="a new folder; default reports/profile-MODEL-RECIPE-TIME")
    flag("--json", action="store_true", help="print JSON")
    profile.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Profile and print; exit code 3 where a child failed."""
    from qtool import host, profile, tasks
    from qtool.aliases import ALIASES
    from qtool.plan import Options

    if options.task == flags_of_sweep.GROUP:
        raise QtoolError(f"--task {flags_of_sweep.GROUP} is for several models. Give one task by its name.")
    if options.task is None and options.model in ALIASES:
        options.task = ALIASES[options.model].task
    if options.task is not None:
        tasks.find(options.task)
    wanted = Options(
        model=options.model,
        revision=options.revision,
        task=options.task,
        data=options.data,
        text=options.text,
        text_pair=options.text_pair,
        label=options.label,
        metric=None,
        patterns=[options.recipe],
        devices=[options.device],
        batch_sizes=list(dict.fromkeys(options.batch_size)) or list(BATCH_SIZES),
        seq_len=flags_of_sweep.length(options.seq_len),
        rounds=1,
        auto_rounds=False,
        speedup_within=0.1,
        time_budget_s=0.0,
        policy=None,
        track=None,
        limit=options.limit,
        split=options.split,
        calibration=options.calibration,
        score=False,
        threads=options.threads or host.physical_cores(),
        timeout_s=options.timeout,
        out=options.out,
        resume=False,
        dry_run=False,
    )
    return profile.run(wanted, as_json=options.json)
