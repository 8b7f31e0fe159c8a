"""One recipe over the runs of a folder: a section for each model, task, device and batch size, with drawings.

Values are joined by a line only within a series: runs on the same host with the same versions, data and arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qtool import comparability
from qtool.core import METRICS
from qtool.report.shelf import Book, facts, label, told
from qtool.report.text import place
from qtool.units import number, peak_name, unit

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 26
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = 6
Cell = Mapping[str, Any]


@dataclass
class Series:
    """Runs that may be joined; `differs` says what sets them apart from the first series."""

    letter: str
    first: Book
    differs: list[str] = field(default_factory=list)


@dataclass
class Point:
    book: Book
    series: Series
    status: str
    cells: Mapping[str, Cell]


@dataclass
class Section:
    title: str
    metrics: list[str]
    points: list[Point]
    series: list[Series]


def sections(books: Sequence[Book], recipe: str) -> list[Section]:
    """The recipe's trials by model, task, device and batch size, the oldest run first. Empty: no run has it."""
    found: dict[tuple[Any, ...], Section] = {}
    dated = [book for book in books if not book.error and book.started is not None]
    for book in sorted(dated, key=lambda b: (_time(b), b.name)):
        summary = book.summary
        for row in summary["rows"]:
            if row["recipe"] != recipe:
                continue
            key = (summary["model"], summary["task"], summary["metric"], place(row), row["batch_size"])
            if key not in found:
                metrics = ["latency_p50_s", *filter(None, [summary["metric"]]), peak_name(row["device"])]
                title = f"{book.model}, {key[1] or 'no task'}: {place(row)}, batch {row['batch_size']}"
                found[key] = Section(title, metrics, [], [])
            section = found[key]
            point = Point(book, _series(section, book), row["status"], row["metrics"])
            section.points.append(point)
    return sorted(found.values(), key=lambda section: -len(section.points))


def _series(section: Section, book: Book) -> Series:
    for series in section.series:
        if not comparability.differences(series.first.run, book.run):
            return series
    number_of = len(section.series)
    letter = LETTERS[number_of] if number_of < len(LETTERS) else str(number_of + 1)
    differs = comparability.differences(section.series[0].first.run, book.run) if section.series else []
    section.series.append(Series(letter, book, facts(differs)))
    return section.series[-1]


def drawing(section: Section, name: str) -> dict[str, Any] | None:
    """Where everything of one metric's drawing stands, in units of its view box; None without any value.

    `lines` join the points of a series, `marks` are values with their intervals, `rules` are the scale's ticks.
    """
    shown = [point for point in section.points if _value(point, name) is not None]
    if not shown:
        return None
    times = [_time(point.book) for point in shown]
    ends = [x for point in shown for x in _ends(point.cells[name])]
    low, high = _scale(name, min(ends), max(ends))
    first, last = min(times), max(times)

    def x_of(time: float) -> float:
        share = 0.5 if first == last else (time - first) / (last - first)
        return round(LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24), 1)

    def y_of(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    marks = []
    for point, time in zip(shown, times, strict=True):
        cell, order = point.cells[name], section.series.index(point.series)
        bottom, top = (y_of(x) for x in (min(_ends(cell)), max(_ends(cell))))
        marks.append(
            {
                "x": x_of(time),
                "y": y_of(cell["value"]),
                "bottom": bottom,
                "top": top,
                "colour": order % COLOURS,
                "letter": point.series.letter,
                "words": f"{point.book.name}: {told(name, cell, None)} {unit(name)}".strip(),
            }
        )
    lines = []
    for order, series in enumerate(section.series):
        own = [mark for mark, point in zip(marks, shown, strict=True) if point.series is series]
        if len(own) > 1:
            path = " ".join(f"{mark['x']:g},{mark['y']:g}" for mark in own)
            lines.append({"points": path, "colour": order % COLOURS})
    dates = [shown[0], shown[-1]] if first != last else shown[:1]
    return {
        "title": label(name),
        "better": METRICS[name].better,
        "marks": marks,
        "lines": lines,
        "rules": [{"y": y_of(tick), "words": number(name, tick)} for tick in ticks(low, high)],
        "dates": [{"x": x_of(_time(point.book)), "words": date(point.book)} for point in dates],
    }


def date(book: Book) -> str:
    return book.started.strftime("%Y-%m-%d %H:%M") if book.started else ""


def _time(book: Book) -> float:
    return book.started.timestamp() if book.started else 0.0


def _value(point: Point, name: str) -> float | None:
    return (point.cells.get(name) or {}).get("value")


def _ends(cell: Cell) -> list[float]:
    return [x for x in (cell["low"], cell["value"], cell["high"]) if x is not None]


def _scale(name: str, low: float, high: float) -> tuple[float, float]:
    """From `low` to `high` with a little room, and so wide that no two ticks are written alike."""
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    while True:
        bottom, top = max(0.0, low - room) if low >= 0 else low - room, high + room
        written = [number(name, tick) for tick in ticks(bottom, top)]
        if len(written) > 1 and len(set(written)) == len(written):
            return bottom, top
        room *= 1.5


def ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, two to six of them.

    Heckbert 1990, "Nice numbers for graph labels", Graphics Gems, p. 61.
    """
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(nice for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
