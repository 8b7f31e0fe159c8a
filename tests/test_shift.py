"""Expected values are scipy's, scikit-learn's, closed forms or hand counts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special
from scipy import stats as scipy_stats
from sklearn.metrics import log_loss

from qtool.shift import calibration_error, log_probabilities, max_logit_difference, mean_kl

RNG = np.random.default_rng(7)
BASE = RNG.normal(0, 3, (200, 4))
MOVED = BASE + RNG.normal(0, 0.5, (200, 4))


def of(probabilities):
    """Logits with these probabilities."""
    return np.log(np.asarray(probabilities, float))


def test_log_probabilities_are_scipys_also_of_huge_logits():
    huge = np.array([[1e4, -1e4, 0.0], [88.0, 89.0, 1000.0]])
    assert log_probabilities(BASE) == pytest.approx(special.log_softmax(BASE, axis=1))
    assert log_probabilities(huge) == pytest.approx(special.log_softmax(huge, axis=1))


def test_mean_kl_is_scipys_relative_entropy():
    p, q = special.softmax(BASE, axis=1), special.softmax(MOVED, axis=1)
    assert mean_kl(BASE, MOVED) == pytest.approx(scipy_stats.entropy(p, q, axis=1).mean())


def test_mean_kl_is_scikit_learns_cross_entropy_less_the_baselines_own():
    p, q = special.softmax(BASE, axis=1), special.softmax(MOVED, axis=1)
    every = np.arange(4)
    cross, own = (
        np.mean(
            [log_loss(every, np.tile(row, (4, 1)), sample_weight=w) for w, row in zip(p, told, strict=True)]
        )
        for told in (q, p)
    )
    assert mean_kl(BASE, MOVED) == pytest.approx(cross - own)


def test_mean_kl_of_a_coin_against_a_loaded_one_is_worked_by_hand():
    # 1/2 ln(0.5/0.9) + 1/2 ln(0.5/0.1) = 0.510826
    assert mean_kl(of([[0.5, 0.5]]), of([[0.9, 0.1]])) == pytest.approx(0.5108256, abs=1e-7)


def test_outputs_that_did_not_move_are_at_no_distance_nor_are_probabilities_that_only_their_scale_tells_apart():
    assert mean_kl(BASE, BASE) == 0
    assert max_logit_difference(BASE, BASE) == 0
    # a constant added to an example's logits changes no probability, and it is a difference of logits
    assert mean_kl(BASE, BASE + 2) == pytest.approx(0, abs=1e-12)
    assert max_logit_difference(BASE, BASE + 2) == pytest.approx(2)


def test_a_sure_and_wrong_answer_costs_what_its_logits_say_and_not_infinity():
    assert mean_kl(np.array([[1000.0, 0.0]]), np.array([[0.0, 1000.0]])) == pytest.approx(1000)


def test_the_largest_difference_counts_both_signs():
    assert max_logit_difference(np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[0.5, 1.0], [2.0, -1.0]])) == 4


def test_calibration_error_is_the_hand_count():
    # bins of 1/5: two of 0.7 with one right, one of 0.9 that is right, one of 0.55 that is wrong:
    # (|1 - 1.4| + |1 - 0.9| + |0 - 0.55|) / 4
    logits = of([[0.7, 0.3], [0.3, 0.7], [0.9, 0.1], [0.55, 0.45]])
    assert calibration_error(np.array([0, 0, 0, 1]), logits, bins=5) == pytest.approx((0.4 + 0.1 + 0.55) / 4)


def test_calibration_error_in_fifteen_bins_is_a_count_bin_by_bin():
    probabilities = special.softmax(BASE, axis=1)
    labels = np.where(RNG.random(200) < 0.7, probabilities.argmax(axis=1), 0)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    expected = 0.0
    for i in range(15):
        here = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if here.any():
            expected += here.mean() * abs(right[here].mean() - confidence[here].mean())
    assert calibration_error(labels, BASE) == pytest.approx(expected)


def test_one_sure_right_answer_is_calibrated_and_one_sure_wrong_answer_is_not():
    sure = np.array([[1000.0, 0.0]])
    assert calibration_error(np.array([0]), sure) == 0
    assert calibration_error(np.array([1]), sure) == 1


@pytest.mark.slow
def test_a_calibrated_model_has_an_error_that_vanishes_with_its_examples():
    rng = np.random.default_rng(1)
    probability = rng.uniform(0, 1, 400_000)
    labels = (rng.random(400_000) < probability).astype(int)
    logits = np.stack([np.zeros(400_000), special.logit(probability)], axis=1)
    assert calibration_error(labels, logits) < 0.005
