"""From which rate the GPU is cheaper: staircases counted by hand, and by brute force over exact fractions."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest

from qtool.break_even import Machine, break_even, machines


def found(c, r, g, s):
    told = break_even(Machine(c, r), Machine(g, s))
    return told["first_cheaper_per_s"], told["break_even_per_s"]


def test_whole_machines_break_even_at_the_last_count_that_costs_no_more_than_the_gpu():
    # 4 CPU machines cost 0.8 an hour and serve 40/s; a fifth makes it 1.0, more than the GPU's 0.9
    told = break_even(Machine(0.2, 10), Machine(0.9, 1000))
    assert told["break_even_per_s"] == pytest.approx(40)
    assert told["first_cheaper_per_s"] == pytest.approx(40)
    assert told["ratio_per_s"] == pytest.approx(45)
    assert told["reason"] is None


def test_at_a_whole_ratio_of_prices_the_count_and_the_fractions_agree():
    # four cost as much as the GPU: not less, so the GPU is cheaper from the fifth on, above 40/s
    told = break_even(Machine(0.2, 10), Machine(0.8, 1000))
    assert told["break_even_per_s"] == pytest.approx(40)
    assert told["ratio_per_s"] == pytest.approx(40)


def test_a_price_whose_multiples_round_badly_is_counted_as_people_count_it():
    # 3 x 0.1 is 0.30000000000000004 to a float, and still 0.3
    assert found(0.1, 10, 0.3, 1000) == (pytest.approx(30), pytest.approx(30))


def test_a_gpu_that_costs_less_an_hour_is_cheaper_at_every_rate():
    assert found(1, 10, 0.5, 100) == (0, 0)


def test_several_gpus_are_whole_machines_too():
    # an hour at (rate]: 10 1:2.5, 20 2:2.5, 30 3:2.5 cheaper, 40 4:5, 50 5:5, 60 6:5 cheaper, 70 7:7.5,
    # 90 9:7.5 cheaper, 100 10:10 equal, from there on cheaper
    assert found(1, 10, 2.5, 30) == (pytest.approx(20), pytest.approx(100))


def test_a_gpu_that_is_dearer_for_each_request_does_not_pay_for_good():
    told = break_even(Machine(0.1, 10), Machine(1, 50))
    assert (told["break_even_per_s"], told["first_cheaper_per_s"]) == (None, None)
    assert "or more" in told["reason"]
    # 18/s: two CPU machines cost 2, the GPU 1.9; at 20/s two GPUs cost 3.8
    assert found(1, 10, 1.9, 18) == (pytest.approx(10), None)


def test_nearly_equal_costs_are_not_parted():
    told = break_even(Machine(1, 10), Machine(2, 20.0001))
    assert told["break_even_per_s"] is None
    assert "nearly the same" in told["reason"]


def test_how_many_machines_serve_a_rate():
    assert [machines(rate, Machine(1, 0.1)) for rate in (0.05, 0.1, 0.3, 0.31)] == [1, 1, 3, 4]


def brute(c, r, g, s):
    """Over every step of both staircases, in exact fractions, up to where the GPU must be cheaper."""
    c, r, g, s = (Fraction(str(x)) for x in (c, r, g, s))
    end = g / (c / r - g / s)
    steps = sorted({k * each for each in (r, s) for k in range(int(end / each) + 3)})
    stairs = [
        (low, high, c * math.ceil(high / r) > g * math.ceil(high / s))
        for low, high in itertools.pairwise(steps)
        if low < end
    ]
    first = next(low for low, _, cheaper in [*stairs, (end, end, True)] if cheaper)
    stays = max((high for _, high, cheaper in stairs if not cheaper), default=0)
    return float(first), float(stays)


@pytest.mark.parametrize("seed", range(40))
def test_the_scan_agrees_with_exact_arithmetic(seed):
    draw = random.Random(seed)
    c, r = round(draw.uniform(0.05, 1), 3), round(draw.uniform(5, 80), 1)
    g = round(draw.uniform(0.3, 6), 3)
    s = round(r * g / c * draw.uniform(1.05, 6), 1)
    first, stays = brute(c, r, g, s)
    assert found(c, r, g, s) == (pytest.approx(first), pytest.approx(stays))
