"""The queue against closed forms, against a recursion and a clock that ticks, and against a count by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from qtool import arrivals, queueing
from qtool.queueing import Policy, simulate

pytest.importorskip("simpy")
ALONE = Policy(1, 0.0)


def exponential(mean_s: float, seed: int = 1):
    draw = random.Random(seed).expovariate
    return lambda size: draw(1 / mean_s)


def poisson(requests: int, rate_per_s: float, seed: int = 0) -> list[float]:
    return (arrivals.poisson(requests, np.random.default_rng(seed)) / rate_per_s).tolist()


def after(values, warm: int = 5000):
    return values[warm:]


def test_a_batch_that_finds_the_server_idle_may_take_longer():
    # M/G/1 whose first service of a busy period is exceptional: Welch 1964, Operations Research 12:736-752
    rate, service_s, first_s = 30.0, 0.015, 0.025
    served = simulate(poisson(400_000, rate), lambda size: service_s, ALONE, lambda size: first_s)
    usual_s = rate * service_s**2 / (2 * (1 - rate * service_s))
    more_s = rate * (first_s**2 - service_s**2) / (2 * (1 + rate * (first_s - service_s)))
    assert after(served.wait_s).mean() == pytest.approx(usual_s + more_s, rel=0.02)
    # the share of requests that find it idle
    idle = (1 - rate * service_s) / (1 + rate * (first_s - service_s))
    assert np.mean(after(served.wait_s) < 1e-12) == pytest.approx(idle, rel=0.02)


def test_regular_requests_that_fit_never_wait():
    served = simulate([0.01 * i for i in range(1000)], lambda size: 0.005, ALONE)
    assert np.allclose(served.wait_s, 0, atol=1e-9)
    assert np.allclose(served.response_s, 0.005, atol=1e-9)
    assert served.busy_ratio == pytest.approx(0.5, rel=1e-3)


def test_the_mean_wait_of_constant_service_is_pollaczeks_and_khinchines():
    load, service_s = 0.5, 0.02
    served = simulate(poisson(300_000, load / service_s), lambda size: service_s, ALONE)
    expected_s = load * service_s / (2 * (1 - load))
    assert after(served.wait_s).mean() == pytest.approx(expected_s, rel=0.02)


def test_mean_wait_and_percentiles_of_exponential_service():
    # M/M/1: mean wait rho / (mu - lambda); the response time is exponential with rate mu - lambda
    rate, service_rate = 25.0, 50.0
    served = simulate(poisson(400_000, rate), exponential(1 / service_rate), ALONE)
    assert after(served.wait_s).mean() == pytest.approx(0.5 / (service_rate - rate), rel=0.02)
    for share in (0.5, 0.95, 0.99):
        expected_s = -math.log(1 - share) / (service_rate - rate)
        assert np.quantile(after(served.response_s), share) == pytest.approx(expected_s, rel=0.02)
    assert served.busy_ratio == pytest.approx(0.5, rel=0.01)


def test_bursts_wait_as_the_root_of_their_transform_says():
    # GI/M/1 (Kleinrock 1975, Queueing Systems I, 6.4): mean wait = s / (mu (1 - s)) with s = A(mu (1 - s)), and
    # A(x) = on (x + to_on) / (x^2 + x (on + to_off + to_on) + on to_on) of an interrupted Poisson process
    on, to_off, to_on = arrivals.ipp_rates()
    service_rate = 4.0
    root = 0.5
    for _ in range(500):
        x = service_rate * (1 - root)
        root = on * (x + to_on) / (x * x + x * (on + to_off + to_on) + on * to_on)
    times = arrivals.burst(400_000, np.random.default_rng(2)).tolist()
    served = simulate(times, exponential(1 / service_rate), ALONE)
    assert after(served.wait_s).mean() == pytest.approx(root / (service_rate * (1 - root)), rel=0.03)


@pytest.mark.slow
def test_the_closed_forms_hold_at_high_load_too():
    load, requests, service_s = 0.8, 2_000_000, 0.01
    constant = simulate(poisson(requests, load / service_s), lambda size: service_s, ALONE)
    assert after(constant.wait_s).mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.02)
    varied = simulate(poisson(requests, load / service_s, seed=3), exponential(service_s, 4), ALONE)
    apart = (1 - load) / service_s
    assert after(varied.wait_s).mean() == pytest.approx(load / apart, rel=0.02)
    assert np.quantile(after(varied.response_s), 0.95) == pytest.approx(math.log(20) / apart, rel=0.02)


def lindley(arrivals_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """Waits by Lindley's recursion W = max(0, W + S - A), unrolled: another way to the same numbers."""
    steps = np.concatenate([[0.0], service_s[:-1] - np.diff(arrivals_s)])
    walk = np.cumsum(steps)
    return walk - np.minimum.accumulate(walk)


def test_without_batches_every_wait_is_lindleys():
    rng = np.random.default_rng(5)
    times, service_s = np.cumsum(rng.exponential(size=5000)), rng.gamma(2.0, 0.4, 5000)
    drawn = iter(service_s.tolist())
    served = simulate(times.tolist(), lambda size: next(drawn), ALONE)
    assert np.allclose(served.wait_s, lindley(times, service_s), atol=1e-9)


def test_littles_law():
    """Mean number in the system, summed over time, is the arrival rate times the mean time in it (Little 1961)."""
    served = simulate(poisson(20_000, 30.0), lambda size: 0.02 + 0.005 * size, Policy(8, 0.01))
    moments = np.concatenate([served.arrivals_s, served.finish_s])
    order = np.argsort(moments, kind="stable")
    inside = np.cumsum(np.repeat([1, -1], len(served.arrivals_s))[order])
    span = moments.max() - moments.min()
    mean_inside = float((inside[:-1] * np.diff(moments[order])).sum() / span)
    assert mean_inside == pytest.approx(len(served.arrivals_s) / span * served.response_s.mean(), rel=1e-6)


def test_batches_counted_by_hand():
    # pairs, at most 5 s of waiting, 4 s a batch: 0+1 start when the pair is full, 2+3 when the server is free,
    # 10 waits in vain for a second and starts at 15
    served = simulate([0.0, 1.0, 2.0, 3.0, 10.0], lambda size: 4.0, Policy(2, 5.0))
    assert served.start_s.tolist() == [1, 1, 5, 5, 15]
    assert served.finish_s.tolist() == [5, 5, 9, 9, 19]
    assert served.sizes.tolist() == [2, 2, 1]
    assert served.busy_ratio == pytest.approx(12 / 19)


def test_without_waiting_a_free_server_takes_whatever_waits():
    served = simulate([0.0, 1.0, 2.0, 3.0, 10.0], lambda size: 4.0, Policy(8, 0.0))
    assert served.start_s.tolist() == [0, 4, 4, 4, 10]
    assert served.sizes.tolist() == [1, 3, 1]


def ticking(arrivals_s: list[int], took_s, policy: Policy) -> list[int]:
    """Starts by the policy's words, second by second: a second implementation that looks at no future arrival."""
    queue, starts, free_at, now, came = [], [0] * len(arrivals_s), 0, 0, 0
    while came < len(arrivals_s) or queue:
        while came < len(arrivals_s) and arrivals_s[came] == now:
            queue.append(came)
            came += 1
        full = len(queue) >= policy.max_batch
        if queue and free_at <= now and (full or now - arrivals_s[queue[0]] >= policy.max_wait_s):
            batch, queue = queue[: policy.max_batch], queue[policy.max_batch :]
            for request in batch:
                starts[request] = now
            free_at = now + took_s(len(batch))
            continue
        now += 1
    return starts


@pytest.mark.parametrize("seed", range(30))
def test_the_policy_is_what_its_words_say(seed):
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 300, 120)).tolist()
    policy = Policy(int(rng.integers(1, 7)), float(rng.integers(0, 9)))

    def took_s(size: int) -> int:
        return 2 + size

    assert simulate(times, took_s, policy).start_s.tolist() == ticking(times, took_s, policy)


def test_the_error_of_independent_values_is_that_of_their_quantile():
    # the 95 % quantile of n uniforms has standard error sqrt(0.95 x 0.05 / n); ten blocks, t of 9 degrees: 2.262
    rng = np.random.default_rng(0)
    errors = [queueing.block_error(rng.random(10_000), 0.95) for _ in range(40)]
    expected = 2.262 * math.sqrt(0.95 * 0.05 / 10_000) / 0.95
    assert np.mean(errors) == pytest.approx(expected, rel=0.15)
    assert queueing.block_error(rng.random(199), 0.95) is None


def test_a_missing_simulator_is_one_line(monkeypatch):
    import sys

    from qtool.core import QtoolError

    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(QtoolError, match="pip install simpy"):
        simulate([0.0], lambda size: 1.0, ALONE)
