"""The links' ceilings, with a clock made up here: bytes are counted by hand."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from qtool import host, links


def clock(took_s: Iterable[float]) -> Callable[[], float]:
    edges = itertools.chain.from_iterable((0.0, seconds) for seconds in took_s)
    return lambda: next(edges)


def test_a_mapped_file_counts_each_byte_once_and_is_made_ready_before_each_reading(tmp_path: Path) -> None:
    place, ready = tmp_path / "file", []
    place.write_bytes(bytes(8000))
    with place.open("rb") as file:
        rate = links.read_rate(file.fileno(), 8000, ready.append, clock([0.5, 0.25, 0.27, 0.3]))
    assert rate == 8000 / 0.25
    assert len(ready) == 3  # three readings take a second: enough


def test_a_copy_to_the_device_counts_each_byte_once_and_ends_when_the_device_has() -> None:
    seen: list[str] = []
    source = SimpleNamespace(nbytes=1000)
    target = SimpleNamespace(copy_=lambda source: seen.append("copy"))
    rate = links.copy_rate(source, target, lambda: seen.append("wait"), clock([2.0, 0.5]))
    assert rate == 1000 / 0.5
    assert seen == ["copy", "wait"] * 3  # one before the clock, and two readings of it


def test_disk_and_page_cache_are_told_apart_or_one_of_them_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "FILE_BYTES", 2 * 2**20)
    found = links.disk(tmp_path)
    assert found["page_cache_read_bytes_per_s"] > 0
    assert (found["disk_read_bytes_per_s"] or 0) > 0 or found["disk_read_bytes_per_s_reason"]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "preadv", lambda *about: 4096)  # a page that is still there
    found = links.disk(tmp_path)
    assert found["disk_read_bytes_per_s"] is None
    assert "in memory" in found["disk_read_bytes_per_s_reason"]


def test_a_place_that_cannot_be_written_to_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = links.disk(tmp_path / "file")
    assert found["disk_read_bytes_per_s"] is None
    assert "no file to read" in found["page_cache_read_bytes_per_s_reason"]


def test_without_a_gpu_its_links_are_null_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cuda_available", lambda: False)
    found = links.device()
    for name in ("pinned_copy_bytes_per_s", "pageable_copy_bytes_per_s"):
        assert found[name] is None
        assert "no CUDA GPU" in found[f"{name}_reason"]


@pytest.mark.gpu
def test_a_copy_from_pinned_memory_is_not_slower_than_half_of_one_from_pageable() -> None:
    if not host.cuda_available():
        pytest.skip("no CUDA device")
    found = links.device()
    if found["pinned_copy_bytes_per_s"] is None:
        pytest.skip(found["pinned_copy_bytes_per_s_reason"])
    assert 1e8 < found["pageable_copy_bytes_per_s"] < 2 * found["pinned_copy_bytes_per_s"] < 2e12
