"""A recipe of a run as a Hugging Face model card: metadata that the hub reads, then what was done and measured.

The metadata's `model-index` holds scores alone, by https://github.com/huggingface/hub-docs/blob/main/modelcard.md;
times and memory belong to a host, which that format has no place for, and stand in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from qtool import checkpoint, evidence, export, plugins, tasks
from qtool import summary as summaries
from qtool.aliases import ALIASES
from qtool.artifacts import built, is_whole
from qtool.core import METRICS, QtoolError, Recipe, did_you_mean
from qtool.evidence import Evidence, group_of
from qtool.report.markdown import escape
from qtool.report.text import place, printable
from qtool.tasks import glue
from qtool.units import PERCENT, between, change, number, peak_name, unit

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

HUB_METRICS = {"pearson": "pearsonr", "spearman": "spearmanr"}
"""Metrics that the hub's `evaluate` calls otherwise."""
Row = dict[str, Any]


def render(run_dir: Path, name: str) -> str:
    """The whole card of recipe `name`: YAML front matter and Markdown.

    Raises QtoolError for a recipe that the run does not have or that is not ok in it, and without huggingface_hub.
    """
    found = evidence.load(run_dir)
    summary = summaries.of(found)
    rows = [row for row in summary["rows"] if row["recipe"] == name]
    if not rows:
        known = {row["recipe"] for row in summary["rows"]}
        raise QtoolError(f"run {run_dir} has no recipe '{name}'.{did_you_mean(name, known)}")
    ok = [row for row in rows if row["status"] == "ok"]
    if not ok:
        told = f"{rows[0]['status']} in {run_dir} ({rows[0]['cause']})"
        raise QtoolError(f"recipe '{name}' was {told}. Choose an ok one.")
    recipe = _recipe(found, name)
    parts = [f"# {escape(_title(found.run, recipe))}", *_made(found.run, recipe)]
    for row in ok:
        parts += _measured(found, summary, row)
    parts += [_where(found.run, ok), _how_to_load(found, recipe, ok[0])]
    metadata = _metadata(found.run, recipe, ok).to_yaml()
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(part for part in parts if part)


def _recipe(found: Evidence, name: str) -> Recipe:
    """The recipe as it was when it was swept."""
    stored = (found.run.get("recipes") or {}).get(name)
    try:
        return Recipe.model_validate(stored)
    except ValidationError:
        raise QtoolError(
            f"{found.run_dir / 'run.json'} does not hold what recipe '{name}' is. Sweep again into a new --out."
        ) from None


def _title(run: Mapping[str, Any], recipe: Recipe) -> str:
    return f"{Path(printable(run['model'])).name}-{recipe.name}"


def _hub_id(run: Mapping[str, Any]) -> str | None:
    """The hub's name of the model; None for a folder of one's own and for what ships with qtool."""
    model, info = run["model"], run.get("model_info") or {}
    if model in ALIASES:
        return ALIASES[model].hub_id
    # only what came from the hub has a revision; and the hub takes no card that names a model by anything else
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model, re.ASCII)
    return model if info.get("revision") and named else None


def _metadata(run: Mapping[str, Any], recipe: Recipe, ok: list[Row]) -> ModelCardData:
    try:
        from huggingface_hub import EvalResult, ModelCardData
    except ImportError:
        raise QtoolError("--format card needs huggingface_hub: pip install huggingface_hub.") from None
    embeds = (run.get("model_info") or {}).get("embeds")
    task = "sentence-similarity" if embeds else "text-classification"
    scores, by_device = [], {}
    for row in ok:
        by_device.setdefault(place(row), row)
    for device, row in by_device.items():
        for metric in run.get("metrics") or []:
            value = row["metrics"].get(metric, {}).get("value")
            if value is not None:
                label = METRICS[metric].label + (f" on {device}" if len(by_device) > 1 else "")
                kind = str(HUB_METRICS.get(metric, metric))
                dataset = _dataset(run)
                scores.append(
                    EvalResult(
                        task_type=task, metric_type=kind, metric_name=label, metric_value=value, **dataset
                    )
                )
    hub_id = _hub_id(run)
    reduced = bool(recipe.quantize) or recipe.dtype != "float32"
    found = ModelCardData(
        base_model=hub_id,
        library_name="transformers" if "torch" in plugins.load("runtimes", recipe.runtime).PACKAGES else None,
        pipeline_tag=task,
        tags=["qtool", recipe.runtime],
        model_name=_title(run, recipe) if scores else None,
        eval_results=scores or None,
    )
    if hub_id and reduced:
        found["base_model_relation"] = "quantized"
    return found


def _dataset(run: Mapping[str, Any]) -> dict[str, Any]:
    """What was scored, as `EvalResult` names it. A split is told only where it is known to be one."""
    args, data, task = run.get("args") or {}, run.get("data") or {}, str(run["task"])
    rows, source = _count(data.get("rows")), str(data.get("source") or "")
    if task not in glue.FORMS:
        known = tasks.find_all()
        words = known[task][0].description if task in known else task
        return {
            "dataset_type": "custom",
            "dataset_name": f"{printable(words)} ({Path(printable(source)).name}, {rows} rows)",
        }
    form, train = glue.FORMS[task], args.get("split") == "train"
    official = form.train if train else form.dev
    name = f"GLUE {form.folder}" + ("" if rows == _count(official) else f", {rows} of {official:,} rows")
    # a single file may be any split
    split = None if args.get("data") and args["data"] == source else "train" if train else form.hub_dev
    return {
        "dataset_type": glue.HUB,
        "dataset_name": name,
        "dataset_config": form.hub or task,
        "dataset_split": split,
    }


def _count(rows: Any) -> str:
    return f"{rows:,}" if isinstance(rows, int) else "an unknown number of"


def _made(run: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """What was done to which model."""
    model = _hub_id(run) or Path(printable(run["model"])).name
    content = printable(str((run.get("model_info") or {}).get("content") or ""))[:12]
    identity = f" (SHA-256 of its files {escape(content)})" if content else ""
    facts = [f"method {recipe.method}", f"runtime {recipe.runtime}", f"compute type {recipe.dtype}"]
    facts += [
        f"{name}: {_flat(value)}"
        for name in ("quantize", "compile", "placement")
        if (value := getattr(recipe, name))
    ]
    if recipe.calibration:
        facts.append(f"calibrated on {(run.get('data') or {}).get('calibration_rows', 'some')} rows")
    # an address that Markdown can take as it stands becomes a link
    linked = re.fullmatch(r"https://[\w./#%?=&~+:-]+", recipe.source)
    source = f"<{recipe.source}>" if linked else escape(recipe.source)
    return [
        f"{escape(model)}{identity} made by the qtool recipe {escape(recipe.name)}: {escape(recipe.description)}",
        "\n".join([*(f"- {escape(fact)}" for fact in facts), f"- where the method comes from: {source}"]),
    ]


def _flat(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {entry}" for key, entry in value.items())


def _measured(found: Evidence, summary: Mapping[str, Any], row: Row) -> list[str]:
    """One table: the recipe against the baseline on a device at a batch size."""
    metric, against = summary["metric"], summary["baseline"]
    group = group_of(row)
    base = next((r for r in summary["rows"] if r["recipe"] == against and group_of(r) == group), None)
    cells = (base or {}).get("metrics") or {}
    own = row["recipe"] == against
    header = ["", *([] if own else [escape(against)]), escape(row["recipe"]), *([] if own else ["change"])]
    lines = [header, [":--", *["--:"] * (len(header) - 1)]]
    names = [*([metric] if metric else []), "latency_p50_s", "latency_p95_s", "throughput_per_s"]
    for name in [*names, peak_name(row["device"]), "disk_bytes"]:
        line = [escape(f"{METRICS[name].label} {unit(name)}".strip()), _cell(name, row["metrics"].get(name))]
        if not own:
            line = [
                line[0],
                _cell(name, cells.get(name)),
                line[1],
                escape(_change(summary, row, cells, name)),
            ]
        lines.append(line)
    notes = []
    if row["flips"]:
        flips = row["flips"]
        notes.append(f"{flips['gained']} answers were gained and {flips['lost']} lost against {against}")
    if row["contended"]:
        used = "GPU" if row.get("gpu_shared") else "processor"
        notes.append(f"other work used the {used} while it was measured: the times are not to be trusted")
    if names := row.get("throttled_by"):
        notes.append(f"the GPU slowed its clocks while it was measured: {', '.join(names)}")
    spread = row["round_spread"] or {}
    if spread.get("unstable"):
        notes.append(f"the p50 differs by {100 * spread['ratio']:.0f} % from process to process")
    told = _intervals(found, summary, row)
    notes = [note[0].upper() + note[1:] for note in notes]
    return [
        f"## Measured on {escape(place(row))}, batch {row['batch_size']}",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        " ".join([*told, *(f"{escape(note)}." for note in notes)]),
    ]


def _intervals(found: Evidence, summary: Mapping[str, Any], row: Row) -> list[str]:
    """What the brackets in the table rest on, a sentence each; none where it has no brackets."""
    counts = {
        escape(name): len(trial.rounds)
        for name in dict.fromkeys((row["recipe"], summary["baseline"]))
        if (trial := found.trial(name, group_of(row))) and trial.status == "ok"
    }
    once, several = [name for name in counts if counts[name] == 1], [n for n in counts if counts[n] > 1]
    told = []
    if several:
        alike = not once and len(set(counts.values())) == 1
        each = str(counts[several[0]]) if alike else " and ".join(f"{n}'s {counts[n]}" for n in several)
        told.append(f"of times and memory over {each} fresh processes")
    if (row["metrics"].get(summary["metric"]) or {}).get("low") is not None:
        told.append("of scores over examples")
    sentences = [f"Brackets hold 95 % intervals: {', '.join(told)}."] if told else []
    return sentences + ([f"Times and memory of {' and '.join(once)} are of one process."] if once else [])


def _cell(name: str, cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["value"] is None:
        return "-"
    exact = cell["low"] == cell["high"]
    return escape(
        number(name, cell["value"]) + ("" if exact else between(dict(cell), lambda x: number(name, x)))
    )


def _change(summary: Mapping[str, Any], row: Row, base: Mapping[str, Any], name: str) -> str:
    """Against the baseline, where the change has an interval of its own or is exact."""
    told, metric = row["metrics"], summary["metric"]
    if name == metric and told["score_delta"]["value"] is not None:
        delta = told["score_delta"]
        points = " points" if metric in PERCENT else ""
        return change(metric, delta["value"]) + between(delta, lambda x: change(metric, x)) + points
    if name == "latency_p50_s" and told["speedup"]["value"] is not None:
        speedup = told["speedup"]
        return f"{number('speedup', speedup['value'])}x as fast" + between(
            speedup, lambda x: number("speedup", x)
        )
    if name == "disk_bytes" and (base.get(name) or {}).get("value") and told[name]["value"] is not None:
        return f"{told[name]['value'] / base[name]['value']:.2f}x"
    return ""


def _where(run: Mapping[str, Any], ok: list[Row]) -> str:
    """Where it was measured; numbers of another host, version or text may differ."""
    host, args, versions, data = (run.get(key) or {} for key in ("host", "args", "versions", "data"))
    cores, threads = host.get("physical_cores"), args.get("threads")
    facts = {
        "processor": host.get("cpu_model"),
        "cores, threads used": None if cores is None else f"{cores}, {threads}",
        "memory": None if host.get("memory_gib") is None else f"{host['memory_gib']} GiB",
        "system": " ".join(str(host[key]) for key in ("os", "kernel") if host.get(key)),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "texts": None
        if data.get("rows") is None
        else f"{_count(data['rows'])}, at most {data.get('longest')} tokens",
        "date": run.get("started_at"),
    }
    if any(row["device"] == "cuda" for row in ok):
        facts["GPU"] = ", ".join(str(gpu.get("name")) for gpu in host.get("gpus") or [])
    lines = [f"- {what}: {escape(found)}" for what, found in facts.items() if found]
    told = "Numbers hold for this machine, these versions and these texts."
    return "\n\n".join(["## Where", "\n".join(lines), told])


def _how_to_load(found: Evidence, recipe: Recipe, row: Row) -> str:
    """The script that `qtool export` writes beside the model, and what it needs."""
    run = found.run
    run_name = escape(found.run_dir.resolve().name)
    lead = (
        "## How to load it\n\n"
        f"`qtool export RUN {recipe.name} DIR` (RUN is the folder of this run, {run_name}) writes the files of this"
        " model with this script as `load.py`."
    )
    script = _script(found, recipe, row)
    if script is None:
        return lead
    # longer than any run of backticks in the script, which would end the block
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", script)), default=0))
    needs = export.needs(recipe, {name: printable(str(v)) for name, v in (run.get("versions") or {}).items()})
    return f"{lead} It needs `pip install {needs.replace('`', '')}`.\n\n{fence}python\n{script.rstrip()}\n{fence}"


def _script(found: Evidence, recipe: Recipe, row: Row) -> str | None:
    """None where a part of what the script says is not in the run folder and no longer in the cache."""
    run, sentence = found.run, None
    max_tokens = (run.get("data") or {}).get("max_tokens")
    if max_tokens is None:
        return None
    info = run.get("model_info") or {}
    if info.get("embeds"):
        place = built(found.lines.values(), recipe.name)
        if place is None or not is_whole(place):
            return None
        sentence = checkpoint.read_sentence(place / "model")
    return export.load_script(recipe, row["device"], max_tokens, sentence, info.get("token_types", True))
