"""What a sweep will do: its arguments, its trials, which of them are skipped, and what a resumed run must repeat."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from qtool import checkpoint, host, plugins, recipes, store
from qtool.core import BASELINES, Device, QtoolError, Recipe, Trial, cache_dir, content_hash, file_hash

# Guesses before the first child of a stage has ended, for the estimate only.
STAGE_S = {"build": 15.0, "score": 15.0, "measure": 14.0, "harness": 3.0}

WhyNot = Callable[..., recipes.Why | None]
"""`recipes.why_not`, as the machines of a kind of node answer it."""
HERE: Sequence[tuple[str | None, WhyNot]] = ((None, recipes.why_not),)
"""This machine, which is of no kind."""


@dataclass
class Options:
    """What the command line asks for. `devices`, `batch_sizes` and `patterns` keep their order."""

    model: str
    revision: str | None
    task: str | None
    data: str | None
    text: str | None
    text_pair: str | None
    label: str | None
    metric: str | None
    patterns: list[str]
    devices: list[Device]
    batch_sizes: list[int]
    seq_len: int | None
    rounds: int
    """At least so many; `auto_rounds` goes on until `speedup_within` or `time_budget_s`."""
    auto_rounds: bool
    speedup_within: float
    time_budget_s: float
    policy: Path | None
    track: str | None
    limit: int | None
    split: str | None
    calibration: str | None
    score: bool
    threads: int
    timeout_s: float
    out: Path | None
    resume: bool
    dry_run: bool
    seed: int = 0
    executor: str = "local"
    address: str | None = None
    on: list[str] = field(default_factory=list)
    """Names of the kinds of node, for the executor `ray`; empty: one kind, all nodes."""
    shared: str | None = None
    turn: int = 0
    """Which of several models this is: they are spread over the nodes of a kind."""


@dataclass
class Plan:
    """What the probe found and what follows: the trials, and why some will not run."""

    options: Options
    recipes: dict[str, Recipe]
    probed: dict[str, Any]
    data_dir: Path
    trials: list[Trial] = field(default_factory=list)
    skipped: dict[str, recipes.Why] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    """Recipe name to the key of its artifact in the cache."""
    hosts: dict[str | None, dict[str, Any]] = field(default_factory=dict)
    """Of a sweep over nodes, by kind: the fingerprint of the node that is timed, its hash, and the attempt."""
    cluster: Any = None
    """A `ray_sweep.Reach`, of a sweep over nodes."""

    @property
    def baseline(self) -> str:
        return BASELINES[self.probed["model"]["source"]]

    @property
    def build_bytes(self) -> int:
        """What one build may hold at most: its libraries, the checkpoint, and copies while it converts."""
        return 2 * 2**30 + 6 * self.probed["model"]["weight_bytes"]

    @property
    def runnable(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.id not in self.skipped]


def make_plan(
    options: Options,
    chosen: dict[str, Recipe],
    probed: dict[str, Any],
    data_dir: Path,
    places: Sequence[tuple[str | None, WhyNot]] = HERE,
) -> Plan:
    """One trial for each kind of node, device, batch size and recipe, in that order; skips with their reasons."""
    plan = Plan(options, chosen, probed, data_dir)
    data, model = probed["data"], probed["model"]
    for name, recipe in chosen.items():
        plan.artifacts[name] = artifact_key(recipe, model["content"], data["calibration_hash"])
    for (kind, why_not), device, batch_size, (name, recipe) in product(
        places, options.devices, options.batch_sizes, chosen.items()
    ):
        trial = Trial(
            model=model["content"],
            revision=model["revision"],
            recipe=name,
            fingerprint=_deployment(recipe, plan.artifacts[name]),
            task=options.task,
            data_hash=data["data_hash"],
            limit=options.limit,
            calibration_hash=data["calibration_hash"] if recipe.calibration else None,
            device=device,
            batch_size=batch_size,
            seq_len=options.seq_len,
            threads=options.threads,
            seed=options.seed,
            kind=kind,
        )
        plan.trials.append(trial)
        why = why_not(recipe, device, has_calibration=data["calibration_rows"] > 0, source=model["source"])
        why = why or _refusal(recipe, model["model_type"], options.threads)
        if why:
            plan.skipped[trial.id] = why
    return plan


def _refusal(recipe: Recipe, model_type: str, threads: int) -> recipes.Why | None:
    """What the recipe's method says of this architecture."""
    refuse = getattr(plugins.load("methods", recipe.method), "refuse", None)
    reason = refuse(recipe, model_type, threads) if refuse else None
    return recipes.Why(*reason.rsplit(": ", 1)) if reason else None


def artifact_key(recipe: Recipe, model_content: str, calibration_hash: str | None) -> str:
    """Hash of all that decides an artifact: model, recipe, code that builds, library versions, calibration."""
    method = plugins.load("methods", recipe.method)
    versions = {package: host.installed(package) for package in method.PACKAGES}
    helpers = [part for part in vars(method).values() if inspect.ismodule(part) and "._" in part.__name__]
    code = [file_hash(Path(inspect.getfile(module))) for module in (method, checkpoint, *helpers)]
    calibration = calibration_hash if recipe.calibration else None
    # the logits kept for the reload check were computed with the runtime's options
    running = [recipe.runtime, recipe.runtime_options]
    return content_hash([model_content, recipe.content(), code, versions, calibration, running])[:16]


def _deployment(recipe: Recipe, artifact: str) -> str:
    """Hash of an artifact, how it is run and what is expected of it: what a score and its verdict belong to."""
    how = [recipe.runtime, recipe.runtime_options, recipe.compile, recipe.expect.model_dump()]
    placed = [recipe.placement] if recipe.placement else []
    return content_hash([artifact, recipe.name, *how, *placed])[:16]


def run_record(plan: Plan) -> dict[str, Any]:
    """`run.json`: everything but the measurements, and no path of this machine beyond what was typed."""
    probed, options = plan.probed, plan.options
    machine = host.fingerprint()
    here = {**machine, "hash": host.fingerprint_hash(machine)}
    model = {key: value for key, value in probed["model"].items() if key != "folder"}
    return {
        "schema": store.SCHEMA,
        "model": options.model,
        "task": probed["task"]["name"] if options.score else None,
        "metric": probed["task"]["score"] if options.score else None,
        "metrics": probed["task"]["metrics"] if options.score else [],
        "baseline": plan.baseline,
        "limit": options.limit,
        "rounds": options.rounds,
        "plan": [
            {
                "trial_id": trial.id,
                "description": plan.recipes[trial.recipe].description,
                **trial.model_dump(include={"recipe", "device", "batch_size", "fingerprint"}),
                **(
                    {"host": host_name(plan.hosts[trial.kind]), "kind": trial.kind}
                    if trial.kind in plan.hosts
                    else {}
                ),
            }
            for trial in plan.trials
        ],
        # what led a sweep over nodes decides none of its numbers: of several hosts it is the first
        "host": next(iter(plan.hosts.values()), here),
        **({"hosts": {host_name(each): each for each in plan.hosts.values()}} if plan.hosts else {}),
        "versions": host.versions(),
        "args": comparable(options),
        "model_info": model,
        "data": probed["data"],
        "notes": probed["data"]["notes"],
        "recipes": {name: recipe.model_dump() for name, recipe in plan.recipes.items()},
        "fit": probed.get("fit") or {},
        "started_at": now(),
    }


def host_name(facts: Mapping[str, Any]) -> str:
    """`KIND/HASH` of a host, or its hash where the sweep named no kinds."""
    return f"{facts['kind']}/{facts['hash']}" if facts.get("kind") else facts["hash"]


def keep_texts(plan: Plan, out: Path) -> None:
    """Write `texts.json`, the scored texts in the order of the stored predictions, into the run folder.

    A run folder travels, the cache does not, and a changed answer says little without its text.
    """
    import numpy as np

    content = json.loads((plan.data_dir / "texts.json").read_text("utf-8"))
    with np.load(plan.data_dir / "inputs.npz", allow_pickle=False) as arrays:
        order = np.argsort(arrays["ids"]).tolist()
    found = {name: rows and [rows[row] for row in order] for name, rows in content.items()}
    store.write_json(out / "texts.json", found)


def comparable(options: Options) -> dict[str, Any]:
    """The arguments that decide numbers: a resumed sweep must repeat them."""
    left_out = {"out", "resume", "dry_run", "timeout_s", "time_budget_s", "policy", "track"}
    left_out |= {"executor", "address", "shared", "turn"}
    left_out |= set() if options.on else {"on"}  # as in the runs of a qtool that had no kinds
    return {key: value for key, value in vars(options).items() if key not in left_out}


def check_resume(out: Path, plan: Plan) -> None:
    """Raises QtoolError naming the first thing that differs from the run in `out`."""
    before, wanted = store.read_run(out), run_record(plan)
    for what in ("args", "versions", "model_info", "data", "recipes"):
        for key in sorted({*before[what], *wanted[what]}):
            was, found = before[what].get(key), wanted[what].get(key)
            if was != found:
                names = {
                    "args": f"argument {key}",
                    "versions": f"version of {key}",
                    "recipes": f"recipe {key}",
                }
                raise QtoolError(
                    f"cannot resume {out}: {names.get(what, f'{what} {key}')} was {_short(was)}, now {_short(found)}."
                    " Restore it, or start a new run with another --out."
                )
    if bool(before.get("hosts")) != bool(plan.hosts):
        was = "ray" if before.get("hosts") else "local"
        raise QtoolError(f"cannot resume {out}: it was begun with --executor {was}. Go on with the same.")
    if not plan.hosts and before["host"]["hash"] != wanted["host"]["hash"]:
        changed = [key for key in wanted["host"] if before["host"].get(key) != wanted["host"][key]]
        raise QtoolError(
            f"cannot resume {out}: it ran on another host ({', '.join(changed)} differ). Start a new run."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def describe(plan: Plan) -> str:
    """The plan in words for --dry-run: trials, skips with reasons, an estimate of time and disk."""
    options, model, data = plan.options, plan.probed["model"], plan.probed["data"]
    lines = [
        f"model    {options.model}: {model['parameters'] / 1e6:.1f} M parameters, {model['weight_bytes'] / 1e6:.0f} MB",
        f"data     {data['source']}: {data['rows']} rows, {data['mean_tokens']:.0f} tokens on average",
        f"run      {options.rounds}{' or more' if options.auto_rounds else ''} rounds, {options.threads} threads,"
        f" into {options.out}",
    ]
    for trial in plan.trials:
        why = plan.skipped.get(trial.id)
        key = plan.artifacts[trial.recipe]
        state = (
            f"skipped: {why}" if why else ("artifact cached" if artifact_place(key).is_dir() else "to build")
        )
        where = f"{trial.kind} {trial.device}" if trial.kind else trial.device
        lines.append(f"  {trial.recipe:24} {where:5} batch {trial.batch_size:<4} {state}")
    seconds = sum(STAGE_S[stage] * count for stage, count in stage_counts(plan).items())
    new = {t.recipe for t in plan.runnable if not artifact_place(plan.artifacts[t.recipe]).is_dir()}
    # no recipe of the book stores more than its base type does
    size = sum(model["weight_bytes"] * (1.0 if plan.recipes[n].dtype == "float32" else 0.5) for n in new)
    lines.append(
        f"estimate about {minutes(seconds)}, at most {size / 1e6:.0f} MB of new artifacts in the cache"
    )
    return "\n".join(lines)


def stage_counts(plan: Plan) -> dict[str, int]:
    deployments = {(t.recipe, t.device, t.kind) for t in plan.runnable}
    return {
        "build": len({name for name, _, _ in deployments}),
        "score": len(deployments),
        "harness": 1,
        "measure": len(plan.runnable) * plan.options.rounds,
    }


def artifact_place(key: str) -> Path:
    return cache_dir() / "artifacts" / key


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
