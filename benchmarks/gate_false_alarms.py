"""How often a gate cries wolf, and what it misses: qtool's verdicts beside fixed limits on the same runs.

    python benchmarks/gate_false_alarms.py [MODEL] [--real N]

Target: false alarms in at most 5 % of the simulated runs and in none of the real ones; faults never pass.
Simulated: 200 runs of five rounds and 872 examples in which nothing is wrong (5 % of the answers flip, as many
gained as lost on average; the paired log ratios spread by 5 %), then with a 30 % slowdown, then with three points of accuracy lost. The
fixed limits are what CI scripts do: fail when the score is 1 % lower, or the p50 10 % higher.

`--real N` sweeps MODEL against itself N times (the baseline under a second name), half of them beside a process
that loads a core; then once with a runtime that sleeps for 30 % of each call and once with weights that were
corrupted, both as plug-ins from outside the package.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from qtool import gate, policy, recipes, summary
from tests.run_folder import Made, write_run

RUNS, ROUNDS, EXAMPLES = 200, 5, 872
POLICY = "all: {max_drop: 1%, min_speedup: 1.0}"
# what is the baseline itself can never be shown to be as fast: the real runs leave it a tenth
ITSELF = "all: {max_drop: 1%, min_speedup: 0.9}"
FIXED_DROP, FIXED_SLOWDOWN = 0.01, 1.10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--real", type=int, default=0, metavar="N")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        simulate(Path(folder))
        if options.real:
            real(options.model, options.real, Path(folder))


def simulate(folder: Path) -> None:
    print(
        f"{RUNS} simulated runs each; verdicts of qtool (pass / fail / inconclusive) and what fixed limits fail"
    )
    for name, slowdown, loss in (
        ("nothing is wrong", 1.0, 0.0),
        ("30 % slower", 1.3, 0.0),
        ("3 points lost", 1.0, 0.03),
    ):
        ours: Counter[str] = Counter()
        fixed: Counter[str] = Counter()
        for seed in range(RUNS):
            run = simulated(folder / f"{slowdown}-{loss}-{seed}", seed, slowdown, loss)
            ours[judge(run)["verdict"]] += 1
            fixed.update(fixed_limits(run))
        told = " / ".join(str(ours[verdict]) for verdict in ("pass", "fail", "inconclusive"))
        print(
            f"{name:18} qtool {told:16} fixed 1 % of the score: {fixed['score'] / RUNS:.1%} of runs,"
            f" fixed 10 % of the p50: {fixed['p50'] / RUNS:.1%}",
            flush=True,
        )


def simulated(folder: Path, seed: int, slowdown: float, loss: float, spread: float = 0.05) -> Path:
    """A run folder with `fp32` and `again`; machine noise is common to a round, process noise is not."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, EXAMPLES)
    base = np.where(rng.random(EXAMPLES) < 0.112, 1 - labels, labels)
    # of the wrong ones more than of the right ones, so that as many are gained as lost on average
    flips = rng.random(EXAMPLES) < np.where(base == labels, 0.025 / 0.888, 0.025 / 0.112)
    flipped = np.where(flips, 1 - base, base)
    told = np.where((flipped == labels) & (rng.random(EXAMPLES) < loss / 0.888), 1 - labels, flipped)
    machine = rng.normal(0, 0.2, ROUNDS)
    times = 0.01 * np.exp(machine + rng.normal(0, spread / np.sqrt(2), (2, ROUNDS)))
    made = {
        name: Made(
            tuple(row.tolist()),
            answers.tolist(),
            peak_bytes=(400e6,) * ROUNDS,
            metrics={"accuracy": float(np.mean(answers == labels))},
        )
        for name, row, answers in (("fp32", times[0], base), ("again", slowdown * times[1], told))
    }
    return write_run(folder, made, labels=labels.tolist())


def judge(run: Path, text: str = POLICY) -> dict[str, Any]:
    path = run / "qtool.yaml"
    path.write_text(text)
    return gate.gate(run, policy.read(path))


def fixed_limits(run: Path) -> list[str]:
    """Which of the two fixed limits the run breaks."""
    rows = {row["recipe"]: row["metrics"] for row in summary.summarise(run)["rows"]}
    base, own = rows["fp32"], rows["again"]
    broken = []
    if own["accuracy"]["value"] < (1 - FIXED_DROP) * base["accuracy"]["value"]:
        broken.append("score")
    if own["latency_p50_s"]["value"] > FIXED_SLOWDOWN * base["latency_p50_s"]["value"]:
        broken.append("p50")
    return broken


def real(model: str, count: int, folder: Path) -> None:
    fp32 = recipes.find("fp32")[0].model_dump(exclude_defaults=True)
    again = folder / "again.yaml"
    again.write_text(yaml.safe_dump(fp32 | {"name": "again"}))
    verdicts: Counter[str] = Counter()
    for number in range(count):
        busy = number % 2 == 1
        load = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            run = sweep(model, again, folder / f"real-{number}", os.environ)
        finally:
            if load:
                load.kill()
        found = judge(run, ITSELF)
        verdicts[found["verdict"]] += 1
        print(f"real {number + 1}/{count}{' beside a busy core' if busy else ''}: {tell(found)}", flush=True)
    print(f"{count} real runs of a model against itself: {dict(verdicts)}; fail must be 0", flush=True)
    plugins = outside(folder / "plugins")
    paths = [str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
    for name, change in (
        ("slow", {"method": "slow_cast", "runtime": "slow_pytorch"}),
        ("corrupt", {"method": "corrupt_cast", "expect": {}}),
    ):
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(fp32 | {"name": name} | change))
        found = judge(sweep(model, file, folder / name, environment))
        print(f"{name}: {tell(found)}; pass must not be", flush=True)


def sweep(model: str, recipe: Path, out: Path, environment: Any) -> Path:
    # one thread: where every core has one, a busy core makes them wait for each other and a run takes ten minutes
    flags = ["--recipe", str(recipe), "--rounds", str(ROUNDS), "--threads", "1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "qtool.cli", "sweep", model, *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the sweep failed: {done.stderr[-500:]}")
    return out


def tell(found: dict[str, Any]) -> str:
    parts = [
        f"{c['limit_name']} {c['verdict']} ({c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]"
        + (f", {c['why']})" if c["why"] else ")")
        for c in found["checks"]
    ]
    return f"{found['verdict']}: " + "; ".join(parts)


def outside(folder: Path) -> Path:
    """A package outside qtool with a method and a runtime, announced by entry points as an installed one is."""
    folder.mkdir()
    (folder / "slow_pytorch.py").write_text(
        "import time\n"
        "from qtool.runtimes import pytorch\n"
        "PACKAGES, Options, Compile, open_model = pytorch.PACKAGES, pytorch.Options, pytorch.Compile, pytorch.open_model\n"
        "def wrap(*given):\n"
        "    loaded = pytorch.wrap(*given)\n"
        "    inner = loaded.predict\n"
        "    def predict(batch):\n"
        "        start = time.perf_counter()\n"
        "        answer = inner(batch)\n"
        "        until = start + 1.3 * (time.perf_counter() - start)\n"
        "        while time.perf_counter() < until:\n"
        "            pass\n"
        "        return answer\n"
        "    loaded.predict = predict\n"
        "    return loaded\n"
    )
    (folder / "slow_cast.py").write_text(
        "from qtool.methods import torch_cast\n"
        "PACKAGES, Options, RUNTIME = torch_cast.PACKAGES, torch_cast.Options, 'slow_pytorch'\n"
        "build = torch_cast.build\n"
    )
    (folder / "corrupt_cast.py").write_text(
        "import torch\n"
        "from qtool.methods import torch_cast\n"
        "PACKAGES, Options = torch_cast.PACKAGES, torch_cast.Options\n"
        "def build(job):\n"
        "    model = torch_cast.build(job)\n"
        "    torch.manual_seed(0)\n"
        "    with torch.no_grad():\n"
        "        for name, weight in model.named_parameters():\n"
        "            if 'query.weight' in name or 'value.weight' in name:\n"
        "                weight += 0.75 * weight.std() * torch.randn_like(weight)\n"
        "    model.save_pretrained(job.out)\n"
        "    return model\n"
    )
    info = folder / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[qtool.methods]\ncorrupt_cast = corrupt_cast\nslow_cast = slow_cast\n[qtool.runtimes]\nslow_pytorch = slow_pytorch\n"
    )
    return folder


if __name__ == "__main__":
    main()
