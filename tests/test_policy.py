"""The policy file: what it may say, and one line for what it may not."""

from __future__ import annotations

import pytest

from qtool import policy
from qtool.core import QtoolError
from qtool.goals import Drop

WHOLE = """
baseline: fp32
confidence: 0.9
inconclusive: fail
target_cpu_flags: [avx2]
all:
  max_drop: 1%
  max_p95: 50ms
  max_memory: 500MB
recipes:
  "onnx-*":
    min_speedup: 1.5
  onnx-int8-dynamic:
    max_drop: 0.005
    confidence: 0.99
expected_failures:
  bnb-nf4: needs a GPU here
reference:
  tolerance: 5%
  max_drop: 0.5%
"""


def read(tmp_path, text):
    path = tmp_path / "qtool.yaml"
    path.write_text(text)
    return policy.read(path)


def test_a_whole_policy_in_base_units(tmp_path):
    found = read(tmp_path, WHOLE)
    assert (found.baseline, found.confidence, found.inconclusive) == ("fp32", 0.9, "fail")
    assert found.expected_failures == {"bnb-nf4": "needs a GPU here"}
    assert (found.tolerance, found.reference_drop) == (0.05, Drop(0.005, True))
    everywhere = found.limits("bf16")
    assert everywhere is not None
    assert (everywhere.max_drop, everywhere.max_p95_s, everywhere.max_memory_bytes) == (
        Drop(0.01, True),
        0.05,
        500e6,
    )


def test_a_recipes_own_limits_go_before_a_pattern_and_that_before_all(tmp_path):
    own = read(tmp_path, WHOLE).limits("onnx-int8-dynamic")
    assert own is not None
    assert (own.max_drop, own.min_speedup, own.max_p95_s, own.confidence) == (
        Drop(0.005, False),
        1.5,
        0.05,
        0.99,
    )


def test_without_limits_for_all_only_named_recipes_are_judged(tmp_path):
    found = read(tmp_path, "recipes: {int8: {max_disk: 30MB}}")
    assert found.limits("bf16") is None
    assert found.limits("int8") is not None
    assert (found.confidence, found.inconclusive) == (0.95, "pass")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds NoneType"),
        ("- all", "holds list"),
        ("all: {max_dorp: 1%}", "unknown key 'max_dorp'. Did you mean 'max_drop'?"),
        ("al: {max_drop: 1%}", "unknown key 'al'. Did you mean 'all'?"),
        ("confidence: 0.9", "demands nothing"),
        ("all: {}", "demands nothing"),
        ("all:", "holds NoneType"),
        ("all: {max_drop: 150%}", "out of range"),
        ("all: {max_drop: 0}", "out of range"),
        ("all: {max_drop: yes}", "expected a share"),
        ("all: {max_p95: 50}", "the unit is missing"),
        ("all: {max_p95: '50'}", "the unit is missing"),
        ("all: {max_p95: 50MB}", "unknown unit 'MB'"),
        ("all: {max_memory: 500mb}", "Did you mean 'MB'?"),
        ("all: {max_disk: -1MB}", "out of range"),
        ("all: {min_speedup: 1.5x}", "expected a factor"),
        ("all: {min_speedup: 0}", "out of range"),
        ("all: {min_speedup: .inf}", "out of range"),
        ("all: {min_speedup: .nan}", "out of range"),
        ("all: {min_throughput: 100}", "the unit is missing"),
        ("{confidence: 95, all: {max_drop: 1%}}", "expected a number over 0.5, at most 0.9999"),
        ("{confidence: 1, all: {max_drop: 1%}}", "expected a number over 0.5, at most 0.9999"),
        ("{inconclusive: warn, all: {max_drop: 1%}}", "expected pass or fail"),
        ("{expected_failures: [a], all: {max_drop: 1%}}", "holds list"),
        ("{expected_failures: {a: }, all: {max_drop: 1%}}", "the reason is None, expected text"),
        ("{baseline: 3, all: {max_drop: 1%}}", "baseline is 3, expected text"),
        ("recipes: {1: {max_drop: 1%}}", "recipes is 1, expected text"),
        ("reference: {tolerance: 0.1}", "expected a percentage such as 10%"),
        ("reference: {tolerence: 10%}", "Did you mean 'tolerance'?"),
        ("{target_cpu_flags: avx2, all: {max_drop: 1%}}", "expected a list"),
        ("{target_cpu_flags: [avx3], all: {max_drop: 1%}}", "unknown CPU flag 'avx3'. Did you mean 'avx2'?"),
        ("all: {max_drop: 1%", "is not valid YAML"),
        ("all: {max_drop: 1%, max_drop: 60%}", "key 'max_drop' stands twice"),
        ("all: {max_drop: 1%}\nall: {max_disk: 1MB}", "key 'all' stands twice"),
        ("reference: {tolerance: 100%}", "allows everything"),
        ("{target_cpu_flags: [[avx2]], all: {max_drop: 1%}}", "unknown CPU flag"),
        ("{confidence: 0.99999999, all: {max_drop: 1%}}", "at most 0.9999"),
        ("all: {max_drop: 1e-300}", "out of range"),
        ("all: {max_p50: 1e-320ms}", "out of range"),
        ("all: &a {max_drop: 1%}\nrecipes: {x: *a}", "aliases"),
        ("all: !!python/object:os.system {}", "is not valid YAML"),
    ],
)
def test_what_no_policy_may_say_is_one_line(tmp_path, text, told):
    with pytest.raises(QtoolError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_that_is_not_there(tmp_path):
    with pytest.raises(QtoolError, match="cannot read the policy"):
        policy.read(tmp_path / "none.yaml")


def test_names_that_the_run_does_not_know(tmp_path):
    found = read(tmp_path, WHOLE)
    with pytest.raises(
        QtoolError, match=r"'onnx-int8-dynamic' is not in the run\. Did you mean 'onnx-int8-dynamo'"
    ):
        found.check_names(["fp32", "onnx-int8-dynamo", "bnb-nf4"], "fp32")
    with pytest.raises(QtoolError, match="the run was measured against 'onnx-fp32'"):
        found.check_names(["onnx-fp32", "onnx-int8-dynamic", "bnb-nf4"], "onnx-fp32")


def test_the_very_name_goes_before_a_pattern_wherever_it_stands(tmp_path):
    found = read(tmp_path, 'recipes: {onnx-int8: {max_drop: 0.5%}, "onnx-*": {max_drop: 5%, min_speedup: 2}}')
    own = found.limits("onnx-int8")
    assert own is not None
    assert (own.max_drop, own.min_speedup) == (Drop(0.005, True), 2.0)


@pytest.mark.parametrize(
    ("text", "scored", "told"),
    [
        ("all: {max_drop: 1%}", False, "max_drop needs scores"),
        ("reference: {tolerance: 10%}", True, "no limit speaks of a recipe of this sweep"),
        ("recipes: {onnx-int8: {max_disk: 1MB}}", True, "'onnx-int8' is not in the run"),
    ],
)
def test_what_a_sweep_could_not_be_judged_by_is_told_before_it_starts(tmp_path, text, scored, told):
    with pytest.raises(QtoolError) as caught:
        read(tmp_path, text).check_sweep(["fp32", "bf16"], "fp32", scored)
    assert told in str(caught.value)


def test_a_sweep_that_can_be_judged_is_let_through(tmp_path):
    read(tmp_path, "all: {max_drop: 1%}").check_sweep(["fp32", "bf16"], "fp32", True)
    read(tmp_path, "recipes: {fp32: {max_disk: 1MB}}").check_sweep(["fp32"], "fp32", False)
