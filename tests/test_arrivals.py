"""Arrival patterns against their closed forms, and traces as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from qtool import arrivals
from qtool.arrivals import Pattern, read_trace
from qtool.core import QtoolError

REQUESTS = 1_000_000


def gaps(times: np.ndarray) -> np.ndarray:
    return np.diff(times, prepend=0.0)


def test_poisson_gaps_have_mean_and_deviation_of_one():
    found = gaps(Pattern("poisson").draw(REQUESTS, np.random.default_rng(0)))
    assert found.mean() == pytest.approx(1, rel=0.005)
    assert found.std() == pytest.approx(1, rel=0.01)


def test_bursts_have_the_mean_and_the_variation_of_an_interrupted_poisson_process():
    # squared coefficient of variation 1 + 2 on to_off / (to_off + to_on)^2 (Kuczura 1973), counted by hand: the
    # source is on for 4 s (20 requests at 5/s) and off for 16 s, so 1 + 2 x 5 x 0.25 / 0.3125^2 = 26.6
    found = gaps(Pattern("burst").draw(REQUESTS, np.random.default_rng(0)))
    assert found.mean() == pytest.approx(1, rel=0.02)
    assert found.var() / found.mean() ** 2 == pytest.approx(26.6, rel=0.03)


def test_bursts_are_what_their_words_say():
    on, to_off, to_on = arrivals.ipp_rates()
    assert (on, 1 / to_off, 1 / to_on) == pytest.approx((5.0, 4.0, 16.0))
    assert "bursts of 20 requests on average at 5 times the mean rate" in Pattern("burst").told()


def test_one_seed_draws_one_sequence():
    for name in ("poisson", "burst"):
        one, two = (Pattern(name).draw(100, np.random.default_rng(7)) for _ in range(2))
        assert np.array_equal(one, two)
        assert (np.diff(one) > 0).all()


def write(folder, text: str):
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_has_its_own_rate_and_is_repeated_without_a_gap(tmp_path):
    pattern = read_trace(write(tmp_path, "100.0\n101.0\n\n102.0\n104.0\n"))
    assert pattern.trace_s is not None
    assert pattern.trace_s.tolist() == [0, 1, 2, 4]
    assert pattern.rate_per_s == pytest.approx(0.75)
    # at one request a second: 0, 0.75, 1.5, 3; once more four seconds later
    drawn = pattern.draw(6, np.random.default_rng(0))
    assert drawn.tolist() == pytest.approx([0, 0.75, 1.5, 3, 4, 4.75, 5.5, 7])


def test_a_search_gets_the_beginning_of_a_long_trace_at_the_pace_it_has_there(tmp_path):
    pattern = read_trace(write(tmp_path, "0\n1\n2\n4\n"))
    rng = np.random.default_rng(0)
    assert pattern.draw(2, rng, whole=False).tolist() == pytest.approx([0, 0.75])
    assert pattern.draw(2, rng).tolist() == pytest.approx([0, 0.75, 1.5, 3])
    assert pattern.draw(4, rng, whole=False).tolist() == pytest.approx([0, 0.75, 1.5, 3])
    assert len(pattern.draw(6, rng, whole=False)) == 8


def test_a_byte_order_mark_is_no_part_of_a_time(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf0.5\n1.5\n")
    pattern = read_trace(tmp_path / "t.csv")
    assert pattern.trace_s is not None
    assert pattern.trace_s.tolist() == [0, 1]


def test_a_table_has_its_times_in_the_first_column_below_their_name(tmp_path):
    pattern = read_trace(write(tmp_path, 'arrival_s,path\n0.5,"/a"\n1.5,"/b"\n'))
    assert pattern.trace_s is not None
    assert pattern.trace_s.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0\nsoon\n2\n", "line 2: 'soon' is no time"),
        ("time\n1\n2\n", "line 1: 'time' is no time"),
        ("0\n1\nnan\n", "line 3: 'nan' is no time"),
        ("0\n-1\n", "line 2: '-1' is no time"),
        ("0\n5\n4\n", "line 3: 4 s is before the line above"),
        ("a,b\nc,d\n", "line 2: 'c' is no time"),
        ("", "0 arrivals over no time"),
        ("3\n", "1 arrivals over no time"),
        ("3\n3\n", "2 arrivals over no time"),
        ("\x00\x01\n", "line 1"),
    ],
)
def test_a_malformed_trace_is_told_by_its_line(tmp_path, text, told):
    with pytest.raises(QtoolError, match=r"line|arrivals") as caught:
        read_trace(write(tmp_path, text))
    assert told in str(caught.value)


def test_a_trace_that_is_not_there_or_far_too_long(tmp_path, monkeypatch):
    with pytest.raises(QtoolError, match="cannot read the trace"):
        read_trace(tmp_path / "none.txt")
    monkeypatch.setattr(arrivals, "MOST_LINES", 3)
    with pytest.raises(QtoolError, match="more than 3 arrivals"):
        read_trace(write(tmp_path, "1\n2\n3\n4\n"))
