"""Runs of several hosts as one sheet: terminal, Markdown, CSV and a page, all from what `joint.join` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.core import METRICS
from qtool.report import tidy
from qtool.report.markdown import escape
from qtool.report.text import one_line, printable
from qtool.report.two_runs import short
from qtool.units import NONE, PERCENT, between, change, number, rounded, unit

FORMATS = ("table", "md", "json", "csv", "html")
LEFT = 3
"""Columns that are set left: recipe, hardware, device."""
LEGEND = (
    "speed-up is against the baseline of the row's own run; [low, high] is a 95 % interval within one run, there is none"
    " across runs; ! measured under contention, ~ the score is not shown to stay within 2 points of the baseline's"
)
COLUMNS = (
    *("hardware", "run", "host", "cpu_model", "gpus", "threads", "instance", "recipe", "device"),
    *("batch_size", "status", "metric", "unit", "value", "low", "high", "reason"),
)
"""Of the CSV: a line a metric of a recipe on a device of a host; what holds for all batch sizes has no batch size."""


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and a line for each recipe, hardware and batch size; recipes in order, their hardware below each other."""
    metric = found["metric"]
    # what the sheet is for comes first: a screen or a page may end before the last column
    header = ["recipe", "hardware", "on", "batch"]
    header += [f"{found['prices']['currency']} per million"] if found["prices"] else []
    header.append(_rate_label(found))
    if metric:
        header += [
            f"{METRICS[metric].label} {unit(metric)}".strip(),
            "Δ points" if metric in PERCENT else "Δ",
        ]
    header += ["speed-up x", "p50 ms", "p95 ms", "texts/s", "peak MB", "J a text"]
    recipes = list(dict.fromkeys(row["recipe"] for row in found["rows"]))
    lines = []
    for row in sorted(found["rows"], key=lambda row: recipes.index(row["recipe"])):
        for number_, batch in enumerate(row["batches"]):
            lines.append(_line(found, row, batch, first=number_ == 0))
    return header, lines


def _rate_label(found: Mapping[str, Any]) -> str:
    return "most texts/s" if found["sla_s"] is None else "rate/s at SLA"


def _line(
    found: Mapping[str, Any], row: Mapping[str, Any], batch: Mapping[str, Any], first: bool
) -> list[str]:
    """What holds for every batch size of a recipe stands in its first line."""
    name = row["recipe"] + (" !" if batch["contended"] else "")
    hardware = row["hardware"] + (f" ({row['instance']})" if row["instance"] else "")
    line = [name, hardware, row["device"], str(batch["batch_size"])]
    rate, cost = row["served"]["value"], row["cost_per_million"]
    if found["prices"]:
        line.append(_money(cost) if first else "")
    line.append((NONE if rate is None else rounded(rate)) if first else "")
    metric, metrics = found["metric"], batch["metrics"]
    if metric:
        line += [_score(metric, row["score"]) if first else "", _delta(metric, row) if first else ""]
    if batch["status"] != "ok":
        line += [batch["status"], *[NONE] * 5]
    else:
        line += [_cell(metrics, name) for name in ("speedup", "latency_p50_s", "latency_p95_s")]
        line += [_cell(metrics, "throughput_per_s"), _peak(metrics), _cell(metrics, "energy_j")]
    return line


def _score(metric: str, cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["value"] is None:
        return NONE
    return number(metric, cell["value"]) + between(dict(cell), lambda x: number(metric, x))


def _delta(metric: str, row: Mapping[str, Any]) -> str:
    cell = row["score_delta"]
    if cell is None or cell["value"] is None:
        return NONE
    interval = "" if cell["low"] == cell["high"] else between(dict(cell), lambda x: change(metric, x))
    return change(metric, cell["value"]) + ("" if row["score_shown"] else "~") + interval


def _cell(metrics: Mapping[str, Any], name: str) -> str:
    cell = metrics[name]
    value = number(name, cell["value"])
    exact = name != "speedup" or cell["low"] == cell["high"]
    return value if exact else value + between(cell, lambda x: number(name, x))


def _peak(metrics: Mapping[str, Any]) -> str:
    name = next(name for name in metrics if name.startswith("peak_"))
    return number(name, metrics[name]["value"])


def _money(cell: Mapping[str, Any]) -> str:
    return NONE if cell["value"] is None else rounded(cell["value"]) + between(dict(cell), rounded)


def title(found: Mapping[str, Any]) -> str:
    runs = len({side["run"] for side in found["hardware"]})
    task = f"task {found['task']} ({found['metric']})" if found["metric"] else "no score"
    what = "from text to class" if found["samples"] == "end_to_end_s" else "of the model alone"
    limit = "no SLA: full measured throughput"
    if found["sla_s"] is not None:
        limit = (
            f"SLA p95 <= {rounded(1e3 * found['sla_s'])} ms from arrival to answer,"
            f" independent requests, times {what}"
        )
    return f"{found['model']}: {task}, {runs} {'run' if runs == 1 else 'runs'}; {limit}"


def hardware(found: Mapping[str, Any]) -> list[str]:
    """Each side in a line: the run, the host, its threads and its prices, or why it has none."""
    lines = []
    for side in found["hardware"]:
        parts = [f"{side['label']}  {side['run']}: {side['described']}"]
        parts += [f"{side['memory_gib']} GiB"] if side["memory_gib"] else []
        parts += [f"{side['threads']} threads"] if side["threads"] else []
        for device, price in side["prices"].items():
            words = side["price_reasons"].get(device) or (
                f"{price['instance']}, {price['price_per_hour']:g} {price['currency']} an hour"
                f" ({price['date']}, {price['source']})"
            )
            parts.append(f"{device} rows: {words}")
        lines.append("; ".join(parts))
    return lines


def notes(found: Mapping[str, Any]) -> list[str]:
    """What differs between the runs, what else to know, and why a number is missing."""
    lines = [
        f"not the same {told['what']}: {told['first']} {short(told['a'])}, {told['other']} {short(told['b'])}"
        for told in found["differences"]
    ]
    lines += found["notes"]
    return [*lines, *_missing(found)]


def _missing(found: Mapping[str, Any]) -> list[str]:
    """Why a rate or a cost is missing, once for all rows that share the reason."""
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for row in found["rows"]:
        where = f"{row['hardware']} {row['device']}"
        if row["served"]["value"] is None:
            by_reason.setdefault(("rate", where, str(row["served"]["reason"])), []).append(row["recipe"])
        elif found["prices"] and row["cost_per_million"]["value"] is None:
            why = str(row["cost_per_million"]["reason"])
            by_reason.setdefault(("cost", where, why), []).append(row["recipe"])
    counts = Counter(f"{row['hardware']} {row['device']}" for row in found["rows"])
    lines = []
    for (what, where, reason), recipes in by_reason.items():
        who = "every recipe" if len(recipes) == counts[where] > 1 else ", ".join(recipes)
        lines.append(f"no {what} of {who} on {where}: {reason}")
    return lines


def assumed(found: Mapping[str, Any]) -> list[str]:
    """How cost and rate were made."""
    if not found["prices"]:
        return []
    share = f"{100 * found['prices']['utilization']:g} %"
    return [
        f"cost per million = price an hour / 3600 / ({share} of the rate beside it) x 10^6; that a machine is used to"
        f" {share} on average is an assumption (utilization in the price list), and one replica a machine is counted"
    ]


def render(found: Mapping[str, Any]) -> str:
    """Lines for a terminal or a log, never cut to a width."""
    header, body = table(found)
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [title(found), *hardware(found), ""]
    for line in [header, *body]:
        cells = zip(line, widths, strict=True)
        lines.append(
            "  ".join(w.ljust(n) if i < LEFT else w.rjust(n) for i, (w, n) in enumerate(cells)).rstrip()
        )
    lines += ["", found["sentence"], "", LEGEND, *assumed(found)]
    lines += [f"note: {note}" for note in notes(found)]
    return "\n".join(map(one_line, lines))


def to_markdown(found: Mapping[str, Any]) -> str:
    """The same as GitHub's Markdown, every string from outside escaped."""
    header, body = table(found)
    rule = [":--" if i < LEFT else "--:" for i in range(len(header))]
    rows = [
        [escape(word) or " " for word in header],
        rule,
        *([escape(w) or " " for w in line] for line in body),
    ]
    parts = [
        f"# {escape(title(found))}",
        f"**{escape(found['sentence'])}**",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "\n".join(escape(line) for line in [LEGEND, *assumed(found)]),
        "## Hardware",
        "\n".join(f"- {escape(line)}" for line in hardware(found)),
        "## Notes",
        "\n".join(f"- {escape(note)}" for note in notes(found)) or "None.",
    ]
    return "\n\n".join(parts) + "\n"


def to_html(found: Mapping[str, Any]) -> str:
    """The same as one page that needs nothing but itself: no script, no fetch, every string escaped."""
    from qtool.report import page

    header, body = table(found)
    return (
        page.templates(Path(__file__).parent / "sheet")
        .get_template("sheet.html")
        .render(
            title=title(found),
            sentence=found["sentence"],
            header=header,
            left=LEFT,
            lines=body,
            legend=[LEGEND, *assumed(found)],
            hardware=hardware(found),
            notes=notes(found),
            style=(page.HERE / "page.css").read_text("utf-8"),
        )
    )


def to_csv(found: Mapping[str, Any]) -> str:
    """A line a metric, all digits, in seconds and bytes: see COLUMNS."""
    sides = {side["label"]: side for side in found["hardware"]}
    lines = []
    for row in found["rows"]:
        side = sides[row["hardware"]]
        whole = {
            **{key: side[key] for key in ("run", "host", "cpu_model", "threads")},
            "gpus": ", ".join(side["gpus"]) or None,
            **{key: row[key] for key in ("hardware", "instance", "recipe", "device", "status")},
        }
        currency = found["prices"]["currency"] if found["prices"] else None
        for batch in row["batches"]:
            own = whole | {key: batch[key] for key in ("batch_size", "status")}
            if batch["status"] != "ok":
                lines.append(own | {"reason": batch["cause"]})
            for name, cell in batch["metrics"].items():
                lines.append(own | {"metric": name, "unit": METRICS[name].unit} | cell)
        rate = "largest_rate_per_s" if row["served"]["basis"] == "sla" else "largest_throughput_per_s"
        cells = [
            (found["metric"], "", row["score"]),
            ("score_delta", "", row["score_delta"]),
            (rate, "/s", row["served"]),
            *([("cost_per_million", currency, row["cost_per_million"])] if found["prices"] else []),
        ]
        lines += [whole | {"metric": n, "unit": u} | cell for n, u, cell in cells if cell is not None]
    return tidy.written(COLUMNS, [{name: _plain(line.get(name)) for name in COLUMNS} for line in lines])


def _plain(value: Any) -> Any:
    """A text is one line without control characters."""
    return printable(value) or None if isinstance(value, str) else value
