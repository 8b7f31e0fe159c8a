"""Profiles one recipe: checks, builds, lets child processes take samples, and says where a request's time goes."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from qtool import artifacts, asking, host, isolate, lever, padding, recipes, stats, store
from qtool.core import QtoolError, Recipe
from qtool.parts import PARTS, WHOLE
from qtool.plan import Options, Plan, artifact_place, make_plan, now
from qtool.progress import tell
from qtool.report.tidy import FORMULA

SCHEMA = 1


def run(options: Options, *, as_json: bool) -> int:
    """The whole profile. Exit code: 0 done, 3 where a child failed (its cause is told).

    Raises QtoolError for whatever the user can fix, and where the recipe cannot run here.
    """
    recipe, _ = recipes.find(options.patterns[0])
    device = options.devices[0]
    _refuse(recipe, device, recipes.why_not(recipe, device))
    if options.out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"profile-{asking.folder_name(options.model)}-{recipe.name}-{stamp}"
        options.out = Path("reports") / name
    out = asking.check_out(options)
    tell(f"checking model, task and data of '{options.model}'", sys.stderr)
    probed, data_dir = asking.probe(options, {recipe.name: recipe})
    plan = make_plan(options, {recipe.name: recipe}, probed, data_dir)
    _refuse(recipe, device, plan.skipped.get(plan.trials[0].id))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QtoolError(f"cannot write to {out}: {error.strerror}. Choose another --out.") from None
    taken = _take(plan, recipe, out)
    if isinstance(taken, str):
        tell(f"qtool: {taken}", sys.stderr)
        return 3
    found = assemble(plan, recipe, *taken)
    samples = ("batch_size", "tokens_by_call", "samples", "plain_s")
    found["files"] = write(
        out, found, [{key: part.get(key) for key in samples} for part in taken[0]["splits"]]
    )
    from qtool.report import profile as words
    from qtool.report import to_json

    tell(to_json(found) if as_json else words.render(found), sys.stdout)
    return 0


def _refuse(recipe: Recipe, device: str, why: recipes.Why | None) -> None:
    if why:
        raise QtoolError(f"recipe '{recipe.name}' cannot run on {device}: {why.reason}. Try: {why.fix}.")


def _take(plan: Plan, recipe: Recipe, out: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]] | str:
    """What the children found: of the requests, and of the tokenizer by its threads; or how one failed."""
    options = plan.options
    place = artifact_place(plan.artifacts[recipe.name])

    def child(stage: str, log: str, **spec: Any) -> isolate.Outcome:
        common = {
            "recipe": recipe.model_dump(),
            "model_dir": plan.probed["model"]["folder"],
            "data": str(plan.data_dir),
            "artifact": str(place),
            "device": options.devices[0],
            "threads": options.threads,
        }
        path = out / "logs" / f"{log}.log"
        limits = {"timeout_s": options.timeout_s, "threads": options.threads}
        outcome = isolate.run(stage, {**common, **spec}, log=path, **limits)
        if outcome.status in ("unavailable", "user_error"):
            raise QtoolError(f"recipe '{recipe.name}' cannot run here: {outcome.error}.")
        return outcome

    artifacts.drop_stale()
    tell(f"{recipe.name}: finding or building its artifact", sys.stderr)
    built = artifacts.obtain(place, lambda made: child("build", "build", out=str(made)))
    if built.status != "ok":
        return _failure(recipe, "build", built, out)
    tell(f"{recipe.name}: requests in their parts, texts in bulk, operators", sys.stderr)
    trace = str((out / "trace.json").absolute())
    profiled = child("profile", "profile", batch_sizes=options.batch_sizes, trace=trace)
    if profiled.status != "ok":
        return _failure(recipe, "profile", profiled, out)
    tell(f"{recipe.name}: the tokenizer alone", sys.stderr)
    tokenised = {}
    for threads in sorted({1, options.threads}):
        outcome = child("tokenise", f"tokenise-{threads}", tokenizer_threads=threads, slow=threads == 1)
        if outcome.status != "ok":
            return _failure(recipe, f"tokenise-{threads}", outcome, out)
        tokenised[threads] = outcome.values
    return {**profiled.values, "build": built.values}, tokenised


def _failure(recipe: Recipe, log: str, outcome: isolate.Outcome, out: Path) -> str:
    where, next_step = out / "logs" / f"{log}.log", outcome.next_step
    told = f"{recipe.name}: {log} {outcome.status}: {outcome.error}. See {where}."
    return f"{told} Next: {next_step}." if next_step else told


def assemble(
    plan: Plan, recipe: Recipe, taken: dict[str, Any], tokenised: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """`profile.json`: the lever first, then what it was found in."""
    options, data = plan.options, plan.probed["data"]
    splits = [split(found, taken["absent"]) for found in taken["splits"]]
    operators = count(taken["layers"]["rows"])
    tokenizer = tokenizer_of(tokenised)
    wasted = [
        pads(found, taken["lengths"], data["seq_len"]) for found in taken["splits"] if found["batch_size"] > 1
    ]
    machine = host.fingerprint()
    return {
        "schema": SCHEMA,
        "lever": lever.find(splits, operators, wasted, tokenizer),
        "model": options.model,
        "recipe": recipe.name,
        "device": options.devices[0],
        "threads": options.threads,
        "texts": {key: data[key] for key in ("source", "rows", "mean_tokens", "longest", "data_hash")},
        "splits": splits,
        "bulk": bulk(taken["bulk"]),
        "tokenizer": tokenizer,
        "padding": wasted,
        "operators": {
            "batch_size": options.batch_sizes[0],
            "calls": taken["layers"]["calls"],
            "reason": taken["layers"].get("reason"),
            "rows": operators,
        },
        "layers": [row for row in taken["layers"]["rows"] if row["layer"] is not None],
        "contention": taken["contention"],
        "clock": {key: taken[key] for key in ("clock", "resolution_s", "monotonic", "adjustable")},
        "build": taken["build"],
        "recipe_content": recipe.model_dump(),
        "host": {**machine, "hash": host.fingerprint_hash(machine)},
        "versions": host.versions(),
        "started_at": now(),
    }


def figures(samples: Sequence[float]) -> dict[str, Any]:
    """Mean and percentiles (s); a percentile that the samples cannot support is None (`stats.least_samples`)."""
    return {
        "mean_s": fmean(samples),
        **{
            name: stats.percentile(samples, share) if len(samples) >= stats.least_samples(share) else None
            for name, share in (("p50_s", 0.5), ("p95_s", 0.95))
        },
    }


def split(found: dict[str, Any], absent: dict[str, str]) -> dict[str, Any]:
    """Requests of one batch size: figures of each part and of the whole, and shares of the whole's time.

    Shares are of sums, so that they add up; `residual_share` is what they leave. `splitting_share`: how much
    longer a request took in its parts than undivided. A part without samples says why.
    """
    common = {"batch_size": found["batch_size"], "stable": found["stable"], "reason": found.get("reason")}
    samples = found.get("samples")
    if samples is None:
        return {**common, "calls": 0, "parts": {}}
    whole_s = sum(samples[WHOLE])
    cells: dict[str, dict[str, Any]] = {}
    for name in PARTS:
        if name in samples:
            cells[name] = {"share": sum(samples[name]) / whole_s, **figures(samples[name]), "reason": None}
        elif name in absent:
            nothing = dict.fromkeys(("share", "mean_s", "p50_s", "p95_s"))
            cells[name] = {**nothing, "reason": absent[name]}
    request, plain = figures(samples[WHOLE]), figures(found["plain_s"])
    return {
        **common,
        "calls": len(samples[WHOLE]),
        "parts": cells,
        "request": request,
        "residual_share": 1 - sum(cell["share"] for cell in cells.values() if cell["share"] is not None),
        "undivided": plain,
        "splitting_share": request["mean_s"] / plain["mean_s"] - 1,
    }


def bulk(taken: dict[str, Any]) -> dict[str, Any]:
    """All texts at once: medians over passes, by order of the texts; shares as in `split`."""
    orders = {}
    for order, samples in taken["order"].items():
        whole_s = sum(samples[WHOLE])
        orders[order] = {
            "passes": len(samples[WHOLE]),
            "pass_s": median(samples[WHOLE]),
            "texts_per_s": taken["texts"] / median(samples[WHOLE]),
            "shares": {name: sum(samples[name]) / whole_s for name in PARTS if name in samples},
        }
    come, by_length = orders["as they come"], orders["by length"]
    return {
        "texts": taken["texts"],
        "batch_size": taken["batch_size"],
        "orders": orders,
        "sorting_saved_share": 1 - by_length["pass_s"] / come["pass_s"],
    }


def pads(found: dict[str, Any], lengths: list[int], seq_len: int | None) -> dict[str, Any]:
    """Padding at one batch size, and what sorting is predicted to save of a request's time."""
    wasted = padding.waste(lengths, found["batch_size"], seq_len)
    slope_s = saved = None
    if found.get("samples"):
        slope_s = padding.seconds_a_token(found["tokens_by_call"], found["samples"]["model"])
        saved = padding.time_saved_share(wasted, slope_s, fmean(found["samples"][WHOLE]))
    why = None if saved is not None else "a call's time was not seen to grow with its tokens"
    return {**wasted, "seconds_a_token": slope_s, "time_saved_share": saved, "time_saved_reason": why}


def tokenizer_of(tokenised: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Texts a second of each tokenizer, way of calling and number of threads."""
    first = tokenised[1]
    variants = []
    for threads, found in tokenised.items():
        for kind, passes in found["passes"].items():
            for call, seconds in passes.items():
                # a single text, and Python, know no threads: one row is enough
                if threads > 1 and (call == "one" or kind == "slow"):
                    continue
                how = {"tokenizer": kind, "call": call, "threads": threads, "passes": len(seconds)}
                variants.append({**how, "texts_per_s": found["texts"] / median(seconds)})
    return {
        "used": first["used"],
        "class": first["class"],
        "texts": first["texts"],
        "variants": variants,
        "slow_reason": first.get("slow_reason"),
        "differing_texts": first.get("differing_texts"),
    }


def count(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers by operator: name, calls, total_s and share of all, largest first."""
    calls: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for row in rows:
        calls[row["operator"]] += row["calls"]
        spent[row["operator"]] += row["total_s"]
    total = sum(spent.values())
    return [
        {"name": name, "calls": calls[name], "total_s": seconds, "share": seconds / total if total else 0.0}
        for name, seconds in spent.most_common()
    ]


def write(out: Path, found: dict[str, Any], samples: list[dict[str, Any]]) -> list[str]:
    """`profile.json`, `samples.json`, `operators.csv` and, of an engine that counts layers, `layers.csv`.

    Gives the names of all files of the profile, with the trace that the engine wrote, if it writes one.
    """
    rows = found["operators"]["rows"]
    _write_csv(out / "operators.csv", ("name", "calls", "total_s", "share"), rows)
    if found["layers"]:
        _write_csv(out / "layers.csv", ("layer", "operator", "calls", "total_s"), found["layers"])
    # a line: a small model's samples are too many for a line each
    (out / "samples.json").write_text(json.dumps(samples, allow_nan=False) + "\n", "utf-8")
    store.write_json(out / "profile.json", found)
    names = ("profile.json", "samples.json", "trace.json", "operators.csv", "layers.csv")
    return [str(out / name) for name in names if (out / name).is_file()]


def _write_csv(path: Path, columns: tuple[str, ...], rows: Sequence[dict[str, Any]]) -> None:
    """A graph's names are its maker's: none becomes a spreadsheet's formula."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            cells = [row[name] for name in columns]
            writer.writerow(
                f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in cells
            )
