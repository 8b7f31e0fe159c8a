"""The flags of `qtool report`, and where each format goes: printed, or written into the run folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qtool.core import QtoolError

FORMATS = ("table", "md", "json", "html", "csv", "parquet", "svg", "png", "card")
PORT = 8750


def add(report: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    flag = report.add_argument
    flag(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="a run folder, or several of one model to join; with --serve a folder of them",
    )
    flag(
        "--format",
        choices=FORMATS,
        help="table (default), md, json, csv and card are printed; html, svg, png and parquet are written into"
        " the run folder (html of several runs, or with --cost or --sla, is printed)",
    )
    flag("--recipe", metavar="NAME", help="the recipe that --format card describes")
    flag("--serve", action="store_true", help="show the runs of a folder in a browser, on this machine only")
    flag("--port", metavar="N", type=_port, help=f"port of --serve, 0 for any free one; default {PORT}")
    flag("--track", choices=("mlflow",), help="log the run to MLflow: MLFLOW_TRACKING_URI, else ./mlruns")
    flag(
        "--cost",
        metavar="FILE",
        type=Path,
        help="prices.yaml: adds the cost and the break-even of CPU and GPU",
    )
    flag(
        "--sla",
        metavar="T",
        help="largest p95 from arrival to answer that the cost is counted at, such as 50ms",
    )
    report.set_defaults(carry_out=carry_out)


def carry_out(options: argparse.Namespace) -> int:
    """Print, write, serve or log. Raises QtoolError for flags that do not go together."""
    _refuse_mixtures(options)
    if len(options.runs) > 1 or options.cost is not None or options.sla is not None:
        return _joint(options)
    (run,) = options.runs
    if options.serve:
        from qtool.report import serve

        return serve.serve(run, PORT if options.port is None else options.port)
    if options.track:
        from qtool import track

        print(track.log(run))
        return 0
    format = options.format or "table"
    if format in ("html", "svg", "png", "parquet"):
        print(_write(run, format))
    elif format == "csv":
        from qtool.report import tidy

        sys.stdout.write(tidy.to_csv(tidy.of(run)))
    elif format == "card":
        from qtool.report import card

        print(card.render(run, options.recipe))
    else:
        from qtool import report

        print(report.render(run, format))
    return 0


def _joint(options: argparse.Namespace) -> int:
    """Print the sheet of several runs, or of one with its cost."""
    from qtool import goals, joint, prices
    from qtool.report import joint as sheet
    from qtool.report import to_json

    format = options.format or "table"
    asked = "--serve" if options.serve else "--track" if options.track else None
    asked = asked or (f"--format {format}" if format not in sheet.FORMATS else None)
    if asked:
        why = "several runs" if len(options.runs) > 1 else "--cost and --sla"
        raise QtoolError(f"{asked} is of one run, not with {why}. Formats here: {', '.join(sheet.FORMATS)}.")
    found = joint.join(
        options.runs,
        None if options.cost is None else prices.read(options.cost),
        None if options.sla is None else goals.quantity(options.sla, goals.SECONDS, "--sla"),
    )
    ways = {"table": sheet.render, "md": sheet.to_markdown, "html": sheet.to_html, "json": to_json}
    if format == "csv":
        sys.stdout.write(sheet.to_csv(found))
    else:
        print(ways[format](found).rstrip("\n"))
    return 0


def _refuse_mixtures(options: argparse.Namespace) -> None:
    ways = [flag for flag in ("serve", "track", "format") if getattr(options, flag)]
    if len(ways) > 1:
        raise QtoolError(f"--{ways[0]} and --{ways[1]} are two different things to do. Give one of them.")
    if options.format == "card" and not options.recipe:
        raise QtoolError("--format card describes one recipe. Add --recipe NAME.")
    if options.recipe and options.format != "card":
        raise QtoolError(
            "--recipe is for --format card; the other formats tell of all recipes. Leave it out."
        )
    if options.port is not None and not options.serve:
        raise QtoolError("--port is for --serve. Add --serve, or leave it out.")


def _write(run_dir: Path, format: str) -> Path:
    """The path of the file that was written into the run folder."""
    if format == "html":
        from qtool.report import page

        return page.write(run_dir)
    if format == "parquet":
        from qtool.report import tidy

        path = run_dir / "table.parquet"
        tidy.write_parquet(tidy.of(run_dir), path)
        return path
    from qtool.report import plots
    from qtool.summary import summarise

    plots.draw(summarise(run_dir), run_dir)
    return run_dir / f"frontier.{format}"


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port, expected 0 to 65535")
    return int(text)
