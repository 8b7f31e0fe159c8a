"""Runs a plan: builds, scores and measures its trials in child processes, and resumes what is missing."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from qtool import artifacts, asking, evidence, host, isolate, policy, recipes, store, track
from qtool.core import BASELINE, BASELINES, Measurement, QtoolError, Recipe, Trial, file_hash
from qtool.plan import (
    HERE,
    Options,
    Plan,
    artifact_place,
    check_resume,
    describe,
    keep_texts,
    make_plan,
    now,
    run_record,
    stage_counts,
)
from qtool.progress import Say, tell
from qtool.rows import score_id

_REPORTING = Lock()
"""Of several models on a cluster one report at a time is drawn: matplotlib is not made for threads."""
AT_ONCE = 2
"""Builds, and after them scores, that run side by side: most of their time is one thread importing libraries."""


def run(options: Options) -> int:
    """The whole sweep. Exit code: 0 all runnable trials ok, 3 some failed, 130 interrupted.

    Raises QtoolError for whatever the user can fix, before anything is written.
    """
    plan = check(options)
    if options.dry_run:
        print(describe(plan))
        return 0
    return carry_out(plan)


def check(options: Options) -> Plan:
    """Settle everything the user can get wrong. Raises QtoolError; writes nothing into the run folder."""
    out = asking.check_out(options)
    demanded = policy.read(options.policy) if options.policy else None
    if options.track:
        track.check()
    chosen = {recipe.name: recipe for recipe in recipes.select(options.patterns)}
    reach = _reach(options)
    if reach is None:
        _check_baseline(chosen[BASELINE], options)
    tell(f"checking model, task and data of '{options.model}'", sys.stderr)
    probed, data_dir = asking.probe(options, chosen)
    baseline = BASELINES[probed["model"]["source"]]
    if baseline != BASELINE:
        chosen = {recipe.name: recipe for recipe in recipes.select(options.patterns, baseline)}
        if reach is None:
            _check_baseline(chosen[baseline], options)
    places = reach.places(chosen, probed, baseline) if reach else HERE
    plan = make_plan(options, chosen, probed, data_dir, places)
    if reach:
        plan.cluster, plan.hosts = reach, reach.hosts(options)
    if demanded:
        demanded.check_sweep(list(chosen), baseline, options.score)
    if options.resume:
        check_resume(out, plan)
    return plan


def _reach(options: Options) -> Any:
    """The cluster a sweep runs on; None where it is this machine."""
    if options.executor == "local":
        return None
    from qtool import ray_sweep  # an extra that a local sweep does without

    reach = ray_sweep.Reach(options)
    options.threads = options.threads or reach.threads
    return reach


def _check_baseline(baseline: Recipe, options: Options) -> None:
    for device in options.devices:
        if why := recipes.why_not(baseline, device):
            raise QtoolError(
                f"the baseline {baseline.name} cannot run on {device}: {why.reason}. Try: {why.fix}."
            )


def carry_out(plan: Plan) -> int:
    """Build, score and measure what is missing, then write and print the report; the exit code of `run`."""
    options = plan.options
    out = asking.check_out(options)
    try:
        out.mkdir(parents=True, exist_ok=True)
        writer = store.Writer(out)
    except OSError as error:
        raise QtoolError(f"cannot write to {out}: {error.strerror}. Choose another --out.") from None
    artifacts.drop_stale()
    with writer:
        if not options.resume:
            store.write_json(out / "run.json", run_record(plan))
        if options.score:
            keep_texts(plan, out)
        sweep = plan.cluster.sweep(plan, out, writer) if plan.cluster else Sweep(plan, out, writer)
        try:
            sweep.go()
            interrupted = False
        except KeyboardInterrupt:
            sweep.say("interrupted: what finished is kept; --resume goes on")
            interrupted = True
    from qtool import report

    with _REPORTING:
        summary = report.write(out)
    tell(f"{report.render(out, 'table')}\n\nreport: {out / 'report.html'}", sys.stdout)
    if interrupted:
        return 130
    failed = {row["recipe"] for row in summary["rows"] if row["status"] not in ("ok", "skipped")}
    code = 0
    if options.policy:
        from qtool.report import verdict

        found = verdict.hold(out, options.policy)
        tell(verdict.render(found), sys.stdout)
        failed -= set(found["expected_failures"])
        code = found["exit_code"]
    code = code or (3 if failed else 0)
    if options.track:
        try:
            tell(track.log(out), sys.stdout)
        except QtoolError as error:  # the run is whole, and other models may follow
            tell(f"qtool: {error} Then: qtool report {out} --track {options.track}", sys.stderr)
            code = code or 2
    return code


class Sweep:
    """The stages in order. What is already in `results.jsonl` is not done again."""

    def __init__(self, plan: Plan, out: Path, writer: store.Writer) -> None:
        self.plan, self.out, self.writer, self.say = plan, out, writer, Say()
        self.whole = {
            key: line
            for key, line in store.current(store.latest(store.read(out)), store.read_run(out)).items()
            if line.status in ("ok", "skipped")
        }
        self.dead = {line.trial_id for line in self.whole.values() if line.stage == "plan"}
        """Ids of trials with a stage that did not end well: their later stages are left out."""
        self.host_hash = host.fingerprint_hash(host.fingerprint())
        self.stamp: dict[str, Any] = {}
        """What is put beside the values of every timed stage."""
        self.say.left = stage_counts(plan)
        self.stop_read, self.stop_write = os.pipe()
        self.building = {key: Lock() for key in plan.artifacts.values()}
        self.at_once = AT_ONCE if host.available_bytes() > AT_ONCE * plan.build_bytes else 1

    def go(self) -> None:
        self._make()
        self._time()

    def _make(self) -> None:
        """Skips, builds and scores: nothing is being timed."""
        for trial in self.plan.trials:
            why = self.plan.skipped.get(trial.id)
            if why and (trial.id, "plan", None) not in self.whole:
                self._append(
                    trial.id, trial, "plan", None, isolate.Outcome("skipped", {}, why.reason, why.fix)
                )
        firsts = {(trial.recipe, trial.device): trial for trial in reversed(self.plan.runnable)}
        deployments = list(reversed(firsts.values()))
        self._side_by_side("build", [(trial, trial.fingerprint) for trial in deployments], self._build)
        self._side_by_side(
            "score",
            [(trial, score_id(trial.fingerprint, trial.device, trial.kind)) for trial in deployments],
            self._score,
        )

    def _time(self) -> None:
        """The harness, then round after round of every trial that is not dead."""
        baseline = next(trial for trial in self.plan.runnable if trial.recipe == self.plan.baseline)
        name = "-".join(filter(None, ("harness", baseline.kind)))
        self._stage(baseline, "harness", name, None, self._harness)
        started = time.monotonic()
        for number in range(1, self.plan.options.rounds + 1):
            self._round(number, self.plan.runnable)
        if self.plan.options.auto_rounds:
            self._more_rounds(started)

    def _round(self, number: int, trials: Sequence[Trial]) -> None:
        order = list(trials)
        # A fixed order would give each recipe the same neighbour, and its heat, in every round.
        random.Random(f"{self.plan.options.seed}-{number}").shuffle(order)
        for trial in order:
            self._stage(trial, "measure", trial.id, number, self._measure)

    def _more_rounds(self, started: float) -> None:
        """Rounds of what is still too uncertain, with its baseline, until it is not or the time is over."""
        options, number = self.plan.options, self.plan.options.rounds
        own = {trial.id for trial in self.plan.runnable}
        while wide := [
            trial
            for trial in evidence.unsettled(evidence.load_times(self.out), options.speedup_within)
            if trial.entry["trial_id"] in own
        ]:
            names = ", ".join(dict.fromkeys(trial.recipe for trial in wide))
            if time.monotonic() - started > options.time_budget_s:
                self.say(
                    f"the time budget is over; still wider than {100 * options.speedup_within:g} %: {names}"
                )
                return
            number += 1
            again = {(trial.recipe, *trial.group[1:]) for trial in wide}
            again |= {(self.plan.baseline, *trial.group[1:]) for trial in wide}
            trials = [t for t in self.plan.runnable if (t.recipe, t.device, t.batch_size) in again]
            self.say.left["measure"] = len(trials)
            self._round(number, trials)

    def _side_by_side(
        self, stage: str, works: Sequence[tuple[Trial, str]], work: Callable[[Trial], isolate.Outcome]
    ) -> None:
        """A stage of every deployment, `at_once` at a time: nothing is being timed."""
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                for done in [pool.submit(self._stage, trial, stage, key, None, work) for trial, key in works]:
                    done.result()
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise

    def _stop(self) -> None:
        os.close(self.stop_write)  # ends the children that run now

    def _stage(
        self, trial: Trial, stage: str, key: str, number: int | None, work: Callable[[Trial], isolate.Outcome]
    ) -> None:
        if (key, stage, number) in self.whole and self._still_there(trial, stage, key):
            self.say.finished(stage, 0.0)
            return
        if trial.id in self.dead:
            self.say.finished(stage, 0.0)
            return
        rounds = f"round {number}/{max(number, self.plan.options.rounds)}" if number else "once"
        self.say.stage(stage, f"{trial.recipe} {trial.device} batch {trial.batch_size}: {stage}, {rounds}")
        started = time.monotonic()
        outcome = work(trial)
        self.say.finished(stage, time.monotonic() - started)
        if outcome.status == "unavailable":
            for each in self._shared(trial):
                self._append(each.id, each, "plan", None, replace(outcome, status="skipped"))
        else:
            self._append(key, trial, stage, number, outcome, time.monotonic() - started)
        if outcome.status != "ok":
            self.say(f"  {trial.recipe}: {outcome.status}: {outcome.error}")
            if stage in ("build", "score"):
                self.dead |= {each.id for each in self._shared(trial)}
            elif stage == "measure":
                self.dead.add(trial.id)

    def _shared(self, trial: Trial) -> list[Trial]:
        """The trials that stand on the same artifact and score."""
        return [t for t in self.plan.runnable if (t.recipe, t.device) == (trial.recipe, trial.device)]

    def _still_there(self, trial: Trial, stage: str, key: str) -> bool:
        """A whole line is not enough where the file it speaks of was deleted since."""
        if stage == "build":
            return artifacts.is_whole(artifact_place(self.plan.artifacts[trial.recipe]))
        if stage == "score" and self.plan.options.score:
            path, line = self._predictions(trial), self.whole[key, stage, None]
            return path.is_file() and file_hash(path) == line.values["predictions_sha256"]
        return True

    def _append(
        self,
        key: str,
        trial: Trial,
        stage: str,
        number: int | None,
        outcome: isolate.Outcome,
        wall_s: float | None = None,
    ) -> None:
        values = dict(outcome.values)
        samples = values.pop("samples", {})
        if stage in ("measure", "harness"):
            values = values.get("values", {})
        if wall_s is not None:
            values["wall_s"] = wall_s
        if stage in ("measure", "harness"):
            values |= self.stamp
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
        return isolate.run(
            stage,
            self._spec(trial) | spec,
            log=self._log(trial, stage, number),
            timeout_s=self.plan.options.timeout_s,
            threads=self.plan.options.threads,
            stop=self.stop_read if stage in ("build", "score") else None,
        )

    def _label(self, trial: Trial) -> str:
        """How the files of a recipe on a device begin."""
        return f"{trial.recipe}-{trial.device}"

    def _log(self, trial: Trial, stage: str, number: int | None) -> Path:
        suffix = f"-{number}" if number else ""
        return self.out / "logs" / f"{self._label(trial)}-{trial.batch_size}-{stage}{suffix}.log"

    def _spec(self, trial: Trial) -> dict[str, Any]:
        """What every stage is told of a trial."""
        return {
            "recipe": self.plan.recipes[trial.recipe].model_dump(),
            "model_dir": self.plan.probed["model"]["folder"],
            "data": str(self.plan.data_dir),
            "artifact": str(artifact_place(self.plan.artifacts[trial.recipe])),
            "device": trial.device,
            "threads": self.plan.options.threads,
        }

    def _build(self, trial: Trial) -> isolate.Outcome:
        """Find the artifact in the cache, or build it.

        Recipes that differ only in how they run share an artifact: the second waits for the first.
        """
        with self.building[self.plan.artifacts[trial.recipe]]:
            return self._build_alone(trial)

    def _build_alone(self, trial: Trial) -> isolate.Outcome:
        place = artifact_place(self.plan.artifacts[trial.recipe])
        return artifacts.obtain(place, lambda made: self._child(trial, "build", {"out": str(made)}))

    def _predictions(self, trial: Trial) -> Path:
        return self.out / "predictions" / f"{self._label(trial)}.npz"

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
