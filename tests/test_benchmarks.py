"""The benchmarks' own logic; their figures are the business of whoever runs them on a quiet machine."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# common.py and gpu_children.py are no commands, and training has no peer and no target
OTHERS = {BENCHMARKS / name for name in ("common.py", "gpu_children.py", "train_demo.py", "finetune.py")}
SCRIPTS = sorted(set(BENCHMARKS.glob("*.py")) - OTHERS)


@pytest.fixture
def script(monkeypatch):
    """Import a benchmark as its command line does: with its own folder first on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(path: Path, *arguments: object, timeout_s: float = 60) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_explains_itself_when_asked_for_help(path):
    done = run(path, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_says_its_command_and_its_target(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python benchmarks/{path.name}" in docstring
    assert "Target" in docstring


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_benchmark_stands_in_the_table_of_benchmarks(path):
    assert f"benchmarks/{path.name}" in (BENCHMARKS / "README.md").read_text()


def test_a_verdict_is_met_by_the_median_and_not_by_the_best_round(script):
    verdict = script("common").verdict
    line = verdict("x", [2.0, 2.9, 9.0], least=3.0)
    assert line == "x: 2.900 (rounds 2.000 to 9.000), target at least 3: missed"
    assert verdict("x", [3.0], least=3.0).endswith(": met")
    line = verdict("x", [1.06, 1.02, 1.04], least=0.95, most=1.05)
    assert line.endswith("target at least 0.95 and at most 1.05: met")
    assert verdict("x", [1.06], least=0.95, most=1.05).endswith(": missed")
    assert verdict("x", [1.5]) == "x: 1.500 (rounds 1.500 to 1.500)"


def test_no_peer_goes_first_in_every_round(script):
    ran: list[str] = []
    peers = {name: lambda name=name: ran.append(name) or len(ran) for name in "ab"}
    assert script("common").alternate(3, peers) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert ran == ["a", "b", "b", "a", "a", "b"]


def test_a_peer_that_fails_ends_the_benchmark_with_its_words(script):
    with pytest.raises(SystemExit, match="no such thing"):
        script("common").run_script("raise SystemExit('no such thing')", threads=1)


def test_benchmark_apps_median_is_read_in_seconds_whatever_its_unit(script):
    read_median = script("latency_against_other_clocks").read_median
    lines = "[ INFO ] Latency:\n[ INFO ]    Median:        {}\n[ INFO ]    Average:       9.99 ms\n"
    assert read_median(lines.format("5.23 ms")) == pytest.approx(0.00523)
    assert read_median(lines.format("812.50 us")) == pytest.approx(0.0008125)
    assert read_median("[ ERROR ] the model is dynamic") is None


def row(
    recipe: str, status: str = "ok", cause: str | None = None, device: str = "cuda", **figures: object
) -> dict:
    values = {
        "peak_vram_bytes": 5e8,
        "gpu_utilization_ratio": 0.4,
        "power_w": 90.0,
        "energy_j": 0.2,
    } | figures
    metrics = {name: {"value": value, "reason": "NVML is silent"} for name, value in values.items()}
    return {"recipe": recipe, "device": device, "status": status, "cause": cause, "metrics": metrics}


def test_a_gpu_run_with_every_figure_has_no_problem(script):
    assert script("gpu_check").problems([row("fp32"), row("bf16")], ["fp32", "bf16"]) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (row("bf16", "failed", "it crashed"), "bf16: failed: it crashed"),
        (row("bf16", "skipped", "needs bitsandbytes"), "bf16: skipped: needs bitsandbytes"),
        (row("bf16", device="cpu"), "bf16: no row on cuda"),
        (row("bf16", energy_j=None), "bf16: no energy_j: NVML is silent"),
        (row("bf16", power_w=0.0), "bf16: power_w is 0.0, expected more than 1"),
        (row("bf16", gpu_utilization_ratio=0.0), "bf16: gpu_utilization_ratio is 0.0, expected more than 0"),
    ],
)
def test_a_gpu_run_that_lacks_something_is_told_apart(script, found, problem):
    assert script("gpu_check").problems([found], ["bf16"]) == [problem]


def test_a_recipe_that_the_gpu_is_too_old_for_is_no_problem(script):
    too_old = row("fp8", "skipped", "needs CUDA capability 8.9, found 8.0: use a newer GPU")
    assert script("gpu_check").problems([too_old], ["fp8"]) == []


@pytest.mark.parametrize("name", ["gpu_check.py", "clocks_agree.py"])
def test_without_a_gpu_what_needs_one_says_that_it_did_not_run(name):
    done = run(BENCHMARKS / name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "not run on a GPU"


def test_the_gpu_check_is_estimated_below_its_six_minutes(script):
    from qtool import recipes

    check = script("gpu_check")
    chosen = [recipe for recipe in recipes.load_all() if "cuda" in recipe.devices]
    compiled = sum(bool(recipe.compile) for recipe in chosen)
    # by hand, on 8 cores four at a time: probe, preparing, the last compiled one, measuring, profile, clocks
    four = 8 + (14 * len(chosen) + 30 * compiled) / 4 + 30 + 6 + 7 * len(chosen) + 30 + 12
    assert check.estimate_s(chosen, 8) == pytest.approx(four)
    assert four < check.BUDGET_S == 360
    assert check.estimate_s(chosen, 64) < four < check.estimate_s(chosen, 2)


def test_a_line_of_the_gpu_checks_table_has_a_cell_for_each_column(script):
    check = script("gpu_check")
    values = {
        "latency_p50_s": 0.0025,
        "peak_vram_bytes": 3e8,
        "vram_allocated_bytes": 1.2e8,
        "power_w": 301.5,
    }
    values |= {"vram_device_bytes": 3e8, "gpu_utilization_ratio": 0.42, "energy_j": 0.7}
    answer = {"status": "ok", "values": values | {"throttle_reasons": ["software power cap"]}}
    found = check.row("bf16", answer)
    found["metrics"] |= {"speedup": {"value": 1.5}, "agreement": {"value": 1.0}}
    shown = check.cells(found)
    assert len(shown) == len(check.COLUMNS)
    assert shown == ["bf16", "2.5", "1.5", "1", "120", "300", "42", "301.5", "0.7", "software power cap"]
    failed = check.cells(check.row("bf16", {"status": "failed", "error": "a | b"}))
    assert failed[:2] == ["bf16", "failed: a / b"]
    assert len(failed) == len(check.COLUMNS)


def test_the_gpu_check_compares_answers_and_times_with_the_baselines(script, tmp_path):
    numpy = pytest.importorskip("numpy")
    check = script("gpu_check")
    rows = []
    for name, p50_s, classes in (("fp32", 0.004, [0, 1, 1, 0]), ("bf16", 0.002, [0, 1, 0, 0])):
        path = tmp_path / f"{name}.npz"
        numpy.savez(path, logits=numpy.eye(2, dtype="f4")[classes])
        answer = {"status": "ok", "values": {"latency_p50_s": p50_s}}
        rows.append(check.row(name, answer, {"values": {"predictions": str(path)}}))
    check.compare(rows)
    assert rows[1]["metrics"]["speedup"]["value"] == pytest.approx(2.0)
    assert rows[1]["metrics"]["agreement"]["value"] == pytest.approx(0.75)
    assert rows[0]["metrics"]["agreement"]["value"] == 1.0


def test_the_gpu_checks_table_names_the_gpu_the_paths_and_the_problems(script):
    check = script("gpu_check")
    gpu = {"name": "a GPU", "capability": 9.0, "driver": "580.1"}
    whole = {"gpu": gpu, "versions": {"torch": "2.13.0"}, "made_at": "2026-12-01", "seconds": 200.0}
    whole |= {"rows": [check.row("bf16", {"status": "failed", "error": "it crashed"})]}
    whole |= {"paths": {"profile on cuda": None, "both clocks": "clocks: x"}, "problems": ["clocks: x"]}
    lines = check.markdown(whole).splitlines()
    assert lines[0] == "# a GPU: every CUDA path once"
    assert "- profile on cuda: ok" in lines
    assert lines[-2:] == ["1 problems", "- clocks: x"]


def test_a_child_of_the_gpu_check_that_dies_is_a_failed_row(script):
    check = script("gpu_check")
    gone = subprocess.Popen(
        [sys.executable, "-c", "print('noise'); raise SystemExit(3)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert check.finish(gone, {}) == {"status": "failed", "error": "ended with exit code 3 and no answer"}


@pytest.mark.slow
def test_the_children_of_the_gpu_check_prepare_and_measure_on_a_cpu_too(script, tmp_path):
    pytest.importorskip("transformers")
    check, common = script("gpu_check"), script("common")
    from argparse import Namespace

    from qtool import recipes

    common.write_random(tmp_path / "random")
    asked = Namespace(model=str(tmp_path / "random"), data=None, limit=16, threads=1)
    bench = common.prepare_model(asked, tmp_path, score=True)
    spec = {
        **{"model_dir": str(bench.model_dir), "data": str(bench.data), "device": "cpu", "threads": 1},
        **{
            "recipe": recipes.find("bf16")[0].model_dump(),
            "batch_size": 1,
            "score": True,
            "metrics": ["accuracy"],
        },
        **{
            "out": str(tmp_path / "bf16"),
            "artifact": str(tmp_path / "bf16"),
            "predictions": str(tmp_path / "p.npz"),
        },
    }
    prepared = check.finish(check.start("prepare", spec), spec)
    assert prepared["status"] == "ok", (tmp_path / "bf16.log").read_text()[-2000:]
    answer = check.finish(check.start("measure", spec), spec)
    assert answer["status"] == "ok", (tmp_path / "bf16.log").read_text()[-2000:]
    found = check.row("bf16", answer, prepared)
    assert found["metrics"]["latency_p50_s"]["value"] > 0
    assert found["metrics"]["peak_vram_bytes"] == {"value": None, "reason": "not measured on a CPU"}


def test_both_clocks_are_read_around_the_same_calls(script):
    clocks = script("clocks_agree")
    now = [0.0]

    class Event:
        """CUDA's event on a device whose calls take 2 ms each."""

        def record(self) -> None:
            self.at_ms = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, after: Event) -> float:
            return after.at_ms - self.at_ms

    def predict(batch: int) -> None:
        now[0] += 2.0

    by_host, by_events = clocks.both(predict, [1, 2], Event)
    assert len(by_host) == len(by_events) == 2 * clocks.PASSES
    assert by_events == [0.002] * 6


@pytest.mark.slow
def test_the_stand_in_for_the_demo_takes_every_text_of_its_table(script, tmp_path):
    pytest.importorskip("transformers")
    script("common").write_random(tmp_path / "model")
    from qtool import demo, models

    checked = models.check(tmp_path / "model", None)
    words = set(demo.EVAL_TABLE.read_text("utf-8").lower().split())
    assert checked.id2label == {0: "negative", 1: "positive"}
    assert checked.vocabulary == len(words) + 5


@pytest.mark.slow
def test_memory_of_a_known_amount_is_read_within_three_per_cent():
    done = run(BENCHMARKS / "memory_known_amount.py", 128)
    if "does not tell the peak" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("target at most 0.03: met")


def test_only_the_prediction_from_the_run_is_judged_against_traffic(script, monkeypatch, tmp_path, capsys):
    from argparse import Namespace

    from qtool.queueing import Policy
    from qtool.service_times import ServiceTimes

    traffic = script("load_predicted_and_real")
    ratios = {"predicted": 0.5, "predicted_own": 1.0, "predicted_served": 1.0}
    driven = {name: {"p95_s": {"value": 0.01}} for name in ratios}
    driven |= {f"{name}_over_real": {"p95_s": value} for name, value in ratios.items()}
    driven |= {"real": {"p95_s": 0.02}, "real_error_ratio": 0.0, "requests": 200, "late_p50_s": 0.0}
    driven |= {"own_over_run": {"1": 1.0}, "served_over_own": 1.0, "contended": False}
    gathered = Namespace(times={"fp32": ServiceTimes({1: {1: [0.01]}})})
    monkeypatch.setattr(traffic.load, "gather", lambda *given: gathered)
    monkeypatch.setattr(traffic.real_load, "drive", lambda *given: driven)
    options = Namespace(recipe="fp32", rounds=2, seconds=30)
    traffic.compare(options, tmp_path, Policy(1, 0.0), 0.6)
    judged = [line for line in capsys.readouterr().out.splitlines() if "target" in line]
    assert len(judged) == 1
    assert "predicted over real p95: 0.500" in judged[0]
    assert judged[0].endswith("missed")
