"""`report.html`: a run's whole report as one file that a browser opens from disk, without any network.

The template is escaped by Jinja, the scripts' data stand in a JSON block, and a Content-Security-Policy lets
only the scripts of this file run (by their hashes) and nothing be fetched. What is said is made in `context`
(server-rendered) and `data` (for the drawings); the drawing itself is Observable Plot's (see `vendor`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool import summary as summaries
from qtool.evidence import Evidence, load
from qtool.report.text import one_line

HERE = Path(__file__).parent
LIBRARY = "vendor/plot.min.js"
SCRIPTS = ("page.js", "chart.js", "frontier.js", "curve.js", "table.js", "recipes.js", "print.js")
# What ends a script block, opens a comment in it, or is a line's end to old JavaScript only.
UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write(run_dir: Path) -> Path:
    """Derive the page from the stored samples and write `report.html` into `run_dir`; its path.

    Raises QtoolError as `evidence.load` does.
    """
    evidence = load(run_dir)
    path = run_dir / "report.html"
    path.write_text(render(evidence, summaries.of(evidence)), "utf-8")
    return path


def render(evidence: Evidence, summary: Mapping[str, Any]) -> str:
    """The page of a run as HTML; `summary` is what `summary.of(evidence)` gives."""
    from qtool.report.page import context, data

    drawn, notes = data.data(evidence, summary)
    library, script = _source(LIBRARY), "\n".join(map(_source, SCRIPTS))
    return (
        templates(HERE)
        .get_template("template.html")
        .render(
            context.context(evidence, summary, notes),
            policy=_policy(library, script),
            style=_source("page.css"),
            library=library,
            script=script,
            data=to_json(drawn),
        )
    )


def templates(folder: Path) -> Any:
    """The jinja2 Environment of HTML templates in `folder`: whatever they are given is escaped and printable."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def to_json(value: Any) -> str:
    """JSON that stands inside a script block: no text in it can end the block or act as markup."""
    told = json.dumps(_clean(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return told.translate(UNSAFE)


def _source(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _policy(*scripts: str) -> str:
    """Nothing may be fetched, framed or sent; Plot writes a style element into each drawing, hence its rule."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _printable(value: Any) -> Any:
    """Strings from outside lose control characters, lone surrogates and marks that turn the reading direction."""
    return one_line(value) if type(value) is str else value


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {_clean(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    return _printable(value)
