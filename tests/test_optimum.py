"""The second set of versions: qtool beside the transformers that optimum-intel allows, and Optimum reading our files.

Two environments are made with pip, of 2 GB together, and removed at the end; QTOOL_OPTIMUM_ENV names an
environment of the first kind to use or to make and keep.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qtool import plugins, recipes
from qtool.core import BuildJob
from tests.conftest import WORDS, lines_of, make_checkpoint, need, write_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints-optimum.txt"
CORE_TESTS = ("test_recipes", "test_laws", "test_tables", "test_labels", "test_stats", "test_engines")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "NNCF_CI": "1"}
NO_INDEX = ("connection broken by", "Failed to establish a new connection", "Read timed out")

# What a user of Optimum writes, without qtool: folders in, the logits of one batch out.
READER = """
import json, sys
sys.modules["openvino_telemetry"] = None
import numpy as np
job = json.load(open(sys.argv[1]))
module = __import__(job["module"], fromlist=[job["class"]])
batch = dict(np.load(job["batch"]))
found = {}
for name, (folder, options) in job["folders"].items():
    model = getattr(module, job["class"]).from_pretrained(folder, **options)
    found[name] = model(**batch).logits
np.savez(job["out"], **found)
"""


def make_environment(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment; skips where pip reaches no package index."""
    python = folder / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True, cwd=ROOT, timeout=900)
    if done.returncode:
        shutil.rmtree(folder)
        if any(sign in done.stderr for sign in NO_INDEX):
            pytest.skip("no package index is reachable")
        pytest.fail(done.stderr[-3000:])
    return python


@pytest.fixture(scope="module")
def intel(tmp_path_factory):
    """The interpreter of an environment with `qtool[optimum,onnx]` at the versions of its own constraints."""
    kept = os.environ.get("QTOOL_OPTIMUM_ENV")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("optimum") / "env"
    python = folder / "bin/python"
    if not python.is_file():
        python = make_environment(folder, "-c", str(PINS), "-e", ".[optimum,onnx]", "pytest", "jsonschema")
    yield python
    if not kept:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-bert")


@pytest.fixture(scope="module")
def artifacts(model_dir, tmp_path_factory):
    """By family: a batch, and by recipe that can run here the folder, its recipe and the logits it gives here."""
    need("onnxruntime", "openvino", "nncf")
    rng = np.random.default_rng(0)

    def batch(rows: int, tokens: int) -> dict[str, np.ndarray]:
        ids = rng.integers(5, 5 + len(WORDS), (rows, tokens))
        mask = np.ones((rows, tokens), np.int64)
        mask[1:, -1] = 0
        return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}

    calibration, asked, made = [batch(1, tokens) for tokens in range(3, 33)], batch(3, 9), {}
    for recipe in recipes.select(["onnx-*", "openvino-*"]):
        if recipe.method not in ("onnx", "openvino") or recipes.why_not(recipe, "cpu"):
            continue
        out = tmp_path_factory.mktemp(recipe.name)
        runtime = plugins.load("runtimes", recipe.runtime)
        plugins.load("methods", recipe.method).build(BuildJob(model_dir, out, recipe, calibration, 1))
        loaded = runtime.wrap(runtime.open_model(out, recipe, "cpu"), recipe, "cpu", 1)
        made[recipe.name] = (out, recipe, loaded.predict(asked))
    return asked, made


def read_with(python: Path, module: str, name: str, batch, folders, scratch: Path) -> dict[str, np.ndarray]:
    """Logits by recipe of the class `name` of `module` in the environment of `python`."""
    np.savez(scratch / "batch.npz", **batch)
    job = {"module": module, "class": name, "batch": str(scratch / "batch.npz"), "folders": folders}
    (scratch / "job.json").write_text(json.dumps(job | {"out": str(scratch / "logits.npz")}))
    (scratch / "reader.py").write_text(READER)
    command = [str(python), str(scratch / "reader.py"), str(scratch / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **OFFLINE}, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(scratch / "logits.npz"))


def test_the_optimum_recipes_sweep_a_model_in_their_environment(intel, model_dir, tmp_path):
    table, calibration = write_table(tmp_path / "films.csv", 24), tmp_path / "more.csv"
    calibration.write_text("text\n" + "\n".join(f"not a {word} film at all" for word in WORDS) + "\n")
    arguments = ["--task", "text", "--data", table, "--text", "text", "--label", "label"]
    arguments += ["--calibration", calibration, "--no-score", "--rounds", "1", "--out", tmp_path / "run"]
    command = [intel, "-m", "qtool.cli", "sweep", model_dir, *arguments, "--recipe", "optimum-*"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    measured = {
        line["recipe"]: line["status"] for line in lines_of(tmp_path / "run") if line["stage"] == "measure"
    }
    assert measured == dict.fromkeys(("fp32", "optimum-openvino-fp32", "optimum-openvino-int8"), "ok")


def test_optimum_intel_gives_the_logits_of_our_openvino_folders(intel, artifacts, tmp_path):
    batch, made = artifacts
    folders = {}
    for name, (folder, recipe, _) in made.items():
        if recipe.method == "openvino":
            options = plugins.load("runtimes", "openvino").Options(**recipe.runtime_options)
            hints = {"INFERENCE_PRECISION_HINT": options.inference_precision, "INFERENCE_NUM_THREADS": 1}
            hints["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = options.dynamic_quantization_group_size
            folders[name] = (str(folder), {"ov_config": hints})
    found = read_with(intel, "optimum.intel", "OVModelForSequenceClassification", batch, folders, tmp_path)
    assert {"openvino-fp32", "openvino-int8"} <= found.keys()
    for name, logits in found.items():
        np.testing.assert_allclose(logits, made[name][2], atol=1e-5, err_msg=name)


def test_the_core_tests_pass_with_the_older_transformers(intel):
    files = [f"tests/{name}.py" for name in CORE_TESTS if (ROOT / f"tests/{name}.py").is_file()]
    options = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    command = [str(intel), "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]


def test_optimum_onnx_gives_the_logits_of_our_onnx_folders(artifacts, tmp_path):
    need("onnxruntime")
    import onnxruntime

    batch, made = artifacts
    folders = {name: (str(made[name][0]), {}) for name in made if made[name][1].method == "onnx"}
    torch = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))
    # its own pin is transformers<4.58; the engine is the one that gave our logits
    wanted = ["optimum-onnx==0.1.0", torch, f"onnxruntime=={onnxruntime.__version__}"]
    python = make_environment(tmp_path / "env", *wanted)
    name = "ORTModelForSequenceClassification"
    found = read_with(python, "optimum.onnxruntime", name, batch, folders, tmp_path)
    shutil.rmtree(tmp_path / "env")
    assert {"onnx-fp32", "onnx-int8-dynamic"} <= found.keys()
    for name, logits in found.items():
        np.testing.assert_allclose(logits, made[name][2], atol=1e-5, err_msg=name)
