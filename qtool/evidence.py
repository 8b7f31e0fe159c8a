"""What a run folder holds, read once: its trials with their samples, and its scores paired by example.

Everything that decides (summary, pick, compare, gate) starts here. No model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from qtool import store
from qtool.claims import Rounds
from qtool.core import BASELINE, METRICS, Measurement, QtoolError, file_hash
from qtool.frontier import Candidate, Numbers
from qtool.paired import PairedScores
from qtool.rows import Group, Key, Trial, make_trial, speedup
from qtool.stats import Interval


@dataclass(frozen=True)
class Evidence:
    """A run: `scores` by host and device, empty where nothing was scored."""

    run_dir: Path
    run: Mapping[str, Any]
    lines: Mapping[Key, Measurement]
    trials: Sequence[Trial]
    scores: Mapping[tuple[str, str], PairedScores]

    @property
    def baseline(self) -> str:
        return self.run.get("baseline", BASELINE)

    @property
    def groups(self) -> list[Group]:
        """Host, device and batch size of every trial, each once, in the order of the plan."""
        return list(dict.fromkeys(trial.group for trial in self.trials))

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(trial.group.host for trial in self.trials))

    def trial(self, recipe: str, group: Group) -> Trial | None:
        return self._trials.get((recipe, group))

    @cached_property
    def _trials(self) -> dict[tuple[str, Group], Trial]:
        return {(trial.recipe, trial.group): trial for trial in reversed(self.trials)}

    def row_trial(self, row: Mapping[str, Any]) -> Trial | None:
        """The trial of a row of the summary."""
        return self.trial(row["recipe"], group_of(row))

    def counterpart(self, other: Evidence, trial: Trial) -> Trial | None:
        """The trial of this run that does what `trial` of `other` does.

        Two runs of one host each are set side by side whatever the hosts are; of several hosts, the same one.
        """
        alone = len(self.hosts) == 1 == len(other.hosts)
        return next(
            (
                t
                for t in self.trials
                if (t.recipe, *t.group[1:]) == (trial.recipe, *trial.group[1:])
                and (alone or machine(t.group.host) == machine(trial.group.host))
            ),
            None,
        )


def group_of(row: Mapping[str, Any]) -> Group:
    """The group of a row, or of an entry of the frontier; in a summary of an older qtool the host is ''."""
    return Group(row.get("host") or "", row["device"], row["batch_size"])


def machine(host: str) -> str:
    """The fingerprint's hash of a host that may be named `KIND/HASH`."""
    return host.rpartition("/")[2]


def load(run_dir: Path, keep: bool = True) -> Evidence:
    """Without `keep` nothing is written: a regression's draws, which take seconds, are stored in the run otherwise.

    Raises QtoolError when the folder holds no readable run or measurements of more than one host.
    """
    found = load_times(run_dir)
    scores = _scores(run_dir, found.run["metric"], found.trials, found.baseline, keep)
    return replace(found, scores=scores)


def load_times(run_dir: Path) -> Evidence:
    """As `load`, without the scores: what a running sweep looks at between its rounds."""
    run = store.read_run(run_dir)
    lines = store.current(store.latest(store.read(run_dir)), run)
    own = {"host": (run.get("host") or {}).get("hash") or ""}
    trials = [make_trial(own | entry, lines, run["rounds"]) for entry in run["plan"]]
    _refuse_mixed_hosts(run_dir, run, lines, trials)
    return Evidence(run_dir, run, lines, trials, {})


def _refuse_mixed_hosts(
    run_dir: Path, run: Mapping[str, Any], lines: Mapping[Key, Measurement], trials: Sequence[Trial]
) -> None:
    """A sweep over several hosts tells them, and each of its groups holds lines of one; any other run has one."""
    if run.get("hosts"):
        wrong = [
            (machine(t.group.host), m.host)
            for t in trials
            for m in t.rounds.values()
            if m.host != machine(t.group.host)
        ]
        hosts = sorted({host for pair in wrong for host in pair})
    else:
        hosts = sorted({m.host for m in lines.values() if m.stage in ("measure", "harness") and m.host})
    if len(hosts) > 1:
        raise QtoolError(
            f"{run_dir} holds measurements of {len(hosts)} hosts ({', '.join(hosts)}), and no statistic pools"
            " hosts. Sweep on each host into its own --out."
        )


def _scores(
    run_dir: Path, metric: str | None, trials: Sequence[Trial], baseline: str, keep: bool
) -> dict[tuple[str, str], PairedScores]:
    """Paired scores by host and device, of every recipe that was scored there, whatever became of its timing."""
    if metric is None:
        return {}
    return {
        scored: PairedScores(
            metric, prediction_files(run_dir, (t for t in trials if t.group.scored == scored)), baseline, keep
        )
        for scored in dict.fromkeys(trial.group.scored for trial in trials)
    }


def prediction_files(run_dir: Path, trials: Iterable[Trial]) -> dict[str, Path | str]:
    """Stored predictions by recipe, of the trials that were scored, or the reason why they cannot be used."""
    files: dict[str, Path | str] = {}
    for trial in trials:
        if trial.score is None or trial.score.status != "ok" or trial.recipe in files:
            continue
        name, expected = (trial.score.values.get(key) for key in ("predictions", "predictions_sha256"))
        path = run_dir / str(name)
        if not name:
            files[trial.recipe] = "its predictions were not stored"
        elif not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(run_dir)):
            # a run folder may come from somebody else: it names no file of this machine, and no place to write to
            files[trial.recipe] = "its predictions are not in the run's folder"
        elif expected and path.is_file() and file_hash(path) != expected:
            files[trial.recipe] = f"its predictions in {path.name} are not those that were scored"
        else:
            files[trial.recipe] = path
    return files


def delta_of(scores: PairedScores | None, baseline: str) -> Callable[[str, str], Interval | None] | None:
    """Score of one recipe less that of another, as a function; None where nothing was scored.

    The baseline is the reference here as it is in score_delta, and each pair has one interval, seen from both sides.
    """
    if scores is None:
        return None

    def delta(a: str, b: str) -> Interval | None:
        if a not in scores.predictions or b not in scores.predictions:
            return None
        first, second = sorted((a, b), key=lambda name: (name == baseline, name))
        found = scores.delta(first, second) if first == baseline else scores.near(first, second)
        return found if a == first else _negative(found)

    return delta


def _negative(delta: Interval) -> Interval | None:
    if delta.low is None or delta.high is None:
        return None
    return Interval(-delta.value, -delta.high, -delta.low)


def numbers(trial: Trial, metric: str, value: float | None = None) -> Numbers:
    """A metric so that lower is better: by round where it has rounds, else `value`, the row's own."""
    higher = METRICS[metric].better == "higher"
    series = trial.series(metric)
    if series is None:
        return None if value is None else -value if higher else value
    return {r: 1 / x if higher else x for r, x in series.items() if x or not higher}


def candidate(trial: Trial, times: Sequence[str]) -> Candidate:
    """A trial by metrics that have rounds, and bytes on disk."""
    return Candidate(
        trial.recipe, {name: numbers(trial, name) for name in times} | {"disk_bytes": trial.disk_bytes}
    )


def unsettled(found: Evidence, within: float) -> list[Trial]:
    """Finished trials whose speed-up's 95 % interval reaches further than `within` to either side.

    Looking again after each round costs some coverage: see the sequential simulation in the tests of claims.
    """
    wide = []
    for trial in found.trials:
        baseline = found.trial(found.baseline, trial.group)
        if trial.status != "ok" or baseline is None or baseline.status != "ok":
            continue  # without its baseline no round can settle it
        estimate = speedup(trial, baseline)
        if not isinstance(estimate, Rounds):
            continue
        interval = estimate.interval()
        if interval.low is None or interval.high is None or interval.high > (1 + within) ** 2 * interval.low:
            wide.append(trial)
    return wide
