"""Folders in the cache that are put in place whole, checked by their hashes, and swept of what a kill left."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from qtool import store
from qtool.core import Measurement, cache_dir, file_hash
from qtool.isolate import Outcome

STALE_S = 8 * 86400.0
"""A scratch folder older than this belongs to no sweep: --timeout ends a stage after a week at most."""


def obtain(at: Path, build: Callable[[Path], Outcome]) -> Outcome:
    """Find the artifact in the cache, or let `build` make it beside its place and rename it when it is whole.

    Ok has the values artifact, cached, build_s (None where it was cached) and disk_bytes.
    """
    found: dict[str, object] = {"artifact": at.name, "cached": is_whole(at), "build_s": None}
    if not found["cached"]:
        shutil.rmtree(at, ignore_errors=True)
        at.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{at.name}-", dir=at.parent) as scratch:
            made = Path(scratch) / "artifact"
            outcome = build(made)
            if outcome.status != "ok":
                return outcome
            store.write_json(made / "manifest.json", outcome.values)
            place(made, at)
        found["build_s"] = outcome.values["build_s"]
    files = [path for path in (at / "model").rglob("*") if path.is_file()]
    return Outcome("ok", {**found, "disk_bytes": sum(path.stat().st_size for path in files)})


def place(made: Path, to: Path) -> None:
    """Rename into place; another sweep that was first has put the same content there."""
    try:
        made.rename(to)
    except OSError:
        if not to.is_dir():
            raise


def built(lines: Iterable[Measurement], recipe: str) -> Path | None:
    """The folder in the cache of what a run built for `recipe`; None where no ok line tells it.

    A run folder may come from anyone: of a path only the last part counts, so that nothing outside the cache is
    opened.
    """
    for line in lines:
        if line.stage == "build" and line.recipe == recipe and line.status == "ok":
            name = Path(str(line.values.get("artifact") or "")).name
            if name not in ("", ".", ".."):
                return cache_dir() / "artifacts" / name
    return None


def is_whole(place: Path) -> bool:
    """Whether a cached artifact still is what its build left, by the hashes in its manifest."""
    manifest = place / "manifest.json"
    if not manifest.is_file():
        return False
    try:
        files = json.loads(manifest.read_text("utf-8"))["files"]
    except (ValueError, KeyError, TypeError):  # a disk that was full, or an older qtool
        return False
    return all(
        (place / name).is_file() and file_hash(place / name) == digest for name, digest in files.items()
    )


def drop_stale() -> None:
    """Remove the scratch folders, some of them model-sized, that killed sweeps left in the cache."""
    for folder in (*cache_dir().glob("artifacts/.*"), *cache_dir().glob("data/.probe-*")):
        if folder.is_dir() and time.time() - folder.stat().st_mtime > STALE_S:
            shutil.rmtree(folder, ignore_errors=True)
