"""What `qtool load` says follows from what it simulates: rates, replicas, ties and words do not contradict each other."""

from __future__ import annotations

import json
from math import comb

import numpy as np
import pytest

from qtool import artifacts, capacity, isolate, load, measure, open_loop, real_load, replicas
from qtool.arrivals import Pattern
from qtool.core import Measurement, QtoolError, cache_dir
from qtool.export import export
from qtool.isolate import Outcome
from qtool.queueing import Policy, simulate
from qtool.report import sla
from qtool.service_times import ServiceTimes
from tests.run_folder import STARTED, Made, write_run
from tests.test_load import (
    POISSON,
    SERVICE_S,
    cli,
    constant,
    drive_flags,
    here,
    question,
    run_of,
    share_within,
)

FILLS = Policy(8, 0.045)


def run_that_batches_for_nothing(folder):
    """10 ms for one text and for eight."""
    made = {"fp32": Made((0.008,) * 3), "fp32@8": Made((0.008,) * 3, batch_size=8)}
    return write_run(folder / "run", made, metric=None)


def test_batches_that_wait_in_vain_are_no_reason_for_replicas(tmp_path):
    run = run_that_batches_for_nothing(tmp_path)
    found = load.answer(run, question(rate_per_s=1.0, sla_s=0.05, max_batch=8, max_wait_s=0.045))
    (row,) = found["rows"]
    # 96 of 100 requests at 1/s see no other within 45 ms: they wait all of it and take 10 ms
    assert row["p95_s"]["value"] == pytest.approx(0.055)
    assert row["lone_p95_s"] == pytest.approx(0.055)
    assert (row["meets"], row["replicas"]) == (False, None)
    # eight come within 45 ms from some 200/s on, and full batches take 800/s
    assert 200 < row["largest_rate_per_s"] < 800
    told = sla.render(found)
    assert "a lone request waits max-wait in vain and is answered after 55.0 ms (p95)" in told
    assert "but not at 0 %, 1.00/s: batches wait max-wait and do not fill" in told
    assert "next: a shorter max-wait" in told
    assert "One process is enough" not in told
    assert "more replicas do not help" not in told
    flags = ("--arrival", "1/s", "--sla", "50ms", "--max-batch", "8")
    assert cli(run, *flags, "--max-wait", "45ms") == 1
    assert cli(run, *flags) == 0


def test_a_wait_that_breaks_the_limit_of_a_lone_request_is_not_tried():
    # of 50 ms, 40 go to the model: 5 ms of waiting fit, 12.5 do not
    tried = capacity.policies(constant((1, 0.04), (2, 0.04)), 0.05, None, None)
    assert tried == [Policy(1, 0.0), Policy(2, 0.0), Policy(2, 0.005)]


@pytest.mark.parametrize("share", [0.97, 0.99, 1.01, 1.03])
def test_the_verdict_at_a_rate_and_the_largest_rate_agree(tmp_path, share):
    times = constant((1, SERVICE_S))
    rate = share * capacity.largest_rate(times, POISSON, Policy(1, 0.0), 0.03, 0)
    found = load.answer(run_of(tmp_path), question(rate_per_s=rate, sla_s=0.03))
    (row,) = found["rows"]
    assert row["meets"] == (row["largest_rate_per_s"] >= rate)
    assert (row["replicas"] == 1) == row["meets"]
    assert ("One process is enough" in sla.render(found)) == row["meets"]


def test_a_search_that_went_too_far_is_corrected_by_the_printed_verdict():
    times, policy, sla_s = constant((1, SERVICE_S)), Policy(1, 0.0), 0.03
    # 30 ms are kept up to 51/s (Erlang's M/D/1): 60/s is too much, whatever a search has found
    found = replicas.agree(times, POISSON, policy, sla_s, 0, 60.0, False, 70.0)
    assert 40 < found < 60
    assert share_within(sla_s - SERVICE_S, found, SERVICE_S) > 0.94
    assert replicas.agree(times, POISSON, policy, sla_s, 0, 45.0, True, 44.0) == 45
    assert replicas.agree(times, POISSON, policy, sla_s, 0, 80.0, False, 51.0) == 51
    # here higher rates do keep it: nothing is taken back
    filled = constant((1, SERVICE_S), (8, SERVICE_S))
    assert replicas.agree(filled, POISSON, FILLS, 0.05, 0, 1.0, False, 700.0) == 700


def test_replicas_that_make_traffic_too_thin_are_not_advised():
    times = constant((1, SERVICE_S), (8, SERVICE_S))
    largest = capacity.largest_rate(times, POISSON, FILLS, 0.05, 0)
    assert replicas.replicas(times, POISSON, FILLS, 1.0, largest, 0.05, 0) is None
    assert replicas.replicas(times, POISSON, FILLS, 2.9 * largest, largest, 0.05, 0) == 3


def test_a_load_so_high_that_nothing_is_called_safe_does_not_keep_the_sla(tmp_path):
    found = load.answer(run_of(tmp_path), question(rate_per_s=97.0, sla_s=10.0))
    (row,) = found["rows"]
    assert row["p95_s"]["value"] < 10
    assert (row["meets"], row["replicas"]) == (False, 2)
    assert row["largest_rate_per_s"] == pytest.approx(95)
    assert "a load of 97 %: above 95 % no rate is called safe" in sla.render(found)


def kept_share(group: int, place: int, replicas: int) -> float:
    """Share of requests among the first `place` of their group on their replica, each sent to any of them alike."""
    p = 1 / replicas
    return sum(
        comb(before, j) * p**j * (1 - p) ** (before - j) / group
        for before in range(group)
        for j in range(min(before, place - 1) + 1)
    )


def test_requests_that_come_together_are_helped_by_replicas(tmp_path):
    # twenty at once, 10 ms each: within 60 ms is who finds fewer than six before it on its replica
    expected = next(count for count in range(2, 20) if kept_share(20, 6, count) >= 0.95)
    assert expected == 5
    trace = Pattern("trace", np.repeat(np.arange(100.0), 20))
    asked = question(pattern=trace, rate_per_s=trace.rate_per_s, sla_s=0.0601, max_batch=1)
    found = load.answer(run_of(tmp_path), asked)
    (row,) = found["rows"]
    assert (row["largest_rate_per_s"], row["meets"], row["replicas"]) == (None, False, 5)
    told = sla.render(found)
    assert "for requests come together; a lone one is fast enough" in told
    assert "more replicas do not help" not in told
    assert "It needs 5 replicas" in told


def test_replicas_do_not_help_a_model_that_is_too_slow_alone(tmp_path):
    found = load.answer(run_of(tmp_path), question(rate_per_s=1.0, sla_s=0.009))
    assert found["rows"][0]["replicas"] is None
    told = sla.render(found)
    assert "even a lone request breaks the SLA, it takes 10.0 ms (p95): more replicas do not help" in told
    assert "next: a faster recipe, a shorter text or another device" in told


def test_recipes_of_one_capacity_and_unlike_percentiles_are_told_apart(tmp_path):
    # full batches of eight take 20 ms in all three; a lone text takes 2 ms in two of them and 10 in the third
    made = {}
    for name, p50_s in (("quick", 0.0016), ("same", 0.0016), ("slow", 0.008)):
        made |= {name: Made((p50_s,) * 3), f"{name}@8": Made((0.016,) * 3, batch_size=8)}
    run = write_run(tmp_path / "run", made, metric=None)
    found = load.answer(run, question(sla_s=0.03, max_batch=8, max_wait_s=0.0))
    assert {found["best"], *found["not_told_apart"]} == {"quick", "same"}


@pytest.mark.parametrize(
    ("mine", "its", "equal"),
    [
        # logs of the ratios by hand: mean 0 and deviation 0.1, so +-0.25 with t of 2 degrees
        ([1, 1, 1], [1.105, 1.0, 0.905], True),
        ([1, 1, 1], [1.5, 1.51, 1.49], False),
        ([1, 2, 3], [1, 2, 3], True),
        ([1], [1], False),
        ([1, 1, 1], [np.inf, np.inf, np.inf], False),
        # as [3, 2, 3]: 2.62, and from 1.47 to 4.69 with t of 2 degrees
        ([1, 1, 1], [np.inf, 2, 3], False),
        ([1, 1, 1], [np.inf, 1.01, 1.0], True),
        ([1, 1, 1], [np.inf, 0.5, 3], True),
        ([1, np.inf, 1], [2, np.inf, 2], False),
    ],
)
def test_a_tie_is_equality_inside_the_paired_interval(mine, its, equal):
    assert load.may_equal(dict(enumerate(mine)), dict(enumerate(its))) is equal


def test_each_recipe_has_its_own_number_of_processes(tmp_path):
    made = {"fp32": Made((0.008,) * 3), "int8": Made((0.004,) * 3)}
    run = write_run(tmp_path / "run", made, metric=None)
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if line["recipe"] == "int8" and line["round"] in (2, 3):
            del line["samples"]["end_to_end_s"]
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = load.answer(run, question())
    assert {row["recipe"]: row["rounds"] for row in found["rows"]} == {"fp32": 3, "int8": 1}
    told = sla.render(found)
    assert "the median over each recipe's 1 to 3 measured processes" in told
    assert "one measured process tells none apart" in told


def test_each_recipe_is_capped_at_its_own_largest_batch(tmp_path):
    made = {"fp32": Made((0.008,) * 3), "int8": Made((0.004,) * 3)}
    made |= {"int8@8": Made((0.016,) * 3, batch_size=8)}
    run = write_run(tmp_path / "run", made, metric=None)
    found = load.answer(run, question(max_batch=8))
    assert {row["recipe"]: row["max_batch"] for row in found["rows"]} == {"fp32": 1, "int8": 8}
    assert found["notes"] == [
        "max-batch 8 is capped at the largest measured batch size (fp32 1): nothing is extrapolated"
    ]
    assert load.answer(run, question())["notes"] == [
        "batching is off for fp32: measured at batch size 1 only"
    ]


def test_the_curve_is_what_the_run_stored(tmp_path):
    # times lie evenly within 10 % of the p50: the p95 is 1.09 times it, the mean is the p50
    found = load.answer(run_of(tmp_path, sizes=(1, 8)), question())
    one, eight = found["rows"][0]["curve"]
    assert one == pytest.approx({"batch_size": 1, "p50_s": 0.008, "p95_s": 0.00872, "throughput_per_s": 125})
    assert eight == pytest.approx(
        {"batch_size": 8, "p50_s": 0.032, "p95_s": 0.03488, "throughput_per_s": 250}
    )
    line = "fp32, model alone: batch 1: p50 8.00, p95 8.72 ms, 125 texts/s; batch 8: p50 32.0, p95 34.9 ms, 250 texts/s"
    assert line in sla.render(found)
    alone = load.answer(run_of(tmp_path / "alone"), question())
    assert "model alone" not in sla.render(alone)


def grouped_then_regular(grouped: int, regular: int) -> np.ndarray:
    """First ten at a time every ten seconds, then one a second."""
    groups = np.repeat(np.arange(0.0, grouped, 10.0), 10)
    return np.concatenate([groups, grouped + np.arange(regular)])


def test_the_beginning_of_a_trace_leads_and_all_of_it_decides():
    times, policies = constant((1, SERVICE_S)), [Policy(1, 0.0)]

    def found(arrivals_s: np.ndarray) -> float:
        return capacity.best_policy(times, Pattern("trace", arrivals_s), 0.0505, policies, 0)[1]

    # half of a group is late beyond 50 ms: 2 % of all requests, but 18 % of the 4,500 that a search begins with
    mild = grouped_then_regular(1600, 30_000)
    assert found(mild) == pytest.approx(capacity.MOST_LOAD / SERVICE_S)
    assert found(mild[-1] - mild[::-1]) == pytest.approx(capacity.MOST_LOAD / SERVICE_S)
    # a quiet beginning hides that more than half come in groups: more than a quarter are late at any rate
    hidden = grouped_then_regular(26_000, 22_000)
    assert found(hidden[-1] - hidden[::-1]) == 0


def test_a_step_of_the_search_simulates_few_requests_of_a_long_trace(monkeypatch):
    seen = []

    def count(arrivals_s, *rest):
        seen.append(len(arrivals_s))
        return simulate(arrivals_s, *rest)

    monkeypatch.setattr(capacity, "simulate", count)
    trace = Pattern("trace", np.arange(60_000.0))
    capacity.largest_rate(constant((1, SERVICE_S)), trace, Policy(1, 0.0), 0.05, 0)
    assert set(seen) == {capacity.COARSE, capacity.FINE}
    seen.clear()
    capacity.report(constant((1, SERVICE_S)), trace, 50.0, Policy(1, 0.0), 0)
    assert seen == [60_000]


def test_real_traffic_in_batches_that_were_not_measured_is_refused(tmp_path):
    run = run_of(tmp_path, sizes=(1, 8), **here())
    with pytest.raises(QtoolError, match=r"up to batch size 8\. Use --max-batch 8") as caught:
        cli(run, *drive_flags("--max-batch", "64"))
    assert "qtool sweep a/model" in str(caught.value)
    assert "--batch-size 64" in str(caught.value)


@pytest.mark.parametrize(("limit", "code", "told"), [("90ms", 0, "was kept"), ("30ms", 1, "was broken")])
def test_the_exit_code_says_whether_the_real_artifact_kept_the_sla(
    tmp_path, monkeypatch, capsys, limit, code, told
):
    # the run took 10 ms a call, now it takes 40 at a request every 50 ms
    def served(stage, spec, **rest):
        starts = [float(arrival) for arrival in spec["arrivals_s"]]
        values = {"starts_s": starts, "finishes_s": [start + 0.04 for start in starts]}
        values |= {"sizes": [1] * len(starts), "late_s": [0.0] * len(starts), "own": {"1": [0.01]}}
        return Outcome("ok", values | {"contended": False, "reason": None})

    spec = {"threads": 1, "measured_sizes": [1]}
    monkeypatch.setattr(real_load, "_spec", lambda *given: spec)
    monkeypatch.setattr(isolate, "run", served)
    flags = ("--real", "--recipe", "fp32", "--arrival", "20/s", "--sla", limit)
    assert cli(run_of(tmp_path, **here()), *flags) == code
    out = capsys.readouterr().out
    assert f"the SLA (p95 <= {limit[:2]}.0 ms from arrival to answer) {told}: the real p95 was 40.0 ms" in out


def test_a_child_has_the_time_that_its_steps_may_take():
    times = ServiceTimes({1: {1: [0.01], 64: [0.5]}})
    for measured, max_batch in (([1], 1), ([1, 64], 64)):
        found = real_load.limit_s(times, measured, max_batch, 30.0)
        # each measured size is warmed up and timed to the end of a pass, each size up to max-batch is served
        steps_s = len(measured) * (measure.WARM_UP_MAX_S + measure.MAX_TIME_S) + max_batch * open_loop.WARM_S
        pass_s = sum(measure.CALLS * times.table(1, size)[0] for size in measured)
        assert found > steps_s + pass_s + 30 + 60


def build_line(**changed) -> Measurement:
    facts = {"trial_id": "t", "stage": "build", "recipe": "fp32", "device": "cpu", "batch_size": None}
    facts |= {
        "status": "ok",
        "values": {"artifact": "aa11"},
        "started_at": STARTED,
        "host": "h",
        "round": None,
    }
    return Measurement(**(facts | changed))


@pytest.mark.parametrize("name", ["../../aa11", "/etc/aa11", "aa11"])
def test_an_artifact_is_looked_for_in_the_cache_only(name):
    line = build_line(values={"artifact": name})
    assert artifacts.built([line], "fp32") == cache_dir() / "artifacts" / "aa11"


@pytest.mark.parametrize("name", ["..", "../..", "", ".", None, "a/.."])
def test_a_name_that_is_none_names_no_artifact(name):
    assert artifacts.built([build_line(values={"artifact": name})], "fp32") is None


def test_a_build_that_failed_left_no_artifact():
    failed = build_line(status="failed", error="it crashed")
    assert artifacts.built([failed, build_line(recipe="int8")], "fp32") is None
    assert artifacts.built([failed, build_line(values={"artifact": "bb22"})], "fp32") == (
        cache_dir() / "artifacts" / "bb22"
    )


def test_a_run_cannot_name_a_folder_outside_the_cache(tmp_path):
    outside = cache_dir() / "outside"
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "manifest.json").write_text('{"files": {}}')
    assert artifacts.is_whole(outside)
    recipes = {"fp32": {"runtime": "pytorch"}}
    run = run_of(tmp_path, recipes=("fp32",), **here())
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"recipes": recipes}))
    told = (run / "results.jsonl").read_text().replace('"artifact": "a"', '"artifact": "../outside"')
    assert "../outside" in told
    (run / "results.jsonl").write_text(told)
    with pytest.raises(QtoolError, match="no longer whole"):
        export(run, "fp32", tmp_path / "out")
    with pytest.raises(QtoolError, match="no longer whole"):
        cli(run, *drive_flags())
