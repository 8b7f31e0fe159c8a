"""Writes and prints a run's report: summary.json, report.md, report.html and the plots, from stored samples alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from qtool import evidence, store
from qtool.summary import of, summarise


def write(run_dir: Path) -> dict[str, Any]:
    """Derive the summary; write `summary.json`, `report.md`, `report.html`, `frontier.svg` and `frontier.png`."""
    from qtool.report import markdown, page, plots

    found = evidence.load(run_dir)
    summary = of(found)
    store.write_json(run_dir / "summary.json", summary)
    plots.draw(summary, run_dir)
    (run_dir / "report.md").write_text(markdown.render(summary, dict(found.run)), "utf-8")
    (run_dir / "report.html").write_text(page.render(found, summary), "utf-8")
    return summary


def render(run_dir: Path, format: str) -> str:
    """The report as `table`, `md` or `json`, derived anew from the stored samples."""
    summary, run = summarise(run_dir), store.read_run(run_dir)
    if format == "json":
        return to_json(summary)
    if format == "md":
        from qtool.report import markdown

        return markdown.render(summary, run)
    from qtool.report import terminal

    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    return terminal.render(summary, run, width=width, color=is_terminal and not os.environ.get("NO_COLOR"))


def to_json(found: dict[str, Any]) -> str:
    """As the files of a run are written: None, never NaN."""
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
