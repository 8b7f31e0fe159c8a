"""Reads tables of texts and labels: CSV, TSV, JSON lines and Parquet. A malformed row is named by its line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.core import QtoolError, did_you_mean

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Table:
    """Examples in file order. `labels` are as written (None where the table is read for its texts only)."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[Any] | None
    source: str

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Table:
        """The table of these rows, in this order."""
        return Table(
            [self.texts[row] for row in rows],
            [self.pairs[row] for row in rows] if self.pairs is not None else None,
            [self.labels[row] for row in rows] if self.labels is not None else None,
            self.source,
        )


def read(path: Path, text: str, text_pair: str | None, label: str | None, *, quoted: bool = False) -> Table:
    """Read the named columns of a table; its kind goes by its ending.

    TSV has no quoting (a lone quotation mark is text, as in GLUE's files) unless `quoted`; CSV follows RFC 4180.
    Raises QtoolError for a file that cannot be read, a missing column or a malformed row.
    """
    if path.suffix not in SUFFIXES:
        raise QtoolError(
            f"cannot tell what kind of table {path} is. Its name should end in {', '.join(SUFFIXES)}."
        )
    if path.is_dir() or not path.is_file():
        raise QtoolError(f"there is no table at {path}. Give the path of a file.")
    if path.suffix == ".parquet":
        columns, rows = _parquet(path)
    elif path.suffix == ".jsonl":
        columns, rows = _json_lines(path)
    else:
        columns, rows = _delimited(
            path, "," if path.suffix == ".csv" else "\t", quoted or path.suffix == ".csv"
        )
    wanted = [name for name in (text, text_pair, label) if name is not None]
    for name in wanted:
        if name not in columns:
            raise QtoolError(
                f"{path} has no column '{name}'.{did_you_mean(name, columns)} It has: {', '.join(columns)}."
            )
    picked: dict[str, list[Any]] = {name: [] for name in wanted}
    for line, row in rows:
        for name in wanted:
            value = row.get(name)
            is_text = name in (text, text_pair)
            if value is None or (is_text and not isinstance(value, str)) or value == "":
                raise QtoolError(
                    f"{path} line {line}: column '{name}' holds {value!r}, expected {'text' if is_text else 'a label'}."
                )
            picked[name].append(value)
    if not picked[text]:
        raise QtoolError(f"{path} has no rows. Give a table with at least one example.")
    return Table(
        picked[text],
        picked[text_pair] if text_pair else None,
        picked[label] if label else None,
        str(path.name),
    )


Rows = Iterable[tuple[int, dict[str, Any]]]


def _text_of(path: Path) -> str:
    data = path.read_bytes()
    if b"\0" in data:
        raise QtoolError(f"{path} is binary, not a text table. Give UTF-8 text or a .parquet file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise QtoolError(f"{path} line {line} is not UTF-8 text. Save the table as UTF-8.") from None


def _delimited(path: Path, delimiter: str, quoted: bool) -> tuple[list[str], Rows]:
    text = _text_of(path)
    if not text.strip():
        raise QtoolError(f"{path} is empty. Give a table with a header and at least one example.")
    if quoted:
        csv.field_size_limit(2**31 - 1)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows: list[tuple[int, list[str]]] = []
        try:
            for fields in reader:
                if fields:
                    rows.append((reader.line_num, fields))
        except csv.Error as error:
            raise QtoolError(f"{path} line {reader.line_num}: {error}. Check the quoting.") from None
    else:
        lines = text.split("\n")  # not splitlines: texts may hold other line separators
        rows = [
            (n, line.removesuffix("\r").split(delimiter))
            for n, line in enumerate(lines, 1)
            if line.strip("\r")
        ]
    header = rows[0][1]
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise QtoolError(f"{path}: column '{twice}' stands twice in the header. Rename one.")
    for line, fields in rows[1:]:
        if len(fields) != len(header):
            raise QtoolError(
                f"{path} line {line} has {len(fields)} fields, the header has {len(header)}. Mend the row."
            )
    return header, [(line, dict(zip(header, fields, strict=True))) for line, fields in rows[1:]]


def _json_lines(path: Path) -> tuple[list[str], Rows]:
    rows = []
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise QtoolError(
                f"{path} line {number} is not JSON: {error.msg}. Put one object on each line."
            ) from None
        if not isinstance(row, dict):
            raise QtoolError(f"{path} line {number} holds {type(row).__name__}, expected an object.")
        rows.append((number, row))
    if not rows:
        raise QtoolError(f"{path} is empty. Put one JSON object on each line.")
    return list(rows[0][1]), rows


def _parquet(path: Path) -> tuple[list[str], Rows]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise QtoolError(f"{path} is not a Parquet file: {str(error).splitlines()[0][:120]}.") from None
    return table.column_names, list(enumerate(table.to_pylist(), 1))
