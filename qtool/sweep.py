"""Runs a plan: builds, scores and measures its trials in child processes, and resumes what is missing."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from qtool import host, isolate, recipes, store
from qtool.core import (
    BASELINE,
    Measurement,
    QtoolError,
    Recipe,
    Trial,
    cache_dir,
    content_hash,
    file_hash,
)
from qtool.plan import (
    STAGE_S,
    Options,
    Plan,
    artifact_place,
    check_resume,
    describe,
    make_plan,
    minutes,
    now,
    run_record,
    stage_counts,
)

PROBE_TIMEOUT_S = 1800.0


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
        check_resume(out, plan)
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
        if not (data_dir / "meta.json").is_file():
            shutil.rmtree(data_dir, ignore_errors=True)
            _place(scratch / "data", data_dir)
        return values, data_dir
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
        self(f"{text:<50} {minutes(seconds)} left")

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
        self.dead = {line.trial_id for line in self.whole.values() if line.stage == "plan"}
        """Ids of trials with a stage that did not end well: their later stages are left out."""
        self.host_hash = host.fingerprint_hash(host.fingerprint())
        say.left = stage_counts(plan)

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
        if (key, stage, number) in self.whole and self._still_there(trial, stage, key):
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
            if stage in ("build", "score"):
                self.dead |= {each.id for each in shared}
            elif stage == "measure":
                self.dead.add(trial.id)

    def _still_there(self, trial: Trial, stage: str, key: str) -> bool:
        """A whole line is not enough where the file it speaks of was deleted since."""
        if stage == "build":
            return artifact_place(self.plan.artifacts[trial.recipe]).is_dir()
        if stage == "score" and self.plan.options.score:
            path, line = self._predictions(trial), self.whole[key, stage, None]
            return path.is_file() and file_hash(path) == line.values["predictions_sha256"]
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
                    "started_at": now(),
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
                "artifact": str(artifact_place(self.plan.artifacts[trial.recipe])),
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
        place = artifact_place(self.plan.artifacts[trial.recipe])
        values: dict[str, Any] = {"artifact": place.name}
        if not is_whole(place):
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
                made = Path(scratch) / "artifact"
                outcome = self._child(trial, "build", {"out": str(made)})
                if outcome.status != "ok":
                    return outcome
                store.write_json(made / "manifest.json", outcome.values)
                _place(made, place)
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


def _place(made: Path, place: Path) -> None:
    """Rename into place; another sweep that was first has put the same content there."""
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def is_whole(place: Path) -> bool:
    """Whether a cached artifact still is what its build left, by the hashes in its manifest."""
    manifest = place / "manifest.json"
    if not manifest.is_file():
        return False
    files = json.loads(manifest.read_text())["files"]
    return all(
        (place / "model" / name).is_file() and file_hash(place / "model" / name) == digest
        for name, digest in files.items()
    )
