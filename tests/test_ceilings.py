"""The ceilings, with a clock made up here: bytes and operations are counted by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from qtool import ceilings, host, isolate


def clock(took_s: Iterable[float]) -> Callable[[], float]:
    """Reads twice a run: at its start and `took_s` later."""
    edges = itertools.chain.from_iterable((0.0, seconds) for seconds in took_s)
    return lambda: next(edges)


def test_a_copy_counts_each_byte_read_and_each_byte_written() -> None:
    # 1,000 numbers of 8 bytes: 8,000 read and 8,000 written in the fastest 0.25 s
    assert ceilings.copy_rate(2, 8000, clock([0.5, 0.25, 0.27])) == 16_000 / 0.25


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_threads_together_copy_every_byte_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(np, "copyto", lambda to, of: moved.append(to.nbytes + of.nbytes))
    rate = ceilings.copy_rate(threads, 8 * 10, clock([1.0, 1.0]))
    assert len(moved) == 2 * threads
    assert sum(moved) == 2 * rate == 2 * 160


def test_a_product_counts_a_multiplication_and_an_addition_for_each_term() -> None:
    side, counted = 6, 0
    for _row, _column, _term in itertools.product(range(side), repeat=3):
        counted += 2
    assert ceilings.product_rate(side, clock([2.0, 0.5, 4.0])) == counted / 0.5


def test_fast_runs_are_taken_five_times_and_slow_ones_twice() -> None:
    with pytest.raises(StopIteration):
        ceilings.product_rate(2, clock([0.01] * 4))
    assert ceilings.product_rate(2, clock([0.02] * 4 + [0.01])) == 16 / 0.01
    assert ceilings.product_rate(2, clock([9.0, 8.0])) == 2.0


def test_the_copied_array_is_four_times_the_largest_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, size in enumerate(("48K", "2M", "30720K")):
        place = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        place.mkdir(parents=True)
        (place / "size").write_text(f"{size}\n")
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * 2**30)
    assert ceilings.array_bytes(tmp_path) == 4 * 30 * 2**20
    assert ceilings.array_bytes(tmp_path / "nothing") == 4 * 32 * 2**20
    monkeypatch.setattr(host, "available_bytes", lambda: 800 * 2**20)
    assert ceilings.array_bytes(tmp_path) == 100 * 2**20  # an eighth of what is free


def test_what_is_taken_is_positive_and_says_on_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "array_bytes", lambda: 2**20)
    monkeypatch.setattr(ceilings, "SIDE", 64)
    found = ceilings.take(2)
    assert found["threads"] == 2
    assert found["copy_array_bytes"] == 2**20
    for name in ("copy_bytes_per_s", "fp32_flop_per_s"):
        assert isinstance(found[name], float)
        assert found[name] > 0


def test_a_child_hands_its_threads_to_every_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    told = " ".join(f"${name}" for name in names)
    script.write_text(
        f'#!/bin/bash\nread job\necho "{{\\"status\\": \\"ok\\", \\"values\\": {{\\"x\\": \\"{told}\\"}}}}" >&$5\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.setattr(isolate.sys, "executable", str(script))
    outcome = isolate.run("ceilings", {}, log=tmp_path / "log", timeout_s=20.0, threads=3)
    assert outcome.values == {"x": "3 3 3"}


@pytest.mark.slow
def test_a_child_takes_the_ceilings_of_this_machine(tmp_path: Path) -> None:
    outcome = isolate.run("ceilings", {"threads": 1}, log=tmp_path / "log", timeout_s=60.0, threads=1)
    assert outcome.status == "ok"
    assert outcome.values["threads"] == 1
    assert outcome.values["copy_bytes_per_s"] > 1e8
    assert outcome.values["fp32_flop_per_s"] > 1e8
