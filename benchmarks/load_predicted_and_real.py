"""p95 that `qtool load` predicts from a run against the p95 of the real artifact under the same arrivals.

    python benchmarks/load_predicted_and_real.py [MODEL] [--data DIR] [--recipe NAME] [--run DIR] [--rounds 3]

Target: the ratio between 0.85 and 1.15 at loads of 0.3, 0.6 and 0.8, without batching and with it (max-batch 8,
max-wait 5 ms). Every round is a fresh process with arrivals of its own, and the prediction comes from the run alone.
Printed beside it, without a verdict, to tell where an error comes from: the same ratio when the driven process's own
closed-loop calls are the prediction's service times, which leaves out that processes differ; and when they are what
its calls took while they were served, which leaves only the queue to predict.
Without `--run` it sweeps MODEL first, at batch sizes 1 and 8.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import common

from qtool import capacity, load, real_load
from qtool.arrivals import Pattern
from qtool.load import Question
from qtool.queueing import Policy

LOADS = (0.3, 0.6, 0.8)
POLICIES = (Policy(1, 0.0), Policy(8, 0.005))
LOW, HIGH = 0.85, 1.15


def main() -> None:
    made = common.parser(__doc__, rounds=3)
    add = made.add_argument
    add("--recipe", metavar="NAME", default="openvino-int8", help="default openvino-int8")
    add(
        "--run",
        metavar="DIR",
        type=Path,
        help="a run of this machine with batch sizes 1 and 8; default swept now",
    )
    add("--seconds", metavar="S", type=common.positive, default=30, help="of traffic; default 30")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or sweep(options, Path(folder) / "run")
        for policy in POLICIES:
            for share in LOADS:
                compare(options, run, policy, share)


def sweep(options: argparse.Namespace, out: Path) -> Path:
    """A run of the recipe at both batch sizes. Raises SystemExit with its error."""
    command = [
        sys.executable,
        "-m",
        "qtool.cli",
        "sweep",
        options.model,
        "--recipe",
        options.recipe,
        "--out",
        out,
    ]
    command += ["--batch-size", 1, "--batch-size", 8, "--threads", options.threads]
    command += ["--task", "sst2", "--data", options.data] if options.data else []
    command += ["--limit", options.limit] if options.limit else []
    done = common.run_apart([str(word) for word in command], dict(os.environ))
    if done.returncode:
        raise SystemExit(f"the sweep ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return out


def compare(options: argparse.Namespace, run: Path, policy: Policy, share: float) -> None:
    """Drive one policy at one load, once a round, and print the ratios."""
    gathered = load.gather(run, [options.recipe], None)
    most_per_s = 1 / capacity.load(gathered.times[options.recipe], 1.0, policy)
    found = []
    for seed in range(options.rounds):
        question = Question(
            share * most_per_s,
            Pattern("poisson"),
            1.0,
            policy.max_batch,
            policy.max_wait_s,
            (options.recipe,),
            None,
            seed,
        )
        driven = real_load.drive(run, question, max(options.seconds, 300 / question.rate_per_s))
        found.append(driven)
        ms = {key: 1e3 * driven[key]["p95_s"]["value"] for key in ("predicted", "predicted_own")}
        print(
            f"  {question.rate_per_s:.1f}/s, {driven['requests']} requests: real p95 {1e3 * driven['real']['p95_s']:.2f} ms"
            f" (+-{100 * driven['real_error_ratio']:.0f} %), predicted {ms['predicted']:.2f},"
            f" own {ms['predicted_own']:.2f}; its calls {driven['own_over_run']['1']:.2f} of the run's, under load"
            f" {driven['served_over_own']:.2f} of its own; late {1e3 * driven['late_p50_s']:.2f} ms"
            f"{'; contended' if driven['contended'] else ''}",
            flush=True,
        )
    what = f"{options.recipe}, max-batch {policy.max_batch}, load {share:g}: predicted over real p95"
    served = [each["predicted_served_over_real"]["p95_s"] for each in found]
    # fitted to the very drive that it is set beside: it tells where an error comes from, and passes nothing
    print(common.verdict(f"{what}, its calls as served (the queue alone)", served), flush=True)
    own = [each["predicted_own_over_real"]["p95_s"] for each in found]
    print(common.verdict(f"{what}, its own calls", own), flush=True)
    ratios = [each["predicted_over_real"]["p95_s"] for each in found]
    print(common.verdict(what, ratios, least=LOW, most=HIGH), flush=True)


if __name__ == "__main__":
    main()
