"""The ratio of two runs that were not paired, with scipy's Welch test beside it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from qtool.reference import Groups

A, B = (0.0100, 0.0110, 0.0120, 0.0115), (0.0061, 0.0055, 0.0060)


def test_a_ratio_of_two_runs_has_welchs_interval_and_test():
    ratio = Groups(A, B)
    for limit in (1.5, 1.8, 2.0, 2.2):
        shifted = np.log(A) - np.log(limit)
        above = scipy_stats.ttest_ind(shifted, np.log(B), equal_var=False, alternative="greater")
        below = scipy_stats.ttest_ind(shifted, np.log(B), equal_var=False, alternative="less")
        assert ratio.p_above(limit) == pytest.approx(above.pvalue)
        assert ratio.p_below(limit) == pytest.approx(below.pvalue)
    theirs = scipy_stats.ttest_ind(np.log(A), np.log(B), equal_var=False).confidence_interval()
    interval = ratio.interval()
    assert (interval.low, interval.high) == (
        pytest.approx(np.exp(theirs.low)),
        pytest.approx(np.exp(theirs.high)),
    )


def test_one_process_a_run_settles_nothing():
    ratio = Groups([2.0], [1.0])
    assert (ratio.value, ratio.p_above(1.5), ratio.p_below(1.5), ratio.needed(1.5, 0.025)) == (
        2.0,
        1.0,
        1.0,
        3,
    )


def test_runs_without_any_spread_settle_everything():
    ratio = Groups([2.0, 2.0], [1.0, 1.0])
    assert (ratio.p_above(1.9), ratio.p_above(2.1), ratio.p_below(2.1)) == (0.0, 1.0, 0.0)
