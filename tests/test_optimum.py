"""The second set of versions: qtool beside the transformers that optimum-intel allows, and Optimum reading our files.

Two environments are made with pip, of 3 GB together, and removed at the end; QTOOL_OPTIMUM_ENV and QTOOL_ORT_ENV
name folders where they are kept and found again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from qtool import plugins, recipes
from qtool.core import BuildJob, Unavailable
from tests.conftest import WORDS, lines_of, make_checkpoint, need, write_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints-optimum.txt"
# what reads models, traces them or says what is wrong with them; the rest of the suite passes there as well
CORE_TESTS = (
    *("recipes", "laws", "tables", "labels", "models", "bad_inputs", "pytorch_runtime", "embeddings"),
    *("engines", "architectures_engines", "architectures_pytorch"),
)
OPTIMUM = ("optimum-openvino-fp32", "optimum-openvino-int8")
CHILD_ENV = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "NNCF_CI": "1",
    # pip is told not to compile: with a 1 here every process would compile what it imports
    "PYTHONDONTWRITEBYTECODE": "",
}
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

# What a user of exported folders writes: several in one process, the import of the libraries is the long part.
LOADER = """
import importlib.util, json, sys
import numpy as np
folders, texts, out = json.load(sys.stdin)
found = {}
for name, folder in folders.items():
    spec = importlib.util.spec_from_file_location("load_" + str(len(found)), folder + "/load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found[name] = module.predict(texts)
assert "qtool" not in sys.modules
np.savez(out, **found)
"""


def environment(kept: str | None, scratch: Path, *packages: str) -> Iterator[Path]:
    """The interpreter of an environment with `packages`; skips where pip reaches no package index.

    It is kept in the folder `kept`, where there is one; else it lies in `scratch` and is removed.
    """
    folder = Path(kept) if kept else scratch / "env"
    python = folder / "bin/python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        # most of torch's thousands of files are never imported: Python compiles those that are
        pip += ["install", "-q", "--retries", "1", "--no-compile"]
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, cwd=ROOT, timeout=900)
        if done.returncode:
            shutil.rmtree(folder)
            if any(sign in done.stderr for sign in NO_INDEX):
                pytest.skip("no package index is reachable")
            pytest.fail(done.stderr[-3000:])
    yield python
    if not kept:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def intel(tmp_path_factory):
    """The interpreter of an environment with `qtool[optimum,onnx]` at the versions of its own constraints."""
    wanted = ["-c", str(PINS), "-e", ".[optimum,onnx]", "pytest", "jsonschema"]
    yield from environment(os.environ.get("QTOOL_OPTIMUM_ENV"), tmp_path_factory.mktemp("intel"), *wanted)


@pytest.fixture(scope="module")
def ort(tmp_path_factory):
    """The interpreter of an environment with optimum-onnx, its transformers (below 4.58) and our engine."""
    need("onnxruntime")
    import onnxruntime

    torch = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))
    wanted = ["optimum-onnx==0.1.0", torch, f"onnxruntime=={onnxruntime.__version__}"]
    yield from environment(os.environ.get("QTOOL_ORT_ENV"), tmp_path_factory.mktemp("ort"), *wanted)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-bert")


@pytest.fixture(scope="module")
def artifacts(model_dir: Path, tmp_path_factory):
    """By family: a batch, and by recipe that can run here the folder, its recipe and the logits it gives here."""
    need("onnxruntime", "openvino", "nncf")
    rng = np.random.default_rng(0)

    def batch(rows: int, tokens: int) -> dict[str, np.ndarray]:
        ids = rng.integers(5, 5 + len(WORDS), (rows, tokens))
        mask = np.ones((rows, tokens), np.int64)
        mask[1:, -1] = 0
        return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}

    calibration, asked, made = [batch(1, tokens) for tokens in range(3, 33)], batch(3, 9), {}
    plain: dict[str, Path] = {}
    for recipe in recipes.select(["onnx-*", "openvino-*"]):
        if recipe.method not in ("onnx", "openvino") or recipes.why_not(recipe, "cpu"):
            continue
        out = tmp_path_factory.mktemp(recipe.name)
        runtime = plugins.load("runtimes", recipe.runtime)
        # the second recipe of a family starts from what the first exported
        source = plain.get(recipe.method, model_dir)
        plugins.load("methods", recipe.method).build(BuildJob(source, out, recipe, calibration, 1))
        if not recipe.quantize:
            plain.setdefault(recipe.method, out)
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
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **CHILD_ENV}, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(scratch / "logits.npz"))


@pytest.fixture(scope="module")
def swept(intel, model_dir, tmp_path_factory) -> Path:
    """The run folder of a sweep of the optimum recipes in their environment; `cache` lies beside it."""
    folder = tmp_path_factory.mktemp("swept")
    table, calibration = write_table(folder / "films.csv", 24), folder / "more.csv"
    calibration.write_text("text\n" + "\n".join(f"not a {word} film at all" for word in WORDS) + "\n")
    arguments = ["--task", "text", "--data", table, "--text", "text", "--label", "label"]
    arguments += ["--calibration", calibration, "--no-score", "--rounds", "1", "--out", folder / "run"]
    run_qtool(
        intel,
        folder,
        "sweep",
        model_dir,
        *arguments,
        "--recipe",
        "optimum-*",
        QTOOL_CACHE=str(folder / "cache"),
    )
    return folder / "run"


def run_qtool(python: Path, cwd: Path, *arguments: object, **env: str) -> None:
    done = subprocess.run(
        list(map(str, [python, "-m", "qtool.cli", *arguments])),
        capture_output=True, text=True, timeout=400, cwd=cwd, env={**os.environ, **CHILD_ENV, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_optimum_recipes_sweep_a_model_in_their_environment(swept):
    measured = {line["recipe"]: line["status"] for line in lines_of(swept) if line["stage"] == "measure"}
    assert measured == dict.fromkeys(("fp32", *OPTIMUM), "ok")


def test_an_exported_optimum_folder_loads_without_qtool(intel, swept, model_dir, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    for name in OPTIMUM:
        run_qtool(intel, tmp_path, "export", swept, name, name, QTOOL_CACHE=str(swept.parent / "cache"))
    texts = [" ".join(WORDS[:7]), "a film", " ".join(WORDS * 4)]  # the last is cut to the model's 64 tokens
    job = [{name: str(tmp_path / name) for name in OPTIMUM}, texts, str(tmp_path / "logits.npz")]
    done = subprocess.run(
        [str(intel), "-c", LOADER], input=json.dumps(job),
        capture_output=True, text=True, timeout=280, cwd=tmp_path, env={**os.environ, **CHILD_ENV},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(np.load(tmp_path / "logits.npz"))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="np")
    with torch.inference_mode():
        module = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32)
        expected = module(**{key: torch.from_numpy(array) for key, array in batch.items()}).logits.numpy()
    np.testing.assert_allclose(found["optimum-openvino-fp32"], expected, atol=1e-4)
    # int8: OpenVINO's own Python over the same file
    runtime, recipe = plugins.load("runtimes", "openvino"), recipes.find("optimum-openvino-int8")[0]
    loaded = runtime.wrap(runtime.open_model(tmp_path / recipe.name, recipe, "cpu"), recipe, "cpu", 1)
    np.testing.assert_allclose(found[recipe.name], loaded.predict(dict(batch)), atol=1e-4)


def test_beside_a_newer_transformers_the_optimum_recipes_are_skipped(intel, model_dir, tmp_path):
    """The default set, to which optimum-intel is added by its folder."""
    if tuple(map(int, metadata.version("transformers").split(".")[:2])) < (5, 6):
        pytest.skip("this set's transformers is one that optimum-intel can use")
    (site,) = intel.parents[1].glob("lib/python3*/site-packages")
    for folder in [*site.glob("optimum*"), *site.glob("openvino_tokenizers*")]:
        (tmp_path / folder.name).symlink_to(folder)
    table = write_table(tmp_path / "films.csv", 8)
    arguments = ["--task", "text", "--data", table, "--text", "text", "--label", "label", "--no-score"]
    arguments += ["--rounds", "1", "--recipe", "optimum-openvino-fp32", "--out", tmp_path / "run"]
    run_qtool(Path(sys.executable), ROOT, "sweep", model_dir, *arguments, PYTHONPATH=str(tmp_path))
    (line,) = [line for line in lines_of(tmp_path / "run") if line["recipe"] == "optimum-openvino-fp32"]
    assert line["status"] == "skipped"
    for named in (metadata.version("transformers"), "optimum-intel 2.1", "constraints-optimum.txt"):
        assert named in str(line["error"])


def test_deberta_is_not_quantised_by_optimum_and_the_reason_is_said(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deberta"}')
    recipe, rows = recipes.find("optimum-openvino-int8")[0], [{"input_ids": np.ones((1, 3), np.int64)}]
    with pytest.raises(Unavailable, match="position projections"):
        plugins.load("methods", "optimum").build(BuildJob(tmp_path, tmp_path, recipe, rows, 1))


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
    files = [f"tests/test_{name}.py" for name in CORE_TESTS]
    options = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [str(intel), "-m", "pytest", *options, *files],
        capture_output=True, text=True, cwd=ROOT, timeout=500, env={**os.environ, **CHILD_ENV},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


def test_optimum_onnx_gives_the_logits_of_our_onnx_folders(ort, artifacts, tmp_path):
    batch, made = artifacts
    folders = {name: (str(made[name][0]), {}) for name in made if made[name][1].method == "onnx"}
    name = "ORTModelForSequenceClassification"
    found = read_with(ort, "optimum.onnxruntime", name, batch, folders, tmp_path)
    assert {"onnx-fp32", "onnx-int8-dynamic"} <= found.keys()
    for name, logits in found.items():
        np.testing.assert_allclose(logits, made[name][2], atol=1e-5, err_msg=name)
