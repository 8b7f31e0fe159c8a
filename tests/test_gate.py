"""Verdicts on runs written by hand; what passes and what fails is counted by hand or follows from a t table."""

from __future__ import annotations

import json
import math
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
from statsmodels.stats.power import TTestPower

from qtool import cli, gate, policy
from qtool.core import QtoolError
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 500
BASE = [1 - label if i < 100 else label for i, label in enumerate(LABELS)]
"""900 of 1000 right: the first 100 are wrong."""


def answers(gained=0, lost=0):
    changed = {*range(gained), *range(1000 - lost, 1000)}
    return [1 - answer if i in changed else answer for i, answer in enumerate(BASE)]


def made(p50_s=(0.010, 0.010, 0.010), gained=0, lost=0, **more):
    return Made(p50_s, answers(gained, lost), metrics={"accuracy": (900 + gained - lost) / 1000}, **more)


FAST = (0.0049, 0.0050, 0.0051)


def judge(tmp_path, recipes, text, reference=None, **more):
    run = tmp_path / "run"
    if not run.exists():
        write_run(run, recipes, **({"labels": LABELS} | more))
    path = tmp_path / "qtool.yaml"
    path.write_text(text)
    return gate.gate(run, policy.read(path), reference)


def verdicts(found):
    return {(c["recipe"], c["limit_name"]): c["verdict"] for c in found["checks"]}


def test_a_limit_that_is_shown_to_be_kept_passes_and_one_shown_to_be_broken_fails(tmp_path):
    recipes = {"fp32": made(), "int8": made(FAST)}
    # log ratios log 2 and 2 % around it: t(2) = 60 from 1.5 (p < 0.001) and -35 from 3
    assert verdicts(judge(tmp_path, recipes, "all: {min_speedup: 1.5}")) == {("int8", "min_speedup"): "pass"}
    found = judge(tmp_path, recipes, "all: {min_speedup: 3}")
    assert verdicts(found) == {("int8", "min_speedup"): "fail"}
    assert (found["verdict"], found["exit_code"]) == ("fail", 1)


def test_rounds_that_contradict_each_other_are_inconclusive_and_say_how_many_would_settle_it(tmp_path):
    recipes = {"fp32": made(), "int8": made((0.004, 0.009, 0.006))}
    found = judge(tmp_path, recipes, "all: {min_speedup: 1.2}")
    (check,) = found["checks"]
    assert (check["verdict"], found["exit_code"]) == ("inconclusive", 0)
    logs = np.log(np.divide(0.010, (0.004, 0.009, 0.006))) - np.log(1.2)
    effect = logs.mean() / logs.std(ddof=1)
    rounds = TTestPower().solve_power(effect, alpha=0.025, power=0.8, alternative="larger")
    assert check["needed"] == math.ceil(rounds)
    assert f"about {math.ceil(rounds)} rounds would settle it" in check["why"]
    strict = judge(tmp_path, recipes, "{inconclusive: fail, all: {min_speedup: 1.2}}")
    assert (strict["verdict"], strict["exit_code"]) == ("inconclusive", 1)


def test_one_round_never_settles_a_time(tmp_path):
    found = judge(
        tmp_path, {"fp32": made((0.01,)), "int8": made((0.001,))}, "all: {min_speedup: 1.5, max_p50: 1s}"
    )
    assert set(verdicts(found).values()) == {"inconclusive"}


def test_a_score_is_not_worse_only_where_a_larger_fall_is_ruled_out(tmp_path):
    recipes = {"fp32": made(), "same": made(), "noisy": made(gained=20, lost=22), "broken": made(lost=40)}
    found = judge(tmp_path, recipes, "all: {max_drop: 1%}")
    # margin 0.009. No flip: shown. 42 flips: sd 0.0065, neither. 40 lost: -0.04, its upper end -0.029: broken
    assert verdicts(found) == {
        ("same", "max_drop"): "pass",
        ("noisy", "max_drop"): "inconclusive",
        ("broken", "max_drop"): "fail",
    }
    noisy = next(c for c in found["checks"] if c["recipe"] == "noisy")
    assert noisy["limit"] == pytest.approx(-0.009)
    assert "examples would settle it" in noisy["why"]


def test_a_score_is_judged_once_however_many_batch_sizes_there_are(tmp_path):
    recipes = {
        "fp32": made(),
        "int8": made(FAST),
        "fp32@8": made(batch_size=8),
        "int8@8": made(FAST, batch_size=8),
    }
    found = judge(tmp_path, recipes, "all: {max_drop: 1%, min_speedup: 1.5}")
    assert [(c["limit_name"], c["batch_size"]) for c in found["checks"]] == [
        ("max_drop", 1),
        ("min_speedup", 1),
        ("min_speedup", 8),
    ]


def test_a_size_has_no_chance_in_it(tmp_path):
    recipes = {"fp32": made(), "int8": made(disk_bytes=25_000_000)}
    assert verdicts(judge(tmp_path, recipes, "all: {max_disk: 25MB}")) == {("int8", "max_disk"): "pass"}
    assert verdicts(judge(tmp_path, recipes, "all: {max_disk: 24999KB}")) == {("int8", "max_disk"): "fail"}


def test_absolute_limits_are_held_against_the_rounds(tmp_path):
    recipes = {"fp32": made(), "int8": made(FAST, peak_bytes=(300e6, 301e6, 299e6))}
    text = "all: {max_p50: 6ms, max_p95: 4.5ms, min_throughput: 150/s, max_memory: 310MB}"
    # the samples spread evenly from 0.9 to 1.1 of the p50: p95 5.45 ms, 200 texts a second; p of p95 over 4.5 ms is 0.002 x 4
    assert {name: verdict for (_, name), verdict in verdicts(judge(tmp_path, recipes, text)).items()} == {
        "max_p50": "pass",
        "max_p95": "fail",
        "min_throughput": "pass",
        "max_memory": "pass",
    }


def test_the_baseline_is_judged_only_by_its_name(tmp_path):
    recipes = {"fp32": made(), "int8": made(disk_bytes=1)}
    assert ("fp32", "max_disk") not in verdicts(judge(tmp_path, recipes, "all: {max_disk: 1MB}"))
    named = judge(tmp_path, recipes, "recipes: {fp32: {max_disk: 1MB, min_speedup: 2, max_drop: 1%}}")
    assert verdicts(named) == {("fp32", "max_disk"): "fail"}


def test_what_failed_is_a_violation_unless_it_was_expected(tmp_path):
    bad = made(bad={"build": ("failed", "it broke", "mend it")})
    recipes = {"fp32": made(), "int8": bad, "int4": made()}
    found = judge(tmp_path, recipes, "all: {max_disk: 100MB}")
    assert verdicts(found)["int8", "finished"] == "fail"
    found = judge(
        tmp_path, recipes, "{all: {max_disk: 100MB}, expected_failures: {int8: known, int4: known}}"
    )
    assert (verdicts(found)["int8", "finished"], found["exit_code"]) == ("pass", 0)
    assert found["notes"] == ["int4 on cpu batch 1 succeeded unexpectedly: known"]


def test_a_skipped_recipe_breaks_a_policy_only_where_it_is_named(tmp_path):
    skipped = made(bad={"plan": ("skipped", "no such CPU", "buy one")})
    recipes = {"fp32": made(), "int8": made(), "fp8": skipped}
    assert judge(tmp_path, recipes, "all: {max_disk: 100MB}")["exit_code"] == 0
    found = judge(tmp_path, recipes, "recipes: {fp8: {max_disk: 100MB}}")
    assert (verdicts(found)["fp8", "finished"], found["exit_code"]) == ("fail", 1)


def test_many_claims_at_once_are_harder_to_make(tmp_path):
    # one fall of 15 in 1000 with 25 flips against 0.2 %: p of being broken about 0.004; beside 19 others not enough
    text = "all: {max_drop: 0.002}"
    alone = judge(tmp_path, {"fp32": made(), "bad": made(gained=5, lost=20)}, text)
    assert verdicts(alone)["bad", "max_drop"] == "fail"
    shutil.rmtree(tmp_path / "run")
    many = {"fp32": made(), "bad": made(gained=5, lost=20)} | {
        f"r{i}": made(gained=3, lost=3) for i in range(19)
    }
    assert verdicts(judge(tmp_path, many, text))["bad", "max_drop"] == "inconclusive"


def reference_of(tmp_path, recipes, **more):
    return write_run(tmp_path / "reference", recipes, labels=LABELS, **more)


def test_a_stored_reference_is_held_by_speedup_memory_disk_and_score(tmp_path):
    then = {"fp32": made((0.02, 0.0201, 0.0199)), "int8": made((0.010, 0.0101, 0.0099))}
    reference = reference_of(tmp_path, then)
    now = {"fp32": made(), "int8": made((0.0049, 0.0050, 0.0051), lost=40)}
    found = judge(tmp_path, now, "reference: {tolerance: 10%, max_drop: 1%}", reference)
    # a machine twice as fast, the same speed-up
    assert verdicts(found) == {
        ("int8", "reference_speedup"): "pass",
        ("int8", "reference_memory"): "pass",
        ("int8", "reference_disk"): "pass",
        ("int8", "reference_drop"): "fail",
    }


def test_another_hosts_times_are_not_compared_and_the_note_says_so(tmp_path):
    reference = reference_of(tmp_path, {"fp32": made(), "int8": made(FAST)}, run={"host": {"hash": "other"}})
    found = judge(tmp_path, {"fp32": made(), "int8": made(FAST)}, "reference: {tolerance: 10%}", reference)
    assert set(verdicts(found)) == {("int8", "reference_disk")}
    assert "not the same host" in found["notes"][0]


def test_a_target_with_other_instructions_is_warned_about(tmp_path):
    recipe = {
        "name": "int8",
        "description": "d",
        "source": "s",
        "method": "torch_dynamic",
        "quantize": {"weights": "int8"},
        "runtime": "pytorch",
    }
    run = {"host": {"cpu_flags": ["avx2", "avx512_vnni"]}, "recipes": {"int8": recipe}}
    found = judge(
        tmp_path,
        {"fp32": made(), "int8": made()},
        "{target_cpu_flags: [avx2], all: {max_drop: 2%}}",
        run=run,
    )
    assert any("the score of int8 was measured with avx512_vnni" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("recipes: {int9: {max_drop: 1%}}", "recipe 'int9' is not in the run. Did you mean 'int8'?"),
        ("expected_failures: {int9: why}\nall: {max_drop: 1%}", "recipe 'int9' is not in the run"),
        ("{baseline: bf16, all: {max_drop: 1%}}", "measured against 'fp32'"),
        ("recipes: {fp32: {max_drop: 1%}}", "nothing in"),
    ],
)
def test_a_policy_that_does_not_fit_the_run(tmp_path, text, told):
    with pytest.raises(QtoolError) as caught:
        judge(tmp_path, {"fp32": made(), "int8": made()}, text)
    assert told in str(caught.value)


def test_a_run_whose_baseline_is_missing_cannot_be_judged_against_it(tmp_path):
    broken = made(bad={"build": ("failed", "no memory", None)})
    for text in ("all: {min_speedup: 1}", "all: {max_drop: 1%}"):
        with pytest.raises(QtoolError, match="fp32"):
            judge(tmp_path, {"fp32": broken, "int8": made()}, text)


def test_an_empty_run_and_one_of_an_older_schema(tmp_path, capsys):
    run = write_run(tmp_path / "run", {"fp32": made(), "int8": made()}, labels=LABELS)
    (tmp_path / "qtool.yaml").write_text("all: {max_drop: 1%}")
    (run / "results.jsonl").write_text("")
    for told in ("nothing was measured", "schema 0"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["gate", str(run), "--policy", str(tmp_path / "qtool.yaml")])
        error = capsys.readouterr().err
        assert caught.value.code == 2
        assert told in error
        assert error.count("\n") == 1
        content = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(content | {"schema": 0}))


def test_the_verb_writes_json_markdown_and_junit_and_exits_with_the_verdict(tmp_path, capsys, monkeypatch):
    run = write_run(
        tmp_path / "run", {"fp32": made(), "a|b": made((0.004, 0.009, 0.006), lost=40)}, labels=LABELS
    )
    (tmp_path / "qtool.yaml").write_text("all: {max_drop: 1%, min_speedup: 1.2, max_disk: 100MB}")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert cli.run(["gate", str(run), "--policy", str(tmp_path / "qtool.yaml")]) == 1
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == "gate: fail: 1 pass, 1 fail, 1 inconclusive, at 95 % confidence"
    assert json.loads((run / "gate.json").read_text())["exit_code"] == 1
    assert (tmp_path / "summary.md").read_text() == (run / "gate.md").read_text()
    assert "a\\|b" in (run / "gate.md").read_text()
    suite = ElementTree.parse(run / "gate.xml").getroot()[0]
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
    }
    assert [case.get("name") for case in suite if len(case) and case[0].tag == "failure"] == ["max_drop"]


def test_an_expected_failure_may_be_a_pattern_that_fits_nothing_here(tmp_path):
    bad = made(bad={"build": ("failed", "it broke", None)})
    text = "{all: {max_disk: 100MB}, expected_failures: {'bnb-*': known, 'fp8-*': known}}"
    found = judge(tmp_path, {"fp32": made(), "bnb-nf4": bad, "int8": made()}, text)
    assert (verdicts(found)["bnb-nf4", "finished"], found["expected_failures"]) == ("pass", ["bnb-nf4"])


def test_what_was_left_unfinished_is_missing_evidence_and_no_violation(tmp_path):
    run = write_run(tmp_path / "run", {"fp32": made(), "int8": made()}, labels=LABELS)
    lines = (run / "results.jsonl").read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if json.loads(line)["recipe"] == "int8")
    (run / "results.jsonl").write_text("\n".join(lines[:last] + lines[last + 1 :]) + "\n")
    found = judge(tmp_path, {}, "all: {max_disk: 100MB}")
    assert verdicts(found) == {("int8", "finished"): "inconclusive"}
    assert "2 of 3 rounds" in found["checks"][0]["why"]


def test_a_named_recipe_may_be_skipped_on_a_device_it_is_not_for(tmp_path):
    skipped = made(device="cuda", bad={"plan": ("skipped", "cpu only", None)})
    recipes = {"fp32": made(), "int8": made(), "int8@cuda": skipped}
    found = judge(tmp_path, recipes, "recipes: {int8: {max_disk: 100MB}}")
    assert verdicts(found) == {("int8", "max_disk"): "pass"}


def test_a_score_is_judged_at_the_first_batch_that_ran(tmp_path):
    gone = made(batch_size=32, bad={"measure-1": ("oom", "no memory", None)})
    recipes = {"fp32@32": made(batch_size=32), "int8@32": gone, "fp32": made(), "int8": made(lost=200)}
    found = judge(tmp_path, recipes, "all: {max_drop: 1%}")
    assert verdicts(found) == {("int8", "finished"): "fail", ("int8", "max_drop"): "fail"}


def test_an_answer_that_is_constant_has_no_correlation_to_judge(tmp_path):
    labels = [float(i % 5) for i in range(40)]
    noisy = [x + 0.1 * ((7 * i) % 3) for i, x in enumerate(labels)]
    recipes = {
        "fp32": Made((0.01,) * 3, noisy, metrics={"spearman": 0.99}),
        "flat": Made((0.01,) * 3, [1.0] * 40, metrics={"spearman": None}),
    }
    found = judge(tmp_path, recipes, "all: {max_drop: 1%}", labels=labels, metric="spearman")
    assert verdicts(found) == {("flat", "max_drop"): "inconclusive"}
    json.dumps(found, allow_nan=False)


def test_a_recipe_that_stopped_working_breaks_the_reference(tmp_path):
    reference = reference_of(tmp_path, {"fp32": made(), "int8": made(), "int4": made()})
    bad = made(bad={"build": ("failed", "it broke", None)})
    text = "{reference: {tolerance: 10%}, expected_failures: {int4: known}}"
    found = judge(tmp_path, {"fp32": made(), "int8": bad, "int4": bad}, text, reference)
    assert verdicts(found)["int8", "reference_finished"] == "fail"
    assert verdicts(found)["int4", "finished"] == "pass"
    assert ("int4", "reference_finished") not in verdicts(found)


def test_a_reference_whose_scores_are_gone_is_inconclusive(tmp_path):
    reference = reference_of(tmp_path, {"fp32": made(), "int8": made()})
    (reference / "predictions" / "int8-cpu.npz").unlink()
    found = judge(tmp_path, {"fp32": made(), "int8": made()}, "reference: {max_drop: 1%}", reference)
    assert verdicts(found)["int8", "reference_drop"] == "inconclusive"
    why = next(c["why"] for c in found["checks"] if c["limit_name"] == "reference_drop")
    assert "cannot be read" in why


def test_one_round_is_told_how_many_it_takes_to_judge_at_all(tmp_path):
    found = judge(tmp_path, {"fp32": made((0.01,)), "int8": made((0.001,))}, "all: {min_speedup: 1.5}")
    assert found["checks"][0]["why"] == "one round has no interval: at least 3 are needed to judge"


@pytest.mark.slow
def test_two_hundred_runs_in_which_nothing_is_wrong_fail_in_at_most_one_of_twenty(tmp_path):
    failed = sum(simulated(tmp_path / str(i), i, slowdown=1.0, spread=0.05)["exit_code"] for i in range(200))
    assert failed <= 10


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "certain"), [(0.02, True), (0.05, True), (0.2, False)])
def test_a_real_slowdown_never_passes_and_fails_whenever_the_rounds_agree(tmp_path, spread, certain):
    for i in range(200):
        found = simulated(tmp_path / str(i), i, slowdown=1.3, spread=spread)
        check = next(c for c in found["checks"] if c["limit_name"] == "min_speedup")
        assert check["verdict"] == "fail" if certain else check["verdict"] != "pass"
        if check["verdict"] == "inconclusive":
            assert "would settle it" in check["why"]


@pytest.mark.slow
def test_a_loss_of_three_points_never_passes(tmp_path):
    for i in range(200):
        found = simulated(tmp_path / str(i), i, slowdown=1.0, spread=0.02, loss=0.03)
        check = next(c for c in found["checks"] if c["limit_name"] == "max_drop")
        assert check["verdict"] in ("fail", "inconclusive")


def simulated(folder, seed, slowdown, spread, loss=0.0):
    """Five rounds, as a sweep with a policy runs, and 872 examples: 5 % of the answers flip both ways, and `loss`
    is lost besides. `spread` is the standard deviation of the paired log ratios."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 872)
    base = np.where(rng.random(872) < 0.112, 1 - labels, labels)
    # of the wrong ones more than of the right ones, so that as many are gained as lost on average
    flips = rng.random(872) < np.where(base == labels, 0.025 / 0.888, 0.025 / 0.112)
    flipped = np.where(flips, 1 - base, base)
    told = np.where((flipped == labels) & (rng.random(872) < loss / 0.888), 1 - labels, flipped)
    machine = rng.normal(0, 0.2, 5)
    noise = rng.normal(0, spread / np.sqrt(2), (2, 5))
    times = 0.01 * np.exp(machine + noise)
    recipes = {
        "fp32": Made(tuple(times[0]), base.tolist(), metrics={"accuracy": float(np.mean(base == labels))}),
        "again": Made(
            tuple(slowdown * times[1]), told.tolist(), metrics={"accuracy": float(np.mean(told == labels))}
        ),
    }
    for made_ in recipes.values():
        made_.peak_bytes = (400e6,) * 5
    folder.mkdir()
    write_run(folder / "run", recipes, labels=labels.tolist())
    (folder / "qtool.yaml").write_text("all: {max_drop: 1%, min_speedup: 1.0}")
    return gate.gate(folder / "run", policy.read(folder / "qtool.yaml"))
