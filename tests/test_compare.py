"""Two runs side by side: which columns may be compared, and the changes, with scipy's Welch interval beside."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats as scipy_stats

from qtool import cli, compare
from qtool.core import QtoolError
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 500
BASE = [1 - label if i < 100 else label for i, label in enumerate(LABELS)]
FACTS = {
    "host": {"hash": "h", "cpu_flags": ["avx2"]},
    "args": {"threads": 2, "seq_len": None},
    "model_info": {"content": "m"},
    "data": {"data_hash": "d", "rows": 1000},
    "versions": {"torch": "2.13.0"},
}
A, B = (0.010, 0.011, 0.012), (0.006, 0.0055, 0.0061)


def made(p50_s, lost=0, **more):
    told = [1 - answer if i >= 1000 - lost else answer for i, answer in enumerate(BASE)]
    return Made(p50_s, told, metrics={"accuracy": (900 - lost) / 1000}, **more)


def pair(tmp_path, b=None, recipes_b=None, **changed):
    one = write_run(tmp_path / "a", {"fp32": made((0.02,) * 3), "int8": made(A)}, labels=LABELS, run=FACTS)
    two = write_run(
        tmp_path / "b",
        recipes_b or {"fp32": made((0.02,) * 3), "int8": b or made(B, lost=40, disk_bytes=45_000_000)},
        labels=LABELS,
        run=FACTS | changed,
    )
    return compare.compare(one, two)


def column(found, name, recipe="int8"):
    return next(row for row in found["rows"] if row["recipe"] == recipe)["columns"][name]


def test_runs_alike_are_compared_in_every_column(tmp_path):
    found = pair(tmp_path)
    assert found["differences"] == []
    # int8 of A: score 0.9 from 0.85, half the time less 1.25: (0.05 / 0.15) (1 - 0.55 / 1.25) (1 - 1 / 1.25)^2
    assert found["a"]["hypervolume"] == pytest.approx(0.05 / 0.15 * (1 - 0.55 / 1.25) * 0.2 * 0.2)
    p50 = column(found, "latency_p50_s")
    theirs = scipy_stats.ttest_ind(np.log(B), np.log(A), equal_var=False).confidence_interval()
    assert (p50["a"], p50["b"], p50["verdict"]) == (0.011, 0.006, "better")
    assert (p50["low"], p50["high"]) == (
        pytest.approx(np.exp(theirs.low)),
        pytest.approx(np.exp(theirs.high)),
    )
    score = column(found, "score")
    assert (score["a"], score["b"], score["verdict"]) == (0.9, 0.86, "worse")
    assert score["change"] == pytest.approx(-0.04)
    disk = column(found, "disk_bytes")
    assert (disk["change"], disk["verdict"]) == (0.5, "better")
    assert column(found, "speedup")["verdict"] == "better"
    assert (column(found, "speedup", "fp32")["change"], column(found, "speedup", "fp32")["verdict"]) == (
        1,
        "tie",
    )


@pytest.mark.parametrize(
    ("changed", "blank", "kept"),
    [
        (
            {"host": {"hash": "other"}},
            ["latency_p50_s", "speedup", "peak_rss_bytes"],
            ["score", "disk_bytes"],
        ),
        ({"args": {"threads": 4}}, ["latency_p50_s", "throughput_per_s"], ["score", "disk_bytes"]),
        ({"versions": {"torch": "2.14.0"}}, ["latency_p95_s", "peak_rss_bytes"], ["score", "disk_bytes"]),
        ({"data": {"data_hash": "e"}}, ["score", "latency_p50_s"], ["disk_bytes"]),
        ({"task": "sst2"}, ["score"], ["latency_p50_s", "disk_bytes"]),
        ({"metric": "f1"}, ["score"], ["latency_p50_s", "disk_bytes"]),
        ({"model_info": {"content": "n"}}, ["score", "latency_p50_s", "disk_bytes"], []),
    ],
)
def test_a_difference_blanks_the_columns_it_spoils_and_says_why(tmp_path, changed, blank, kept):
    found = pair(tmp_path, **changed)
    (difference,) = found["differences"]
    for name in blank:
        cell = column(found, name)
        assert cell["change"] is None
        assert cell["reason"] == f"not the same {difference['what']}"
        assert cell["a"] is not None
    for name in kept:
        assert column(found, name)["change"] is not None


def test_other_instructions_are_noted_beside_a_score_that_is_compared(tmp_path):
    found = pair(tmp_path, host={"hash": "other", "cpu_flags": ["avx2", "avx512_vnni"]})
    assert column(found, "score")["change"] is not None
    assert "avx512_vnni" in found["notes"][0]


def test_rows_of_one_run_alone_are_listed(tmp_path):
    found = pair(tmp_path, recipes_b={"fp32": made((0.02,) * 3), "int4": made(B)})
    assert (found["only_in_a"], found["only_in_b"]) == ([["int8", "cpu", 1]], [["int4", "cpu", 1]])


def test_runs_that_share_nothing_cannot_be_compared(tmp_path):
    with pytest.raises(QtoolError, match="share no recipe"):
        pair(tmp_path, recipes_b={"onnx-fp32": made(B)})


def test_one_round_has_no_interval_and_a_failed_row_no_change(tmp_path):
    found = pair(tmp_path, b=made((0.005, 0.005, 0.005), bad={"measure-1": ("oom", "no memory", None)}))
    assert column(found, "latency_p50_s")["reason"] == "one of the two has no value"
    assert next(row for row in found["rows"] if row["recipe"] == "int8")["status_b"] == "oom"


def test_the_verb_prints_a_table_or_json(tmp_path, capsys):
    pair(tmp_path, versions={"torch": "2.14.0"})
    assert cli.run(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    told = capsys.readouterr().out
    assert 'not the same library versions: A {"torch": "2.13.0"}, B {"torch": "2.14.0"}' in told
    assert "no change of p50 ms: not the same library versions" in told
    assert "-4.00 [" in told
    assert cli.run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["recipe"] == "fp32"
