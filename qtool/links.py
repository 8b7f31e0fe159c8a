"""What the ways to a computing device do at most: a copy to the GPU, and reading a mapped file.

The ceilings of offloaded weights: they come over one of these at every pass. Knows nothing of models.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtool import host
from qtool.fastest import best_s

FILE_BYTES = 64 * 2**20
COPY_BYTES = 256 * 2**20
Clock = Callable[[], float]


def take(folder: Path, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Bytes a second of every link, None with a NAME_reason where there is none; `folder` is where weights lie."""
    return disk(folder, clock) | device(clock)


def disk(folder: Path, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Of a mapped file in `folder`: `disk_read_bytes_per_s` of one that the page cache was told to forget
    (posix_fadvise, https://man7.org/linux/man-pages/man2/posix_fadvise.2.html), and
    `page_cache_read_bytes_per_s` of one that it holds.
    """
    names = ("disk_read_bytes_per_s", "page_cache_read_bytes_per_s")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            block = os.urandom(2**20)  # a file system may compress or leave out what repeats or is zero
            for _ in range(FILE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            found: dict[str, Any] = {names[0]: None}
            if reason := _forget(file.fileno()):
                found[f"{names[0]}_reason"] = reason
            else:
                found[names[0]] = read_rate(file.fileno(), FILE_BYTES, _forget, clock)
            found[names[1]] = read_rate(file.fileno(), FILE_BYTES, lambda number: None, clock)
    except OSError as error:
        return _without(list(names), f"no file to read: {error.strerror}")
    return found


def read_rate(file: int, size: int, prepare: Callable[[int], object], clock: Clock) -> float:
    """Bytes a second of the best reading of all `size` bytes through a new mapping, `prepare` before each."""
    import numpy as np

    def read() -> None:
        with mmap.mmap(file, size, access=mmap.ACCESS_READ) as mapped:
            np.frombuffer(mapped, np.uint64).max()

    return size / best_s(read, clock, lambda: prepare(file))


def _forget(file: int) -> str | None:
    """Drop a file's pages from the page cache; None, or why it is not known to be dropped."""
    if not hasattr(os, "posix_fadvise"):
        return "this system has no posix_fadvise"
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        # answers at once, with an error where the page has to be fetched
        os.preadv(file, [bytearray(4096)], FILE_BYTES // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return None
    except (OSError, AttributeError):
        return "this file system does not tell whether a file is in the page cache"
    return "this file system keeps its files in memory"


def device(clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Of a copy from host memory to the GPU, out of `pinned` and out of `pageable` memory: Accelerate's is pageable.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers
    """
    names = [f"{kind}_copy_bytes_per_s" for kind in ("pinned", "pageable")]
    if not host.cuda_available():
        return _without(names, "no CUDA GPU is visible")
    try:
        import torch
    except ImportError:
        return _without(names, "needs torch: pip install 'qtool[pytorch]'")
    if not torch.cuda.is_available():
        return _without(names, "this torch does not use the GPU")
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    sources = (pageable.pin_memory(), pageable)
    rates = (copy_rate(source, target, torch.cuda.synchronize, clock) for source in sources)
    return dict(zip(names, rates, strict=True))


def _without(names: list[str], reason: str) -> dict[str, Any]:
    return dict.fromkeys(names) | {f"{name}_reason": reason for name in names}


def copy_rate(source: Any, target: Any, wait: Callable[[], object], clock: Clock) -> float:
    """Bytes a second that cross from tensor `source` to `target`, each byte once; `wait` ends when they have."""

    def copy() -> None:
        target.copy_(source)
        wait()

    copy()
    return source.nbytes / best_s(copy, clock)
