"""Peak memory as qtool reads it, against processes that allocate a known amount, touch it and free it.

    python benchmarks/memory_known_amount.py [MIB ...]

Target: the largest relative error at most 0.03. The peak is read after the memory was given back, so only a
peak counted by the kernel can be right.
"""

from __future__ import annotations

import argparse

import common

TARGET_RATIO = 0.03

SCRIPT = """
import json, mmap, sys
from qtool import memory
size = int(sys.argv[1]) * 2**20
failed = memory.reset_peak()
before = memory.read(failed)
block = mmap.mmap(-1, size)
for page in range(0, size, mmap.PAGESIZE):
    block[page] = 1
held = memory.read(failed)
block.close()
after = memory.read(failed)
print(json.dumps({
    "reason": after.reason,
    "peak_bytes": None if after.reason else after.peak_rss_bytes - before.rss_bytes,
    "held_bytes": None if after.reason else held.rss_bytes - before.rss_bytes,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("mib", metavar="MIB", type=common.positive, nargs="*", default=[64, 256, 1024], help="amounts in MiB")
    worst = 0.0
    for mib in parser.parse_args().mib:
        found = common.run_script(SCRIPT, mib, threads=1)
        if found["reason"]:
            raise SystemExit(f"this system does not tell the peak: {found['reason']}")
        errors = {name: found[f"{name}_bytes"] / (mib * 2**20) - 1 for name in ("peak", "held")}
        print(f"{mib} MiB: peak off by {errors['peak']:+.4f}, while held {errors['held']:+.4f}", flush=True)
        worst = max(worst, *map(abs, errors.values()))
    print(common.verdict("largest relative error", [worst], most=TARGET_RATIO))


if __name__ == "__main__":
    main()
