"""What this machine does at most: bytes a second of a copy, operations a second of an fp32 matrix product.

Runs in a child whose threads `isolate` has set before numpy is imported. Knows nothing of models.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qtool import host, links, procfs
from qtool.core import cache_dir
from qtool.fastest import best_s

SIDE = 2048
"""Rows and columns of the factors: 50 MB in all, large enough for a library's blocking to pay."""
LEAST_BYTES, MOST_BYTES = 64 * 2**20, 2 * 2**30


def take(threads: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Both ceilings on `threads` threads, the size of the copied array, and those of `links`, in a few seconds.

    The two axes of a roofline: Williams et al. 2009, "Roofline", CACM 52(4):65. `fp32_flop_per_s` is what
    numpy's BLAS reaches; a library with better kernels, or with narrower numbers, can exceed it.
    """
    size = array_bytes()
    return {
        "copy_bytes_per_s": copy_rate(threads, size, clock),
        "fp32_flop_per_s": product_rate(SIDE, clock),
        "threads": threads,
        "copy_array_bytes": size,
        **links.take(cache_dir(), clock),
    }


def copy_rate(threads: int, size: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second, read plus written, of the best copy of `size` bytes, a slice for each thread.

    The copy of STREAM (McCalpin 1995, "Memory bandwidth and machine balance in current high performance
    computers", https://www.cs.virginia.edu/stream/), counted as there: what a cache reads before it writes is
    not counted. One thread alone does not saturate the memory of most machines.
    """
    import numpy as np

    count = size // 8
    source, target = np.empty(count), np.empty(count)
    edges = [count * i // threads for i in range(threads + 1)]
    slices = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    with ThreadPoolExecutor(threads) as pool:

        def fill(part: slice) -> None:
            # Written by the thread that will copy it, so that the pages exist and lie near that thread.
            source[part], target[part] = 1.0, 0.0

        def copy(part: slice) -> None:
            np.copyto(target[part], source[part])  # without the interpreter's lock

        list(pool.map(fill, slices))
        took_s = best_s(lambda: list(pool.map(copy, slices)), clock)
    return 2 * 8 * count / took_s


def product_rate(side: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Operations a second of the best product of two fp32 matrices (side, side): 2 side^3 each.

    The number of threads is BLAS' own, from the environment that numpy was imported in.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    left, right = (rng.random((side, side), np.float32) for _ in range(2))
    out = np.empty((side, side), np.float32)
    took_s = best_s(lambda: np.matmul(left, right, out=out), clock)
    return 2 * side**3 / took_s


def array_bytes(root: Path = procfs.ROOT) -> int:
    """Size of the array to copy: four times the largest cache, as STREAM asks, within an eighth of free memory.

    A cache that the system does not tell counts as 32 MiB.
    """
    found = [_cache_bytes(path) for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    wanted = 4 * max(found, default=32 * 2**20)
    return min(max(wanted, LEAST_BYTES), MOST_BYTES, max(LEAST_BYTES, host.available_bytes() // 8))


def _cache_bytes(path: Path) -> int:
    """`/sys` writes 307200K or 32M."""
    written = procfs.text(path) or "0"
    return int(written.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(written[-1], 1)
