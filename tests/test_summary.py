"""Runs are written by hand (`run_folder`); expected values are counted by hand or come from scipy."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.proportion import proportion_confint

from qtool import evidence
from qtool.core import METRICS, SCORES, Measurement, QtoolError
from qtool.report import text
from qtool.summary import summarise
from tests.run_folder import STARTED, Made, save, times, write_run

LABELS = [0, 1] * 500
BASE = [1 - label if i < 100 else label for i, label in enumerate(LABELS)]
"""900 of 1000 right: the first 100 are wrong."""


def answers(gained=0, lost=0):
    """The baseline's, with `gained` of its wrong ones put right and `lost` of its right ones made wrong."""
    changed = [*range(gained), *range(1000 - lost, 1000)]
    return [1 - answer if i in set(changed) else answer for i, answer in enumerate(BASE)]


def made(p50_s=(0.010, 0.010, 0.010), gained=0, lost=0, **more):
    right = (900 + gained - lost) / 1000
    return Made(p50_s, answers(gained, lost), metrics={"accuracy": right}, **more)


def swept(tmp_path, recipes, **more):
    facts: dict[str, Any] = {"labels": LABELS} | more
    return summarise(write_run(tmp_path, recipes, **facts))


def row(summary, recipe, batch_size=1):
    return next(r for r in summary["rows"] if (r["recipe"], r["batch_size"]) == (recipe, batch_size))


def metric(summary, recipe, name):
    return row(summary, recipe)["metrics"][name]


def bounds(cell):
    return cell["low"], cell["value"], cell["high"]


FAST = (0.0049, 0.0050, 0.0051)


def test_an_ok_row_carries_every_metric_of_its_task_and_none_of_another(tmp_path):
    summary = swept(tmp_path, {"fp32": made(), "int8": made(FAST)})
    expected = [name for name in METRICS if name not in SCORES or name == "accuracy"]
    for found in summary["rows"]:
        assert list(found["metrics"]) == expected
        for cell in found["metrics"].values():
            assert {"value", "low", "high"} <= cell.keys()
            assert cell["value"] is not None or cell["reason"]
    json.dumps(summary, allow_nan=False)


def test_the_top_of_the_summary_names_model_task_metric_and_baseline(tmp_path):
    summary = swept(tmp_path, {"fp32": made()})
    top = {key: summary[key] for key in ("schema", "model", "task", "metric", "baseline")}
    assert top == {"schema": 1, "model": "a/model", "task": "demo", "metric": "accuracy", "baseline": "fp32"}


def test_every_row_and_frontier_names_the_machine_it_was_measured_on(tmp_path):
    folder = write_run(tmp_path, {"fp32": made(), "int8": made(FAST)}, labels=LABELS)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"host": {"hash": "4f2a"}}))
    found = summarise(folder)
    assert {entry["host"] for entry in (*found["rows"], *found["frontier"])} == {"4f2a"}


def test_p50_is_the_median_of_the_rounds_with_a_t_interval_on_their_logs(tmp_path):
    rounds = (0.010, 0.012, 0.011)
    low, value, high = bounds(metric(swept(tmp_path, {"fp32": made(rounds)}), "fp32", "latency_p50_s"))
    expected = scipy_stats.ttest_1samp(np.log(rounds), 0).confidence_interval()
    assert value == pytest.approx(0.011)
    assert (low, high) == (pytest.approx(np.exp(expected.low)), pytest.approx(np.exp(expected.high)))


def test_the_speedup_is_paired_by_round_so_that_a_slow_round_cancels(tmp_path):
    summary = swept(tmp_path, {"fp32": made((0.010, 0.020, 0.015)), "int8": made((0.0025, 0.005, 0.00375))})
    assert bounds(metric(summary, "int8", "speedup")) == pytest.approx((4, 4, 4))
    assert bounds(metric(summary, "fp32", "speedup")) == (1, 1, 1)


def test_score_change_and_flips_are_counted_on_the_same_examples(tmp_path):
    summary = swept(tmp_path, {"fp32": made(), "int8": made(FAST, gained=14, lost=6)})
    low, value, high = bounds(metric(summary, "int8", "score_delta"))
    assert value == pytest.approx(0.008)
    # Newcombe's square-and-add by hand from Wilson's limits of 908 and 900 in 1000; 894 right both times, 86 never
    (a, b), (c, d) = (proportion_confint(right, 1000, method="wilson") for right in (908, 900))
    phi = (894 * 86 - 14 * 6 - 500) / np.sqrt(908 * 92 * 900 * 100)
    down, up, old_down, old_up = 0.908 - a, b - 0.908, 0.9 - c, d - 0.9
    assert low == pytest.approx(0.008 - np.sqrt(down**2 - 2 * phi * down * old_up + old_up**2))
    assert high == pytest.approx(0.008 + np.sqrt(up**2 - 2 * phi * up * old_down + old_down**2))
    flips = row(summary, "int8")["flips"]
    assert (flips["gained"], flips["lost"]) == (14, 6)
    # P(X <= 6) for Binomial(20, 1/2), twice
    assert flips["mcnemar_p"] == pytest.approx(0.1153, abs=5e-5)
    assert metric(summary, "int8", "agreement")["value"] == pytest.approx(0.98)
    assert bounds(metric(summary, "fp32", "score_delta")) == (0, 0, 0)
    assert bounds(metric(summary, "fp32", "agreement")) == (1, 1, 1)


def test_predictions_stored_in_another_order_are_paired_by_their_ids(tmp_path):
    folder = write_run(tmp_path, {"fp32": made(), "int8": made(FAST, gained=5)}, labels=LABELS)
    path = folder / "predictions" / "int8-cpu.npz"
    with np.load(path) as stored:
        shuffled = {name: stored[name][::-1] for name in stored.files}
    np.savez(path, **shuffled)
    assert row(summarise(folder), "int8")["flips"]["gained"] == 5


def test_predictions_of_other_examples_are_not_compared(tmp_path):
    folder = write_run(tmp_path, {"fp32": made(), "int8": made(FAST)}, labels=LABELS)
    save(folder / "predictions" / "int8-cpu.npz", LABELS[:500], BASE[:500])
    found = summarise(folder)
    assert "other examples" in metric(found, "int8", "score_delta")["reason"]
    assert metric(found, "int8", "accuracy")["value"] == 0.9
    assert found["frontier"][0]["recommended"] == "fp32"


@pytest.mark.parametrize("damage", [b"not an archive", None])
def test_predictions_that_cannot_be_read_leave_a_score_without_interval(tmp_path, damage):
    folder = write_run(tmp_path, {"fp32": made(), "int8": made(FAST)}, labels=LABELS)
    path = folder / "predictions" / "int8-cpu.npz"
    path.unlink()
    if damage:
        path.write_bytes(damage)
    score = metric(summarise(folder), "int8", "accuracy")
    assert (score["low"], score["value"]) == (None, 0.9)
    assert "int8-cpu.npz" in score["reason"]


def test_a_score_that_differs_from_its_predictions_is_told_not_covered_up(tmp_path):
    wrong = Made(FAST, answers(), metrics={"accuracy": 0.95})
    score = metric(swept(tmp_path, {"fp32": made(), "int8": wrong}), "int8", "accuracy")
    assert (score["value"], score["low"]) == (0.95, None)
    assert "0.900000" in score["reason"]


def test_one_round_has_values_without_bounds_and_a_provisional_frontier(tmp_path):
    recipes = {"fp32": made((0.010,)), "int8": made((0.005,))}
    summary = swept(tmp_path, recipes)
    speedup = metric(summary, "int8", "speedup")
    assert speedup["value"] == pytest.approx(2)
    assert (speedup["low"], speedup["high"], speedup["reason"]) == (None, None, "one round has no interval")
    assert summary["frontier"][0]["provisional"]
    assert summary["frontier"][0]["recommended"] == "int8"
    assert "Provisional" in summary["frontier"][0]["reason"]
    assert row(summary, "int8")["ties"] == []


def test_p95_is_the_median_over_rounds_where_each_round_has_enough_samples(tmp_path):
    summary = swept(tmp_path, {"fp32": made((0.010, 0.012, 0.011))}, calls=131)
    # samples are spread evenly from 0.9 to 1.1 times the p50: the 95 % point is 1.09 times it
    assert metric(summary, "fp32", "latency_p95_s")["value"] == pytest.approx(1.09 * 0.011)


def test_p95_pools_rounds_that_agree(tmp_path):
    cell = metric(swept(tmp_path, {"fp32": made()}, calls=61), "fp32", "latency_p95_s")
    assert cell["value"] == pytest.approx(1.09 * 0.010, rel=1e-2)
    assert cell["low"] < cell["value"] < cell["high"]


def test_p95_is_refused_where_rounds_disagree_or_samples_are_too_few(tmp_path):
    apart = metric(
        swept(tmp_path / "a", {"fp32": made((0.010, 0.012, 0.011))}, calls=61), "fp32", "latency_p95_s"
    )
    few = metric(swept(tmp_path / "b", {"fp32": made()}, calls=43), "fp32", "latency_p95_s")
    assert (apart["value"], few["value"]) == (None, None)
    assert "differ too much" in apart["reason"]
    assert few["reason"] == "a p95 needs 130 samples, there are 129"


def test_throughput_counts_every_text_of_every_call(tmp_path):
    summary = swept(tmp_path, {"fp32": made(batch_size=8)})
    assert row(summary, "fp32", 8)["metrics"]["throughput_per_s"]["value"] == pytest.approx(8 / 0.010)


def test_times_and_sizes_of_processes_are_means_over_rounds(tmp_path):
    summary = swept(tmp_path, {"fp32": made(peak_bytes=(4e8, 5e8, 6e8), disk_bytes=91)})
    # load_s is 1, 2, 3: mean 2, t(0.975, 2) / sqrt(3) = 2.484 wide, so the lower bound stops at zero
    assert bounds(metric(summary, "fp32", "load_s")) == (0, 2, pytest.approx(2 + 2.48414, abs=1e-5))
    assert metric(summary, "fp32", "peak_rss_bytes")["value"] == 5e8
    assert bounds(metric(summary, "fp32", "disk_bytes")) == (91, 91, 91)
    # 0.2 of 1.25 times the model's time
    assert metric(summary, "fp32", "tokenize_share")["value"] == pytest.approx(0.16)
    assert metric(summary, "fp32", "end_to_end_p50_s")["value"] == pytest.approx(0.0125)


def test_a_value_absent_in_its_samples_carries_the_reason_it_was_stored_with(tmp_path):
    found = metric(swept(tmp_path, {"fp32": made()}), "fp32", "energy_j")
    assert found == {"value": None, "low": None, "high": None, "reason": "not measured on a CPU"}


@pytest.mark.parametrize(
    ("where", "status"),
    [
        ("plan", "skipped"),
        ("build", "failed"),
        ("score", "oom"),
        ("measure-1", "timeout"),
        ("measure-3", "failed"),
    ],
)
def test_a_stage_that_went_wrong_makes_its_row_that_status(tmp_path, where, status):
    bad = made(FAST, bad={where: (status, "what happened", "what to do")})
    summary = swept(tmp_path, {"fp32": made(), "int8": bad})
    found = row(summary, "int8")
    assert (found["status"], found["cause"], found["next_step"]) == (status, "what happened", "what to do")
    assert (found["metrics"], found["on_frontier"]) == ({}, False)
    assert summary["frontier"][0]["recipes"] == ["fp32"]
    assert row(summary, "fp32")["cause"] is None


def test_a_failed_build_fails_every_batch_size_of_its_recipe(tmp_path):
    bad = {"build": ("failed", "no", None)}
    recipes = {"fp32": made(), "int8": made(bad=bad), "int8@8": made(bad=bad, batch_size=8)}
    assert [r["status"] for r in swept(tmp_path, recipes)["rows"]] == ["ok", "failed", "failed"]


def test_a_round_that_was_never_measured_is_unfinished_not_ok(tmp_path):
    found = row(swept(tmp_path, {"fp32": made(), "int8": made((0.005, 0.005))}), "int8")
    assert (found["status"], found["cause"]) == ("failed", "unfinished: 2 of 3 rounds measured")
    assert "--resume" in found["next_step"]


def test_the_last_line_of_a_stage_replaces_a_failure_before_it(tmp_path):
    bad = made(FAST, bad={"measure-3": ("timeout", "too slow", None)})
    again = Measurement(
        trial_id="int8-cpu-b1",
        recipe="int8",
        device="cpu",
        batch_size=1,
        stage="measure",
        round=3,
        status="ok",
        samples={"latency_s": times(0.005, 131)},
        values={"peak_rss_bytes": 4e8},
        host="h",
        started_at=STARTED,
    )
    folder = write_run(tmp_path, {"fp32": made(), "int8": bad}, labels=LABELS, more=[again])
    found = row(summarise(folder), "int8")
    assert found["status"] == "ok"
    assert found["metrics"]["latency_p50_s"]["value"] == pytest.approx(0.005)


def test_the_fastest_recipe_whose_score_is_shown_to_hold_is_recommended(tmp_path):
    recipes = {
        "fp32": made(),
        "rough": made((0.0020, 0.0021, 0.0019), lost=40),
        "good": made((0.0031, 0.0030, 0.0032), gained=3, lost=5),
        "slow": made((0.0200, 0.0210, 0.0205)),
    }
    summary = swept(tmp_path, recipes)
    group = summary["frontier"][0]
    assert group["recommended"] == "good"
    # rough is faster but 4 points worse, so both stay; fp32 and slow are tied in all but speed
    assert group["recipes"] == ["rough", "good"]
    assert "3 answers gained, 5 lost" in group["reason"]
    assert "A lower p50, but not shown to keep the score: rough." in group["reason"]
    assert not group["provisional"]


def test_a_gain_that_too_few_examples_cannot_show_leaves_the_baseline_recommended(tmp_path):
    one = [1 - a if i == 60 else a for i, a in enumerate(BASE[:110])]
    recipes = {
        "fp32": Made((0.010,) * 3, BASE[:110], metrics={"accuracy": 10 / 110}),
        "int8": Made(FAST, one, metrics={"accuracy": 11 / 110}),
    }
    group = swept(tmp_path, recipes, labels=LABELS[:110])["frontier"][0]
    assert group["recommended"] == "fp32"
    assert "More rows" in group["reason"]


def test_recipes_that_rounds_cannot_tell_apart_are_named_as_ties(tmp_path):
    recipes = {
        "fp32": made(),
        "a": made((0.0050, 0.0054, 0.0051), peak_bytes=(3e8, 3.01e8, 3e8)),
        "b": made((0.0051, 0.0050, 0.0052), peak_bytes=(2e8, 2.01e8, 2e8)),
    }
    summary = swept(tmp_path, recipes)
    assert (row(summary, "a")["ties"], row(summary, "b")["ties"]) == (["b"], ["a"])
    assert row(summary, "fp32")["ties"] == []
    assert summary["frontier"][0]["recommended"] == "b"
    assert "cannot be told apart from a" in summary["frontier"][0]["reason"]


def test_without_a_score_every_score_is_null_and_speed_alone_recommends(tmp_path):
    recipes = {"fp32": Made((0.010, 0.011, 0.010)), "int8": Made(FAST)}
    summary = swept(tmp_path, recipes, labels=None, metric=None)
    assert (summary["task"], summary["metric"]) == (None, None)
    for name in (*SCORES, "score_delta", "agreement"):
        assert metric(summary, "int8", name) == {
            "value": None,
            "low": None,
            "high": None,
            "reason": "nothing was scored",
        }
    assert summary["frontier"][0]["recommended"] == "int8"
    assert "not checked" in summary["frontier"][0]["reason"]


def test_a_regression_has_a_paired_change_and_no_agreement(tmp_path):
    rng = np.random.default_rng(0)
    truth = list(rng.random(300) * 5)
    near, off = [x + rng.normal(0, 0.3) for x in truth], [x + rng.normal(0, 2.0) for x in truth]

    def scored(values) -> dict[str, float | None]:
        told = np.asarray(values, np.float32)
        functions: dict[str, Any] = {"spearman": scipy_stats.spearmanr, "pearson": scipy_stats.pearsonr}
        return {name: float(function(truth, told).statistic) for name, function in functions.items()}

    recipes = {
        "fp32": Made((0.010,) * 3, near, metrics=scored(near)),
        "int8": Made(FAST, off, metrics=scored(off)),
    }
    summary = swept(tmp_path, recipes, labels=truth, metric="spearman", metrics=["spearman", "pearson"])
    assert "no classes" in metric(summary, "int8", "agreement")["reason"]
    low, value, high = bounds(metric(summary, "int8", "score_delta"))
    assert value == pytest.approx(scored(off)["spearman"] - scored(near)["spearman"])  # pyright: ignore
    assert low < value < high < 0
    assert metric(summary, "int8", "pearson")["low"] is not None
    assert row(summary, "int8")["flips"] is None
    assert summary["frontier"][0]["recommended"] == "fp32"


def test_f1_gets_a_bootstrap_interval_around_the_value_scikit_learn_gave(tmp_path):
    from sklearn.metrics import f1_score

    recipes = {
        "fp32": Made((0.010,) * 3, answers(), metrics={"f1": float(f1_score(LABELS, BASE)), "accuracy": 0.9}),
        "int8": Made(FAST, answers(), metrics={"f1": float(f1_score(LABELS, BASE)), "accuracy": 0.9}),
    }
    summary = swept(tmp_path, recipes, metric="f1", metrics=["f1", "accuracy"])
    low, value, high = bounds(metric(summary, "int8", "f1"))
    assert low < value < high
    assert value == pytest.approx(0.9)
    delta = metric(summary, "int8", "score_delta")
    assert delta["low"] < delta["value"] == 0 < delta["high"]


def test_a_score_that_is_undefined_is_null_with_a_reason(tmp_path):
    constant = Made(FAST, [2.0] * 50, metrics={"spearman": None})
    truth = list(np.linspace(0, 5, 50))
    recipes = {"fp32": Made((0.010,) * 3, truth, metrics={"spearman": 1.0}), "int8": constant}
    summary = swept(tmp_path, recipes, labels=truth, metric="spearman")
    assert metric(summary, "int8", "spearman")["value"] is None
    assert metric(summary, "int8", "score_delta")["value"] is None
    assert metric(summary, "int8", "score_delta")["reason"]
    json.dumps(summary, allow_nan=False)


def test_without_a_finished_baseline_there_is_no_speedup_but_still_an_answer(tmp_path):
    bad = made(bad={"measure-1": ("oom", "out of memory", "use more")})
    summary = swept(tmp_path, {"fp32": bad, "int8": made(FAST, gained=2)})
    assert "fp32 is not ok" in metric(summary, "int8", "speedup")["reason"]
    # its score finished before its timing did not
    assert metric(summary, "int8", "score_delta")["value"] == pytest.approx(0.002)
    assert summary["frontier"][0]["recommended"] == "int8"


def test_a_baseline_that_was_never_scored_leaves_nothing_to_recommend(tmp_path):
    bad = made(bad={"build": ("failed", "no such file", None)})
    group = swept(tmp_path, {"fp32": bad, "int8": made(FAST)})["frontier"][0]
    assert group["recommended"] is None
    assert "fp32 failed: no such file" in group["reason"]


def test_nothing_that_finished_is_a_summary_all_the_same(tmp_path):
    bad = made(bad={"plan": ("skipped", "no", None)})
    group = swept(tmp_path, {"fp32": bad})["frontier"][0]
    assert (group["recipes"], group["recommended"]) == ([], None)


def test_each_device_and_batch_size_has_its_own_frontier(tmp_path):
    vram = {"peak_vram_bytes": 7e8, "gpu_utilization_ratio": 0.5, "energy_j": 0.1}
    recipes = {"fp32": made(), "fp32@8": made(batch_size=8), "fp32@gpu": made(device="cuda", values=vram)}
    summary = swept(tmp_path, recipes)
    found = [(g["device"], g["batch_size"], g["recommended"]) for g in summary["frontier"]]
    assert found == [("cpu", 1, "fp32"), ("cpu", 8, "fp32"), ("cuda", 1, "fp32")]


def test_on_a_gpu_the_memory_that_counts_is_the_gpus(tmp_path):
    def gpu(p50_s, vram, rss):
        return made(p50_s, device="cuda", peak_bytes=rss, values={"peak_vram_bytes": vram})

    recipes = {"fp32": gpu((0.01,) * 3, 9e8, (1e8,) * 3), "int8": gpu(FAST, 3e8, (9e8,) * 3)}
    assert swept(tmp_path, recipes)["frontier"][0]["recipes"] == ["int8"]


def test_contention_is_flagged_on_the_row_and_counted_once_a_measurement(tmp_path):
    summary = swept(tmp_path, {"fp32": made(), "int8": made(FAST, contended=True)})
    assert [r["contended"] for r in summary["rows"]] == [False, True]
    assert summary["harness"]["contended_measurements"] == 3
    assert "Other work used the CPUs while int8" in summary["frontier"][0]["reason"]


def test_the_harness_overhead_is_the_median_over_its_rounds(tmp_path):
    nulls = [
        Measurement(
            trial_id="harness",
            recipe="null",
            device="cpu",
            batch_size=None,
            stage="harness",
            round=number,
            status="ok",
            samples={"latency_s": [seconds] * 9},
            host="h",
            started_at=STARTED,
        )
        for number, seconds in enumerate([1e-6, 3e-6, 2e-6])
    ]
    assert swept(tmp_path, {"fp32": made()}, more=nulls)["harness"]["overhead_per_call_s"] == 2e-6


def test_measurements_of_two_hosts_are_refused(tmp_path):
    folder = write_run(tmp_path, {"fp32": made()}, labels=LABELS)
    lines = (folder / "results.jsonl").read_text().splitlines()
    lines[-1] = lines[-1].replace('"host": "h"', '"host": "another"')
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(QtoolError, match="2 hosts"):
        summarise(folder)


def test_the_audit_of_the_scoring_process_is_in_the_row(tmp_path):
    found = row(swept(tmp_path, {"fp32": made(disk_bytes=91)}), "fp32")
    assert found["audit"] == {"weight_bytes_by_dtype": {"float32": 91}}


def test_summary_and_report_import_no_machine_learning_library():
    code = (
        "import sys; import qtool.summary; from qtool.report import terminal, markdown, plots;"
        "heavy = {'torch', 'transformers', 'datasets', 'evaluate', 'sklearn', 'matplotlib', 'scipy.stats'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("examples", "bounded"), [(3, False), (12, True)])
def test_a_correlation_of_a_handful_is_given_no_interval_and_recommends_nothing(tmp_path, examples, bounded):
    truth = [float(i) for i in range(examples)]
    close = [value + 0.3 * (-1) ** i for i, value in enumerate(truth)]
    rows = {
        name: Made(times, told, metrics={"spearman": scipy_stats.spearmanr(told, truth).statistic})
        for name, times, told in (("fp32", (0.010,) * 3, truth), ("int8", FAST, close))
    }
    summary = swept(tmp_path, rows, labels=truth, metric="spearman", metrics=["spearman"])
    delta = metric(summary, "int8", "score_delta")
    assert (delta["low"] is not None) == bounded
    if not bounded:
        assert "needs 10 examples" in delta["reason"]
        assert summary["frontier"][0]["recommended"] == "fp32"


def test_a_recipe_is_unsettled_while_its_interval_reaches_further_than_asked(tmp_path):
    # log ratios log 2 +- 0.02: half-width 4.303 x 0.02 / sqrt(3) = 0.0497, a factor 1.051
    rounds = tuple(0.005 * np.exp(x) for x in (-0.02, 0.0, 0.02))
    run = write_run(
        tmp_path, {"fp32": made(), "int8": made(rounds), "gone": made(bad={"build": ("oom", "x", None)})}
    )
    found = evidence.load_times(run)
    assert [trial.recipe for trial in evidence.unsettled(found, 0.05)] == ["int8"]
    assert evidence.unsettled(found, 0.052) == []


def test_rounds_that_differ_more_than_was_asked_are_called_unstable(tmp_path):
    # log p50 0, 0.2 and 0.4: standard deviation 0.2, so 22 %
    rounds = tuple(0.005 * np.exp(x) for x in (0.0, 0.2, 0.4))
    summary = swept(tmp_path, {"fp32": made(), "int8": made(rounds)})
    spread = row(summary, "int8")["round_spread"]
    assert spread == {"ratio": pytest.approx(np.exp(0.2) - 1), "asked": 0.10, "unstable": True}
    told = text.unstable(summary["rows"])
    assert "the p50 differs by more than 10 % from process to process: int8 22 %." in told
    assert not row(summary, "fp32")["round_spread"]["unstable"]


def test_not_worse_is_claimed_for_all_recipes_together(tmp_path):
    # each alone is shown (p about 0.013); beside six others like it Holm asks for 0.025 / 7
    alone = swept(tmp_path / "a", {"fp32": made(), "r0": made(gained=14, lost=18)})
    many = swept(tmp_path / "b", {"fp32": made()} | {f"r{i}": made(gained=14, lost=18) for i in range(40)})
    first = row(alone, "r0")["not_worse"]
    assert first["shown"]
    assert row(many, "r0")["not_worse"]["p_holm"] == pytest.approx(min(1.0, 40 * first["p_holm"]))


def test_how_far_the_outputs_moved_stands_beside_the_score(tmp_path):
    summary = swept(tmp_path, {"fp32": made(), "int8": made(FAST, gained=5, lost=5)})
    # stored logits are one-hot: a changed answer moves two logits by 1 and the probabilities e/(1+e), 1/(1+e) swap
    p = np.exp(1) / (1 + np.exp(1))
    assert metric(summary, "int8", "max_logit_difference")["value"] == 1
    assert metric(summary, "int8", "mean_kl")["value"] == pytest.approx(0.01 * (2 * p - 1))
    assert metric(summary, "fp32", "mean_kl")["value"] == 0
    assert metric(summary, "fp32", "calibration_error")["value"] == pytest.approx(0.9 - p)


def test_nothing_is_unsettled_whose_baseline_is_gone(tmp_path):
    gone = made(bad={"measure-3": ("oom", "no memory", None)})
    run = write_run(tmp_path, {"fp32": gone, "int8": made((0.004, 0.009, 0.006))})
    assert evidence.unsettled(evidence.load_times(run), 0.1) == []


def test_rounds_that_were_added_are_told(tmp_path):
    more = Made((0.01,) * 5, BASE, metrics={"accuracy": 0.9}, peak_bytes=(4e8,) * 5)
    summary = swept(tmp_path, {"fp32": more, "int8": made()}, run={"rounds": 3})
    assert "3 to 5 rounds" in text.title(summary, {"rounds": 3})


def test_draws_of_a_correlation_are_stored_and_read_again(tmp_path):
    labels = [float(i % 7) for i in range(60)]
    recipes = {
        name: Made(
            (0.01,) * 3, [x + shift * ((5 * i) % 11) for i, x in enumerate(labels)], metrics={"spearman": 0.9}
        )
        for name, shift in (("fp32", 0.1), ("int8", 0.2))
    }
    run = write_run(tmp_path, recipes, labels=labels, metric="spearman")
    first = row(summarise(run), "int8")["metrics"]["score_delta"]
    stored = sorted((run / "predictions" / "draws").iterdir())
    assert len(stored) == 2
    np.save(stored[0], np.load(stored[0]) + 1)
    assert row(summarise(run), "int8")["metrics"]["score_delta"] != first
    for path in stored:
        path.unlink()
    assert row(summarise(run), "int8")["metrics"]["score_delta"] == first
