"""Expected values are published ones, closed forms, or a second library's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from qtool import stats

RNG = np.random.default_rng(7)
LABELS = RNG.integers(0, 2, 300)
ANSWERS = np.where(RNG.random(300) < 0.15, 1 - LABELS, LABELS)
SCORES = RNG.integers(0, 26, 300) / 5
VALUES = np.round(SCORES + RNG.normal(size=300), 1)


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


def test_a_paired_difference_has_the_interval_that_bonetts_own_package_prints():
    # statpsych::ci.prop.ps(.05, 12, 4, 26, 6): 0.44 (adjusted), 0.2548067, 0.6251933
    interval = stats.paired_difference(gained=26, lost=4, n=48)
    assert interval.value == 22 / 48
    assert interval.low == pytest.approx(0.2548067, abs=5e-8)
    assert interval.high == pytest.approx(0.6251933, abs=5e-8)


def test_a_paired_difference_without_any_flip_still_has_a_width():
    # the formula with f12 = f21 = 0: z sqrt(2) / (n + 2)
    interval = stats.paired_difference(0, 0, 200)
    half = 1.959964 * np.sqrt(2) / 202
    assert interval.value == 0
    assert (interval.low, interval.high) == (pytest.approx(-half, rel=1e-6), pytest.approx(half, rel=1e-6))


def test_a_paired_difference_stays_within_one_and_holds_its_value():
    interval = stats.paired_difference(gained=10, lost=0, n=10)
    assert interval.value == 1
    assert interval.high == 1


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


def test_t_ratio_is_the_one_sample_t_interval_on_log_ratios():
    tops, bottoms = [10.2, 11.1, 10.5, 10.9], [2.6, 2.7, 2.5, 2.9]
    mine = stats.t_ratio(tops, bottoms)
    theirs = scipy_stats.ttest_1samp(np.log(np.divide(tops, bottoms)), 0).confidence_interval()
    assert mine.value == pytest.approx(scipy_stats.gmean(np.divide(tops, bottoms)))
    assert (mine.low, mine.high) == (pytest.approx(np.exp(theirs.low)), pytest.approx(np.exp(theirs.high)))


def test_a_slow_round_that_slows_both_leaves_the_paired_ratio_alone():
    interval = stats.t_ratio([10, 20, 30], [5, 10, 15])
    assert (interval.value, interval.low, interval.high) == (
        pytest.approx(2),
        pytest.approx(2),
        pytest.approx(2),
    )


def test_one_round_has_a_value_and_no_bounds():
    single = stats.t_ratio([10], [5])
    assert (single.value, single.low, single.high) == (pytest.approx(2), None, None)
    assert stats.t_mean([3.0]) == stats.Interval(3.0, None, None)


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


def test_scores_are_those_of_scikit_learn_and_scipy():
    assert stats.score("accuracy", LABELS, ANSWERS) == pytest.approx(accuracy_score(LABELS, ANSWERS))
    assert stats.score("f1", LABELS, ANSWERS) == pytest.approx(f1_score(LABELS, ANSWERS))
    mcc = matthews_corrcoef(LABELS, ANSWERS)
    assert stats.score("matthews_correlation", LABELS, ANSWERS) == pytest.approx(mcc)
    pearson, spearman = scipy_stats.pearsonr(SCORES, VALUES), scipy_stats.spearmanr(SCORES, VALUES)
    assert stats.score("pearson", SCORES, VALUES) == pytest.approx(pearson[0])
    assert stats.score("spearman", SCORES, VALUES) == pytest.approx(spearman[0])


def test_matthews_of_four_classes_is_that_of_scikit_learn():
    labels = RNG.integers(0, 4, 200)
    answers = np.where(RNG.random(200) < 0.4, RNG.integers(0, 4, 200), labels)
    mine = stats.score("matthews_correlation", labels, answers)
    assert mine == pytest.approx(matthews_corrcoef(labels, answers))


@pytest.mark.parametrize("metric", list(stats.SCORE_FUNCTIONS))
def test_a_weighted_score_is_the_score_of_the_repeated_examples(metric):
    labels, answers = (SCORES, VALUES) if metric in ("pearson", "spearman") else (LABELS, ANSWERS)
    weights = RNG.integers(0, 4, (3, len(labels)))
    drawn = stats.SCORE_FUNCTIONS[metric](weights.astype(float), labels, answers)
    theirs = {
        "accuracy": accuracy_score,
        "f1": f1_score,
        "matthews_correlation": matthews_corrcoef,
        "pearson": lambda a, b: scipy_stats.pearsonr(a, b)[0],
        "spearman": lambda a, b: scipy_stats.spearmanr(a, b)[0],
    }[metric]
    for row, value in zip(weights, drawn, strict=True):
        assert value == pytest.approx(theirs(np.repeat(labels, row), np.repeat(answers, row)))


def test_scores_without_any_variation_are_undefined_or_zero_as_scikit_learn_says():
    constant = np.zeros(300, int)
    assert stats.score("matthews_correlation", LABELS, constant) == matthews_corrcoef(LABELS, constant)
    assert stats.score("f1", LABELS, constant) == f1_score(LABELS, constant)
    assert np.isnan(stats.score("pearson", SCORES, np.ones(300)))


def test_the_bootstrap_of_accuracy_changes_agrees_with_the_closed_form():
    other = np.where(RNG.random(300) < 0.05, 1 - ANSWERS, ANSWERS)
    gained = int(np.sum((other == LABELS) & (ANSWERS != LABELS)))
    lost = int(np.sum((other != LABELS) & (ANSWERS == LABELS)))
    closed = stats.paired_difference(gained, lost, 300)
    draws = stats.resample("accuracy", LABELS, np.stack([ANSWERS, other]), classes=2)
    drawn = stats.from_draws(closed.value, draws[1, 1] - draws[0, 0])
    assert (drawn.low, drawn.high) == (
        pytest.approx(closed.low, abs=4e-3),
        pytest.approx(closed.high, abs=4e-3),
    )


def test_two_classifiers_that_never_differ_are_not_shown_to_be_equal_exactly():
    draws = stats.resample("f1", LABELS, np.stack([ANSWERS, ANSWERS]), classes=2)
    interval = stats.from_draws(0.0, draws[1, 1] - draws[0, 0])
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low < 0 < interval.high


def test_regressions_share_their_resamples():
    draws = stats.resample("spearman", SCORES, np.stack([VALUES, VALUES]), classes=None)
    assert np.array_equal(draws[0, 0], draws[1, 1])
    assert np.std(draws[0, 0]) > 0


def test_a_bootstrap_repeats_itself():
    twice = [stats.resample("f1", LABELS, ANSWERS[None], classes=2, resamples=50) for _ in range(2)]
    assert np.array_equal(twice[0], twice[1])


def test_the_bootstrap_interval_of_a_correlation_is_near_scipys():
    draws = stats.resample("pearson", SCORES, VALUES[None], classes=None)
    mine = stats.from_draws(stats.score("pearson", SCORES, VALUES), draws[0, 0])
    theirs = scipy_stats.bootstrap(
        (SCORES, VALUES),
        lambda a, b, axis: scipy_stats.pearsonr(a, b, axis=axis)[0],
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=2000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (mine.low, mine.high) == (
        pytest.approx(theirs.low, abs=0.01),
        pytest.approx(theirs.high, abs=0.01),
    )


def test_resamples_in_which_a_score_is_undefined_are_left_out():
    interval = stats.from_draws(0.5, np.array([np.nan, 0.4, 0.6, np.nan]))
    assert interval.low == pytest.approx(0.4, abs=0.02)
    assert stats.from_draws(0.5, np.array([np.nan])) == stats.Interval(0.5, None, None)


@pytest.mark.slow
def test_the_t_interval_of_three_paired_rounds_covers_the_truth_95_times_in_100():
    rng, covered, truth = np.random.default_rng(3), 0, 2.5
    for _ in range(4000):
        machine, noise = np.exp(rng.normal(0, 0.2, 3)), np.exp(rng.normal(0, 0.1, (2, 3)))
        interval = stats.t_ratio(list(truth * machine * noise[0]), list(machine * noise[1]))
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= truth <= interval.high
    # four standard errors of a proportion of 0.95 in 4000 trials
    assert abs(covered / 4000 - 0.95) < 0.014


@pytest.mark.slow
@pytest.mark.parametrize("flips", [0.01, 0.05])
def test_the_paired_bootstrap_of_f1_covers_the_truth_with_few_flips(flips):
    rng = np.random.default_rng(4)

    def sample(n):
        labels = (rng.random(n) < 0.6).astype(int)
        base = np.where(rng.random(n) < 0.12, 1 - labels, labels)
        return labels, base, np.where(rng.random(n) < flips, 1 - base, base)

    labels, base, other = sample(4_000_000)
    truth = f1_score(labels, other) - f1_score(labels, base)
    covered = 0
    for trial in range(400):
        labels, base, other = sample(200)
        draws = stats.resample("f1", labels, np.stack([base, other]), 2, resamples=1000, seed=trial)
        value = stats.score("f1", labels, other) - stats.score("f1", labels, base)
        interval = stats.from_draws(value, draws[1, 1] - draws[0, 0])
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= truth <= interval.high
    assert covered / 400 >= 0.92
