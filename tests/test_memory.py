"""Peak memory against a child process that allocates a known amount."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qtool import memory

MB = 10**6
ALLOCATE = """
import json
from qtool import memory
warm = b"x" * 1000
reasons = [memory.reset_peak()]
before = memory.read(reasons[0])
block = bytearray(b"x") * 300_000_000
during = memory.read(reasons[0])
del block
after_free = memory.read(reasons[0])
reasons.append(memory.reset_peak())
small = bytearray(b"x") * 50_000_000
last = memory.read(reasons[1])
found = dict(before=before, during=during, after_free=after_free, last=last)
print(json.dumps({"reasons": reasons} | {name: part.to_dict() for name, part in found.items()}))
"""

needs_reset = pytest.mark.skipif(
    memory.reset_peak() is not None, reason="this system cannot reset a process' peak memory"
)


@pytest.fixture(scope="module")
def child() -> dict:
    done = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_reset
def test_the_peak_grows_by_what_was_allocated_within_three_per_cent(child: dict) -> None:
    assert child["reasons"] == [None, None]
    growth = child["during"]["peak_rss_bytes"] - child["before"]["rss_bytes"]
    assert growth == pytest.approx(300 * MB, rel=0.03)


@needs_reset
def test_the_peak_outlives_the_memory_that_made_it(child: dict) -> None:
    assert child["after_free"]["rss_bytes"] < child["before"]["rss_bytes"] + 30 * MB
    # the kernel keeps its counters in per-CPU parts: two readings of one peak differ by some pages
    assert child["after_free"]["peak_rss_bytes"] == pytest.approx(child["during"]["peak_rss_bytes"], abs=MB)


@needs_reset
def test_a_reset_peak_does_not_remember_what_was_freed_before(child: dict) -> None:
    growth = child["last"]["peak_rss_bytes"] - child["before"]["rss_bytes"]
    assert growth == pytest.approx(50 * MB, rel=0.1)


@needs_reset
def test_python_memory_is_counted_as_anonymous_and_the_parts_make_the_whole(child: dict) -> None:
    grown = child["during"]["anonymous_bytes"] - child["before"]["anonymous_bytes"]
    assert grown == pytest.approx(300 * MB, rel=0.03)
    parts = sum(child["during"][f"{name}_bytes"] for name in ("anonymous", "file", "shared"))
    assert parts == pytest.approx(child["during"]["rss_bytes"], rel=0.01)


STATUS = """Name:\tpython
VmHWM:\t    2048 kB
VmRSS:\t    1024 kB
RssAnon:\t     600 kB
RssFile:\t     400 kB
RssShmem:\t      24 kB
Threads:\t1
"""


def test_kilobytes_in_proc_are_1024_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert memory.read() == memory.Memory(1048576, 2097152, 614400, 409600, 24576, None)


def test_a_failed_reset_withholds_the_peak_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(memory, "PROC", tmp_path)
    found = memory.read("no clear_refs")
    assert (found.peak_rss_bytes, found.rss_bytes, found.reason) == (None, 1048576, "no clear_refs")


def test_a_forbidden_clear_refs_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "clear_refs").mkdir()
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert "cannot be reset" in (memory.reset_peak() or "")


def test_a_kernel_that_accepts_the_reset_and_does_nothing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text(STATUS.replace("2048", "900000"))
    (tmp_path / "clear_refs").write_text("")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert "was not reset" in (memory.reset_peak() or "")


def test_without_proc_the_resident_size_is_known_and_the_rest_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path / "nothing")
    found = memory.read()
    assert found.rss_bytes is not None
    assert found.rss_bytes > MB
    assert found.peak_rss_bytes is None
    assert "no " in (found.reason or "")
    assert memory.reset_peak() is not None
