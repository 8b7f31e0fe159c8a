"""The runs of a folder, read only: found, summarised once while their files stay the same, set side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from qtool import comparability, evidence
from qtool import summary as summaries
from qtool.core import METRICS, QtoolError
from qtool.report.text import place, printable
from qtool.report.two_runs import short
from qtool.units import NONE, PERCENT, between, change, number, peak_name, unit

DEPTH = 2
"""A sweep of several models leaves a folder of run folders."""
FILES = ("run.json", "results.jsonl")
BROKEN = (
    QtoolError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a damaged run folder may raise, foreseen or not: one such run must not take the others away."""


@dataclass(frozen=True)
class Book:
    """A run of the shelf: its `run.json` and its summary; without them where it cannot be read, `error` says why.

    The samples are let go: a long shelf would fill the memory with them.
    """

    name: str
    path: Path
    run: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=lambda: {"rows": [], "frontier": []})
    error: str = ""

    @property
    def started(self) -> datetime | None:
        try:
            found = datetime.fromisoformat(self.run.get("started_at") or "")
        except (TypeError, ValueError):
            return None
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    @property
    def model(self) -> str:
        """As it was named; of a path the last part."""
        name = printable(str(self.run.get("model")))
        return Path(name).name if name.startswith((".", "/", "~")) else name

    @property
    def host(self) -> str:
        """The processor's name and the start of the host's fingerprint."""
        facts = self.run.get("host") or {}
        return f"{facts.get('cpu_model') or 'not known'} {str(facts.get('hash') or '')[:8]}".strip()


class Shelf:
    """The runs below a folder. What was derived is kept until a file of the run changes; safe among threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[Path, tuple[Any, Book]] = {}
        self._one_at_a_time = Lock()

    def paths(self) -> dict[str, Path]:
        """Run folders by name, as they are now: the only names that can be asked for."""
        if _is_run(self.folder):
            return {self.folder.resolve().name: self.folder}
        found: dict[str, Path] = {}
        below = [self.folder]
        for _ in range(DEPTH):
            children = [child for parent in below for child in _folders(parent)]
            found |= {path.relative_to(self.folder).as_posix(): path for path in children if _is_run(path)}
            below = [path for path in children if not _is_run(path) and _is_inside(path, self.folder)]
        return found

    def books(self) -> list[Book]:
        """Every run, the newest first; those without a date last."""
        books = [self._read(name, path) for name, path in self.paths().items()]
        oldest = datetime.min.replace(tzinfo=UTC)
        return sorted(sorted(books, key=lambda b: b.name), key=lambda b: b.started or oldest, reverse=True)

    def book(self, name: str) -> Book:
        """One run. Raises KeyError where the listing has no such name."""
        return self._read(name, self.paths()[name])

    def _read(self, name: str, path: Path) -> Book:
        with self._one_at_a_time:
            problem = _leads_out(path, self.folder)
            if problem:
                return Book(name, path, error=printable(problem))
            stamp = _stamp(path)
            kept = self._kept.get(path)
            if kept is None or kept[0] != stamp:
                kept = self._kept[path] = (stamp, _open(name, path))
            return kept[1]


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            # of a link to itself an entry's own is_dir raises
            return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and os.path.isdir(e))
    except OSError:  # a folder that went away or may not be read has no runs to show
        return []


def _is_run(path: Path) -> bool:
    return any(os.path.isfile(path / name) for name in FILES)


def _leads_out(run: Path, shelf: Path) -> str:
    """Why a run is not opened: it, or a link in it, leads to what nobody asked to be served. '' where none does."""
    if not _is_inside(run, shelf):
        return "it is a link that leads out of the folder that is served. Serve that other folder, or copy the run."
    for folder, folders, files in os.walk(run):
        for name in (*folders, *files):
            if os.path.islink(place := Path(folder, name)) and not _is_inside(place, run):
                return f"its {name} is a link that leads out of the run. Put a copy in its place."
    return ""


def _is_inside(place: Path, folder: Path) -> bool:
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder))


def _stamp(path: Path) -> list[Any]:
    """Times and sizes of what a summary is derived from."""
    found = []
    for name in (*FILES, "predictions"):
        try:
            status = (path / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return found


def _open(name: str, path: Path) -> Book:
    try:
        found = evidence.load(path, keep=False)
        return Book(name, path, found.run, summaries.of(found))
    except BROKEN as error:
        foreseen = isinstance(error, QtoolError)
        told = str(error) if foreseen else f"it cannot be read ({type(error).__name__}). Sweep again."
        return Book(name, path, error=printable(told))


def columns(metric: str | None, device: str) -> list[str]:
    """The metrics that runs are set beside each other in."""
    score = [metric, "score_delta"] if metric else []
    return [
        *score,
        "speedup",
        "latency_p50_s",
        "latency_p95_s",
        "throughput_per_s",
        peak_name(device),
        "disk_bytes",
    ]


def side_by_side(books: Sequence[Book]) -> list[dict[str, Any]]:
    """A table for each metric of each device and batch size of the first run: recipes down, runs across.

    A column holds no values where its run may not be held against the first one in this metric; `why` says so.
    """
    first, tables = books[0], []
    differ = [comparability.differences(first.run, book.run) for book in books]
    for at in dict.fromkeys(map(_at, first.summary["rows"])):
        (device, batch_size), where = at[-2:], " at ".join(map(str, reversed(at[:-1])))
        rows = [{row["recipe"]: row for row in book.summary["rows"] if _at(row) == at} for book in books]
        for name in columns(first.run["metric"], device):
            why = [_why(found, name, first.run["metric"]) for found in differ]
            lines = []
            for recipe in rows[0]:
                cells = [
                    NONE if reason else _cell(own.get(recipe), name, first.run["metric"])
                    for own, reason in zip(rows, why, strict=True)
                ]
                lines.append([recipe, *cells])
            points = " points" if name == "score_delta" and first.run["metric"] in PERCENT else ""
            title = f"{label(name)}{points} on {where}, batch {batch_size}"
            tables.append({"title": title, "why": why, "lines": lines})
    return tables


def only_elsewhere(books: Sequence[Book]) -> list[str]:
    """What the first run has nothing to hold against."""
    own = {(row["recipe"], *_at(row)) for row in books[0].summary["rows"]}
    lines = []
    for book in books[1:]:
        others = [row for row in book.summary["rows"] if (row["recipe"], *_at(row)) not in own]
        if others:
            named = (f"{row['recipe']} {place(row)} batch {row['batch_size']}" for row in others)
            lines.append(f"not in {books[0].name}, only in {book.name}: {', '.join(named)}")
    return lines


def _at(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Device and batch size, behind the host where it is named by its kind: a run of one host is any machine's."""
    host = row.get("host") or ""
    return (*([host] if "/" in host else []), row["device"], row["batch_size"])


def _why(found: Sequence[Mapping[str, Any]], name: str, metric: str | None) -> str:
    """Why a run's column stays empty beside the first run's; '' where it need not."""
    return comparability.spoiled(found, "score" if name in (metric, "score_delta") else name) or ""


def _cell(row: Mapping[str, Any] | None, name: str, metric: str | None) -> str:
    if row is None:
        return ""
    return told(name, row["metrics"].get(name), metric) if row["status"] == "ok" else row["status"]


def told(name: str, cell: Mapping[str, Any] | None, metric: str | None) -> str:
    """A value with its interval, as the reports write it; `metric` is the score's."""
    if cell is None or cell["value"] is None:
        return NONE

    def write(value: float) -> str:
        return change(metric, value) if name == "score_delta" else number(name, value)

    exact = cell["low"] == cell["high"]
    return write(cell["value"]) + ("" if exact else between(dict(cell), write))


def label(name: str) -> str:
    """A metric's label with the unit that it is written in."""
    return f"{METRICS[name].label} {unit(name)}".strip()


def facts(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs, in words."""
    return [f"{f['what']}: {printable(short(f['a']))} against {printable(short(f['b']))}" for f in found]
