"""Resident memory of this process in bytes: now, and its peak since a reset. Knows nothing of models.

Linux counts the peak itself (VmHWM), so nothing has to poll beside a measurement; `ru_maxrss` would never
reset and holds the imports. What the system does not tell is None with a reason, never 0.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc/self")
# Kernels before 6.17 keep the resident counter in per-CPU parts and read it without summing them.
COUNTER_SLACK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes resident now (anonymous, file-backed and shared pages apart) and the peak since the last reset.

    `reason` says why a field is None; it is None itself when every field is known.
    """

    rss_bytes: int | None
    peak_rss_bytes: int | None
    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reset_peak() -> str | None:
    """Give free memory back to the system, then set the peak to what is resident now.

    Returns None, or why the peak could not be reset: hand that to `read`, which then withholds the peak.
    Writes 5 to `/proc/self/clear_refs`, https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html.
    The memory that was given back is faulted in again by the next call, so an untimed pass should stand
    between a reset and a timed call.
    """
    gc.collect()
    _trim()
    try:
        (PROC / "clear_refs").write_text("5")
    except OSError as error:
        return f"the peak cannot be reset here: {PROC}/clear_refs: {error.strerror}"
    now = read()
    if now.rss_bytes is None or now.peak_rss_bytes is None:
        return now.reason
    # gVisor-like kernels accept the write and do nothing.
    if now.peak_rss_bytes > now.rss_bytes * 1.03 + COUNTER_SLACK_BYTES:
        return f"the peak was not reset: {now.peak_rss_bytes} bytes with {now.rss_bytes} resident"
    return None


def read(reset_failed: str | None = None) -> Memory:
    """Resident memory of this process; with `reset_failed` (what `reset_peak` returned) the peak is None."""
    try:
        status = (PROC / "status").read_text()
    except OSError as error:
        return _from_psutil(reset_failed or f"no {PROC}/status on this system: {error.strerror}")
    fields = _parse(status)
    missing = [name for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem") if name not in fields]
    reason = reset_failed or (f"{PROC}/status does not tell {', '.join(missing)}" if missing else None)
    return Memory(
        rss_bytes=fields.get("VmRSS"),
        peak_rss_bytes=None if reset_failed else fields.get("VmHWM"),
        anonymous_bytes=fields.get("RssAnon"),
        file_bytes=fields.get("RssFile"),
        shared_bytes=fields.get("RssShmem"),
        reason=reason,
    )


def _parse(status: str) -> dict[str, int]:
    """The lines of `/proc/PID/status` that are sizes, in bytes. The file says kB and means 1024 bytes."""
    sizes = {}
    for line in status.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[name] = int(words[0]) * 1024
    return sizes


def _trim() -> None:
    """glibc keeps freed memory; give it back so that a later peak does not rest on it. A no-op elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _from_psutil(reason: str) -> Memory:
    import psutil

    return Memory(psutil.Process().memory_info().rss, None, None, None, None, reason)
