"""A sweep that is killed or interrupted loses nothing that was finished and leaves no process behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import lines_of, make_checkpoint, need, write_table

pytestmark = pytest.mark.slow
LINES = 2 + 2 + 1 + 2 * 2  # builds, scores, the harness, and two rounds of two recipes
GONE_WITHIN_S = 10.0


class Sweep:
    """A sweep as a user starts it, in a process of its own, with eyes on its lines and its children."""

    def __init__(self, arguments: list[str], out: Path, env: dict[str, str], *flags: str) -> None:
        self.out = out
        self.log = out.parent / f"{out.name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "qtool.cli", *arguments, "--out", str(out), *flags],
                stdout=log, stderr=log, env=env,
                # a shell starts its background jobs with SIGINT ignored, and a test run may be one
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def text(self) -> str:
        path = self.out / "results.jsonl"
        return path.read_text() if path.exists() else ""

    def worker(self) -> tuple[int, str] | None:
        """The process id and stage of the child at work."""
        import psutil

        try:
            for child in psutil.Process(self.process.pid).children():
                command = child.cmdline()
                if "qtool.worker" in command:
                    return child.pid, command[command.index("qtool.worker") + 1]
        except psutil.NoSuchProcess:
            return None
        return None

    def until(self, true: Callable[[], object]) -> None:
        """Wait for something of the sweep; fails with its log when it ended first or takes minutes."""
        deadline = time.monotonic() + 240
        while not true():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def group(self) -> list[int]:
        """Every process of the sweep: the parent, its child and whatever that started."""
        import psutil

        parent = psutil.Process(self.process.pid)
        return [parent.pid, *(child.pid for child in parent.children(recursive=True))]

    def end(self, number: signal.Signals) -> int:
        """Signal the parent; its exit code. Nothing of it may be left a few seconds later."""
        mine = self.group()
        os.kill(self.process.pid, number)
        code = self.process.wait(60)
        deadline = time.monotonic() + GONE_WITHIN_S
        while left := [pid for pid in mine if _alive(pid)] + _that_name(self.out):
            assert time.monotonic() < deadline, f"processes {left} outlive their sweep"
            time.sleep(0.05)
        return code

    def finish(self) -> int:
        return self.process.wait(400)


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _that_name(out: Path) -> list[int]:
    import psutil

    return [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if str(out) in (p.info["cmdline"] or []) and _alive(p.pid)
    ]


def _rows(run: Path) -> list[tuple]:
    rows = json.loads((run / "summary.json").read_text())["rows"]
    return [(row["recipe"], row["device"], row["batch_size"], row["status"]) for row in rows]


def _logits(run: Path, recipe: str):
    import numpy as np

    with np.load(run / "predictions" / f"{recipe}-cpu.npz") as file:
        return file["logits"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function (folder name, flags) -> Sweep of the tiny model: two recipes, two rounds, one thread."""
    need("torch", "transformers", "evaluate", "sklearn", "accelerate", "psutil")
    root = tmp_path_factory.mktemp("kill")
    model, table = make_checkpoint(root / "model"), write_table(root / "films.csv")
    arguments = [
        "sweep",
        str(model),
        "--task",
        "text",
        "--data",
        str(table),
        "--text",
        "text",
        "--label",
        "label",
    ]
    arguments += ["--recipe", "fp32", "--recipe", "bf16", "--rounds", "2", "--threads", "1"]
    env = {**os.environ, "QTOOL_CACHE": str(root / "cache"), "HF_HUB_OFFLINE": "1"}
    sweeps: list[Sweep] = []

    def begin(name: str, *flags: str) -> Sweep:
        sweeps.append(Sweep(arguments, root / name, env, *flags))
        return sweeps[-1]

    yield begin
    for sweep in sweeps:
        if sweep.process.poll() is None:
            sweep.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(start):
    """A sweep that nobody disturbs, at work beside the others; `finish` waits for it."""
    return start("undisturbed")


def test_a_killed_and_interrupted_sweep_ends_as_an_undisturbed_one(start, undisturbed, capsys):
    """One run folder dies every death in turn: each then costs one restart and no sweep of its own."""
    import numpy as np

    seed = random.randrange(10**6)
    dice = random.Random(seed)
    with capsys.disabled():
        print(f"\nkilled at moments of seed {seed}")

    # SIGKILL to the parent, anywhere between the first line and the first measurement
    sweep = start("disturbed")
    enough = dice.randint(1, 5)
    sweep.until(lambda: sweep.text().count("\n") >= enough and sweep.worker())
    time.sleep(dice.uniform(0, 1))
    sweep.until(sweep.worker)
    assert sweep.end(signal.SIGKILL) == -signal.SIGKILL
    before = sweep.text()
    whole = before[: before.rfind("\n") + 1]

    # SIGKILL to a child in mid-measurement: the sweep goes on and the row says what happened
    sweep = start("disturbed", "--resume")
    sweep.until(lambda: (sweep.worker() or (0, ""))[1] == "measure")
    time.sleep(dice.uniform(0, 1))
    pid, stage = sweep.worker() or (0, "")
    assert stage == "measure"
    os.kill(pid, signal.SIGKILL)
    sweep.until(lambda: '"status":"failed"' in sweep.text().replace(" ", ""))
    assert sweep.text().startswith(whole)
    failed = [line for line in lines_of(sweep.out) if line["status"] == "failed"]
    assert [(line["stage"], line["error"]) for line in failed] == [("measure", "killed by SIGKILL")]
    assert "--resume" in failed[0]["next_step"]
    whole = sweep.text()

    # Ctrl-C, then the SIGTERM of a job that is cancelled: what finished is kept and reported
    sweep.until(sweep.worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        assert sweep.end(number) == 130, sweep.log.read_text()
        assert sweep.text().startswith(whole)
        assert (sweep.out / "report.md").is_file()
        assert {row[0] for row in _rows(sweep.out)} == {"fp32", "bf16"}
        whole = sweep.text()
        sweep = start("disturbed", "--resume")
        sweep.until(lambda: (sweep.worker() or (0, ""))[1] == "measure")  # noqa: B023 (called at once)

    assert sweep.finish() == 0, sweep.log.read_text()
    assert sweep.text().startswith(whole)
    assert undisturbed.finish() == 0, undisturbed.log.read_text()
    assert _rows(sweep.out) == _rows(undisturbed.out) == [("fp32", "cpu", 1, "ok"), ("bf16", "cpu", 1, "ok")]
    for recipe in ("fp32", "bf16"):
        assert np.array_equal(_logits(sweep.out, recipe), _logits(undisturbed.out, recipe))
    done = [line for line in lines_of(sweep.out) if line["status"] == "ok"]
    assert len(done) == len(lines_of(undisturbed.out)) == LINES  # nothing that was whole was done twice
