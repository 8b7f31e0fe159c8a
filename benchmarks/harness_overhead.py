"""What the harness itself adds to every timed call: the real harness child around a model that does nothing.

    python benchmarks/harness_overhead.py [MODEL]

Target: under 50 microseconds a call. After the null system of MLPerf LoadGen.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import common

from qtool import stats

TARGET_US = 50.0


def main() -> None:
    options = common.parser(__doc__, rounds=3).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = common.prepare_model(options, Path(folder))
        medians_us = []
        for number in range(1, options.rounds + 1):
            samples_s = bench.child("harness", "fp32")["samples"]["latency_s"]
            p50_us, p95_us = (stats.percentile(samples_s, share) * 1e6 for share in (0.5, 0.95))
            print(f"process {number}: p50 {p50_us:.2f} us, p95 {p95_us:.2f} us", flush=True)
            medians_us.append(p50_us)
    print(common.verdict("microseconds a call", medians_us, most=TARGET_US))


if __name__ == "__main__":
    main()
