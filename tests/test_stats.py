"""Expected values are published ones, closed forms, or a second library's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from qtool import stats

SIMULATED = 2000


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_intervals_of_newcombes_table(successes, n, low, high):
    # Newcombe 1998, Stat Med 17:857-872, table I, method 3
    interval = stats.wilson(successes, n)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_agrees_with_scipy_for_every_count():
    for successes in range(21):
        mine = stats.wilson(successes, 20)
        theirs = scipy_stats.binomtest(successes, 20).proportion_ci(method="wilson")
        assert mine.low == pytest.approx(theirs.low, abs=1e-12)
        assert mine.high == pytest.approx(theirs.high, abs=1e-12)


def test_wilson_refuses_a_proportion_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        stats.wilson(0, 0)


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        # Bentur et al. 2009, airway hyper-responsiveness before and after transplantation: Newcombe's square-and-add
        # interval in Fagerland, Lydersen & Laake 2014, Stat Med 33:2850-2875
        ((1, 1, 7, 12), -0.507, -0.026),
        # Altman, Machin, Bryant & Gardner 2000, Statistics with Confidence, table 6.2
        ((14, 5, 0, 22), 0.011, 0.226),
    ],
)
def test_a_paired_difference_has_the_published_interval(counts, low, high):
    interval = stats.paired_difference(*counts)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=6e-4), pytest.approx(high, abs=6e-4))


@pytest.mark.parametrize(
    # uncorrelated by product (12 x 3 = 6 x 6), by an empty margin, and by a product below n / 2
    "counts",
    [(12, 6, 6, 3), (0, 9, 0, 4), (17, 0, 0, 0), (5, 2, 3, 2)],
)
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_an_uncorrelated_pair_has_newcombes_interval_of_two_samples(counts, confidence):
    both, gained, lost, _ = counts
    n = sum(counts)
    mine = stats.paired_difference(*counts, confidence)
    theirs = confint_proportions_2indep(
        both + gained, n, both + lost, n, method="newcomb", compare="diff", alpha=1 - confidence
    )
    assert (mine.low, mine.high) == (pytest.approx(theirs[0], abs=1e-9), pytest.approx(theirs[1], abs=1e-9))


def test_a_paired_difference_is_square_and_add_of_statsmodels_wilson_limits():
    for counts in np.random.default_rng(2).integers(1, 60, (200, 4)):
        e, f, g, h = (int(x) for x in counts)
        n = e + f + g + h
        product = e * h - f * g
        phi = (max(product - n / 2, 0) if product > 0 else product) / np.sqrt(
            (e + f) * (g + h) * (e + g) * (f + h)
        )
        (l2, u2), (l3, u3) = (proportion_confint(k, n, method="wilson") for k in (e + f, e + g))
        p2, p3 = (e + f) / n, (e + g) / n
        low = p2 - p3 - np.sqrt((p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u3 - p3) + (u3 - p3) ** 2)
        high = p2 - p3 + np.sqrt((u2 - p2) ** 2 - 2 * phi * (u2 - p2) * (p3 - l3) + (p3 - l3) ** 2)
        mine = stats.paired_difference(e, f, g, h)
        assert (mine.low, mine.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_a_paired_difference_turns_round_with_its_pair():
    forth, back = stats.paired_difference(700, 14, 6, 152), stats.paired_difference(700, 6, 14, 152)
    assert forth.low is not None
    assert forth.high is not None
    assert (back.value, back.low, back.high) == pytest.approx((-forth.value, -forth.high, -forth.low))


@pytest.mark.parametrize("counts", [(1, 0, 0, 0), (0, 0, 0, 1), (774, 0, 0, 98), (872, 0, 0, 0)])
def test_a_paired_difference_without_any_flip_still_has_a_width(counts):
    interval = stats.paired_difference(*counts)
    assert interval.low is not None
    assert interval.high is not None
    assert interval.value == 0
    assert -1 <= interval.low < 0 < interval.high <= 1


@pytest.mark.parametrize("counts", [(0, 1, 0, 0), (0, 10, 0, 0), (0, 0, 10, 0), (0, 1, 1, 0)])
def test_a_paired_difference_stays_within_one_and_holds_its_value(counts):
    interval = stats.paired_difference(*counts)
    assert interval.low is not None
    assert interval.high is not None
    assert -1 <= interval.low <= interval.value <= interval.high <= 1


def test_a_paired_difference_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        stats.paired_difference(0, 0, 0, 0)


def test_a_wider_confidence_never_brings_a_bound_of_a_paired_difference_nearer():
    for counts in [
        (1, 1, 7, 12),
        (774, 0, 0, 98),
        (0, 9, 0, 4),
        (700, 14, 6, 152),
        (3, 0, 1, 0),
        (0, 5, 5, 0),
    ]:
        found = [stats.newcombe(*counts, z) for z in np.linspace(0.01, 12, 200)]
        assert np.all(np.diff([i.low for i in found]) <= 1e-12)
        assert np.all(np.diff([i.high for i in found]) >= -1e-12)


@pytest.mark.parametrize(
    # 1 and 7: Bentur et al. 2009 in Fagerland, Lydersen & Laake 2014, exact P 0.0703; the others by hand
    ("gained", "lost", "p"),
    [(1, 7, 0.0703125), (14, 6, 0.115318), (5, 5, 1.0), (0, 0, 1.0), (0, 6, 2 / 64)],
)
def test_mcnemar_gives_the_published_exact_p(gained, lost, p):
    assert stats.mcnemar(gained, lost) == pytest.approx(p, abs=1e-6)
    assert stats.mcnemar(lost, gained) == stats.mcnemar(gained, lost)


def test_t_mean_of_one_two_three_is_two_with_the_tabled_quantile():
    # t(0.975, 2 df) = 4.302653, standard error 1/sqrt(3)
    interval = stats.t_mean([1, 2, 3])
    assert interval.value == 2
    assert interval.high == pytest.approx(2 + 4.302653 / np.sqrt(3), abs=1e-6)
    assert interval.low == pytest.approx(2 - 4.302653 / np.sqrt(3), abs=1e-6)


def test_the_interval_of_ratios_is_the_one_sample_t_interval_on_their_logs():
    tops, bottoms = [10.2, 11.1, 10.5, 10.9], [2.6, 2.7, 2.5, 2.9]
    mine = stats.t_log(np.divide(tops, bottoms).tolist())
    theirs = scipy_stats.ttest_1samp(np.log(np.divide(tops, bottoms)), 0).confidence_interval()
    assert mine.value == pytest.approx(scipy_stats.gmean(np.divide(tops, bottoms)))
    assert (mine.low, mine.high) == (pytest.approx(np.exp(theirs.low)), pytest.approx(np.exp(theirs.high)))


def test_a_slow_round_that_slows_both_leaves_the_paired_ratio_alone():
    interval = stats.t_log([10 / 5, 20 / 10, 30 / 15])
    assert (interval.value, interval.low, interval.high) == (
        pytest.approx(2),
        pytest.approx(2),
        pytest.approx(2),
    )


def test_one_round_has_a_value_and_no_bounds():
    single = stats.t_log([10 / 5])
    assert (single.value, single.low, single.high) == (pytest.approx(2), None, None)
    assert stats.t_mean([3.0]) == stats.Interval(3.0, None, None)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize(("x", "y"), [([10.2, 11.1, 10.5, 10.9], [2.6, 2.7, 2.9]), ([1.0, 1.5], [3.0, 3.0])])
def test_the_ratio_of_two_unpaired_groups_is_welchs_interval_on_logs(x, y, confidence):
    mine = stats.welch_ratio(x, y, confidence)
    test = scipy_stats.ttest_ind(np.log(x), np.log(y), equal_var=False)
    theirs = test.confidence_interval(confidence)
    assert mine.value == pytest.approx(scipy_stats.gmean(x) / scipy_stats.gmean(y))
    assert (mine.low, mine.high) == (pytest.approx(np.exp(theirs.low)), pytest.approx(np.exp(theirs.high)))


def test_an_unpaired_ratio_of_single_processes_has_no_bounds_and_of_equal_ones_no_width():
    assert stats.welch_ratio([4.0], [2.0, 2.1]).low is None
    assert stats.welch_ratio([4.0], [2.0]) == stats.Interval(2.0, None, None)
    still = stats.welch_ratio([4.0, 4.0], [2.0, 2.0])
    assert (still.low, still.high) == (pytest.approx(2), pytest.approx(2))
    with pytest.raises(ValueError, match="positive"):
        stats.welch_ratio([1.0, 0.0], [1.0, 1.0])


def test_spread_is_the_geometric_standard_deviation_less_one():
    values = [5.64, 7.1, 10.22]
    assert stats.spread(values) == pytest.approx(scipy_stats.gstd(values, ddof=1) - 1)
    assert stats.spread([3.0, 3.0, 3.0]) == pytest.approx(0, abs=1e-12)
    assert stats.spread([3.0]) is None


def test_an_interval_on_logs_is_widened_to_hold_the_median_it_is_given():
    interval = stats.t_log([1.0] * 9 + [9.0], value=1.0)
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low <= 1.0 <= interval.high


def test_a_ratio_of_nothing_is_refused():
    with pytest.raises(ValueError, match="positive"):
        stats.t_log([1.0, 0.0])


@pytest.mark.parametrize(("share", "least"), [(0.90, 64), (0.95, 130), (0.99, 662)])
def test_a_percentile_needs_as_many_samples_as_wilks_and_mlperf_ask_for(share, least):
    # 64 and 662 are the minimum queries that MLPerf's loadgen prints for p90 and p99
    assert stats.least_samples(share) == least
    # below two exceedances with probability 1 - confidence, by the binomial itself
    assert scipy_stats.binom.cdf(1, least, 1 - share) <= 0.01 < scipy_stats.binom.cdf(1, least - 1, 1 - share)


def test_the_median_of_ten_lies_between_the_second_and_the_ninth():
    # the classical table of the sign test: n = 10, ranks 2 and 9, coverage 97.9 %
    interval = stats.percentile_interval(list(range(1, 11)), 0.5)
    assert (interval.low, interval.value, interval.high) == (2, 5.5, 9)


def test_the_median_of_five_has_no_interval():
    # the whole range covers 1 - 2/32 = 93.75 %
    interval = stats.percentile_interval([1, 2, 3, 4, 5], 0.5)
    assert (interval.low, interval.high) == (None, None)


def test_rounds_of_unlike_processes_do_not_agree():
    assert stats.rounds_agree([[10.0, 10.2], [10.3, 10.4]])
    assert not stats.rounds_agree([[5.64], [10.22]])


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_the_t_interval_of_paired_rounds_covers_the_truth_95_times_in_100(rounds):
    rng, covered, truth = np.random.default_rng(3), 0, 2.5
    for _ in range(SIMULATED):
        # a slow round slows both: what is left is 5 % on each side
        machine, noise = np.exp(rng.normal(0, 0.2, rounds)), np.exp(rng.normal(0, 0.05, (2, rounds)))
        interval = stats.t_log(list(truth * machine * noise[0] / (machine * noise[1])))
        covered += interval.low <= truth <= interval.high
    assert 0.93 <= covered / SIMULATED <= 0.97


@pytest.mark.slow
def test_the_welch_interval_covers_unequal_groups_95_times_in_100():
    rng, covered = np.random.default_rng(3), 0
    for _ in range(SIMULATED):
        tops, bottoms = np.exp(rng.normal(1, 0.1, 5)), np.exp(rng.normal(0, 0.03, 4))
        interval = stats.welch_ratio(list(tops), list(bottoms))
        covered += interval.low <= np.e <= interval.high
    assert 0.93 <= covered / SIMULATED <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("n", "share"), [(100, 0.88), (872, 0.8876), (872, 0.5), (872, 0.98)])
def test_the_wilson_interval_covers_the_truth_95_times_in_100(n, share):
    drawn = np.random.default_rng(5).binomial(n, share, SIMULATED)
    found = [stats.wilson(int(k), n) for k in drawn]
    assert 0.93 <= np.mean([i.low <= share <= i.high for i in found]) <= 0.97
    # and without any simulation: every outcome by its chance
    every = [stats.wilson(k, n) for k in range(n + 1)]
    chance = scipy_stats.binom.pmf(np.arange(n + 1), n, share)
    assert 0.93 <= sum(c for c, i in zip(chance, every, strict=True) if i.low <= share <= i.high) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    # 774 of 872 right; gained and lost as shares. With few flips the method is known to be wide, never narrow.
    ("gained", "lost", "most"),
    [
        (0.005, 0.005, 0.985),
        (0.0, 0.01, 0.985),
        (0.0025, 0.0075, 0.985),
        (0.025, 0.025, 0.97),
        (0.01, 0.04, 0.97),
        (0.0, 0.05, 0.97),
    ],
)
def test_the_paired_interval_covers_the_truth_95_times_in_100_and_a_little_more_with_few_flips(
    gained, lost, most
):
    shares = [0.8876 - lost, gained, lost, 1 - 0.8876 - gained]
    drawn = np.random.default_rng(6).multinomial(872, shares, SIMULATED)
    found = [stats.paired_difference(*(int(k) for k in counts)) for counts in drawn]
    covered = np.mean([i.low <= gained - lost <= i.high for i in found])
    print(f"gained {gained} lost {lost}: {covered:.4f}")
    assert 0.93 <= covered <= most
