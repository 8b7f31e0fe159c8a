"""ONNX and OpenVINO: what is exported computes what PyTorch does; the audit tells what was stored and ran."""

from __future__ import annotations

import contextlib
import csv
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qtool import plugins, recipes
from qtool.core import Batch, BuildJob, Loaded, QtoolError, Recipe, Unavailable, unmet
from qtool.methods import _onnx_quantize

pytest.importorskip("torch", reason="needs torch: pip install 'qtool[all]'")
pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'qtool[onnx]'")
pytest.importorskip("openvino", reason="needs openvino: pip install 'qtool[openvino]'")

SHARED = Path(__file__).parents[2] / "shared"
WORDS = [f"word{index}" for index in range(90)]
HIDDEN, INNER, LAYERS, CLASSES, VOCABULARY, POSITIONS = 32, 64, 2, 3, 100, 40
SIZES = [(1, 1), (1, 9), (3, 1), (3, 5), (2, 33)]
ENGINES = ["onnx", "openvino"]


def tiny_model(folder: Path, kind: str) -> Path:
    """BERT, ALBERT (take token_type_ids) or DistilBERT (does not), random weights, a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    # DistilBERT has these as aliases of its own names, except for the inner size
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "num_labels": CLASSES}
    config = AutoConfig.for_model(kind, intermediate_size=INNER, initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def batch_of(rows: int, tokens: int, seed: int = 0) -> Batch:
    """Random ids; every row but the first is padded by one token where it is long enough."""
    rng = np.random.default_rng(seed)
    mask = np.ones((rows, tokens), np.int64)
    if tokens > 2:
        mask[1:, -1] = 0
    return {
        "input_ids": rng.integers(2, VOCABULARY, (rows, tokens)) * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros((rows, tokens), np.int64),
    }


def recipe_of(method: str, **quantize: Any) -> Recipe:
    runtime = {"onnx": "onnxruntime", "openvino": "openvino"}[method]
    own = {"name": "t", "description": "t", "source": "t", "method": method}
    return Recipe.model_validate(own | {"runtime": runtime, "quantize": quantize})


def make(model_dir: Path, recipe: Recipe, out: Path, calibration: Sequence[Batch] = ()) -> tuple[Any, Path]:
    out.mkdir()
    job = BuildJob(model_dir, out, recipe, list(calibration), 1)
    return plugins.load("methods", recipe.method).build(job), out


def runtime_of(recipe: Recipe) -> ModuleType:
    return plugins.load("runtimes", recipe.runtime)


def opened(folder: Path, recipe: Recipe, threads: int = 1) -> Loaded:
    runtime = runtime_of(recipe)
    return runtime.wrap(runtime.open_model(folder, recipe, "cpu"), recipe, "cpu", threads)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def plain(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By method: the artifact of the tiny BERT without quantisation."""
    root = tmp_path_factory.mktemp("plain")
    return {method: make(bert, recipe_of(method), root / method)[1] for method in ENGINES}


@pytest.fixture(scope="module")
def int8(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Recipe, Any, Path]]:
    """By method: the shipped int8 recipe, the built model in memory, the artifact."""
    root, made = tmp_path_factory.mktemp("int8"), {}
    for method, name in (("onnx", "onnx-int8-dynamic"), ("openvino", "openvino-int8")):
        recipe, _ = recipes.find(name)
        calibration = [batch_of(1, tokens, seed=tokens) for tokens in range(3, 35)]
        made[method] = (recipe, *make(bert, recipe, root / method, calibration))
    return made


def torch_logits(model_dir: Path, batches: list[Batch]) -> list[Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    module = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        inputs = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches]
        return [module(**batch).logits.numpy() for batch in inputs]


@pytest.mark.parametrize("method", ENGINES)
def test_an_exported_model_gives_the_logits_of_pytorch_at_every_size(method, bert, plain):
    loaded = opened(plain[method], recipe_of(method))
    batches = [batch_of(rows, tokens) for rows, tokens in SIZES]
    for batch, expected in zip(batches, torch_logits(bert, batches), strict=True):
        logits = loaded.predict(batch)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ENGINES)
def test_a_model_without_token_types_takes_a_batch_that_has_them(method, tmp_path):
    (tmp_path / "m").mkdir()
    model_dir = tiny_model(tmp_path / "m", "distilbert")
    recipe = recipe_of(method)
    loaded = opened(make(model_dir, recipe, tmp_path / "out")[1], recipe)
    batch = batch_of(2, 7)
    (expected,) = torch_logits(model_dir, [{name: batch[name] for name in ("input_ids", "attention_mask")}])
    np.testing.assert_allclose(loaded.predict(batch), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ENGINES)
def test_weights_that_layers_share_are_stored_once(method, tmp_path):
    (tmp_path / "m").mkdir()
    recipe = recipe_of(method)
    folder = make(tiny_model(tmp_path / "m", "albert"), recipe, tmp_path / "out")[1]
    one_layer = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER
    embedding = 128 * HIDDEN  # ALBERT's factorised embedding, 128 by default
    count = embedding + one_layer + HIDDEN * HIDDEN + HIDDEN * CLASSES
    assert opened(folder, recipe).audit().linear_elements_by_dtype == {"float32": count}


@pytest.mark.parametrize("method", ENGINES)
def test_a_missing_or_an_unknown_input_is_an_error(method, plain):
    loaded = opened(plain[method], recipe_of(method))
    batch = batch_of(1, 5)
    with pytest.raises(QtoolError, match="attention_mask"):
        loaded.predict({"input_ids": batch["input_ids"], "token_type_ids": batch["token_type_ids"]})
    with pytest.raises(QtoolError, match="position_ids"):
        loaded.predict(batch | {"position_ids": batch["input_ids"]})


@pytest.mark.parametrize("method", ENGINES)
def test_the_next_call_does_not_overwrite_logits_and_strided_arrays_are_read_right(method, plain):
    loaded = opened(plain[method], recipe_of(method))
    first = loaded.predict(batch_of(2, 6, seed=1))
    before = first.copy()
    loaded.predict(batch_of(2, 6, seed=2))
    np.testing.assert_array_equal(first, before)
    strided = {name: np.asfortranarray(array) for name, array in batch_of(2, 6, seed=1).items()}
    np.testing.assert_array_equal(loaded.predict(strided), before)


@pytest.mark.parametrize("method", ENGINES)
def test_the_reloaded_int8_artifact_gives_the_built_models_logits(method, int8):
    recipe, built, folder = int8[method]
    loaded = opened(folder, recipe)
    fresh = runtime_of(recipe).wrap(built, recipe, "cpu", 1)
    for rows, tokens in SIZES:
        batch = batch_of(rows, tokens)
        np.testing.assert_allclose(loaded.predict(batch), fresh.predict(batch), atol=1e-6)


@pytest.mark.parametrize("method", ENGINES)
def test_the_audit_of_an_int8_artifact_is_the_hand_count_and_meets_the_recipe(method, int8):
    recipe, _, folder = int8[method]
    loaded = opened(folder, recipe)
    loaded.predict(batch_of(1, 9))
    audit = loaded.audit()
    linear = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) + HIDDEN * HIDDEN + HIDDEN * CLASSES
    tables = (VOCABULARY + POSITIONS + 2) * HIDDEN
    assert audit.linear_elements_by_dtype == {"int8": linear}
    # the zero points of per-channel weights are int8 too: one an output
    zeros = LAYERS * (5 * HIDDEN + INNER) + HIDDEN + CLASSES if method == "onnx" else 0
    assert audit.weight_bytes_by_dtype["int8"] == linear + tables + zeros
    products = LAYERS * 6 + 2
    if method == "onnx":
        assert audit.changed_modules == {"MatMul -> MatMulInteger": products, "Gather -> Gather[int8]": 3}
    else:
        # query, key and value read one tensor; attention may quantise its own operands besides
        assert audit.changed_modules.pop("FakeQuantize") >= LAYERS * 4 + 2
        assert audit.changed_modules == {"MatMul[int8]": products, "Gather[int8]": 3}
    assert unmet(recipe.expect, audit) == []


@pytest.mark.parametrize("method", ENGINES)
def test_an_artifact_that_was_not_quantised_fails_the_int8_recipes_expectations(method, plain):
    recipe, _ = recipes.find({"onnx": "onnx-int8-dynamic", "openvino": "openvino-int8"}[method])
    audit = opened(plain[method], recipe).audit()
    assert audit.linear_elements_by_dtype.keys() == {"float32"}
    assert len(unmet(recipe.expect, audit)) >= 3


def test_openvino_keeps_lookup_tables_int8_in_memory(int8):
    recipe, _, folder = int8["openvino"]
    audit = opened(folder, recipe).audit()
    assert int(audit.engine["constant_bytes.i8"]) == audit.weight_bytes_by_dtype["int8"]
    assert audit.engine["linear_layers"] == "int8"


@pytest.mark.parametrize("scale_shape", [(6, 1), (1, 1)])
def test_gathering_before_unpacking_changes_no_number(scale_shape):
    import openvino as ov
    from openvino import opset13 as ops

    rng = np.random.default_rng(0)
    table, scale = rng.integers(-127, 128, (6, 4), np.int8), rng.random(scale_shape, np.float32)
    ids = ops.parameter([-1, -1], ov.Type.i64)
    unpacked = ops.multiply(ops.convert(ops.constant(table), "f32"), ops.constant(scale))
    model: Any = ov.Model([ops.gather(unpacked, ids, ops.constant(np.int64(0)))], [ids])  # type: ignore[reportGeneralTypeIssues]
    plugins.load("methods", "openvino").keep_lookups_int8(model)
    gathered = [node for node in model.get_ops() if node.get_type_name() == "Gather"]
    assert "i8" in {node.get_output_element_type(0).to_string() for node in gathered}
    rows = np.array([[5, 0], [2, 2]])
    np.testing.assert_array_equal(ov.compile_model(model, "CPU")(rows)[0], (table * scale)[rows])


def test_lookup_rows_are_off_by_at_most_half_a_step_and_rows_of_zeros_by_nothing():
    from onnx import TensorProto, helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    sizes = np.array([[1], [0], [100], [0.01], [3]], np.float32)
    table = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32) * sizes
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [None])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [None, 8])
    node = helper.make_node("Gather", ["table", "ids"], ["out"])
    graph = helper.make_graph([node], "g", [ids], [out], [numpy_helper.from_array(table, "table")])
    model = helper.make_model(graph)
    _onnx_quantize.lookups_to_int8(model)
    rows = np.asarray(ReferenceEvaluator(model).run(None, {"ids": np.arange(5)})).reshape(5, 8)
    step = np.abs(table).max(axis=1, keepdims=True) / 127
    assert (np.abs(rows - table) <= step / 2 + 1e-7).all()
    assert not rows[1].any()
    assert {tensor.data_type for tensor in model.graph.initializer} == {TensorProto.INT8, TensorProto.FLOAT}


def test_the_onnx_file_tells_no_path_of_the_machine_that_made_it(plain):
    content = (plain["onnx"] / "model.onnx").read_bytes()
    assert b"site-packages" not in content
    assert str(Path.home()).encode() not in content


@pytest.mark.parametrize(
    ("method", "files"),
    [
        ("onnx", {"model.onnx", "config.json"}),
        ("openvino", {"openvino_model.xml", "openvino_model.bin", "config.json"}),
    ],
)
def test_the_folder_is_laid_out_as_optimum_reads_it(method, files, int8):
    assert {path.name for path in int8[method][2].iterdir()} == files


@pytest.mark.parametrize("method", ENGINES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_engine_reports_the_threads_it_was_given(method, threads, plain):
    assert opened(plain[method], recipe_of(method), threads).threads == threads


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
def test_openvino_computes_in_the_named_precision_or_refuses(precision, plain):
    options = {"inference_precision": precision, "dynamic_quantization_group_size": 64}
    recipe = recipe_of("openvino").model_copy(update={"runtime_options": options})
    with contextlib.suppress(Unavailable):
        engine = opened(plain["openvino"], recipe).audit().engine
        assert engine["INFERENCE_PRECISION_HINT"] == engine["linear_layers"] == precision
        assert engine["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "64"
        return
    assert precision != "f32"


@pytest.mark.parametrize("method", ENGINES)
def test_a_cuda_device_that_the_engine_does_not_have_is_unavailable(method, plain):
    import onnxruntime

    if method == "onnx" and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has a CUDA provider")
    recipe = recipe_of(method)
    runtime = runtime_of(recipe)
    with pytest.raises(Unavailable):
        runtime.wrap(runtime.open_model(plain[method], recipe, "cuda"), recipe, "cuda", 1)


@pytest.mark.parametrize("method", ENGINES)
def test_another_base_type_than_float32_is_refused_before_anything_is_loaded(method, tmp_path):
    recipe = recipe_of(method).model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(QtoolError, match="float32, found bfloat16"):
        make(tmp_path / "no-model", recipe, tmp_path / "out")


def test_static_quantisation_without_calibration_rows_is_unavailable(bert, tmp_path):
    with pytest.raises(Unavailable, match="--calibration"):
        make(bert, recipe_of("openvino", scheme="static"), tmp_path / "out")


def test_weights_beyond_one_onnx_file_are_refused_and_nothing_is_written(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins.load("methods", "onnx"), "MAX_FILE_BYTES", 1000)
    with pytest.raises(QtoolError, match="at most 1000"):
        make(bert, recipe_of("onnx"), tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("method", ENGINES)
def test_a_folder_without_the_model_file_is_an_error(method, tmp_path):
    recipe = recipe_of(method)
    with pytest.raises(QtoolError, match=r"has no (openvino_)?model"):
        runtime_of(recipe).open_model(tmp_path, recipe, "cpu")


@pytest.mark.parametrize("method", ENGINES)
def test_the_exported_load_script_gives_the_measured_logits(method, bert, int8, tmp_path):
    from transformers import AutoTokenizer

    recipe, _, artifact = int8[method]
    runtime = runtime_of(recipe)
    folder = shutil.copytree(artifact, tmp_path / "export")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bert / name, folder / name)
    options = runtime.Options(**recipe.runtime_options).model_dump()
    script = runtime.LOAD_SCRIPT.replace("$OPTIONS", repr(options)).replace("$DEVICE", repr("cpu"))
    script = script.replace("$MAX_TOKENS", str(POSITIONS))
    (folder / "load.py").write_text(script)
    texts = ["word1 word2 word3", "word4"]
    batch = dict(AutoTokenizer.from_pretrained(bert)(texts, padding=True, return_tensors="np"))
    logits = runpy.run_path(str(folder / "load.py"))["predict"](texts)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, opened(artifact, recipe).predict(batch), atol=1e-5)


TRAP = """
import os, socket, sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        print("REACHED OUT", event, args, flush=True)
        os._exit(9)
sys.addaudithook(refuse)
from qtool import plugins
for name in ("onnxruntime", "openvino"):
    plugins.load("runtimes", name)
import onnxruntime, openvino, nncf
onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print(openvino.tools.ovc.telemetry_utils.tm.__name__)
"""


def test_the_engines_leave_no_trace_of_telemetry(plain, tmp_path):
    silencers = ("CI", "TF_BUILD", "NNCF_CI", "ORT_DISABLE_TELEMETRY")
    env = {key: value for key, value in os.environ.items() if key not in silencers}
    env |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", TRAP, str(plain["onnx"] / "model.onnx")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "openvino.tools.ovc.telemetry_stub"
    written = [str(path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if "intel" in path or "Microsoft" in path or "onnxruntime" in path] == []


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models/minilm-sst2").is_dir(), reason="needs shared/models/minilm-sst2")
@pytest.mark.parametrize(
    "name", ["onnx-int8-dynamic", "onnx-int8-static", "openvino-int8", "openvino-int8-weight"]
)
def test_int8_minilm_agrees_with_fp32_on_sst2_at_a_quarter_of_the_size(name, tmp_path):
    from transformers import AutoTokenizer

    model_dir, glue = SHARED / "models/minilm-sst2", SHARED / "data/glue/SST-2"
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def batches(file: str, step: int, size: int) -> list[Batch]:
        with (glue / file).open(newline="") as lines:
            texts = [row["sentence"] for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
        texts = sorted(texts[::step], key=len)
        cuts = [texts[start : start + size] for start in range(0, len(texts), size)]
        return [dict(tokenizer(cut, padding=True, return_tensors="np")) for cut in cuts]

    recipe, _ = recipes.find(name)
    calibration = batches("train.tsv", 225, 1)[: recipe.calibration.rows] if recipe.calibration else []
    _, folder = make(model_dir, recipe, tmp_path / "out", calibration)
    loaded = opened(folder, recipe, 2)
    scored = batches("dev.tsv", 1, 32)
    expected = torch_logits(model_dir, scored)
    found = [loaded.predict(batch) for batch in scored]
    same = np.concatenate(found).argmax(1) == np.concatenate(expected).argmax(1)
    assert len(same) == 872
    assert same.mean() >= 0.95
    assert unmet(recipe.expect, loaded.audit()) == []
    stored = sum(path.stat().st_size for path in folder.iterdir())
    assert stored <= 0.27 * (model_dir / "model.safetensors").stat().st_size
