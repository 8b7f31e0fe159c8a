"""Timing on a clock that only predictions move, so that nothing here depends on real time."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from qtool import timing


class FakeTime:
    """A clock that stands still except for `spend`."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def costing(clock: FakeTime, cost_s: Callable[[int, Any], float]) -> tuple[Callable[[Any], None], list[Any]]:
    """A predict whose n-th call on a batch takes `cost_s(n, batch)`, and the list of batches it was given."""
    seen: list[Any] = []

    def predict(batch: Any) -> None:
        clock.spend(cost_s(len(seen), batch))
        seen.append(batch)

    return predict, seen


SETTINGS = [
    # batches, seconds a call, min_time_s, min_calls
    (1, 0.010, 0.5, 10),
    (7, 0.003, 1.0, 64),
    (64, 0.010, 0.1, 130),
    (100, 0.050, 2.0, 1),
    (3, 0.200, 0.0, 662),
]


@pytest.mark.parametrize(("count", "cost_s", "min_time_s", "min_calls"), SETTINGS)
def test_samples_are_whole_passes(count: int, cost_s: float, min_time_s: float, min_calls: int) -> None:
    clock = FakeTime()
    predict, seen = costing(clock, lambda n, batch: cost_s)
    samples = timing.time_calls(
        predict, range(count), min_time_s=min_time_s, min_calls=min_calls, max_time_s=1e9, clock=clock
    )
    assert seen == list(range(count)) * (len(samples) // count)
    assert len(samples) % count == 0


@pytest.mark.parametrize(("count", "cost_s", "min_time_s", "min_calls"), SETTINGS)
def test_both_minima_are_reached_and_one_pass_less_would_miss_one(
    count: int, cost_s: float, min_time_s: float, min_calls: int
) -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: cost_s)
    samples = timing.time_calls(
        predict, range(count), min_time_s=min_time_s, min_calls=min_calls, max_time_s=1e9, clock=clock
    )
    shorter = len(samples) - count
    assert len(samples) >= min_calls
    assert sum(samples) >= min_time_s * (1 - 1e-9)
    assert shorter == 0 or shorter < min_calls or shorter * cost_s < min_time_s


def test_each_sample_is_the_time_of_its_own_call() -> None:
    clock = FakeTime()
    costs = [0.010, 0.002, 0.030]
    predict, _ = costing(clock, lambda n, batch: costs[batch] + 0.001 * (n // 3))
    samples = timing.time_calls(predict, [0, 1, 2], min_time_s=0, min_calls=6, max_time_s=9, clock=clock)
    assert samples == pytest.approx([0.010, 0.002, 0.030, 0.011, 0.003, 0.031])


def test_the_bound_in_time_stops_after_the_pass_that_exceeds_it() -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: 1.0)
    samples = timing.time_calls(predict, range(4), min_time_s=100, min_calls=1000, max_time_s=9, clock=clock)
    assert len(samples) == 12


def test_a_pass_longer_than_the_bound_is_still_finished() -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: 10.0)
    samples = timing.time_calls(predict, range(5), min_time_s=1, min_calls=1, max_time_s=3, clock=clock)
    assert len(samples) == 5


def test_the_garbage_collector_stays_on_while_timing() -> None:
    states: list[bool] = []
    timing.time_calls(
        lambda batch: states.append(gc.isenabled()), [0], min_time_s=0, min_calls=3, max_time_s=60
    )
    assert states == [True] * 3


@pytest.mark.parametrize("run", ["time_calls", "warm_up"])
def test_an_empty_list_of_batches_is_refused(run: str) -> None:
    limits = {"min_time_s": 0, "max_time_s": 1} | ({"min_calls": 1} if run == "time_calls" else {})
    with pytest.raises(ValueError, match="list of batches is empty"):
        getattr(timing, run)(lambda batch: None, [], **limits)


def test_end_to_end_is_tokenise_plus_predict_plus_finish_of_the_same_call() -> None:
    clock = FakeTime()
    finished: list[str] = []

    def tokenize(text: str) -> str:
        clock.spend(0.001 * len(text))
        return f"tokens of {text}"

    def predict(batch: str) -> str:
        clock.spend(0.020)
        return f"logits of {batch}"

    def finish(logits: str) -> None:
        clock.spend(0.003)
        finished.append(logits)

    found = timing.time_end_to_end(
        ["ab", "abcd"], tokenize, predict, finish, min_time_s=0, min_calls=4, max_time_s=9, clock=clock
    )
    assert found["tokenize_s"] == pytest.approx([0.002, 0.004] * 2)
    assert found["end_to_end_s"] == pytest.approx([0.025, 0.027] * 2)
    assert finished == ["logits of tokens of ab", "logits of tokens of abcd"] * 2


def test_a_pause_comes_before_each_call_and_is_in_no_sample() -> None:
    clock, told = FakeTime(), []

    def step(name: str, seconds: float, answer: str) -> str:
        told.append(name)
        clock.spend(seconds)
        return answer

    found = timing.time_end_to_end(
        ["ab", "cd"],
        lambda text: step("tokenize", 0.001, text),
        lambda batch: step("predict", 0.020, batch),
        lambda logits: None,
        min_time_s=0,
        min_calls=2,
        max_time_s=9,
        pause_s=0.5,
        clock=clock,
        sleep=lambda seconds: step("pause", seconds, ""),
    )
    assert told == ["pause", "tokenize", "predict"] * 2
    assert found["end_to_end_s"] == pytest.approx([0.021] * 2)


def test_a_steady_predict_is_stable_after_half_a_second_and_has_seen_every_batch() -> None:
    clock = FakeTime()
    predict, seen = costing(clock, lambda n, batch: 0.001)
    warm = timing.warm_up(predict, range(200), clock=clock)
    assert warm.stable
    assert warm.calls == len(seen)
    assert set(seen) == set(range(200))
    assert warm.seconds == pytest.approx(0.001 * len(seen))
    assert warm.seconds >= 0.5


def test_texts_of_very_different_length_do_not_look_like_drift() -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: 0.002 * (1 + batch % 50))
    warm = timing.warm_up(predict, range(300), clock=clock)
    assert warm.stable
    assert warm.spread_ratio == pytest.approx(0.0)


@pytest.mark.parametrize("change_per_call", [1.01, 0.99])
def test_a_drifting_predict_is_declared_unstable_at_the_bound(change_per_call: float) -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: 0.030 * change_per_call ** min(n, 700))
    warm = timing.warm_up(predict, range(10), max_time_s=8.0, clock=clock)
    if change_per_call > 1:
        assert not warm.stable
        assert 8.0 <= warm.seconds <= 8.0 + 0.030 * 1.01**warm.calls
    else:
        # 1 % faster per call for 700 calls: it may be called stable only after the slope has ended
        assert warm.calls > 700 or not warm.stable


def test_slow_first_calls_are_over_when_warm_up_ends() -> None:
    clock = FakeTime()
    predict, seen = costing(clock, lambda n, batch: 0.010 * (1 + 20 * 0.97**n))
    warm = timing.warm_up(predict, range(5), clock=clock)
    assert warm.stable
    assert 1 + 20 * 0.97 ** len(seen) < 1.05


def test_one_late_call_in_a_window_does_not_make_it_unstable() -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: 0.5 if n == 150 else 0.005)
    warm = timing.warm_up(predict, range(100), clock=clock)
    assert warm.stable
    assert warm.spread_ratio == pytest.approx(0.0)


def test_a_first_pass_that_fills_the_bound_is_unstable_and_overshoots_by_one_call() -> None:
    clock = FakeTime()
    predict, _ = costing(clock, lambda n, batch: 4.0)
    warm = timing.warm_up(predict, range(100), max_time_s=10.0, clock=clock)
    assert warm == timing.WarmUp(calls=3, seconds=12.0, stable=False, spread_ratio=None)


def test_two_speeds_that_alternate_by_the_second_are_unstable() -> None:
    clock = FakeTime()
    start_ns = clock.now_ns
    slow = lambda: ((clock.now_ns - start_ns) // 300_000_000) % 2  # noqa: E731
    predict, _ = costing(clock, lambda n, batch: 0.010 if slow() else 0.005)
    warm = timing.warm_up(predict, range(20), max_time_s=5.0, clock=clock)
    assert not warm.stable
    assert warm.spread_ratio is not None
    assert warm.spread_ratio > timing.STABLE_WITHIN_RATIO


def test_a_predict_that_costs_nothing_on_the_clock_ends_at_the_least_time() -> None:
    clock = FakeTime()
    calls = 0

    def predict(batch: Any) -> None:
        nonlocal calls
        calls += 1
        clock.now_ns += 1000 if calls % 10 == 0 else 0

    assert timing.warm_up(predict, range(3), min_time_s=0.01, max_time_s=1.0, clock=clock).stable


def test_the_clock_is_monotonic_and_finer_than_a_microsecond() -> None:
    facts = timing.clock_facts()
    assert facts["monotonic"] is True
    assert facts["adjustable"] is False
    assert 0 < facts["resolution_s"] <= 1e-6
