from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from qtool import frontier
from qtool.frontier import Candidate
from qtool.stats import Interval


def candidate(recipe: str, p50: Any = 1.0, peak: Any = 1.0, disk: float = 1.0) -> Candidate:
    """Three rounds: a number stands for three equal ones."""

    def rounds(x):
        return dict(enumerate(x if isinstance(x, tuple) else (x, x, x)))

    return Candidate(recipe, {"p50": rounds(p50), "peak": rounds(peak), "disk": disk})


def dominance(*edges: tuple[str, str]) -> Any:
    """Pairs in which the first of each edge dominates the second and nothing else is settled."""
    names = {name for edge in edges for name in edge}
    pairs = {pair: {"p50": "unresolved"} for pair in itertools.permutations(names, 2)}
    return pairs | {edge: {"p50": "better"} for edge in edges}


def outcome(mine: frontier.Numbers, its: frontier.Numbers) -> str:
    return frontier.outcomes([mine, its])[0][1]


def test_rounds_that_all_agree_tell_two_recipes_apart():
    fast, slow = {1: 1.0, 2: 1.1, 3: 1.05}, {1: 2.0, 2: 2.2, 3: 2.11}
    assert outcome(fast, slow) == "better"
    assert outcome(slow, fast) == "worse"


def test_rounds_that_contradict_each_other_settle_nothing():
    assert outcome({1: 1.0, 2: 2.0, 3: 1.5}, {1: 2.0, 2: 1.0, 3: 1.5}) == "unresolved"


def test_rounds_that_agree_on_no_difference_are_a_tie():
    # log ratios 0.01, -0.01, 0: mean 0, t(2, 97.5 %) 4.303 x 0.01 / sqrt(3) = 0.025, inside 10 %
    assert outcome({1: 1.01, 2: 0.99, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}) == "tie"


def test_a_recipe_far_slower_in_noisy_rounds_is_no_tie_to_choose_from():
    pair = [candidate("fast", p50=(1.0, 1.1, 1.0)), candidate("noisy", p50=(0.5, 9.0, 3.0), peak=0.1)]
    assert choose(pair).name == "fast"


def test_only_rounds_that_both_have_are_compared():
    assert outcome({1: 1.0, 2: 9.0}, {2: 1.0, 3: 9.0}) == "worse"
    assert outcome({1: 1.0}, {2: 1.0}) == "unresolved"


def test_one_round_is_compared_by_value():
    assert outcome({1: 1.0}, {1: 1.01}) == "better"
    assert outcome({1: 1.0}, {1: 1.0}) == "tie"


def test_values_that_have_no_ratio_settle_nothing():
    assert outcome({1: 0.0, 2: 0.0}, {1: 1.0, 2: 1.0}) == "unresolved"


def test_a_value_that_is_not_positive_counts_only_where_it_is_compared():
    assert outcome({1: 1.0, 2: 1.0, 3: 0.0}, {1: 2.0, 2: 2.0}) == "better"
    assert outcome({1: 1.0, 2: 1.0, 3: 0.0}, {1: 2.0, 2: 2.0, 3: 2.0}) == "unresolved"


def test_exact_values_are_compared_as_they_are_and_never_with_rounds():
    assert outcome(3, 4.0) == "better"
    assert outcome(-3.0, -4.0) == "worse"
    assert outcome(4, 4) == "tie"
    assert outcome(4, None) == outcome(None, None) == outcome(4, {1: 4.0, 2: 4.0}) == "unresolved"
    assert outcome({}, {}) == "unresolved"


def test_each_against_each_agrees_with_a_t_interval_from_scipy():
    rng = np.random.default_rng(7)
    level = rng.choice([1.0, 1.02, 1.3], 40)
    tables = [{r: float(x * rng.lognormal(0, 0.02)) for r in range(5) if rng.random() < 0.8} for x in level]
    tables = [table for table in tables if len(table) > 1]
    found = frontier.outcomes(tables)
    seen = set()
    for (i, a), (j, b) in itertools.permutations(enumerate(tables), 2):
        logs = [math.log(a[r] / b[r]) for r in sorted(a.keys() & b.keys())]
        if len(logs) < 2:
            continue
        low, high = scipy.stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        near = low > -math.log(1.1) and high < math.log(1.1)
        expected = "better" if high < 0 else "worse" if low > 0 else "tie" if near else "unresolved"
        assert found[i][j] == expected, (a, b)
        seen.add(expected)
    assert seen == {"better", "worse", "tie", "unresolved"}


@pytest.mark.parametrize(
    ("low", "high", "evidence"),
    [
        (0.001, 0.03, "better"),
        (-0.03, -0.001, "worse"),
        (-0.019, 0.019, "tie"),
        (-0.021, 0.010, "unresolved"),
        (-0.010, 0.021, "unresolved"),
        (None, None, "unresolved"),
    ],
)
def test_a_score_ties_only_inside_the_margin(low, high, evidence):
    assert frontier.by_score(Interval(0.0, low, high)) == evidence


def test_what_is_unresolved_blocks_dominance():
    assert frontier.dominates({"p50": "better", "disk": "tie"})
    assert not frontier.dominates({"p50": "better", "score": "unresolved"})
    assert not frontier.dominates({"p50": "better", "disk": "worse"})
    assert not frontier.dominates({"p50": "tie", "disk": "tie"})


def test_without_ties_the_frontier_is_the_pareto_set_of_the_points():
    rng = np.random.default_rng(0)
    points = rng.random((12, 3)) + 0.1
    candidates = [candidate(str(i), *map(float, point)) for i, point in enumerate(points)]
    names = [c.name for c in candidates]
    expected = [
        str(i) for i, p in enumerate(points) if not any(np.all(q <= p) and np.any(q < p) for q in points)
    ]
    assert frontier.front(names, frontier.compare(candidates, None)) == expected
    assert 1 < len(expected) < 12


def test_a_circle_of_dominance_keeps_all_of_it_and_drops_what_hangs_below():
    pairs = dominance(("a", "b"), ("b", "c"), ("c", "a"), ("b", "d"))
    assert frontier.front(["a", "b", "c", "d"], pairs) == ["a", "b", "c"]


def test_a_circle_that_something_outside_dominates_leaves_whole():
    pairs = dominance(("a", "b"), ("b", "a"), ("top", "a"))
    assert frontier.front(["a", "b", "top"], pairs) == ["top"]


def test_dominance_reaches_through_a_recipe_that_left_itself():
    pairs = dominance(("a", "b"), ("b", "c"))
    assert frontier.front(["c", "b", "a"], pairs) == ["a"]


def test_an_objective_nobody_has_a_number_for_blocks_nobody():
    empty: Any = {"peak": {}, "disk": None}
    bare = [Candidate("fast", {"p50": {1: 1.0}} | empty), Candidate("slow", {"p50": {1: 2.0}} | empty)]
    pairs = frontier.compare(bare, None)
    assert set(pairs["fast", "slow"]) == {"p50"}
    assert frontier.front(["fast", "slow"], pairs) == ["fast"]


def test_a_number_that_one_of_two_lacks_keeps_both():
    some = [
        Candidate("fast", {"p50": {1: 1.0}, "peak": {1: 5.0}, "disk": 1}),
        Candidate("slow", {"p50": {1: 2.0}, "peak": {}, "disk": 1}),
    ]
    assert frontier.front(["fast", "slow"], frontier.compare(some, None)) == ["fast", "slow"]


def test_a_score_that_is_shown_worse_keeps_the_slower_recipe():
    pair = [candidate("exact", p50=2.0), candidate("rough", p50=1.0)]
    lost = {("rough", "exact"): Interval(-0.05, -0.07, -0.03), ("exact", "rough"): Interval(0.05, 0.03, 0.07)}
    same = {("rough", "exact"): Interval(0.0, -0.01, 0.01), ("exact", "rough"): Interval(0.0, -0.01, 0.01)}
    assert frontier.front(["exact", "rough"], frontier.compare(pair, lambda a, b: lost[a, b])) == [
        "exact",
        "rough",
    ]
    assert frontier.front(["exact", "rough"], frontier.compare(pair, lambda a, b: same[a, b])) == ["rough"]


def choose(candidates, members=None, baseline=None):
    names = [c.name for c in candidates]
    pairs = frontier.compare(candidates, None)
    return frontier.choose(candidates, pairs, members or names, ["p50", "peak", "disk"], baseline)


def test_the_fastest_is_chosen_when_it_can_be_told_apart():
    choice = choose([candidate("slow", p50=2.0, peak=0.1), candidate("fast", p50=1.0)])
    assert (choice.name, choice.tied, choice.decided_by) == ("fast", (), "p50")


def test_among_equally_fast_recipes_the_smaller_peak_memory_decides():
    noisy = (1.0, 1.4, 1.1)
    choice = choose(
        [
            candidate("big", p50=1.1, peak=2.0),
            candidate("small", p50=noisy, peak=1.0),
            candidate("slow", p50=5.0),
        ]
    )
    assert (choice.name, choice.tied, choice.decided_by) == ("small", ("big",), "peak")


def test_where_memory_ties_too_the_size_on_disk_decides():
    noisy = (1.0, 1.4, 1.1)
    choice = choose([candidate("big", p50=1.1, disk=2.0), candidate("small", p50=noisy, disk=1.0)])
    assert (choice.name, choice.decided_by) == ("small", "disk")


def test_where_all_ties_the_lower_p50_is_taken():
    choice = choose([candidate("a", p50=(1.2, 1.0, 1.3)), candidate("b", p50=(1.0, 1.2, 1.1))])
    assert (choice.name, choice.tied, choice.decided_by) == ("b", ("a",), "p50")


def test_of_tied_recipes_one_on_the_frontier_goes_first():
    pair = [candidate("off", p50=1.1, peak=1.0), candidate("on", p50=(1.0, 1.4, 1.1), peak=2.0)]
    assert choose(pair, ["on"]).name == "on"


def test_a_low_median_of_noisy_rounds_does_not_go_before_a_gain_that_was_shown():
    base, lucky = candidate("fp32", p50=10.0), candidate("lucky", p50=(1.0, 30.0, 2.0))
    sure = candidate("sure", p50=(3.0, 3.1, 2.9))
    assert choose([base, lucky, sure], baseline="fp32").name == "sure"
    assert choose([base, lucky], baseline="fp32").name == "lucky"


def test_any_objective_may_come_first():
    pair = [candidate("fast", p50=1.0, disk=2.0), candidate("small", p50=5.0, disk=1.0)]
    pairs = frontier.compare(pair, None)
    assert frontier.choose(pair, pairs, ["fast", "small"], ["disk", "p50"]).name == "small"
    assert frontier.choose(pair, pairs, ["fast", "small"], ["p50", "disk"]).name == "fast"


def test_nothing_is_chosen_from_nothing():
    with pytest.raises(ValueError, match="nothing qualified"):
        choose([])
