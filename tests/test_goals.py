"""Goals as they are typed; expected values are the units' definitions."""

from __future__ import annotations

import pytest

from qtool import goals
from qtool.core import QtoolError
from qtool.goals import Drop


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("50ms", goals.SECONDS, 0.05),
        ("250us", goals.SECONDS, 0.00025),
        ("1.5s", goals.SECONDS, 1.5),
        (" 2 s ", goals.SECONDS, 2.0),
        ("100/s", goals.RATES, 100.0),
        ("500KB", goals.BYTES, 500e3),
        ("500MB", goals.BYTES, 500e6),
        ("1GB", goals.BYTES, 1e9),
        ("1KiB", goals.BYTES, 1024.0),
        ("2MiB", goals.BYTES, 2097152.0),
        ("1GiB", goals.BYTES, 1073741824.0),
        ("1e3MB", goals.BYTES, 1e9),
        ("30min", goals.MINUTES, 1800.0),
    ],
)
def test_a_number_and_its_unit(text, units, value):
    assert goals.quantity(text, units, "--x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "units", "told"),
    [
        ("50", goals.SECONDS, "the unit is missing"),
        (50, goals.SECONDS, "the unit is missing"),
        ("ms", goals.SECONDS, "expected a number"),
        ("", goals.SECONDS, "expected a number"),
        (None, goals.SECONDS, "expected a number"),
        ([1], goals.SECONDS, "expected a number"),
        ("50mss", goals.SECONDS, "Did you mean 'ms'?"),
        ("50 MS", goals.SECONDS, "Did you mean 'ms'?"),
        ("500mb", goals.BYTES, "Did you mean 'MB'?"),
        ("0ms", goals.SECONDS, "out of range"),
        ("-5ms", goals.SECONDS, "out of range"),
        ("1e999s", goals.SECONDS, "out of range"),
        ("nanms", goals.SECONDS, "expected a number"),
        ("infs", goals.SECONDS, "expected a number"),
    ],
)
def test_what_is_no_quantity_is_told_where_and_what_would_work(text, units, told):
    with pytest.raises(QtoolError, match="--x") as caught:
        goals.quantity(text, units, "--x")
    assert told in str(caught.value)


def test_a_percentage_is_relative_and_a_number_absolute():
    assert goals.drop("1%", "--max-drop") == Drop(0.01, True)
    assert goals.drop("0.005", "--max-drop") == Drop(0.005, False)
    assert goals.drop(0.005, "--max-drop") == Drop(0.005, False)
    assert goals.drop("1%", "x").margin(0.8876) == pytest.approx(0.008876)
    assert goals.drop("0.005", "x").margin(0.8876) == 0.005
    # a Matthews correlation may be negative: a share of it is still a size
    assert goals.drop("10%", "x").margin(-0.2) == pytest.approx(0.02)


@pytest.mark.parametrize("text", ["0", "0%", "-1%", "1", "100%", "1.5", "5ms", "one", True, None, "nan"])
def test_what_is_no_drop(text):
    with pytest.raises(QtoolError, match="--max-drop"):
        goals.drop(text, "--max-drop")


@pytest.mark.parametrize("text", ["10", "0%", "101%", "ten%", 0.1])
def test_what_is_no_percentage(text):
    with pytest.raises(QtoolError, match="--speedup-within"):
        goals.share(text, "--speedup-within")
