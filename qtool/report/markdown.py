"""`report.md` in GitHub's Markdown: tables, recommendation, plots, and where it was measured.

Every string that came from outside (model names, errors, versions) is escaped: it can neither break a table
nor bring in HTML, links or images.
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

from qtool.core import METRICS
from qtool.report import fit, text
from qtool.units import number, unit

DETAILS = (
    "agreement",
    "mean_kl",
    "max_logit_difference",
    "calibration_error",
    "throughput_per_s",
    "end_to_end_p50_s",
    "tokenize_share",
    "load_s",
    "first_call_s",
    "weight_bytes",
    "load_peak_rss_bytes",
    "steady_rss_bytes",
    "vram_allocated_bytes",
    "vram_device_bytes",
    "gpu_utilization_ratio",
    "energy_j",
    "power_w",
)
HOW_TO_READ = (
    "Every row is a recipe. Each round measures every recipe in a fresh process, the baseline among them (with "
    "--rounds auto the later ones only what was still uncertain, and the baseline); "
    "an interval in brackets covers 95 % and comes from the differences between rounds (speed, memory) or "
    "between examples (score).",
    "Speed-up is the baseline's p50 over the recipe's in the same round. Latency includes the copies between "
    "host and device. A percentile without enough samples is left out, not estimated.",
    "Δ is the change of the score against the baseline on the same examples. Agreement is the share of "
    "examples with the baseline's answer, right or wrong.",
    "F marks the frontier: no other recipe is shown to be better in one of score, p50, peak memory and size "
    "on disk while better or tied in the rest.",
)


def render(summary: dict[str, Any], run: dict[str, Any]) -> str:
    """The whole of `report.md`; the plots are linked as files beside it."""
    parts = [f"# {escape(text.title(summary, run))}"]
    for group in summary["frontier"]:
        rows = text.group_rows(summary, group)
        header, lines = text.table(summary, rows, group["device"])
        members = ", ".join(escape(name) for name in group["recipes"]) or "nothing finished"
        parts += [
            f"## {escape(text.group_title(group))}",
            escape(group["reason"]),
            f"Frontier: {members}{' (provisional: one round)' if group['provisional'] else ''}",
            _table(header, [[_bold(cell) for cell in line] for line in lines], 3),
        ]
        if unstable := text.unstable(rows):
            parts.append(escape(f"{unstable[0].upper()}{unstable[1:]}."))
        problems = text.problems(rows)
        if problems:
            told = [f"- **{escape(what)}**: {escape(why)}" for what, why in problems]
            parts.append("\n".join(told))
        parts.append(_details(rows))
        parts.append(_why(rows))
    if any(row["status"] == "ok" for row in summary["rows"]):
        parts.append("![frontier: score against latency and against peak memory](frontier.svg)")
        parts.append("The same as a bitmap: [frontier.png](frontier.png).")
    parts += ["## How to read this", escape(text.LEGEND) + ".", *HOW_TO_READ]
    if compared := fit.compared(summary["rows"]):
        parts.append(escape(compared))
    parts += ["## Recipes", _recipes(summary)]
    parts += ["## Where it was measured", _facts(summary, run)]
    if notes := summary["notes"]:
        parts += ["## Notes", "\n".join(f"- {escape(note)}" for note in notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(value: Any) -> str:
    """A string from outside as plain text on one line of Markdown."""
    words = html.escape(text.printable(str(value)), quote=False)
    # A scheme must not become a link by itself, hence the entity for its colon.
    words = re.sub(r"(?i)\b(https?|ftp|mailto)://", r"\1&#58;//", words)
    words = re.sub(r"(?i)\bwww\.", "www&#46;", words)
    return re.sub(r"([\\`*_\[\]|~!#@])", r"\\\1", words)


def _bold(cell: text.Cell) -> str:
    words = escape(cell.plain(True))
    return f"**{words}**" if cell.best else words


def _table(header: list[str], lines: list[list[str]], left: int) -> str:
    """A GFM table of escaped cells; the first `left` columns are set left, the others right."""
    rule = [":--" if number < left else "--:" for number in range(len(header))]
    shown = [[escape(name) or " " for name in header], rule, *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def _why(rows: list[text.Row]) -> str:
    """Why each recipe is as fast or slow as it is."""
    told = [(row["recipe"], row.get("why") or []) for row in rows]
    lines = [f"- {escape(recipe)}: {escape(' '.join(sentences))}" for recipe, sentences in told if sentences]
    return "### Why each is as fast as it is\n\n" + "\n".join(lines) if lines else ""


def _details(rows: list[text.Row]) -> str:
    """The metrics beside the frontier's, without columns that hold nothing; reasons are below."""
    ok = [row for row in rows if row["status"] == "ok"]
    names = [n for n in DETAILS if any(row["metrics"].get(n, {}).get("value") is not None for row in ok)]
    if not names:
        return ""
    header = ["recipe", *(f"{METRICS[n].label} {unit(n)}".strip() for n in names)]
    lines = [[escape(row["recipe"]), *(number(n, row["metrics"][n]["value"]) for n in names)] for row in ok]
    return f"{_table(header, lines, 1)}\n\n{_reasons(ok)}".rstrip()


def _reasons(ok: list[text.Row]) -> str:
    """Why a number is missing, once for all recipes that share the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in ok:
        for name, cell in row["metrics"].items():
            if cell["value"] is None:
                found.setdefault((METRICS[name].label, cell["reason"]), []).append(row["recipe"])
    by_reason: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (label, reason), recipes in found.items():
        by_reason.setdefault((reason, tuple(recipes)), []).append(label)
    lines = []
    for (reason, recipes), labels in by_reason.items():
        who = "every recipe" if len(recipes) == len(ok) else ", ".join(recipes)
        lines.append(f"- {escape(', '.join(labels))} of {escape(who)}: {escape(reason)}")
    return "Not given:\n\n" + "\n".join(lines) if lines else ""


def _recipes(summary: dict[str, Any]) -> str:
    told = {row["recipe"]: row["description"] for row in summary["rows"]}
    return "\n".join(f"- {escape(name)}: {escape(description)}" for name, description in told.items())


def _facts(summary: dict[str, Any], run: dict[str, Any]) -> str:
    harness = summary["harness"]
    overhead = harness["overhead_per_call_s"]
    facts: dict[str, Any] = {
        "harness overhead per call": "not measured" if overhead is None else f"{overhead * 1e6:.1f} µs",
        "contended measurements": harness["contended_measurements"],
    }
    for stage, seconds in harness.get("stage_wall_s", {}).items():
        facts[f"time of all processes: {stage}"] = f"{seconds:.0f} s"
    for name in ("host", "versions", "data", "args"):
        for key, value in (run.get(name) or {}).items():
            if value not in (None, [], {}):
                facts[f"{name}: {key}"] = _fact(value)
    return _table(["what", "found"], [[escape(key), escape(value)] for key, value in facts.items()], 2)


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
