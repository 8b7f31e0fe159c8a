"""Every CUDA path on a real GPU, once; on a machine without one each test skips and says why."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from qtool import host, isolate, recipes
from tests.conftest import make_checkpoint, write_table

pytestmark = pytest.mark.gpu
ON_CUDA = [recipe.name for recipe in recipes.load_all() if "cuda" in recipe.devices]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _need_a_gpu():
    if not host.cuda_available():
        pytest.skip("no CUDA GPU is visible here: not run on a GPU")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict:
    """A tiny checkpoint and its tokenised texts: what every stage starts from."""
    if not host.cuda_available():
        pytest.skip("no CUDA GPU is visible here: not run on a GPU")
    folder = tmp_path_factory.mktemp("cuda")
    model, table = make_checkpoint(folder / "model"), write_table(folder / "films.csv")
    spec = {
        **dict.fromkeys(
            ("revision", "text", "text_pair", "label", "metric", "split", "calibration", "seq_len")
        ),
        **{"model": str(model), "data": str(table), "task": None, "limit": None, "score": True, "seed": 0},
        **{"calibration_rows": 0, "data_out": str(folder / "data")},
    }
    stage("probe", spec, folder)
    return {
        "model_dir": str(model),
        "data": str(folder / "data"),
        "device": "cuda",
        "threads": 1,
        "folder": folder,
    }


def stage(name: str, spec: dict, folder: Path) -> dict:
    outcome = isolate.run(name, spec, log=folder / f"{name}.log", timeout_s=300, threads=1)
    assert outcome.status == "ok", (outcome, (folder / f"{name}.log").read_text()[-2000:])
    return outcome.values


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_recipe_builds_scores_and_measures_on_the_gpu(name, prepared):
    recipe = recipes.find(name)[0]
    if why := recipes.why_not(recipe, "cuda"):
        pytest.skip(str(why))
    folder = prepared["folder"] / name
    folder.mkdir()
    spec = {key: value for key, value in prepared.items() if key != "folder"}
    spec |= {
        "recipe": recipe.model_dump(),
        "out": str(folder / "artifact"),
        "artifact": str(folder / "artifact"),
    }
    stage("build", spec, folder)
    scored = stage(
        "score", spec | {"score": True, "metrics": ["accuracy"], "predictions": str(folder / "p.npz")}, folder
    )
    assert 0 <= scored["metrics"]["accuracy"] <= 1
    assert scored["audit"]["engine"].get("provider", scored["audit"]["engine"].get("gpu"))
    values = stage("measure", spec | {"batch_size": 1}, folder)["values"]
    assert values["peak_vram_bytes"] > 0
    if values["vram_device_bytes"] is None:
        assert values["vram_device_bytes_reason"]
    for figure in ("power_w", "energy_j", "gpu_utilization_ratio"):
        assert values[figure] is not None or values[f"{figure}_reason"]
    assert values["power_w"] is None or values["power_w"] > 1
    assert isinstance(values["throttled"], bool) or values["throttled_reason"]


def test_memory_that_is_not_there_is_oom(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    from qtool import worker

    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert worker._is_oom(caught.value)
    assert "GPU with more memory" in worker._oom(str(caught.value), "cuda")["next_step"]


def test_both_clocks_agree_on_a_call_that_ends_on_the_host(monkeypatch):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    matrix = torch.randn(4096, 4096, device="cuda")

    def predict(rows: int) -> object:
        return (matrix[:rows] @ matrix).cpu().numpy()

    both = importlib.import_module("clocks_agree").both
    both(predict, [4096], lambda: torch.cuda.Event(enable_timing=True))
    by_host, by_events = both(predict, [4096], lambda: torch.cuda.Event(enable_timing=True))
    # events enclose the host's reading: no asserted speed, only that both saw the same call
    assert all(0.5 < ours / theirs < 1.5 for ours, theirs in zip(by_host, by_events, strict=True))


def test_onnxruntimes_provider_comes_up_where_it_is_installed():
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider: pip install onnxruntime-gpu in its place")
    assert recipes.why_not(recipes.find("onnx-fp32")[0], "cuda") is None


@pytest.mark.slow
def test_the_whole_check_finds_no_problem(tmp_path):
    """`benchmarks/gpu_check.py`, as a user runs it."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert (tmp_path / "gpu_check.md").read_text().startswith("# ")
