"""Kinds of node by resource or label, and the flags of a sweep over a cluster. No cluster is started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from qtool import cli, group
from qtool.cluster import Cluster, Kind, Node, kinds
from qtool.core import QtoolError
from qtool.flags_of_sweep import kinds_of


def node(name: str, *, cpus: float = 4, gpus: float = 0, resources=(), **labels: str) -> Node:
    told = {key.replace("__", "/"): value for key, value in labels.items()}
    own = {"ray.io/node-id": f"id-{name}", **told}
    return Node(f"id-{name}", f"10.0.0.{name}", cpus, gpus, 1e9, dict.fromkeys(resources, 1.0), own)


HEAD = node("0", cpus=0)
AVX = node("1", resources=("cpu-avx512",))
OTHER = node("2", resources=("cpu-avx512",))
L4 = node("3", gpus=1, **{"ray.io__accelerator-type": "L4"})
H200 = node("4", gpus=8, **{"ray.io__accelerator-type": "H200", "zone": "eu"})
ALL = [HEAD, AVX, OTHER, L4, H200]


def test_a_name_is_a_resource_or_the_value_of_a_label_in_any_case():
    assert kinds(["CPU-AVX512", "l4"], ALL, with_gpu=False) == [
        Kind("CPU-AVX512", [AVX, OTHER], {"resources": {"cpu-avx512": 0.001}}),
        Kind("l4", [L4], {"label_selector": {"ray.io/accelerator-type": "L4"}}),
    ]


@pytest.mark.parametrize("name", ["ray.io/accelerator-type=h200", "zone", "eu"])
def test_a_name_may_be_a_labels_key_or_both(name):
    assert [each.id for each in kinds([name], ALL, with_gpu=False)[0].nodes] == ["id-4"]


def test_a_labels_key_takes_every_value_it_has():
    (kind,) = kinds(["ray.io/accelerator-type"], ALL, with_gpu=False)
    assert kind.nodes == [L4, H200]
    assert kind.options == {"label_selector": {"ray.io/accelerator-type": "in(H200,L4)"}}


def test_without_names_all_nodes_that_take_tasks_are_one_kind():
    assert kinds([], ALL, with_gpu=False) == [Kind(None, [AVX, OTHER, L4, H200], {})]
    assert kinds([], ALL, with_gpu=True) == [Kind(None, [L4, H200], {})]


def test_an_unknown_name_is_told_with_what_is_near():
    with pytest.raises(QtoolError, match=r"--on h20: no alive node .* Did you mean 'h200'\?"):
        kinds(["h20"], ALL, with_gpu=False)
    with pytest.raises(QtoolError, match=r"Known: cpu-avx512, eu, h200, l4\.$"):
        kinds(["tpu-v6e"], ALL, with_gpu=False)
    with pytest.raises(QtoolError, match="neither labels nor resources"):
        kinds(["a100"], [node("9")], with_gpu=False)


def test_kinds_that_share_a_node_are_refused():
    with pytest.raises(QtoolError, match="a node is of both kinds"):
        kinds(["h200", "eu"], ALL, with_gpu=False)


def test_no_node_with_a_gpu_is_told():
    with pytest.raises(QtoolError, match="no node of the Ray cluster offers a CPU and a GPU"):
        kinds([], [HEAD, AVX], with_gpu=True)


def test_the_names_of_on_are_cut_at_commas():
    assert kinds_of("cpu-avx512, l4,l4") == ["cpu-avx512", "l4"]
    assert kinds_of(None) == []
    for wrong in ("", "a,", ",b"):
        with pytest.raises(QtoolError, match="empty name"):
            kinds_of(wrong)


@pytest.mark.parametrize("flag", ["--address", "--on", "--shared"])
def test_flags_of_a_cluster_need_its_executor(flag):
    with pytest.raises(QtoolError, match=rf"{flag} is for a cluster: add --executor ray"):
        cli.run(["sweep", "m", "--no-score", flag, "x"])


def test_without_ray_the_extra_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more)
    )
    with pytest.raises(QtoolError, match=r"pip install 'qtool\[ray\]'"):
        Cluster(None)


def test_a_local_sweep_imports_no_ray():
    code = (
        "import sys\nfrom qtool import cli\n"
        "try: cli.run(['sweep', '/no/such/model', '--no-score', '--dry-run'])\n"
        "except Exception as error: print(type(error).__name__)\n"
        "import qtool.sweep, qtool.group, qtool.evidence\n"
        "print('ray' in sys.modules, 'qtool.ray_sweep' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["QtoolError", "False", "False"]


def test_models_of_one_call_run_side_by_side(monkeypatch):
    both = threading.Barrier(2, timeout=20)

    def carry_out(plan):
        both.wait()  # neither goes on without the other
        return plan

    monkeypatch.setattr(group.sweep, "carry_out", carry_out)
    assert group._all_at_once([3, 0]) == [3, 0]  # pyright: ignore[reportArgumentType]


def test_a_mistake_in_one_model_stops_the_tasks_of_the_others(monkeypatch):
    stopped = []

    class Plan:
        def __init__(self, name):
            self.name = name
            self.cluster = SimpleNamespace(cluster=SimpleNamespace(stop=lambda: stopped.append(name)))

    def carry_out(plan):
        if plan.name == "a":
            raise QtoolError("the disk is full")
        return 0

    monkeypatch.setattr(group.sweep, "carry_out", carry_out)
    with pytest.raises(QtoolError, match="disk"):
        group._all_at_once([Plan("a"), Plan("b")])  # pyright: ignore[reportArgumentType]
    assert stopped == ["a", "b"]
