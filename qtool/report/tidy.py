"""The tidy table of a run: a line for each metric of each trial, as CSV and as Parquet.

One variable a column and one observation a line (Wickham 2014, "Tidy Data", https://doi.org/10.18637/jss.v059.i10),
with the run's identity in every line, so that the tables of several runs can be put below each other.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool import evidence
from qtool import summary as summaries
from qtool.core import METRICS, QtoolError, content_hash
from qtool.evidence import group_of
from qtool.report.text import printable

COLUMNS = {
    "run": "string",  # the folder's name
    "run_hash": "string",  # see run_hash
    "started_at": "string",  # ISO 8601
    "model": "string",
    "model_content": "string",  # SHA-256 of its files
    "task": "string",
    "score": "string",  # the task's primary metric
    "data_hash": "string",
    "host": "string",  # the host's fingerprint
    "cpu_model": "string",
    "threads": "int64",
    "rounds": "int64",
    "qtool": "string",
    "recipe": "string",
    "device": "string",
    "batch_size": "int64",
    "status": "string",
    "on_frontier": "bool",
    "recommended": "bool",
    "contended": "bool",
    "metric": "string",  # null for a trial that is not ok: such a trial has one line
    "unit": "string",  # null for a bare number
    "better": "string",
    "value": "float64",
    "low": "float64",  # 95 % interval
    "high": "float64",
    "reason": "string",  # why value or interval is missing; the cause of a trial that is not ok
}
"""Name and Arrow type of each column, in order. Seconds and bytes; empty is null, never NaN."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def run_hash(run: Mapping[str, Any]) -> str:
    """What makes a run this run, whatever its folder is called: 16 hex digits."""
    facts = {key: run.get(key) for key in ("model", "task", "metric", "started_at")}
    facts["host"] = (run.get("host") or {}).get("hash")
    trials = [entry["trial_id"] for entry in run["plan"]]
    # a lone surrogate, which JSON may hold, has no bytes to hash
    return content_hash([printable(str(fact)) for fact in [*facts.values(), *trials]])[:16]


def of(run_dir: Path) -> list[dict[str, Any]]:
    """`rows` of the run in a folder. Raises QtoolError as `evidence.load` does."""
    found = evidence.load(run_dir)
    return rows(summaries.of(found), found.run, run_dir.resolve().name)


def rows(summary: Mapping[str, Any], run: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Every line of the table of the run in a folder called `name`; keys and types are those of COLUMNS."""
    host, args, data, versions = (run.get(key) or {} for key in ("host", "args", "data", "versions"))
    whole = {
        "run": name,
        "run_hash": run_hash(run),
        "started_at": run.get("started_at"),
        "model": summary["model"],
        "model_content": (run.get("model_info") or {}).get("content"),
        "task": summary["task"],
        "score": summary["metric"],
        "data_hash": data.get("data_hash"),
        "host": host.get("hash"),
        "cpu_model": host.get("cpu_model"),
        "threads": args.get("threads"),
        "rounds": run["rounds"],
        "qtool": versions.get("qtool"),
    }
    chosen = {group_of(g): g["recommended"] for g in summary["frontier"]}
    found = []
    for row in summary["rows"]:
        trial = {key: row[key] for key in ("recipe", "device", "batch_size", "status", "on_frontier")}
        own = (run.get("hosts") or {}).get(row.get("host"))
        if own:
            trial |= {"host": own.get("hash"), "cpu_model": own.get("cpu_model")}
        trial["recommended"] = chosen[group_of(row)] == row["recipe"]
        trial["contended"] = row["contended"]
        if row["status"] != "ok":
            found.append(_typed(whole | trial | {"reason": row["cause"]}))
        for metric, cell in row["metrics"].items():
            told = {"metric": metric, "unit": METRICS[metric].unit, "better": METRICS[metric].better}
            found.append(_typed(whole | trial | told | cell))
    return found


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as COLUMNS wants them; a text is one line without control characters."""
    found: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        value = values.get(name)
        if kind == "string":
            found[name] = None if value is None else printable(str(value)) or None
        elif isinstance(value, int | float):
            found[name] = {"int64": int, "float64": float, "bool": bool}[kind](value)
        else:
            found[name] = None  # not measured, or a damaged run.json
    return found


def to_csv(table: list[dict[str, Any]]) -> str:
    """As RFC 4180 has it, a header line first; numbers with all their digits."""
    return written(tuple(COLUMNS), table)


def written(columns: Sequence[str], table: Sequence[Mapping[str, Any]]) -> str:
    """A table of these columns as CSV."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([_written(line[name]) for name in columns] for line in table)
    return out.getvalue()


def _written(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value.startswith(FORMULA):
        # A spreadsheet runs such a text as a formula, quoted or not; the apostrophe makes it a text again
        # (https://owasp.org/www-community/attacks/CSV_Injection). A negative number is no text and stays one.
        return "'" + value
    return repr(value) if isinstance(value, float) else str(value)


def write_parquet(table: list[dict[str, Any]], path: Path) -> None:
    """Write whole or not at all. Raises QtoolError where pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise QtoolError(
            "--format parquet needs pyarrow: pip install pyarrow, or take --format csv."
        ) from None
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    temporary = path.with_name(f".{path.name}.tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table, schema=schema), temporary)
    temporary.replace(path)
