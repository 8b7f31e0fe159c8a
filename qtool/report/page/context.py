"""What the page says in words and tables, for its template: from the summary, the run and its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool import __version__
from qtool.core import METRICS
from qtool.evidence import Evidence
from qtool.report import text
from qtool.report.page import curve, made, recipes
from qtool.report.text import Row
from qtool.units import PERCENT, between, change, number, peak_name, with_unit


def context(evidence: Evidence, summary: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Everything the template names, but for styles and scripts; `notes` are added to the run's."""
    run, told = dict(evidence.run), dict(summary)
    names = list(dict.fromkeys(row["recipe"] for row in told["rows"]))
    groups = [_group(evidence, told, group, names) for group in told["frontier"]]
    return {
        "version": __version__,
        "title": text.title(told, run),
        "model": told["model"],
        "facts_line": [part for part in (_task(told, run), _machine(run), _started(run)) if part],
        "has_score": told["metric"] is not None,
        "groups": groups,
        "problems": _problems(told["rows"], names),
        "curves": curve.curves(told, names),
        "table": _table(evidence, told, names),
        "recipes": [recipes.part(evidence, told, name) for name in names],
        "facts": _facts(told, run),
        "how": made.how(told),
        "legend": made.LEGEND,
        "notes": [*told["notes"], *notes],
        "anchors": [f"recipe-{i}" for i in range(len(names))],
    }


def _task(summary: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The title without the model, which stands above it."""
    return text.title({**summary, "model": ""}, dict(run)).lstrip(": ")


def _started(run: Mapping[str, Any]) -> str:
    return str(run.get("started_at") or "")[:16].replace("T", " ")


def _machine(run: Mapping[str, Any]) -> str:
    host, more = run.get("host") or {}, len(run.get("hosts") or {}) - 1
    listed = host.get("gpus")
    gpus = [g.get("name") if isinstance(g, dict) else g for g in (listed if isinstance(listed, list) else [])]
    cores = host.get("physical_cores")
    parts = [host.get("cpu_model"), cores and f"{cores} cores", *gpus]
    parts += [f"and {more} more hosts" if more > 1 else "and another host"] if more > 0 else []
    return ", ".join(str(part) for part in parts if part)


def _group(
    evidence: Evidence, summary: dict[str, Any], group: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """A group's recommendation: the name, its reasons in a sentence, and the figures that carry it."""
    rows = text.group_rows(summary, dict(group))
    ok = {row["recipe"]: row for row in rows if row["status"] == "ok"}
    name, base = group["recommended"], ok.get(summary["baseline"])
    unstable = text.unstable(rows)
    return {
        "title": text.group_title(dict(group)),
        "recommended": name,
        "anchor": f"recipe-{names.index(name)}" if name else None,
        "is_baseline": name == summary["baseline"],
        "reason": group["reason"],
        "figures": _figures(summary, ok[name], base) if name else [],
        "evidence": _evidence(evidence, summary, ok[name]) if name else "",
        "members": group["recipes"],
        "provisional": group["provisional"],
        "unstable": unstable and unstable.replace("unstable, the", "The", 1) + ".",
        "ok": len(ok),
        "all": len(rows),
    }


def _figures(summary: Mapping[str, Any], row: Row, base: Row | None) -> list[dict[str, str]]:
    """Speed, score, memory and disk of the recommended recipe beside the baseline's."""
    metrics, metric = row["metrics"], summary["metric"]
    other = base["metrics"] if base and base is not row else None
    p50 = with_unit("latency_p50_s", metrics["latency_p50_s"]["value"])
    if other is None or metrics["speedup"]["value"] is None:
        found = [_figure("latency p50", p50, _interval("latency_p50_s", metrics))]
    else:
        against = f"p50 {p50} against {with_unit('latency_p50_s', other['latency_p50_s']['value'])}"
        speedup = with_unit("speedup", metrics["speedup"]["value"])
        found = [_figure("speed-up", speedup, _interval("speedup", metrics), against)]
    if metric:
        found.append(_score(metric, metrics, other))
    for name in (peak_name(row["device"]), "disk_bytes"):
        value, label = metrics[name]["value"], "size on disk" if name == "disk_bytes" else METRICS[name].label
        found.append(_figure(label, with_unit(name, value), against=_against(name, value, other)))
    return found


def _figure(label: str, value: str, interval: str = "", against: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "interval": interval, "against": against}


def _score(metric: str, metrics: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, str]:
    label, own = METRICS[metric].label, with_unit(metric, metrics[metric]["value"])
    delta = metrics["score_delta"]
    if other is None or delta["value"] is None:
        return _figure(label, own, _interval(metric, metrics))
    points = " points" if metric in PERCENT else ""
    return _figure(
        f"change of {label}",
        f"{change(metric, delta['value'])}{points}",
        between(delta, lambda x: change(metric, x)).strip(),
        f"{own} against {with_unit(metric, other[metric]['value'])}",
    )


def _interval(name: str, metrics: Mapping[str, Any]) -> str:
    cell = metrics[name]
    return "" if cell["low"] == cell["high"] else between(cell, lambda x: number(name, x)).strip()


def _against(name: str, value: float | None, other: Mapping[str, Any] | None) -> str:
    known = other[name]["value"] if other else None
    if not known or value is None:
        return ""
    return f"against {with_unit(name, known)} ({100 * (value / known - 1):+.0f} %)"


def _evidence(evidence: Evidence, summary: Mapping[str, Any], row: Row) -> str:
    """What the recommendation stands on, in a line; its own rounds, for --rounds auto gives some recipes more."""
    trial = evidence.row_trial(row)
    rounds = len(trial.p50_s()) if trial else 0
    parts = [f"{rounds} {'round' if rounds == 1 else 'rounds'}, each in fresh processes"]
    scores = evidence.scores.get(trial.group.scored) if trial else None
    many = f"{len(scores.labels):,} " if scores else ""
    if flips := row["flips"]:
        parts.append(f"{flips['gained']} answers gained and {flips['lost']} lost on the same {many}examples")
    claim, metric = row["not_worse"], summary["metric"]
    if claim and claim["shown"]:
        margin = f"{100 * claim['margin']:g} points" if metric in PERCENT else f"{claim['margin']:g}"
        parts.append(
            f"shown to lose less than {margin} of {METRICS[metric].label} (p = {claim['p_holm']:.1g}, adjusted"
            " for all recipes)"
        )
    if row["contended"]:
        parts.append(f"other work used the {'GPU' if row.get('gpu_shared') else 'CPUs'} meanwhile")
    if names := row.get("throttled_by"):
        parts.append(f"the GPU slowed its clocks meanwhile ({', '.join(names)})")
    return "; ".join(parts)


def _problems(rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that are not ok, those with one cause together."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["status"] == "ok":
            continue
        key = (row["recipe"], row["status"], row["cause"], row["next_step"])
        entry = found.setdefault(
            key,
            {
                "recipe": row["recipe"],
                "anchor": f"recipe-{names.index(row['recipe'])}",
                "status": row["status"],
                "cause": row["cause"] or "no cause was recorded",
                "next_step": row["next_step"],
                "where": [],
            },
        )
        entry["where"].append(text.group_title(row))
    return list(found.values())


def _table(evidence: Evidence, summary: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """One table of all groups: `text.table`'s cells, with the numbers they are sorted by."""
    header: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    peaks = {peak_name(group["device"]) for group in summary["frontier"]}
    known = evidence.run.get("recipes") or {}
    for group in summary["frontier"]:
        device, own = group["device"], text.group_rows(summary, group)
        titles, lines = text.table(summary, own, device)
        columns = text.columns(summary["metric"], device)
        header = [
            {"label": "peak MB" if "peak" in name and len(peaks) > 1 else title, "metric": name}
            for name, title in zip(columns, titles[3:], strict=True)
        ]
        for row, line in zip(own, lines, strict=True):
            rows.append(
                {
                    "recipe": row["recipe"],
                    "anchor": f"recipe-{names.index(row['recipe'])}",
                    "device": text.place(group),
                    "batch": group["batch_size"],
                    "runtime": (known.get(row["recipe"]) or {}).get("runtime") or "",
                    "status": row["status"],
                    "frontier": row["on_frontier"],
                    "recommended": row["recipe"] == group["recommended"],
                    "contended": row["contended"],
                    "cells": [
                        {"cell": cell, "sort": (row["metrics"].get(name) or {}).get("value")}
                        for name, cell in zip(columns, line[3:], strict=True)
                    ],
                }
            )
    return {
        "header": header,
        "rows": rows,
        "devices": sorted({row["device"] for row in rows}),
        "batches": sorted({row["batch"] for row in rows}),
        "runtimes": sorted({row["runtime"] for row in rows} - {""}),
    }


def _hosts(run: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of each machine that measured, under a heading each."""
    hosts = run.get("hosts") or {}
    return (
        {f"Host {name}": facts for name, facts in hosts.items()}
        if len(hosts) > 1
        else {"Host": run.get("host")}
    )


def _facts(summary: Mapping[str, Any], run: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Where and with what it was measured, as headings with pairs; what is empty is left out."""
    harness = summary["harness"]
    overhead = harness["overhead_per_call_s"]
    own = {
        "overhead per call": "not measured" if overhead is None else f"{overhead * 1e6:.1f} µs",
        "contended measurements": harness["contended_measurements"],
    } | {f"time of all processes: {stage}": f"{s:.0f} s" for stage, s in harness["stage_wall_s"].items()}
    sections = {**_hosts(run), "Versions": run.get("versions"), "Model": run.get("model_info")}
    sections |= {"Data": run.get("data"), "Arguments": run.get("args"), "Harness": own}
    found = []
    for title, values in sections.items():
        kept = [
            (key.replace("_", " "), recipes.plain(v))
            for key, v in (values or {}).items()
            if v not in (None, [], {}, "")
        ]
        if kept:
            found.append((title, kept))
    return found
