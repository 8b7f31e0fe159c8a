"""What two runs must share before a number of one may be held against the other's, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TIMES = ("latency_p50_s", "latency_p95_s", "throughput_per_s", "speedup")
MEMORY = ("peak_rss_bytes", "peak_vram_bytes")
SCORE, DISK = ("score",), ("disk_bytes",)
COLUMNS = (*SCORE, *TIMES, *MEMORY, *DISK)

SPOILED = "not the same "

# What is compared, where it stands in run.json, and which columns it spoils when it differs.
FACTS = (
    ("model content", ("model_info", "content"), COLUMNS),
    ("task", ("task",), SCORE),
    ("metric", ("metric",), SCORE),
    ("task data", ("data", "data_hash"), (*SCORE, *TIMES, *MEMORY)),
    ("host", ("host", "hash"), (*TIMES, *MEMORY)),
    ("threads", ("args", "threads"), (*TIMES, *MEMORY)),
    ("fixed length", ("args", "seq_len"), (*SCORE, *TIMES, *MEMORY)),
    ("library versions", ("versions",), (*TIMES, *MEMORY)),
    ("baseline", ("baseline",), ("speedup",)),
)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every fact that differs between two `run.json`: what it is, both values, and the columns it spoils."""
    found = []
    for what, path, spoils in FACTS:
        one: Any
        two: Any
        one, two = (_hashes(run) if what == "host" else _at(run, path) for run in (a, b))
        if one == two:
            continue
        if what == "library versions":
            names = sorted(
                n for n in {*(one or {}), *(two or {})} if (one or {}).get(n) != (two or {}).get(n)
            )
            one, two = ({n: (x or {}).get(n) for n in names} for x in (one, two))
        if what == "host":
            one, two = (_host(run) for run in (a, b))
        found.append({"what": what, "a": one, "b": two, "spoils": list(spoils)})
    return found


def _at(run: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = run
    for key in path:
        value = (value or {}).get(key) if isinstance(value, Mapping) or value is None else None
    return value


def _hashes(run: Mapping[str, Any]) -> set[str]:
    """Of the hosts that measured: a sweep over several nodes tells them apart from the one that led it."""
    return {host["hash"] for host in (run.get("hosts") or {}).values()} or {_at(run, ("host", "hash"))}


def _host(run: Mapping[str, Any]) -> Any:
    facts = next(iter((run.get("hosts") or {}).values()), None) or run.get("host") or {}
    return {key: facts.get(key) for key in ("cpu_model", "physical_cores", "memory_gib", "kernel", "hash")}


def spoiled(found: Sequence[Mapping[str, Any]], column: str) -> str | None:
    """Why a column cannot be compared; None where it can."""
    reasons = [difference["what"] for difference in found if column in difference["spoils"]]
    return f"{SPOILED}{', '.join(reasons)}" if reasons else None
