"""What the parent settles before a sweep: the run folder, and a child's word on model, task and data."""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from qtool import artifacts, isolate
from qtool.core import QtoolError, Recipe, cache_dir, content_hash, file_hash
from qtool.plan import Options

PROBE_TIMEOUT_S = 1800.0


def folder_name(model: str) -> str:
    """The last part of MODEL, in letters that every file system takes."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(model).name or model)


def check_out(options: Options) -> Path:
    """The run folder; nothing is made yet. Raises QtoolError when it cannot be used."""
    if options.out is None:
        if options.resume:
            raise QtoolError("--resume needs --out DIR, the folder of the run to go on with.")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        options.out = Path("reports") / f"{folder_name(options.model)}-{options.task or 'no-task'}-{stamp}"
    out = options.out
    if not str(out).strip("."):
        raise QtoolError(f"--out '{out}' names no folder of its own. Give a new one, such as reports/first.")
    holds_run = (out / "run.json").exists()
    if out.exists() and not out.is_dir():
        raise QtoolError(f"--out {out} is a file. Give a folder.")
    if holds_run and not (options.resume or options.dry_run):
        raise QtoolError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
        )
    if out.is_dir() and not holds_run and not options.resume and any(out.iterdir()):
        raise QtoolError(
            f"{out} is not empty and holds no run. Give --out a new folder: a run would overwrite it."
        )
    if options.resume and not holds_run:
        raise QtoolError(
            f"nothing to resume: {out} holds no run. Leave --resume out, or give the run's folder."
        )
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise QtoolError(f"cannot write to {out}: {parent} is not a writable folder. Choose another --out.")
    return out


def probe(options: Options, chosen: dict[str, Recipe]) -> tuple[dict[str, Any], Path]:
    """Ask a child to check everything the user gave; its prepared data goes to the cache."""
    wanted = max((r.calibration.rows for r in chosen.values() if r.calibration), default=0)
    cache = cache_dir() / "data"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".probe-", dir=cache))
    except OSError as error:
        raise QtoolError(
            f"cannot write to the cache {cache}: {error.strerror}. Set QTOOL_CACHE to another folder."
        ) from None
    try:
        spec = {
            **{
                key: getattr(options, key)
                for key in ("model", "revision", "data", "text", "text_pair", "label")
            },
            **{
                key: getattr(options, key)
                for key in ("metric", "seq_len", "limit", "split", "calibration", "score", "seed")
            },
            "task": options.task or ("text" if options.data else "demo"),
            "calibration_rows": wanted,
            "recipes": [recipe.model_dump() for recipe in chosen.values()],
            "data_out": str(scratch / "data"),
        }
        log = scratch / "probe.log"
        outcome = isolate.run(
            "probe", spec, log=log, timeout_s=PROBE_TIMEOUT_S, threads=options.threads, offline=False
        )
        if outcome.status in ("user_error", "unavailable"):
            raise QtoolError(outcome.error or "")
        if outcome.status != "ok":
            kept = cache / "probe-failed.log"
            shutil.copyfile(log, kept)
            raise QtoolError(f"checking the model and the data failed: {outcome.error}. See {kept}.")
        values = outcome.values
        # by content: whatever else decides what was prepared, no run can find another's under its name
        made = sorted((scratch / "data").iterdir())
        data_dir = cache / content_hash([[path.name, file_hash(path)] for path in made])[:16]
        if not (data_dir / "meta.json").is_file():
            shutil.rmtree(data_dir, ignore_errors=True)
            artifacts.place(scratch / "data", data_dir)
        return values, data_dir
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
