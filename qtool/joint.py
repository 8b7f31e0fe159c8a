"""Runs of one model, task and data from several hosts, joined into one sheet for the hardware decision.

Every interval is that of one run on one host. Nothing is pooled, paired or tested across runs: their numbers stand
side by side, and what the hosts, libraries and threads differ in is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import comparability, cost, evidence, hardware_advice, same_artifact, served, summary
from qtool.core import QtoolError
from qtool.evidence import Evidence
from qtool.prices import PriceList, describe, gpu_names
from qtool.rows import Trial
from qtool.same_artifact import Scored
from qtool.units import peak_name

REFUSED = ("model content", "task", "metric", "task data", "fixed length")
"""What runs must share: without one of these they do not answer the same question."""
BY_BATCH = ("latency_p50_s", "latency_p95_s", "throughput_per_s", "speedup", "energy_j")


@dataclass(frozen=True)
class Side:
    """What one run measured on one host; its label is unique in the sheet."""

    label: str
    found: Evidence
    host: Mapping[str, Any]
    rows: Sequence[tuple[Mapping[str, Any], Trial]]

    @property
    def started_at(self) -> str:
        return str(self.found.run.get("started_at") or "")

    @property
    def baseline(self) -> str:
        return self.found.baseline

    def same_machine(self, other: Side) -> bool:
        """The same host and library versions, as far as both runs tell them."""
        ours, theirs = (side.host.get("hash") for side in (self, other))
        versions = self.found.run.get("versions") == other.found.run.get("versions")
        return ours is not None and ours == theirs and versions


def join(
    run_dirs: Sequence[Path], prices: PriceList | None = None, sla_s: float | None = None
) -> dict[str, Any]:
    """Hardware, rows, artifacts that answered differently, break-even rates and the sentence, JSON-able.

    `sla_s` limits the p95 from arrival to answer; without it a recipe's rate is its full measured throughput.
    Raises QtoolError for a folder without a run, the same run twice, and runs that must not be compared.
    """
    runs = [evidence.load(run_dir) for run_dir in run_dirs]
    _refuse(runs)
    sides = _sides(runs)
    later = _later(sides)
    entries: list[dict[str, Any]] = []
    times = served.gather(
        {side.label: [trial for _, trial in side.rows] for side in sides}, simulate=sla_s is not None
    )
    for side in sides:
        for own in _by_recipe(side.rows).values():
            rate = served.rate(own, times.get((side.label, *_key(own))), sla_s)
            entries.append(_entry(side, own, rate, prices, later))
    run = runs[0].run
    artifacts = same_artifact.compare(run["metric"], _scored(sides)) if run["metric"] else []
    found = {
        "model": run["model"],
        "model_content": _content(run),
        "task": run["task"],
        "metric": run["metric"],
        "data_hash": (run.get("data") or {}).get("data_hash"),
        "sla_s": sla_s,
        "percentile": "p95",
        "pattern": "poisson" if sla_s is not None else None,
        "samples": times.what if sla_s is not None else None,
        "prices": prices.told() if prices else None,
        "hardware": [_hardware(side, prices) for side in sides],
        "differences": _marked(sides),
        "rows": entries,
        "artifacts": artifacts,
    }
    found |= hardware_advice.advise(found, prices)
    return found | {"notes": _notes(found, sides, later)}


def _refuse(runs: Sequence[Evidence]) -> None:
    """Raises QtoolError for what cannot be joined, naming what differs."""
    first = runs[0]
    for found in runs:
        if len(runs) > 1 and _content(found.run) is None:
            raise QtoolError(
                f"{found.run_dir} does not tell the content of its model, so that it cannot be joined. Sweep again."
            )
    for number, found in enumerate(runs):
        if not found.trials:
            raise QtoolError(
                f"{found.run_dir} planned no trial, so that nothing is there to show. Sweep again."
            )
        for other in runs[:number]:
            if _identity(found) == _identity(other):
                raise QtoolError(f"{other.run_dir} and {found.run_dir} are the same run. Give each run once.")
        for difference in comparability.differences(first.run, found.run):
            if difference["what"] in REFUSED:
                one, two = (_short(difference[side]) for side in "ab")
                raise QtoolError(
                    f"{first.run_dir} and {found.run_dir} must not be joined: not the same {difference['what']},"
                    f" {one} and {two}. Join runs of one model, task and data."
                )


def _content(run: Mapping[str, Any]) -> str | None:
    return (run.get("model_info") or {}).get("content")


def _identity(found: Evidence) -> tuple[Any, ...]:
    """What makes a run this run, wherever its folder lies."""
    run = found.run
    plan = tuple(entry["trial_id"] for entry in run["plan"])
    return run.get("started_at"), (run.get("host") or {}).get("hash"), plan


def _short(value: Any) -> str:
    """Of a hash the first twelve letters tell two apart."""
    words = str(value)
    return words[:12] if len(words) == 64 else words[:60]


def _sides(runs: Sequence[Evidence]) -> list[Side]:
    """A side for each run and host, numbered in the order given."""
    sides: list[Side] = []
    for found in runs:
        by_host: dict[str, list[tuple[Mapping[str, Any], Trial]]] = {}
        facts: dict[str, Mapping[str, Any]] = {}
        for group in found.groups:
            for row in summary.make_rows(found, group):
                host = cost.host_of(found.run, row)
                trial = found.trial(row["recipe"], group)
                if trial is not None:
                    name = str(row.get("host") or host.get("hash"))
                    facts[name] = host
                    by_host.setdefault(name, []).append((row, trial))
        for name, rows in by_host.items():
            sides.append(Side(f"R{len(sides) + 1}", found, facts[name], rows))
    return sides


def _later(sides: Sequence[Side]) -> dict[tuple[str, str], str]:
    """By side and trial: the label of the latest side that measured the same trial on the same machine again, to the end.

    Repetitions are set side by side and never pooled: they were not interleaved, and what drifted between them (other
    tenants, temperature) is in neither's interval. A decision takes the latest, because to take the better one of two
    would be to choose by luck.
    """
    found: dict[tuple[str, str], str] = {}
    ordered = sorted(sides, key=lambda side: (side.started_at, sides.index(side)))
    for number, side in enumerate(ordered):
        own = {trial.entry["trial_id"] for _, trial in side.rows}
        for other in ordered[number + 1 :]:
            if side.same_machine(other):
                again = own & {trial.entry["trial_id"] for _, trial in other.rows if trial.status == "ok"}
                found |= {(side.label, trial_id): other.label for trial_id in again}
    return found


def _key(own: Sequence[tuple[Mapping[str, Any], Trial]]) -> tuple[str, str]:
    row = own[0][0]
    return row["device"], row["recipe"]


def _by_recipe(
    rows: Sequence[tuple[Mapping[str, Any], Trial]],
) -> dict[tuple[str, str], list[tuple[Mapping[str, Any], Trial]]]:
    """Rows of each device and recipe, by batch size."""
    found: dict[tuple[str, str], list[tuple[Mapping[str, Any], Trial]]] = {}
    for row, trial in rows:
        found.setdefault((row["device"], row["recipe"]), []).append((row, trial))
    return {key: sorted(own, key=lambda pair: pair[0]["batch_size"]) for key, own in found.items()}


def _entry(
    side: Side,
    own: Sequence[tuple[Mapping[str, Any], Trial]],
    rate: dict[str, Any],
    prices: PriceList | None,
    later: Mapping[tuple[str, str], str],
) -> dict[str, Any]:
    """One recipe on one device of one host."""
    device, recipe = _key(own)
    ok = [row for row, _ in own if row["status"] == "ok"]
    first = ok[0] if ok else own[0][0]
    metric = side.found.run["metric"]
    price, why = prices.find(side.host, device) if prices else (None, "no price list was given (--cost)")
    again = [later.get((side.label, trial.entry["trial_id"])) for _, trial in own]
    cell = cost.of_rate(price, why, rate, prices.utilization if prices else 1.0)
    return {
        "hardware": side.label,
        "instance": price.instance if price else None,
        "recipe": recipe,
        "device": device,
        "status": first["status"],
        "cause": first["cause"],
        "score": first["metrics"].get(metric) if ok and metric else None,
        "score_delta": first["metrics"].get("score_delta") if ok and metric else None,
        "score_shown": bool(ok) and _shown(first, side, metric),
        "disk_bytes": first["metrics"]["disk_bytes"]["value"] if ok else None,
        "batches": [_batch(row, device) for row, _ in own],
        "served": rate,
        "cost_per_million": cell,
        "repeated_by": next((label for label in again if label), None),
    }


def _shown(row: Mapping[str, Any], side: Side, metric: str | None) -> bool:
    """Whether the score is shown, on its own host, not to be worse than its own run's baseline by the margin."""
    if metric is None or row["recipe"] == side.baseline:
        return True
    return bool(row["not_worse"] and row["not_worse"]["shown"])


def _batch(row: Mapping[str, Any], device: str) -> dict[str, Any]:
    names = (*BY_BATCH, peak_name(device)) if row["status"] == "ok" else ()
    return {
        **{key: row[key] for key in ("batch_size", "status", "cause", "contended", "gpu_shared")},
        "metrics": {name: row["metrics"][name] for name in names},
    }


def _hardware(side: Side, prices: PriceList | None) -> dict[str, Any]:
    """What the side is: host, threads, versions, and the price of each device's rows."""
    run = side.found.run
    devices = list(dict.fromkeys(row["device"] for row, _ in side.rows))
    matched = {device: prices.find(side.host, device) for device in devices} if prices else {}
    return {
        "label": side.label,
        "run": str(side.found.run_dir),
        "started_at": run.get("started_at"),
        "host": side.host.get("hash"),
        "described": describe(side.host),
        **{key: side.host.get(key) for key in ("cpu_model", "physical_cores", "logical_cpus", "memory_gib")},
        "cpu_flags": side.host.get("cpu_flags") or [],
        "gpus": gpu_names(side.host),
        "threads": (run.get("args") or {}).get("threads"),
        "versions": run.get("versions") or {},
        "baseline": side.baseline,
        "rounds": run["rounds"],
        "prices": {device: price.told() if price else None for device, (price, _) in matched.items()},
        "price_reasons": {device: why for device, (_, why) in matched.items() if why},
    }


def _marked(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """What may differ between runs that are joined, of each against the first, with the columns it concerns."""
    first = sides[0]
    found = []
    for side in sides[1:]:
        a, b = ({**each.found.run, "host": dict(each.host), "hosts": None} for each in (first, side))
        for told in comparability.differences(a, b):
            found.append({"first": first.label, "other": side.label, **told})
    return found


def _scored(sides: Sequence[Side]) -> list[Scored]:
    """Every scored artifact of every side, with where its predictions lie."""
    found = []
    for side in sides:
        metric, run_dir = side.found.run["metric"], side.found.run_dir
        for (device, recipe), own in _by_recipe(side.rows).items():
            row, trial = next((pair for pair in own if pair[0]["status"] == "ok"), own[0])
            path = evidence.prediction_files(run_dir, [trial]).get(recipe)
            fingerprint = trial.entry.get("fingerprint")
            if path is not None and fingerprint:
                score = (row["metrics"].get(metric) or {}).get("value")
                found.append(Scored(side.label, recipe, device, str(fingerprint), score, path, side.host))
    return found


def _notes(
    found: Mapping[str, Any], sides: Sequence[Side], later: Mapping[tuple[str, str], str]
) -> list[str]:
    notes = []
    for label, other in dict.fromkeys((label, other) for (label, _), other in later.items()):
        notes.append(
            f"{other} repeats {label} on the same host with the same library versions: they stand side by side and are"
            f" not pooled, for they were not interleaved; a decision takes the later one, {other}"
        )
    for side, told in zip(sides, found["hardware"], strict=True):
        cores, threads = told["physical_cores"], told["threads"]
        if isinstance(cores, int) and isinstance(threads, int) and threads < cores:
            notes.append(
                f"{side.label} used {threads} of {cores} cores: one replica a machine is counted, and several on one"
                " were not measured"
            )
    chosen = [(told["hardware"], told["device"], told["recipe"]) for told in found["candidates"]]
    for row in found["rows"]:
        busy = any(batch["contended"] for batch in row["batches"])
        what = "GPU" if any(batch["gpu_shared"] for batch in row["batches"]) else "CPUs"
        if busy and (row["hardware"], row["device"], row["recipe"]) in chosen:
            notes.append(
                f"other work used the {what} while {row['recipe']} was measured on {row['hardware']}: sweep again on an"
                " idle machine before you decide"
            )
    if found["artifacts"]:
        unlike = [told for told in found["artifacts"] if same_artifact.differs(told)]
        unknown = [told for told in found["artifacts"] if not (same_artifact.known(told) or told in unlike)]
        alike = len(found["artifacts"]) - len(unlike) - len(unknown)
        notes += [same_artifact.sentence(told) for told in (*unlike, *unknown)]
        if alike:
            notes.append(
                f"{alike} of {len(found['artifacts'])} artifacts scored on several hosts or devices answered alike"
            )
    return notes
