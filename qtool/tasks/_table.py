"""Reads tables of texts and labels: CSV, TSV, JSON lines and Parquet. A malformed row is named by its line."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.core import QtoolError, did_you_mean

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
Names = str | tuple[str, ...]
"""A column's name, or the names it may have, the first one found being taken."""


@dataclass(frozen=True)
class Table:
    """Examples in file order. `labels` are as written or parsed (None where only the texts are read)."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[Any] | None
    source: str
    notes: tuple[str, ...] = ()
    kinds: tuple[Any, ...] = ()
    """The distinct labels of the whole file, where this is a part of it."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Table:
        """The table of these rows, in this order."""
        return Table(
            [self.texts[row] for row in rows],
            [self.pairs[row] for row in rows] if self.pairs is not None else None,
            [self.labels[row] for row in rows] if self.labels is not None else None,
            self.source,
            self.notes,
            self.kinds or tuple(dict.fromkeys(self.labels or [])),
        )


def read(
    path: Path,
    text: Names,
    text_pair: Names | None,
    label: Names | None,
    *,
    headerless: tuple[str, ...] = (),
    parse: Callable[[Any], Any] | None = None,
    empty_texts: bool = False,
    leave_out_broken: bool = False,
) -> Table:
    """Read the named columns of a table; its kind goes by its ending. Other columns do not matter.

    TSV has no quoting (a lone quotation mark is text, as in GLUE's files); CSV follows RFC 4180.
    `headerless` names the columns of a TSV whose first row holds none of the wanted names. `parse` turns a label
    into its value and raises ValueError with what it expected. `leave_out_broken` drops rows with too few or too
    many fields, with a note, instead of refusing them.
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
        lines = _quoted(path) if path.suffix == ".csv" else _tab_separated(path)
        wanted = {name for names in (text, text_pair, label) for name in _names(names)}
        columns, rows = _under_header(path, lines, headerless, wanted)
    columns_of = [
        _find(path, columns, names) if names is not None else None for names in (text, text_pair, label)
    ]
    text_name, pair_name, label_name = columns_of
    picked: dict[str, list[Any]] = {name: [] for name in columns_of if name is not None}
    broken = 0
    for line, row in rows:
        if isinstance(row, str):
            if not leave_out_broken:
                raise QtoolError(f"{path} line {line} {row}. Mend the row.")
            broken += 1
            continue
        for name, values in picked.items():
            value = row.get(name)
            if name == label_name and name not in (text_name, pair_name):
                values.append(_label(path, line, name, value, parse))
            elif isinstance(value, str) and (value or empty_texts) and _is_unicode(value):
                values.append(value)
            else:
                raise QtoolError(f"{path} line {line}: column '{name}' holds {value!r}, expected text.")
    texts = picked[text_name or ""]
    if not texts:
        raise QtoolError(f"{path} has no rows. Give a table with at least one example.")
    return Table(
        texts,
        picked[pair_name] if pair_name else None,
        picked[label_name] if label_name else None,
        str(path.name),
        (f"{broken} broken rows of {path.name} were left out",) if broken else (),
    )


Rows = Iterable[tuple[int, dict[str, Any] | str]]
"""Line number and the row's values by column, or what is wrong with the row."""


def _names(names: Names | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _find(path: Path, columns: Sequence[str], names: Names) -> str:
    """The first of `names` that the table has."""
    found = next((name for name in _names(names) if name in columns), None)
    if found is None:
        wanted = " or ".join(f"'{name}'" for name in _names(names))
        hint = did_you_mean(_names(names)[0], columns)
        raise QtoolError(f"{path} has no column {wanted}.{hint} It has: {', '.join(columns)[:300]}.")
    if list(columns).count(found) > 1:
        raise QtoolError(f"{path}: column '{found}' stands twice in the header. Rename one.")
    return found


def _is_unicode(text: str) -> bool:
    """Whether `text` has no half of a surrogate pair, which JSON can spell and no tokenizer takes."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _label(path: Path, line: int, column: str, value: Any, parse: Callable[[Any], Any] | None) -> Any:
    expected = "a label"
    if value is not None and value != "":
        if parse is None and isinstance(value, (str, int, float)):
            return value
        if parse is None:
            raise QtoolError(
                f"{path} line {line}: column '{column}' holds {value!r:.60}, expected a word or a number."
            )
        try:
            return parse(value)
        except ValueError as error:
            expected = str(error)
    raise QtoolError(f"{path} line {line}: column '{column}' holds {value!r}, expected {expected}.")


def _binary(path: Path) -> QtoolError:
    return QtoolError(f"{path} is binary, not a text table. Give UTF-8 text or a .parquet file.")


def _not_utf8(path: Path, line: int) -> QtoolError:
    return QtoolError(f"{path} line {line} is not UTF-8 text. Save the table as UTF-8.")


def _text_of(path: Path) -> str:
    data = path.read_bytes()
    if b"\0" in data:
        raise _binary(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data[: error.start].count(b"\n") + 1) from None


Lines = Iterator[tuple[int, list[str]]]


def _quoted(path: Path) -> Lines:
    csv.field_size_limit(2**31 - 1)
    text = io.StringIO(_text_of(path), newline="")
    reader = csv.reader(text, strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise QtoolError(f"{path} line {reader.line_num}: {error}. Check the quoting.") from None


def _tab_separated(path: Path) -> Lines:
    # line by line: MNLI's training file with its parses does not belong in memory as a whole;
    # a binary file ends its lines at \n alone: texts may hold other line separators
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if b"\0" in raw:
                raise _binary(path)
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _not_utf8(path, number) from None
            line = line.removesuffix("\n").removesuffix("\r")
            if line:
                yield number, line.split("\t")


def _under_header(
    path: Path, lines: Lines, headerless: tuple[str, ...], wanted: set[str]
) -> tuple[list[str], Rows]:
    """The column names and the rows under them; `headerless` are the names where the first row holds none."""
    first = next(lines, None)
    if first is None or not any(field.strip() for field in first[1]):
        raise QtoolError(f"{path} is empty. Give a table with a header and at least one example.")
    header, count = first[1], f"the header has {len(first[1])}"
    if headerless and not wanted & set(header):
        header, lines = list(headerless), itertools.chain([first], lines)
        count = f"expected {len(headerless)} ({', '.join(headerless)})"

    def rows() -> Rows:
        for line, fields in lines:
            if len(fields) == len(header):
                yield line, dict(zip(header, fields, strict=True))
            else:
                yield line, f"has {len(fields)} fields, {count}"

    return header, rows()


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
