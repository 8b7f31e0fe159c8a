"""The summary as text for a terminal, or as plain lines where output is not one. Draws from `text` only."""

from __future__ import annotations

import io
from typing import Any

from qtool.report import fit, text
from qtool.report.text import Cell

RECIPE, STATUS = 1, 2
"""Columns of `text.table`."""
LEAST_WIDTH = 72


def render(summary: dict[str, Any], run: dict[str, Any], *, width: int | None, color: bool) -> str:
    """The table, what failed or was skipped and why, then frontier and recommendation of every group.

    `width` in columns; None: output is no terminal, and lines keep their length. Ends with a newline.
    """
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        width=width or 100_000,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )

    def line(words: str = "", style: str = "") -> None:
        console.print(Text(text.printable(words), style=style))

    line(text.title(summary, run), "bold")
    for group in summary["frontier"]:
        rows = text.group_rows(summary, group)
        line()
        line(text.group_title(group), "bold")
        console.print(_table(summary, rows, group["device"], width))
        for what, why in text.problems(rows):
            line(f"{what}: {why}", "yellow")
        for recipe, sentence in text.placed(rows):
            line(f"{recipe}: {sentence}")
        line()
        line(f"frontier: {', '.join(group['recipes']) or 'nothing finished'}" + _provisional(group))
        line(group["reason"], "green" if group["recommended"] else "red")
        if unstable := text.unstable(rows):
            line(unstable, "yellow")
    line()
    line(text.LEGEND, "dim")
    if compared := fit.compared(summary["rows"]):
        line(compared, "dim")
    for note in summary["notes"]:
        line(f"note: {note}")
    return "\n".join(row.rstrip() for row in out.getvalue().split("\n"))


def _provisional(group: dict[str, Any]) -> str:
    return " (provisional: one round)" if group["provisional"] else ""


def _table(summary: dict[str, Any], rows: list[text.Row], device: str, width: int | None) -> Any:
    """The widest form that fits: with intervals, without them, or close-set and without status."""
    from rich.table import Table
    from rich.text import Text

    header, lines = text.table(summary, rows, device)
    intervals, gap = True, 2
    if width is not None and _columns(header, lines, True) > width:
        intervals, gap = False, 2 if _columns(header, lines, False) <= width else 1
    # What is not ok is named with its status below the table in any case.
    kept = [n for n in range(len(header)) if gap == 2 or n != STATUS]
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for n in kept:
        table.add_column(
            header[n] if gap == 2 else header[n].replace(" ", "\n", 1),
            justify="left" if n <= STATUS else "right",
            # Names fold before numbers do; where even that is too wide, everything folds and nothing is cut.
            no_wrap=gap == 2 or (n != RECIPE and width is not None and width >= LEAST_WIDTH),
            overflow="fold",
        )
    for line in lines:
        words = [text.printable(line[n].plain(intervals)) for n in kept]
        styles = ["bold" if line[n].best else "" for n in kept]
        table.add_row(*(Text(word, style) for word, style in zip(words, styles, strict=True)))
    return table


def _columns(header: list[str], lines: list[list[Cell]], intervals: bool) -> int:
    """Characters a line of the table takes, columns two apart."""
    widths = [
        max(len(name), *(len(line[n].plain(intervals)) for line in lines), 0) for n, name in enumerate(header)
    ]
    return sum(widths) + 2 * (len(header) - 1)
