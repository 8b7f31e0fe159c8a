"""The data of the page's drawings: answers that changed, counted by hand, and latency along a round."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qtool.core import Measurement
from qtool.report.page import drift, flips
from qtool.rows import Trial
from tests.page_runs import LABELS, data_of, facts, made, put_texts, recipes, shown, wrong
from tests.run_folder import STARTED, Made, write_run


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    folder = write_run(tmp_path_factory.mktemp("page"), recipes(), labels=LABELS, run=facts())
    put_texts(folder)
    return shown(folder)[1]


def test_changed_answers_are_counted_and_told_with_text_and_probabilities(html):
    changed = data_of(html)["changed"]
    quick = changed["devices"]["cpu"]["1"]
    assert (quick["changed"], quick["gained"], quick["lost"]) == (3, 2, 1)
    # logits are 1 for the answer and 0 for the other class: e / (e + 1)
    p = round(math.e / (math.e + 1), 4)
    assert sorted(quick["first"]) == [[0, 1, p, 0, p], [1, 0, p, 1, p], [10, 0, p, 1, p]]
    assert changed["examples"]["cpu"]["10"] == ["10", 0]
    assert changed["texts"]["10"] == ["text number 10"]
    assert changed["classes"] == ["bad", "good"]


def test_the_most_confident_changes_come_first_and_at_most_fifty(tmp_path):
    folder = write_run(
        tmp_path, {"fp32": made((1, 1), wrong()), "bad": made((1, 1), wrong(*range(80)))}, labels=LABELS
    )
    logits = np.zeros((400, 2), np.float32)
    logits[range(400), LABELS] = 1
    logits[:80] = logits[:80, ::-1]
    logits[7] *= 9
    logits[3] *= 5
    np.savez(
        folder / "predictions" / "bad-cpu.npz", logits=logits, labels=np.array(LABELS), ids=np.arange(400)
    )
    _, html = shown(folder)
    bad = data_of(html)["changed"]["devices"]["cpu"]["1"]
    assert bad["changed"] == bad["lost"] == 80
    assert len(bad["first"]) == 50
    assert [entry[0] for entry in bad["first"][:3]] == [7, 3, 0]


@pytest.mark.parametrize("texts", [["one"], "no list", [1] * len(LABELS)])
def test_texts_that_do_not_fit_are_left_out_with_a_note(tmp_path, texts):
    folder = write_run(tmp_path, recipes(), labels=LABELS, run=facts())
    put_texts(folder, texts)
    _, html = shown(folder)
    assert data_of(html)["changed"]["texts"] == {}
    assert "texts.json does not hold the 400 texts that were scored" in html


def test_long_texts_are_cut_and_pairs_are_shown(tmp_path):
    folder = write_run(tmp_path, recipes(), labels=LABELS, run=facts())
    put_texts(folder, ["x" * 9_000] * 400, ["second"] * 400)
    _, html = shown(folder)
    first, second = data_of(html)["changed"]["texts"]["10"]
    assert first == "x" * flips.LONGEST_TEXT + " …"
    assert second == "second"


def test_a_regression_shows_its_largest_changes(tmp_path):
    values = [i / 40 for i in range(200)]
    other = [v + (3 if i == 17 else 0.001) for i, v in enumerate(values)]
    every = {
        "fp32": Made((1, 1), values, metrics={"spearman": 1.0}),
        "other": Made((1, 1), other, metrics={"spearman": 0.99}),
    }
    folder = write_run(tmp_path, every, labels=values, metric="spearman")
    told = data_of(shown(folder)[1])["changed"]
    assert told["classes"] is None
    assert told["devices"]["cpu"]["1"]["first"][0] == [17, 0.425, 3.425]


def similarities() -> tuple[list[float], dict[str, Made]]:
    """Labels, and cosines of a sentence-embedding run of 200 pairs: the third changes by 0.3, the fifth by 0.1."""
    labels = [i / 200 for i in range(200)]
    other = [v - 0.3 if i == 2 else v + 0.1 if i == 4 else v for i, v in enumerate(labels)]
    return labels, {
        "fp32": Made((1, 1), labels, metrics={"spearman": 1.0}),
        "other": Made((1, 1), other, metrics={"spearman": 0.99}),
    }


def test_both_sentences_of_an_embedding_run_stand_by_the_outputs_that_changed(tmp_path):
    labels, every = similarities()
    folder = write_run(tmp_path, every, labels=labels, metric="spearman")
    put_texts(folder, [f"first {i}" for i in range(200)], second=[f"second {i}" for i in range(200)])
    told = data_of(shown(folder)[1])["changed"]
    assert told["devices"]["cpu"]["1"] == {
        "changed": 2,
        "gained": None,
        "lost": None,
        "first": [[2, 0.01, -0.29], [4, 0.02, 0.12]],
    }
    assert told["texts"] == {"2": ["first 2", "second 2"], "4": ["first 4", "second 4"]}


@pytest.mark.parametrize("second", [["one"], [3] * 200, "x" * 7, 5])
def test_second_sentences_that_do_not_fit_are_left_out_with_a_note(tmp_path, second):
    labels, every = similarities()
    folder = write_run(tmp_path, every, labels=labels, metric="spearman")
    put_texts(folder, ["first"] * 200, second=second)
    _, html = shown(folder)
    assert data_of(html)["changed"]["texts"] == {}
    assert "texts.json does not hold the 200 texts that were scored" in html


def timed(samples: dict[int, list[float]], calls: int | None) -> Trial:
    rounds = {
        number: Measurement(
            trial_id="t", recipe="r", device="cpu", batch_size=1, stage="measure", round=number, status="ok",
            samples={"latency_s": times}, values={"calls_in_pass": calls} if calls else {}, started_at=STARTED,
        )
        for number, times in samples.items()
    }  # fmt: skip
    return Trial({"recipe": "r", "device": "cpu", "batch_size": 1}, "ok", None, None, None, None, rounds)


def test_a_round_is_told_by_its_quantiles_where_its_calls_support_them():
    (found,) = drift.by_round(timed({1: [float(x) for x in range(1, 202)]}, None))
    assert found["calls"] == 201
    # p95 needs 130 calls, p99 662; of 1..201 the share q lies at 1 + 200 q
    assert found["quantiles"] == [11, 51, 101, 151, 191, None]
    # 201 in ten parts: one of 21, nine of 20
    assert found["stretches"] == pytest.approx(
        [11, 31.5, 51.5, 71.5, 91.5, 111.5, 131.5, 151.5, 171.5, 191.5]
    )
    assert not found["corrected"]


def test_a_round_is_followed_against_the_usual_time_of_its_own_texts():
    short, long = [1.0] * 50, [3.0] * 50
    steady = (short + long) * 4
    slower = [1.5 * x for x in steady]
    even, grown = drift.by_round(timed({1: steady, 2: slower}, 100))
    # usual: (1 + 1.5) / 2 and (3 + 4.5) / 2, their median 2.5; a pass of short then long texts is no drift
    assert even["corrected"]
    assert even["stretches"] == [2.0] * 10
    assert grown["stretches"] == [3.0] * 10


def test_a_slowing_round_shows_its_slope():
    times = [1.0 + i / 1000 for i in range(1000)]
    (found,) = drift.by_round(timed({1: times}, 10))
    assert found["stretches"] == sorted(found["stretches"])
    assert found["stretches"][-1] / found["stretches"][0] == pytest.approx(1.9495 / 1.0495, rel=0.01)
