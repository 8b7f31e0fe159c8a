"""What the page's drawings need, as plain JSON: metrics of every row, latency by round, examples that changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.core import METRICS
from qtool.evidence import Evidence, group_of
from qtool.report import text
from qtool.report.page import drift, flips
from qtool.units import PERCENT, unit

SCALE = {"ms": 1e3, "MB": 1e-6, "%": 100.0}
TITLES = {"latency_p50_s": "latency p50", "latency_p95_s": "latency p95", "disk_bytes": "size on disk"}


def data(evidence: Evidence, summary: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The scripts' data, and notes on what could not be shown.

    `rows` holds of every ok row: recipe and group (numbers of `recipes` and `groups`), whether it is on the
    frontier, and a cell a metric of `metrics`: [value], [value, low, high], or None.
    """
    recipes = list(dict.fromkeys(row["recipe"] for row in summary["rows"]))
    groups = {group_of(g): number for number, g in enumerate(summary["frontier"])}
    found = [row["metrics"] for row in summary["rows"]]
    names = [n for n in METRICS if any(n in cells and cells[n]["value"] is not None for cells in found)]
    rows, timed = [], {}
    for row in summary["rows"]:
        recipe, group = recipes.index(row["recipe"]), groups[group_of(row)]
        trial = evidence.row_trial(row)
        if trial is not None and (rounds := drift.by_round(trial)):
            timed.setdefault(recipe, {})[group] = rounds
        if row["status"] == "ok":
            rows.append(
                [recipe, group, int(row["on_frontier"]), [_cell(row["metrics"].get(n)) for n in names]]
            )
    changed, notes = flips.flips(evidence, recipes)
    return {
        "metric": summary["metric"],
        "baseline": summary["baseline"],
        "metrics": {name: _metric(name, summary["metric"]) for name in names},
        "recipes": recipes,
        "groups": [
            {
                "title": text.group_title(group),
                "device": group["device"],
                "place": text.place(group),
                "batch": group["batch_size"],
                "recommended": group["recommended"],
            }
            for group in summary["frontier"]
        ],
        "rows": rows,
        "timed": timed,
        "changed": changed,
    }, notes


def _cell(cell: Mapping[str, Any] | None) -> list[float] | None:
    """Ten digits: what is shown of them is rounded to three or four, as the table's are from all of them."""
    if cell is None or cell["value"] is None:
        return None
    value, low, high = cell["value"], cell["low"], cell["high"]
    kept = [value] if low is None or low == high else [value, low, high]
    return [float(f"{x:.10g}") for x in kept]


def _metric(name: str, score: str | None) -> dict[str, Any]:
    """How `page.js` writes a metric, by the rules of `units.number` and `units.change`."""
    metric = METRICS[name]
    of, points = METRICS[score].label if score else "score", score in PERCENT
    if name == "score_delta":
        form, scale, written = (
            "points" if points else "signed",
            100.0 if points else 1.0,
            "points" * points,
        )
        return {"title": f"change of {of}", "unit": written, "scale": scale, "form": form, "better": "higher"}
    if name == "speedup":
        form = "ratio"
    elif name in ("throughput_per_s", "energy_j", "power_w") or name.endswith(("_s", "_bytes")):
        form = "significant"
    else:
        form = "fixed2" if name in PERCENT else "fixed4"
    return {
        "title": TITLES.get(name, metric.label),
        "unit": unit(name),
        "scale": SCALE.get(unit(name), 1.0),
        "form": form,
        "better": metric.better,
    }
