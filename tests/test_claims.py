"""Expected values are statsmodels', scipy's or closed forms; error rates are simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.special import stdtrit
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import NormalIndPower, TTestPower

from qtool.bootstrap import Bootstrap
from qtool.claims import Draws, Exact, Paired, Rounds, examples_needed, holm, rounds_needed

SIMULATED = 2000
# none of them a whole number of draws of 1,000 or 2,000: a tie is decided by the last digit
LEVELS = [0.00213, 0.00517, 0.0103, 0.0251, 0.0507, 0.1013, 0.2017, 0.4013]


def normal_draws(value=0.1, centre=0.1, scale=0.05, acceleration=0.0, count=2000):
    """Draws that are the quantiles of a normal distribution: what they allow is known in closed form."""
    share = (np.arange(count) + 0.5) / count
    return Draws(value, centre, centre + scale * scipy_stats.norm.ppf(share), acceleration, 400)


def real_draws():
    """A paired change of F1 with few flips (many ties) and one of Spearman, skewed."""
    rng = np.random.default_rng(3)
    labels = (rng.random(200) < 0.6).astype(int)
    old = np.where(rng.random(200) < 0.1, 1 - labels, labels)
    new = np.where(rng.random(200) < 0.03, 1 - old, old)
    x = rng.normal(size=40)
    y = x + rng.normal(size=40)
    return [
        Bootstrap("f1", labels, np.stack([old, new]), 2, 1000).change(1, 0),
        Bootstrap("f1", labels, labels[None], 2, 1000).single(0),
        Bootstrap("spearman", x, np.stack([y, y + rng.normal(size=40)]), None, 1000).change(1, 0),
        Bootstrap("pearson", x, (2 * x + 0.1 * y)[None], None, 1000).single(0),
    ]


PAIRED = [
    (1, 1, 7, 12),
    (700, 14, 6, 152),
    (774, 0, 0, 98),
    (0, 9, 0, 4),
    (0, 0, 5, 0),
    (1, 0, 0, 0),
    (0, 3, 3, 0),
]
ESTIMATES = [
    *(Paired(*counts) for counts in PAIRED),
    normal_draws(),
    normal_draws(acceleration=0.1),
    normal_draws(acceleration=-0.3),
    normal_draws(value=0.13, acceleration=0.05),
    # a perfect score: its draws all lie below it
    normal_draws(value=0.4),
    *real_draws(),
    Rounds([1.5, 1.7, 1.6]),
    Rounds([2.0, 2.0, 2.0]),
    Rounds([0.5, 3.0]),
    Exact(0.3),
]


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_limit_is_passed_at_a_level_exactly_when_the_interval_leaves_it_out(estimate):
    intervals = [estimate.interval(1 - 2 * alpha) for alpha in LEVELS]
    for limit in np.concatenate([np.linspace(-1.23, 3.21, 37), estimate.value + np.linspace(-0.2, 0.2, 38)]):
        above, below = estimate.p_above(limit), estimate.p_below(limit)
        for alpha, interval in zip(LEVELS, intervals, strict=True):
            assert (above <= alpha) == (interval.low > limit), (alpha, limit)
            assert (below <= alpha) == (interval.high < limit), (alpha, limit)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_p_falls_as_the_limit_moves_away_and_never_claims_both_sides(estimate):
    limits = np.linspace(-1.5, 4, 56)
    above = [estimate.p_above(limit) for limit in limits]
    below = [estimate.p_below(limit) for limit in limits]
    assert np.all(np.diff(above) >= -1e-12)
    assert np.all(np.diff(below) <= 1e-12)
    assert all(0 <= a <= 1 and 0 <= b <= 1 and a + b >= 1 - 1e-9 for a, b in zip(above, below, strict=True))


def test_two_models_without_any_flip_are_shown_to_be_no_worse_within_a_margin_that_their_examples_carry():
    assert Paired(774, 0, 0, 98).p_above(-0.01) < 0.001
    # seven right of eight and no flip: nothing is known within a point
    assert Paired(7, 0, 0, 1).p_above(-0.01) > 0.05


def test_limits_that_no_difference_can_reach_are_passed_or_never():
    paired = Paired(700, 14, 6, 152)
    assert (paired.p_above(-1.01), paired.p_above(1.01)) == (0, 1)
    assert (paired.p_below(-1.01), paired.p_below(1.01)) == (1, 0)


def test_draws_without_bias_or_skew_have_the_normal_p():
    drawn = normal_draws(value=0.1, scale=0.05)
    for limit in (0.0, 0.05, 0.12):
        assert drawn.p_above(limit) == pytest.approx(scipy_stats.norm.sf((0.1 - limit) / 0.05), abs=1e-3)
        assert drawn.p_below(limit) == pytest.approx(scipy_stats.norm.cdf((0.1 - limit) / 0.05), abs=1e-3)


def test_bca_bounds_are_the_ones_of_efrons_formula():
    # Efron & Tibshirani 1993, eq. 14.9-14.10, with a bias of 0.1 deviations and an acceleration of 0.05
    bias, skew, tail = 0.1, 0.05, scipy_stats.norm.ppf(0.975)
    drawn = Draws(0.0, bias, scipy_stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000), skew, 100)
    low, high = (bias + (bias + z) / (1 - skew * (bias + z)) for z in (-tail, tail))
    found = drawn.interval()
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))


def test_draws_that_are_missing_or_undefined_claim_nothing():
    for nothing in (Draws(0.5, 0.5, np.array([]), 0.0, 10), Draws(math.nan, math.nan, np.ones(3), 0.0, 10)):
        assert nothing.interval().low is None
        assert (nothing.p_above(-1), nothing.p_below(1), nothing.needed(0, 0.05)) == (1, 1, None)


def test_draws_that_are_all_alike_have_no_width_and_pass_what_lies_off_them():
    still = Draws(0.0, 0.0, np.zeros(1000), 0.0, 50)
    assert (still.interval().low, still.interval().high) == (0, 0)
    assert still.p_above(-0.01) < 0.002
    assert still.p_above(0) >= 0.5


@pytest.mark.parametrize("values", [[1.5, 1.7, 1.6], [2.5, 2.4, 2.6, 2.3, 2.5], [0.9, 1.2]])
@pytest.mark.parametrize("limit", [0.8, 1.0, 1.6, 2.5])
def test_rounds_have_the_p_of_scipys_one_sample_t_test_on_logs(values, limit):
    logs = np.log(values)
    for mine, side in [(Rounds(values).p_above(limit), "greater"), (Rounds(values).p_below(limit), "less")]:
        assert mine == pytest.approx(scipy_stats.ttest_1samp(logs, np.log(limit), alternative=side).pvalue)


def test_one_round_claims_nothing_and_asks_for_three():
    single = Rounds([2.0])
    assert single.value == 2
    assert (single.interval().low, single.p_above(0.1), single.p_below(9), single.needed(1, 0.05)) == (
        None,
        1,
        1,
        3,
    )


def test_rounds_without_any_spread_are_certain_on_both_sides_of_their_value():
    still = Rounds([2.0, 2.0, 2.0])
    assert (still.p_above(1.9), still.p_above(2.1), still.p_below(2.1)) == (0, 1, 0)
    assert still.needed(1.9, 0.05) == 2
    assert still.p_above(2.0) == pytest.approx(0.5)


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_positive_numbers_lie_above_every_limit_that_is_not(limit):
    rounds = Rounds([1.5, 1.7, 1.6])
    assert (rounds.p_above(limit), rounds.p_below(limit), rounds.needed(limit, 0.05)) == (0, 1, 2)


def test_an_exact_number_is_above_below_or_at_its_limit():
    size = Exact(5.0)
    assert (size.p_above(4), size.p_above(5), size.p_above(6)) == (0, 1, 1)
    assert (size.p_below(4), size.p_below(5), size.p_below(6)) == (1, 1, 0)
    assert size.needed(5, 0.05) is None


@pytest.mark.parametrize(
    "p", [[0.01], [0.01, 0.04, 0.03, 0.005], [0.5, 0.5, 0.001], [0.2, 0.9, 1.0, 0.0], []]
)
def test_holm_is_that_of_statsmodels(p):
    assert holm(p) == pytest.approx(list(multipletests(p, method="holm")[1]) if p else [])


def test_holm_gives_the_hand_worked_example_with_ties():
    # sorted 0.01 x4, 0.02 x3, 0.02 x2 (raised to the one before), 0.5 x1
    assert holm([0.02, 0.5, 0.01, 0.02]) == pytest.approx([0.06, 0.5, 0.04, 0.06])


@pytest.mark.parametrize("effect", [0.2, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("alpha", [0.005, 0.025, 0.05])
@pytest.mark.parametrize("power", [0.8, 0.95])
def test_rounds_needed_is_the_next_whole_number_of_statsmodels_t_power(effect, alpha, power):
    n = rounds_needed(effect * 0.07, 0.07, alpha, power)
    theirs = TTestPower()
    assert n is not None
    assert theirs.power(effect, n, alpha, alternative="larger") >= power
    if n > 2:
        assert theirs.power(effect, n - 1, alpha, alternative="larger") < power


@pytest.mark.parametrize(("effect", "alpha"), [(0.02, 0.025), (0.1, 0.05), (0.5, 0.005)])
def test_examples_needed_is_the_next_whole_number_of_statsmodels_normal_power(effect, alpha):
    theirs = NormalIndPower(ddof=0).solve_power(effect, None, alpha, 0.8, ratio=0, alternative="larger")
    assert examples_needed(effect * 0.3, 0.3, alpha) == math.ceil(theirs)


def test_nothing_settles_a_limit_that_the_value_sits_on():
    assert rounds_needed(0.0, 0.1, 0.05) is None
    assert examples_needed(0.0, 0.1, 0.05) is None
    assert rounds_needed(1e-9, 0.1, 0.05) is None
    assert examples_needed(1e-9, 0.1, 0.05) is None


@pytest.mark.parametrize("effect", [10.0, 100.0, 1e4, 1e12])
def test_far_from_the_limit_few_rounds_are_enough(effect):
    # t(0.95, 1 df) = 6.3 of a standard error: at 10 deviations two rounds have a power of 0.85 or more
    assert rounds_needed(effect, 1.0, 0.05) == 2


def test_the_examples_a_paired_difference_needs_are_those_of_its_own_spread():
    # 20 flips of 872, one added each way: ((1.644854 + 0.841621) / distance)^2 (22/874 - (8/872)^2)
    paired = Paired(768, 14, 6, 84)
    distance = 8 / 872 - (-0.005)
    expected = ((1.644854 + 0.841621) / distance) ** 2 * (22 / 874 - (8 / 872) ** 2)
    assert paired.needed(-0.005, 0.05) == math.ceil(expected)
    assert Paired(1, 0, 0, 0).needed(-0.01, 0.05) is not None


def simulate_paired(rng, n, gained, lost, right=0.8876):
    shares = [right - lost, gained, lost, 1 - right - gained]
    return [Paired(*(int(k) for k in counts)) for counts in rng.multinomial(n, shares, SIMULATED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gained", "lost"),
    [(0.005, 0.005), (0.0, 0.01), (0.0025, 0.0075), (0.025, 0.025), (0.015, 0.035), (0.0, 0.05)],
)
def test_a_change_of_accuracy_that_sits_on_the_limit_is_claimed_to_pass_it_in_one_of_forty(gained, lost):
    found = simulate_paired(np.random.default_rng(8), 872, gained, lost)
    above, below = (
        np.mean([getattr(each, side)(gained - lost) <= 0.025 for each in found])
        for side in ("p_above", "p_below")
    )
    print(f"gained {gained} lost {lost}: above {above:.4f} below {below:.4f}")
    assert max(above, below) <= 0.035


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_a_ratio_that_sits_on_the_limit_is_claimed_to_pass_it_in_one_of_forty(rounds):
    drawn = np.exp(np.random.default_rng(8).normal(np.log(1.3), 0.1, (SIMULATED, rounds)))
    above = np.mean([Rounds(list(values)).p_above(1.3) <= 0.025 for values in drawn])
    below = np.mean([Rounds(list(values)).p_below(1.3) <= 0.025 for values in drawn])
    assert max(above, below) <= 0.035


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.1])
def test_ten_recipes_at_the_limit_are_claimed_together_at_most_five_times_in_a_hundred(shared):
    # every recipe's ratio has the same baseline rounds in its bottom: their claims lean together
    rng, claimed = np.random.default_rng(9), 0
    for _ in range(SIMULATED):
        logs = rng.normal(0, 0.1, (10, 5)) + rng.normal(0, 1, 5) * shared
        claimed += min(holm([Rounds(list(np.exp(row))).p_above(1.0) for row in logs])) <= 0.05
    print(f"family-wise {claimed / SIMULATED:.4f}")
    # three standard errors above 5 %
    assert claimed / SIMULATED <= 0.05 + 0.015


@pytest.mark.slow
def test_the_advised_number_of_rounds_or_examples_settles_the_claim_four_times_in_five():
    rng = np.random.default_rng(10)
    rounds = rounds_needed(0.1, 0.12, 0.05)
    drawn = np.exp(rng.normal(0.1, 0.12, (SIMULATED, rounds)))
    settled = np.mean([Rounds(list(values)).p_above(1.0) <= 0.05 for values in drawn])
    examples = examples_needed(0.01, math.sqrt(0.03), 0.05)
    paired = np.mean([each.p_above(-0.01) <= 0.05 for each in simulate_paired(rng, examples, 0.015, 0.015)])
    print(f"{rounds} rounds {settled:.3f}, {examples} examples {paired:.3f}")
    assert 0.77 <= settled <= 0.83
    assert 0.75 <= paired <= 0.85


def stop_when_narrow(rng, scale, first, ask=0.0953, most=15):
    """The log ratios of a run that adds rounds until the 95 % interval is within a factor of 1.10 (log 0.0953)."""
    logs = list(rng.normal(0, scale, first))
    while len(logs) < most:
        n = len(logs)
        if stdtrit(n - 1, 0.975) * np.std(logs, ddof=1) / math.sqrt(n) <= ask:
            break
        logs.append(rng.normal(0, scale))
    return logs


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.03, 0.08, 0.2])
# a small sample's spread that happens to be small stops a run too early: five rounds to begin with mend most of it
@pytest.mark.parametrize(("first", "least"), [(3, 0.89), (5, 0.92)])
def test_rounds_that_stop_when_narrow_enough_cover_less(scale, first, least):
    rng, covered, counts = np.random.default_rng(12), 0, []
    for _ in range(SIMULATED):
        logs = stop_when_narrow(rng, scale, first)
        interval = Rounds(list(np.exp(logs))).interval()
        covered += interval.low <= 1 <= interval.high
        counts.append(len(logs))
    print(
        f"scale {scale} first {first}: covered {covered / SIMULATED:.4f}, mean rounds {np.mean(counts):.2f}"
    )
    assert least <= covered / SIMULATED <= 0.97
