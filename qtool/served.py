"""At which rate one replica of a recipe serves: the largest within an SLA by simulation, else its full throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool import capacity
from qtool.arrivals import Pattern
from qtool.load import Question, settle
from qtool.rows import Trial
from qtool.service_times import END_TO_END, MODEL_ONLY, ServiceTimes, from_trials

SEARCHED = "a searched rate has no interval: it is settled to 2 %, its standard error is about 3 %"
Pair = tuple[Mapping[str, Any], Trial]


@dataclass(frozen=True)
class Times:
    """Service times by side, device and recipe, all of the same samples, `what`."""

    what: str
    found: Mapping[tuple[str, str, str], ServiceTimes]

    def get(self, key: tuple[str, str, str]) -> ServiceTimes | None:
        return self.found.get(key)


def gather(trials: Mapping[str, Sequence[Trial]], simulate: bool) -> Times:
    """Of each side's ok trials that were measured at batch size 1; none where nothing is to be simulated (no SLA).

    One kind of sample serves all: a recipe or a host must not look faster because its tokenising is left out.
    """
    if not simulate:
        return Times(MODEL_ONLY, {})
    ok: dict[tuple[str, str, str], dict[int, Trial]] = {}
    for label, own in trials.items():
        for trial in own:
            if trial.status == "ok":
                device, size = trial.group[-2:]
                ok.setdefault((label, device, trial.recipe), {})[size] = trial
    complete = all(trial.samples(END_TO_END) for sizes in ok.values() for trial in sizes.values())
    what = END_TO_END if complete else MODEL_ONLY
    made = {key: from_trials(sizes, what) for key, sizes in ok.items() if 1 in sizes}
    return Times(what, {key: times for key, times in made.items() if times is not None})


def rate(own: Sequence[Pair], times: ServiceTimes | None, sla_s: float | None) -> dict[str, Any]:
    """Requests a second of one replica, with the policy that gives them: `value` is None with a reason."""
    empty: dict[str, Any] = {
        **dict.fromkeys(("value", "low", "high", "reason", "max_batch", "max_wait_s", "batch_size")),
        "basis": "throughput" if sla_s is None else "sla",
    }
    ok = [row for row, _ in own if row["status"] == "ok"]
    if not ok:
        row = own[0][0]
        return empty | {"reason": f"{row['status']}: {row['cause']}"}
    if sla_s is None:
        return empty | _throughput(ok)
    if times is None:
        sizes = [row["batch_size"] for row in ok]
        why = "no round has samples of every batch size" if 1 in sizes else "batch size 1 was not measured"
        return empty | {"reason": why}
    question = Question(rate_per_s=1.0, pattern=Pattern("poisson"), sla_s=sla_s)
    policy, largest = settle(times, question)
    if not largest:
        lone_ms = 1e3 * capacity.lone_s(times, capacity.ALONE)
        return empty | {"reason": f"no rate keeps the SLA: a lone request takes {lone_ms:.3g} ms (p95)"}
    told = {"max_batch": policy.max_batch, "max_wait_s": policy.max_wait_s}
    return empty | told | {"value": largest, "reason": SEARCHED}


def _throughput(ok: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest measured throughput of any batch size, with its interval."""
    best = max(ok, key=lambda row: row["metrics"]["throughput_per_s"]["value"] or 0.0)
    return {**best["metrics"]["throughput_per_s"], "batch_size": best["batch_size"]}
