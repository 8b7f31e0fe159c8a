"""What `qtool export` writes gives the measured logits in a process that knows nothing of qtool."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qtool import cli, export, isolate, measure, recipes, sweep, timing
from qtool.core import QtoolError, Recipe
from tests.conftest import WORDS, lines_of, need, write_table
from tests.test_sweep import run_here

pytestmark = pytest.mark.slow
ROWS = 32  # one scoring batch: an engine that quantises activations by batch sees the same texts again
TOLERANCE = 1e-5

# One process for all folders: what would be measured twice is the import of the libraries.
READER = """\
import importlib.util, json, sys
import numpy as np
folders, texts = json.load(sys.stdin)
for folder in folders:
    spec = importlib.util.spec_from_file_location("load_" + str(len(sys.modules)), folder + "/load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    np.save(folder + ".npy", module.predict(texts))
assert "qtool" not in sys.modules
"""


def _wider(checkpoint: Path, folder: Path) -> Path:
    """The tiny model at twice its width: in a narrower one, biases and scales weigh too much beside int8."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint)
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 128, 256, 4
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def swept(checkpoint, tmp_path_factory):
    """A sweep of every recipe that can run here, its stages in this process and with few calls."""
    need("evaluate", "sklearn", "accelerate")
    root = tmp_path_factory.mktemp("export")
    model = _wider(checkpoint, root / "tiny-bert")
    table, other = write_table(root / "films.csv", ROWS), root / "other.csv"
    other.write_text("text\n" + "\n".join(f"{' '.join(WORDS[n : n + 6])} again" for n in range(12)) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QTOOL_CACHE", str(root / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(measure, "CALLS", 4)
        patch.setattr(measure, "MIN_TIME_S", 0.0)
        patch.setattr(timing, "warm_up", functools.partial(timing.warm_up, min_time_s=0.0, max_time_s=0.1))
        patch.setattr(isolate, "run", run_here)
        patch.setattr(sweep, "AT_ONCE", 1)  # the libraries' lazy imports are not made for two threads
        code = cli.run(
            ["sweep", str(model), "--task", "text", "--data", str(table), "--text", "text",
             "--label", "label", "--calibration", str(other), "--rounds", "1", "--threads", "1",
             "--out", str(root / "run")]
        )  # fmt: skip
        assert code == 0, (root / "run" / "report.md").read_text()
        yield root / "run"


@pytest.fixture(scope="module")
def exported(swept):
    """Recipe name to its exported folder, for every recipe that ran."""
    rows = json.loads((swept / "summary.json").read_text())["rows"]
    names = [row["recipe"] for row in rows if row["status"] == "ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(swept.parent)
        for name in names:
            assert cli.run(["export", str(swept), name, f"out/{name}"]) == 0
    return {name: swept.parent / "out" / name for name in names}


def _scored_order(run: Path) -> tuple[list[str], list[int]]:
    """The texts in the order in which the scoring batch held them, and their rows in the table."""
    (texts,) = (run.parent / "cache" / "data").glob("*/texts.json")
    held = json.loads(texts.read_text())["texts"]
    longest_first = sorted(held, key=lambda text: -len(text.split()))
    lines = (run.parent / "films.csv").read_text().splitlines()[1:]
    table = [line.partition(",")[0] for line in lines]
    return longest_first, [table.index(text) for text in longest_first]


def test_every_recipe_of_the_book_ran(swept, exported):
    rows = {
        row["recipe"]: (row["status"], row["cause"])
        for row in json.loads((swept / "summary.json").read_text())["rows"]
    }
    for recipe in recipes.load_all():
        if recipes.why_not(recipe, "cpu") is None:
            assert rows[recipe.name] == ("ok", None)
    assert {"fp32", "bf16", "int8-dynamic"} <= set(exported)


def test_an_exported_model_gives_the_measured_logits(swept, exported):
    texts, rows = _scored_order(swept)
    assert len(texts) == ROWS
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "QTOOL_CACHE")}
    # a sum's order, and with it the rounding of an activation to int8, goes by the number of threads
    env |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READER], input=json.dumps([[str(f) for f in exported.values()], texts]),
        capture_output=True, text=True, timeout=280, cwd=swept.parent / "out", env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, folder in exported.items():
        with np.load(swept / "predictions" / f"{name}-cpu.npz") as file:
            measured = file["logits"][rows]
        found = np.load(f"{folder}.npy")
        assert found.dtype == np.float32, name
        assert np.abs(found - measured).max() <= TOLERANCE, name
        assert len(np.unique(measured.round(3), axis=0)) > ROWS / 2, name  # not one answer for all


def test_an_exported_folder_holds_no_pickle_and_no_trace_of_qtool(exported):
    for name, folder in exported.items():
        files = {path.name for path in folder.rglob("*") if path.is_file()}
        assert {"README.md", "load.py", "tokenizer.json"} <= files, name
        pickles = [f for f in files if f.endswith((".pt", ".pth", ".pkl", ".bin", ".pickle", ".ckpt"))]
        assert set(pickles) <= {"openvino_model.bin"}, name
        assert any(f.endswith((".safetensors", ".onnx", ".xml")) for f in files), name
        assert not list(folder.parent.glob(f".{name}-*"))
        script = (folder / "load.py").read_text()
        assert "qtool" not in script, name
        assert "$" not in script, name
        assert "trust_remote_code" not in script, name


def test_the_readme_says_what_was_measured_and_what_to_install(swept, exported):
    for name, folder in exported.items():
        text = (folder / "README.md").read_text()
        row = next(r for r in json.loads((swept / "summary.json").read_text())["rows"] if r["recipe"] == name)
        assert f"# tiny-bert as {name}\n" in text
        assert "in the order 0 negative, 1 positive." in text
        assert f"accuracy {row['metrics']['accuracy']['value']:.4f}" in text
        assert not any(
            line.startswith(" ") and not line.startswith("    pip install") for line in text.splitlines()
        ), text
        pins = next(line for line in text.splitlines() if "pip install" in line).split()[2:]
        wanted = re.findall(r"^(?:from|import) (\w+)", (folder / "load.py").read_text(), re.M)
        for package in set(wanted) - {
            "sys",
            "os",
            "pathlib",
            "numpy",
            "warnings",
            "json",
            "__future__",
            "typing",
        }:
            assert any(pin.startswith(f"{package}==") for pin in pins), (name, package, pins)


def test_the_onnx_readme_asks_for_the_engine_and_not_for_pytorch(exported):
    if "onnx-int8-dynamic" not in exported:
        pytest.skip("needs onnx and onnxruntime")
    pins = next(
        line
        for line in (exported["onnx-int8-dynamic"] / "README.md").read_text().splitlines()
        if "pip install" in line
    )
    assert {pin.partition("==")[0] for pin in pins.split()[2:]} == {"transformers", "onnxruntime"}


def _recipe(**parts):
    return Recipe(name="mixed", description="d", source="s", method="torch_cast", runtime="pytorch", **parts)


def test_a_script_repeats_autocast_compilation_the_device_and_the_measured_length():
    recipe = _recipe(runtime_options={"autocast": "bfloat16"}, compile={"dynamic": True})
    script = export.load_script(recipe, "cuda", 77)
    ast.parse(script)
    assert "device_map='cuda'" in script
    assert "batch.to('cuda')" in script
    assert "torch.autocast('cuda', dtype=torch.bfloat16)" in script
    assert "model.compile(fullgraph=True, dynamic=True)" in script
    assert "max_length=77" in script


def test_a_script_is_short():
    for runtime, method in (("pytorch", "torch_cast"), ("onnxruntime", "onnx"), ("openvino", "openvino")):
        recipe = Recipe(name="plain", description="d", source="s", method=method, runtime=runtime)
        lines = export.load_script(recipe, "cpu", 512).splitlines()[1:]
        code = [line for line in lines if line.strip() and not line.startswith(("import ", "from "))]
        assert len(code) <= 15, runtime


def _refused(*parts: str, run: Path, recipe: str, to: Path) -> None:
    with pytest.raises(QtoolError) as caught:
        cli.run(["export", str(run), recipe, str(to)])
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_recipe_is_refused_with_a_suggestion(swept, tmp_path):
    _refused("no recipe 'bf61'", "Did you mean 'bf16'?", run=swept, recipe="bf61", to=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_folder_in_use_a_file_and_a_folder_that_is_no_run_are_refused(swept, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep")
    _refused("not empty", run=swept, recipe="fp32", to=tmp_path / "used")
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"]
    _refused("Give a new folder", run=swept, recipe="fp32", to=tmp_path / "used" / "mine.txt")
    _refused("run", run=tmp_path / "used", recipe="fp32", to=tmp_path / "x")


def test_a_failed_recipe_is_refused_with_its_cause(swept, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run.json", "results.jsonl"):
        (tmp_path / "run" / name).write_bytes((swept / name).read_bytes())
    lines = lines_of(swept)
    score = next(line for line in lines if line["recipe"] == "bf16" and line["stage"] == "score")
    with (tmp_path / "run" / "results.jsonl").open("a") as file:
        file.write(json.dumps({**score, "status": "failed", "error": "out of luck", "values": {}}) + "\n")
    _refused("'bf16' was failed", "out of luck", run=tmp_path / "run", recipe="bf16", to=tmp_path / "x")


def test_an_artifact_gone_from_the_cache_is_said(swept, tmp_path, monkeypatch):
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "empty"))
    _refused("no longer whole in the cache", "--resume", run=swept, recipe="fp32", to=tmp_path / "x")
    assert not (tmp_path / "x").exists()
