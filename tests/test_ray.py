"""Sweeps over a real local Ray cluster of several nodes: equal to a local sweep, and whole though nodes are lost."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from qtool.artifacts import is_whole
from qtool.core import cache_dir
from tests.conftest import lines_of, need, qtool

pytestmark = pytest.mark.slow
INPUTS = ("--task", "text", "--text", "text", "--label", "label", "--limit", "20", "--threads", "1")
HOUSE_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture
def cluster(monkeypatch):
    """A head that takes no tasks; a function that adds a node of a kind, with a cache of its own if asked."""
    need("ray", "fsspec")
    for name, value in HOUSE_SETTINGS.items():
        monkeypatch.setenv(name, value)
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})

    def node(kind: str, cpus: int = 1, cache: Path | None = None):
        env = {"QTOOL_CACHE": str(cache)} if cache else None
        return made.add_node(num_cpus=cpus, resources={kind: 1}, env_vars=env)

    yield made, node
    ray.shutdown()
    made.shutdown()


def summary_rows(run: Path) -> list[dict]:
    return json.loads((run / "summary.json").read_text())["rows"]


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "qtool.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(run: Path, stage: str, process: subprocess.Popen, number: int = 1) -> None:
    """Until `number` lines of a stage are written."""
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "results.jsonl").is_file() and sum(x["stage"] == stage for x in lines_of(run)) >= number:
            return
        time.sleep(0.2)
    process.kill()
    pytest.fail(f"no line of {stage}: {process.communicate()[0][-2000:]}")


def test_a_sweep_over_ray_has_the_scores_and_artifacts_of_a_local_one(cluster, checkpoint, table, tmp_path):
    need("evaluate", "sklearn", "accelerate")
    made, node = cluster
    for number in range(2):
        node("box", cache=tmp_path / f"cache-{number}")
    model = ("sweep", checkpoint, "--data", table, *INPUTS, "--recipe", "bf16", "--rounds", "1")
    shared = ("--executor", "ray", "--address", made.address, "--shared", tmp_path / "shared")
    over_ray = qtool(*model, *shared, "--out", tmp_path / "ray", timeout_s=500)
    assert over_ray.returncode == 0, over_ray.stderr
    built = [line["values"]["artifact"] for line in lines_of(tmp_path / "ray") if line["stage"] == "build"]
    assert not any((cache_dir() / "artifacts" / key).exists() for key in built)  # made on the nodes alone
    local = qtool(*model, "--out", tmp_path / "local", timeout_s=500)
    assert local.returncode == 0, local.stderr
    ours, theirs = (summary_rows(tmp_path / name) for name in ("local", "ray"))
    assert [(r["recipe"], r["host"], r["status"]) for r in ours] == [
        (r["recipe"], r["host"], r["status"]) for r in theirs
    ]
    for mine, its in zip(ours, theirs, strict=True):
        same = ("accuracy", "score_delta", "agreement", "mean_kl", "disk_bytes", "weight_bytes")
        assert {name: mine["metrics"][name] for name in same} == {name: its["metrics"][name] for name in same}
        assert mine["audit"] == its["audit"]
        one, two = (
            np.load(tmp_path / run / f"predictions/{mine['recipe']}-cpu.npz") for run in ("local", "ray")
        )
        assert (one["logits"] == two["logits"]).all()
    keys = [line["values"]["artifact"] for line in lines_of(tmp_path / "local") if line["stage"] == "build"]
    assert sorted(keys) == sorted(built)
    for key in built:
        files = [
            json.loads((folder / "artifacts" / key / "manifest.json").read_text())["files"]
            for folder in (cache_dir(), tmp_path / "shared")
        ]
        assert files[0] == files[1]
        assert is_whole(tmp_path / "shared" / "artifacts" / key)
    trials = [
        {e["trial_id"] for e in json.loads((tmp_path / n / "run.json").read_text())["plan"]}
        for n in ("local", "ray")
    ]
    assert trials[0] == trials[1]


def test_a_lost_nodes_trials_run_again_elsewhere_or_end_with_the_cause(cluster, checkpoint, table, tmp_path):
    need("evaluate", "sklearn", "accelerate")
    made, node = cluster
    box = sorted((node("box") for _ in range(2)), key=lambda each: each.node_id)
    single = node("single")
    run = tmp_path / "run"
    sweeping = start(
        *("sweep", checkpoint, "--data", table, *INPUTS, "--recipe", "fp32", "--rounds", "3", "--out", run),
        *("--executor", "ray", "--address", made.address, "--on", "box,single"),
    )
    wait_for(run, "measure", sweeping, 2)
    # the first of its kind, by address and id, is the one that is timed
    made.remove_node(box[0], allow_graceful=False)
    made.remove_node(single, allow_graceful=False)
    told, _ = sweeping.communicate(timeout=500)
    assert sweeping.returncode == 3, told
    by_kind = {row["host"].partition("/")[0]: row for row in summary_rows(run)}
    assert by_kind["box"]["status"] == "ok", told
    assert by_kind["single"]["status"] == "failed"
    assert "was lost" in by_kind["single"]["cause"]
    assert "no other kind 'single' is alive" in by_kind["single"]["cause"]
    record = json.loads((run / "run.json").read_text())
    assert [lost["host"].partition("/")[0] for lost in record["lost"]] == ["box"]
    entry = next(entry for entry in record["plan"] if entry["kind"] == "box")
    own = [
        line for line in lines_of(run) if (line["stage"], line["trial_id"]) == ("measure", entry["trial_id"])
    ]
    again = [line["round"] for line in own if line["values"].get("attempt") == 2]
    assert again == [1, 2, 3]  # from its first round, on one node


def test_a_thousand_trials_are_a_row_each_and_the_drivers_memory_stays(cluster, tmp_path):
    need("psutil")
    made, node = cluster
    node("box")
    path = Path(__file__).parents[1] / "benchmarks" / "ray_driver_cost.py"
    spec = importlib.util.spec_from_file_location("ray_driver_cost", path)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["ray_driver_cost"] = bench
    spec.loader.exec_module(bench)
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(bench)
    cost = bench.measure(1000, tmp_path / "run", made.address)
    lines = lines_of(tmp_path / "run")
    planned = {entry["trial_id"] for entry in json.loads((tmp_path / "run/run.json").read_text())["plan"]}
    measured = [x["trial_id"] for x in lines if x["stage"] == "measure" and x["status"] == "ok"]
    assert len(planned) == 1000
    assert sorted(measured) == sorted(planned)
    assert cost.rss_bytes[-1] - cost.rss_bytes[len(cost.rss_bytes) // 2] < bench.FLAT_BYTES


def test_an_interrupted_sweep_keeps_what_finished_and_goes_on(cluster, checkpoint, table, tmp_path):
    need("evaluate", "sklearn", "accelerate")
    made, node = cluster
    node("box")
    run = tmp_path / "run"
    flags = ("sweep", checkpoint, "--data", table, *INPUTS, "--recipe", "fp32", "--rounds", "2", "--out", run)
    flags += ("--executor", "ray", "--address", made.address)
    sweeping = start(*flags)
    wait_for(run, "measure", sweeping)
    os.kill(sweeping.pid, 2)
    told, _ = sweeping.communicate(timeout=300)
    assert sweeping.returncode == 130, told
    before = lines_of(run)
    done = qtool(*flags, "--resume", timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert lines_of(run)[: len(before)] == before
    assert {row["status"] for row in summary_rows(run)} == {"ok"}
