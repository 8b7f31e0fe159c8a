"""Plans a sweep, builds, scores and measures its trials in child processes, and resumes what is missing."""

from __future__ import annotations

import inspect
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qtool import host, isolate, plugins, recipes, store
from qtool.core import (
    BASELINE,
    Device,
    Measurement,
    QtoolError,
    Recipe,
    Trial,
    cache_dir,
    content_hash,
    file_hash,
)

PROBE_TIMEOUT_S = 1800.0
# Guesses before the first child of a stage has ended, for the estimate only.
STAGE_S = {"build": 15.0, "score": 15.0, "measure": 14.0, "harness": 3.0}


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

    @property
    def runnable(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.id not in self.skipped]


def run(options: Options) -> int:
    """The whole sweep. Exit code: 0 all runnable trials ok, 3 some failed, 130 interrupted.

    Raises QtoolError for whatever the user can fix, before anything is written.
    """
    out = _check_out(options)
    chosen = {recipe.name: recipe for recipe in recipes.select(options.patterns)}
    for device in options.devices:
        if why := recipes.why_not(chosen[BASELINE], device):
            raise QtoolError(f"the baseline cannot run on {device}: {why.reason}. Try: {why.fix}.")
    say = _Say()
    say(f"checking model, task and data of '{options.model}'")
    plan = make_plan(options, chosen, *_probe(options, chosen))
    if options.dry_run:
        print(describe(plan))
        return 0
    if options.resume:
        _check_resume(out, plan)
    try:
        out.mkdir(parents=True, exist_ok=True)
        writer = store.Writer(out)
    except OSError as error:
        raise QtoolError(f"cannot write to {out}: {error.strerror}. Choose another --out.") from None
    with writer:
        if not options.resume:
            store.write_json(out / "run.json", run_record(plan))
        sweep = _Sweep(plan, out, writer, say)
        try:
            sweep.go()
            interrupted = False
        except KeyboardInterrupt:
            say("interrupted: what finished is kept; --resume goes on")
            interrupted = True
    from qtool import report

    summary = report.write(out)
    print(report.render(out, "table"))
    print(f"\nreport: {out / 'report.md'}")
    if interrupted:
        return 130
    return 3 if any(row["status"] not in ("ok", "skipped") for row in summary["rows"]) else 0


def _check_out(options: Options) -> Path:
    """The run folder; nothing is made yet. Raises QtoolError when it cannot be used."""
    if options.out is None:
        if options.resume:
            raise QtoolError("--resume needs --out DIR, the folder of the run to go on with.")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = "".join(
            c if c.isalnum() or c in "-._" else "-" for c in Path(options.model).name or options.model
        )
        options.out = Path("reports") / f"{name}-{options.task or 'no-task'}-{stamp}"
    out = options.out
    holds_run = (out / "run.json").exists()
    if out.exists() and not out.is_dir():
        raise QtoolError(f"--out {out} is a file. Give a folder.")
    if holds_run and not (options.resume or options.dry_run):
        raise QtoolError(
            f"{out} already holds a run. Add --resume to go on with it, or choose another --out."
        )
    if options.resume and not holds_run:
        raise QtoolError(
            f"nothing to resume: {out} holds no run. Leave --resume out, or give the run's folder."
        )
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise QtoolError(f"cannot write to {out}: {parent} is not a writable folder. Choose another --out.")
    return out


def _probe(options: Options, chosen: dict[str, Recipe]) -> tuple[dict[str, Any], Path]:
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
        key = content_hash([values["model"]["content"], values["task"], values["data"]])[:16]
        data_dir = cache / key
        if data_dir.exists():
            shutil.rmtree(data_dir)
        (scratch / "data").rename(data_dir)
        return values, data_dir
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def make_plan(options: Options, chosen: dict[str, Recipe], probed: dict[str, Any], data_dir: Path) -> Plan:
    """One trial for each recipe, device and batch size, in that order; skips with their reasons."""
    plan = Plan(options, chosen, probed, data_dir)
    data, model = probed["data"], probed["model"]
    for name, recipe in chosen.items():
        plan.artifacts[name] = artifact_key(recipe, model["content"], data["calibration_hash"])
    for device in options.devices:
        for batch_size in options.batch_sizes:
            for name, recipe in chosen.items():
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
                )
                plan.trials.append(trial)
                why = recipes.why_not(recipe, device, has_calibration=data["calibration_rows"] > 0)
                if why:
                    plan.skipped[trial.id] = why
    return plan


def artifact_key(recipe: Recipe, model_content: str, calibration_hash: str | None) -> str:
    """Hash of all that decides an artifact: model, recipe, the method's code, library versions, calibration."""
    method = plugins.load("methods", recipe.method)
    versions = {package: host.installed(package) for package in method.PACKAGES}
    code = file_hash(Path(inspect.getfile(method)))
    calibration = calibration_hash if recipe.calibration else None
    return content_hash([model_content, recipe.content(), code, versions, calibration])[:16]


def _deployment(recipe: Recipe, artifact: str) -> str:
    """Hash of an artifact together with how it is run: what a score belongs to."""
    return content_hash([artifact, recipe.runtime, recipe.runtime_options, recipe.compile])[:16]


def run_record(plan: Plan) -> dict[str, Any]:
    """`run.json`: everything but the measurements, and no path of this machine beyond what was typed."""
    probed, options = plan.probed, plan.options
    machine = host.fingerprint()
    model = {key: value for key, value in probed["model"].items() if key != "folder"}
    return {
        "schema": store.SCHEMA,
        "model": options.model,
        "task": probed["task"]["name"] if options.score else None,
        "metric": probed["task"]["score"] if options.score else None,
        "metrics": probed["task"]["metrics"] if options.score else [],
        "limit": options.limit,
        "rounds": options.rounds,
        "plan": [
            {
                "trial_id": trial.id,
                "description": plan.recipes[trial.recipe].description,
                **trial.model_dump(include={"recipe", "device", "batch_size", "fingerprint"}),
            }
            for trial in plan.trials
        ],
        "host": {**machine, "hash": host.fingerprint_hash(machine)},
        "versions": host.versions(),
        "args": comparable(options),
        "model_info": model,
        "data": probed["data"],
        "notes": probed["data"]["notes"],
        "recipes": {name: recipe.model_dump() for name, recipe in plan.recipes.items()},
        "started_at": _now(),
    }


def comparable(options: Options) -> dict[str, Any]:
    """The arguments that decide numbers: a resumed sweep must repeat them."""
    left_out = ("out", "resume", "dry_run", "timeout_s")
    return {key: value for key, value in vars(options).items() if key not in left_out}


def _check_resume(out: Path, plan: Plan) -> None:
    """Raises QtoolError naming the first thing that differs from the run in `out`."""
    before, now = store.read_run(out), run_record(plan)
    for what in ("args", "versions", "model_info", "data", "recipes"):
        for key in sorted({*before[what], *now[what]}):
            was, found = before[what].get(key), now[what].get(key)
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
    if before["host"]["hash"] != now["host"]["hash"]:
        changed = [key for key in now["host"] if before["host"].get(key) != now["host"][key]]
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
        f"run      {options.rounds} rounds, {options.threads} threads, into {options.out}",
    ]
    for trial in plan.trials:
        why = plan.skipped.get(trial.id)
        key = plan.artifacts[trial.recipe]
        state = f"skipped: {why}" if why else ("artifact cached" if _artifact(key).is_dir() else "to build")
        lines.append(f"  {trial.recipe:24} {trial.device:5} batch {trial.batch_size:<4} {state}")
    seconds = sum(STAGE_S[stage] * count for stage, count in _stage_counts(plan).items())
    new = {t.recipe for t in plan.runnable if not _artifact(plan.artifacts[t.recipe]).is_dir()}
    # no recipe of the book stores more than its base type does
    size = sum(model["weight_bytes"] * (1.0 if plan.recipes[n].dtype == "float32" else 0.5) for n in new)
    lines.append(
        f"estimate about {_minutes(seconds)}, at most {size / 1e6:.0f} MB of new artifacts in the cache"
    )
    return "\n".join(lines)


def _stage_counts(plan: Plan) -> dict[str, int]:
    deployments = {(t.recipe, t.device) for t in plan.runnable}
    return {
        "build": len({name for name, _ in deployments}),
        "score": len(deployments),
        "harness": 1,
        "measure": len(plan.runnable) * plan.options.rounds,
    }


def _artifact(key: str) -> Path:
    return cache_dir() / "artifacts" / key


class _Say:
    """Progress as plain lines on standard error: whole, and only while no child is timing."""

    def __init__(self) -> None:
        self.done: dict[str, list[float]] = {}
        self.left: dict[str, int] = {}

    def __call__(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def stage(self, stage: str, text: str) -> None:
        seconds = 0.0
        for name, count in self.left.items():
            seen = self.done.get(name)
            seconds += count * (sum(seen) / len(seen) if seen else STAGE_S[name])
        self(f"{text:<50} {_minutes(seconds)} left")

    def finished(self, stage: str, seconds: float) -> None:
        self.left[stage] = max(0, self.left.get(stage, 0) - 1)
        if seconds > 0:
            self.done.setdefault(stage, []).append(seconds)


class _Sweep:
    """The stages in order. What is already in `results.jsonl` is not done again."""

    def __init__(self, plan: Plan, out: Path, writer: store.Writer, say: _Say) -> None:
        self.plan, self.out, self.writer, self.say = plan, out, writer, say
        self.whole = {
            key: line
            for key, line in store.latest(store.read(out)).items()
            if line.status in ("ok", "skipped")
        }
        self.dead: set[str] = set()
        """Ids of trials with a stage that did not end well: their later stages are left out."""
        self.host_hash = host.fingerprint_hash(host.fingerprint())
        say.left = _stage_counts(plan)

    def go(self) -> None:
        for trial in self.plan.trials:
            why = self.plan.skipped.get(trial.id)
            if why and (trial.id, "plan", None) not in self.whole:
                self._append(
                    trial.id, trial, "plan", None, isolate.Outcome("skipped", {}, why.reason, why.fix)
                )
        firsts = {(trial.recipe, trial.device): trial for trial in reversed(self.plan.runnable)}
        deployments = list(reversed(firsts.values()))
        for trial in deployments:
            self._stage(trial, "build", trial.fingerprint, None, self._build)
        for trial in deployments:
            self._stage(trial, "score", f"{trial.fingerprint}-{trial.device}", None, self._score)
        baseline = next(trial for trial in self.plan.runnable if trial.recipe == BASELINE)
        self._stage(baseline, "harness", "harness", None, self._harness)
        for number in range(1, self.plan.options.rounds + 1):
            order = list(self.plan.runnable)
            # A fixed order would give each recipe the same neighbour, and its heat, in every round.
            random.Random(f"{self.plan.options.seed}-{number}").shuffle(order)
            for trial in order:
                self._stage(trial, "measure", trial.id, number, self._measure)

    def _stage(
        self, trial: Trial, stage: str, key: str, number: int | None, work: Callable[[Trial], isolate.Outcome]
    ) -> None:
        if (key, stage, number) in self.whole and self._still_there(trial, stage):
            self.say.finished(stage, 0.0)
            return
        if trial.id in self.dead:
            self.say.finished(stage, 0.0)
            return
        rounds = f"round {number}/{self.plan.options.rounds}" if number else "once"
        self.say.stage(stage, f"{trial.recipe} {trial.device} batch {trial.batch_size}: {stage}, {rounds}")
        started = time.monotonic()
        outcome = work(trial)
        self.say.finished(stage, time.monotonic() - started)
        shared = [t for t in self.plan.runnable if (t.recipe, t.device) == (trial.recipe, trial.device)]
        if outcome.status == "unavailable":
            for each in shared:
                self._append(each.id, each, "plan", None, replace(outcome, status="skipped"))
        else:
            self._append(key, trial, stage, number, outcome)
        if outcome.status != "ok":
            self.say(f"  {trial.recipe}: {outcome.status}: {outcome.error}")
            self.dead |= {trial.id} if stage == "measure" else {each.id for each in shared}

    def _still_there(self, trial: Trial, stage: str) -> bool:
        """A whole line is not enough where the file it speaks of was deleted since."""
        if stage == "build":
            return _artifact(self.plan.artifacts[trial.recipe]).is_dir()
        if stage == "score" and self.plan.options.score:
            return self._predictions(trial).is_file()
        return True

    def _append(
        self, key: str, trial: Trial, stage: str, number: int | None, outcome: isolate.Outcome
    ) -> None:
        values = dict(outcome.values)
        samples = values.pop("samples", {})
        if stage in ("measure", "harness"):
            values = values.get("values", {})
        status = "failed" if outcome.status == "user_error" else outcome.status
        self.writer.append(
            Measurement.model_validate(
                {
                    "trial_id": key,
                    "recipe": trial.recipe,
                    "device": trial.device,
                    "batch_size": trial.batch_size if stage in ("plan", "measure") else None,
                    "stage": stage,
                    "round": number,
                    "status": status,
                    "samples": samples,
                    "values": values,
                    "host": self.host_hash,
                    "started_at": _now(),
                    "error": outcome.error,
                    "next_step": outcome.next_step,
                }
            )
        )

    def _child(
        self, trial: Trial, stage: str, spec: dict[str, Any], number: int | None = None
    ) -> isolate.Outcome:
        suffix = f"-{number}" if number else ""
        log = self.out / "logs" / f"{trial.recipe}-{trial.device}-{trial.batch_size}-{stage}{suffix}.log"
        return isolate.run(
            stage,
            {
                "recipe": self.plan.recipes[trial.recipe].model_dump(),
                "model_dir": self.plan.probed["model"]["folder"],
                "data": str(self.plan.data_dir),
                "artifact": str(_artifact(self.plan.artifacts[trial.recipe])),
                "device": trial.device,
                "threads": self.plan.options.threads,
                **spec,
            },
            log=log,
            timeout_s=self.plan.options.timeout_s,
            threads=self.plan.options.threads,
        )

    def _build(self, trial: Trial) -> isolate.Outcome:
        """Find the artifact in the cache, or build it beside its place and rename it when it is whole."""
        place = _artifact(self.plan.artifacts[trial.recipe])
        values: dict[str, Any] = {"artifact": place.name}
        if not _is_whole(place):
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
                made = Path(scratch) / "artifact"
                outcome = self._child(trial, "build", {"out": str(made)})
                if outcome.status != "ok":
                    return outcome
                store.write_json(made / "manifest.json", outcome.values)
                # another sweep may have been first: its artifact has the same content
                if not place.exists():
                    made.rename(place)
            values |= {"cached": False, "build_s": outcome.values["build_s"]}
        else:
            values |= {"cached": True, "build_s": None}
        files = [path for path in (place / "model").rglob("*") if path.is_file()]
        return isolate.Outcome("ok", {**values, "disk_bytes": sum(path.stat().st_size for path in files)})

    def _predictions(self, trial: Trial) -> Path:
        return self.out / "predictions" / f"{trial.recipe}-{trial.device}.npz"

    def _score(self, trial: Trial) -> isolate.Outcome:
        spec = {
            "score": self.plan.options.score,
            "predictions": str(self._predictions(trial)),
            "metrics": self.plan.probed["task"]["metrics"],
        }
        return self._child(trial, "score", spec)

    def _harness(self, trial: Trial) -> isolate.Outcome:
        return self._child(trial, "harness", {})

    def _measure(self, trial: Trial) -> isolate.Outcome:
        return self._child(trial, "measure", {"batch_size": trial.batch_size})


def _is_whole(place: Path) -> bool:
    """Whether a cached artifact still is what its build left, by the hashes in its manifest."""
    manifest = place / "manifest.json"
    if not manifest.is_file():
        return False
    files = json.loads(manifest.read_text())["files"]
    return all(
        (place / "model" / name).is_file() and file_hash(place / "model" / name) == digest
        for name, digest in files.items()
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
