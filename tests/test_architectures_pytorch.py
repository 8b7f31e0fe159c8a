"""Every PyTorch recipe on every architecture, and which parts of a recipe combine.

The error that a method may cause is computed here from the definition of its number format: see `tolerance`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool import core, plugins, prepare, recipes, reload
from qtool.core import Batch, BuildJob, Loaded, QtoolError, Recipe, Unavailable, unmet
from tests import architectures

pytest.importorskip("torch", reason="needs torch: pip install 'qtool[all]'")
pytest.importorskip("torchao", reason="needs torchao: pip install 'qtool[torchao]'")
pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'qtool[bitsandbytes]'")

METHODS = ("torch_cast", "torch_dynamic", "torchao", "bitsandbytes")
BOOK = {recipe.name: recipe for recipe in recipes.load_all() if recipe.method in METHODS}
ON_CPU = [name for name, recipe in BOOK.items() if "cpu" in recipe.devices]
EAGER = [name for name in ON_CPU if not BOOK[name].compile]
COMPILED = [name for name in ON_CPU if BOOK[name].compile]
# Linear layers one behind another: value, output and the two of the inner part in each block, then the pooler.
DEPTH = 4 * architectures.LAYERS + 1

# QLoRA, appendix E: the sixteen values of NormalFloat.
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
# A sign, two bits of exponent and one of fraction, the largest as 1: bitsandbytes' table of fp4.
FP4 = [sign * value / 12 for sign in (-1, 1) for value in (0, 0.0625, 2, 3, 4, 6, 8, 12)]


def rounding_error(kind: str) -> float:
    """Relative root mean square error of standard normal numbers in a format, in rows or blocks of 64."""
    values = np.random.default_rng(0).normal(size=(2000, 64))
    largest = np.abs(values).max(axis=1, keepdims=True)
    if kind in ("nf4", "fp4"):
        levels = np.array(NF4 if kind == "nf4" else FP4)
        rounded = levels[np.abs(values[..., None] / largest[..., None] - levels).argmin(-1)] * largest
    elif kind == "int8":
        rounded = np.rint(values / largest * 127) * largest / 127
    elif kind == "int8 range 7":  # fbgemm keeps activations to 7 bits, with one range for the whole tensor
        rounded = np.rint(values / largest.max() * 63) * largest.max() / 63
    else:
        bits = {"float16": 11, "bfloat16": 8, "float8": 4}[kind]
        unit = 2.0 ** (np.floor(np.log2(np.abs(values))) - bits + 1)
        rounded = np.rint(values / unit) * unit
    return float(np.linalg.norm(rounded - values) / np.linalg.norm(values))


# What is rounded on the way through one linear layer; in half precision: weight, input, product, residual sum, norm.
ROUNDED = {
    "fp32": [],
    "fp32-compile": [],
    "fp32-disk-offload": [],
    "bf16": ["bfloat16"] * 5,
    "bf16-compile": ["bfloat16"] * 5,
    "bf16-autocast": ["bfloat16"] * 5,
    "fp16": ["float16"] * 5,
    "fp16-autocast": ["float16"] * 5,
    "int8-dynamic": ["int8", "int8 range 7"],
    "int8-dynamic-embeddings": ["int8", "int8 range 7", "int8"],
    "torchao-int8-weight": ["int8"] + ["bfloat16"] * 5,
    "torchao-int8-dynamic": ["int8", "int8"] + ["bfloat16"] * 5,
    "fp8-weight": ["float8"] + ["bfloat16"] * 5,
    "bnb-int8": ["int8", "int8"] + ["bfloat16"] * 5,
    "bnb-nf4": ["nf4"] + ["bfloat16"] * 5,
    "bnb-nf4-double": ["nf4"] + ["bfloat16"] * 5,
    "bnb-fp4": ["fp4"] + ["bfloat16"] * 5,
}


def tolerance(name: str) -> float:
    """Bound of the relative logit error: independent errors add as squares, over kinds and over the layers.

    Three times that, as for any random deviate.
    """
    kinds = sum(rounding_error(kind) ** 2 for kind in ROUNDED[name])
    return 1e-4 + 3 * (DEPTH * kinds) ** 0.5


def recipe_of(**parts: Any) -> Recipe:
    own = {"name": "t", "description": "t", "source": "t", "method": "torch_cast", "runtime": "pytorch"}
    return Recipe.model_validate(own | parts)


def build(model_dir: Path, recipe: Recipe, out: Path) -> tuple[Loaded, Loaded]:
    """What was built, running eagerly as in the build stage, and what was read back, running as the recipe says."""
    out.mkdir(parents=True)
    built = plugins.load("methods", recipe.method).build(BuildJob(model_dir, out, recipe, [], 1))
    runtime = plugins.load("runtimes", recipe.runtime)
    eager = recipe.model_copy(update={"compile": {}})
    again = runtime.open_model(out, recipe, "cpu")
    return runtime.wrap(built, eager, "cpu", 1), runtime.wrap(again, recipe, "cpu", 1)


def logits_of(loaded: Loaded, batches: list[Batch]) -> np.ndarray:
    return np.concatenate([loaded.predict(batch) for batch in batches])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By architecture: its folder, made when first asked for, its batches and its float32 logits."""
    made: dict[str, tuple[Path, list[Batch], np.ndarray]] = {}

    def get(model_type: str) -> tuple[Path, list[Batch], np.ndarray]:
        if model_type not in made:
            folder = architectures.make(tmp_path_factory.mktemp(model_type) / "model", model_type)
            batches = architectures.batches(folder)
            _, loaded = build(folder, BOOK["fp32"], tmp_path_factory.mktemp("fp32") / "out")
            made[model_type] = folder, batches, logits_of(loaded, batches)
        return made[model_type]

    return get


@pytest.fixture(autouse=True)
def _one_process_for_each_compiled_model():
    """qtool gives every trial a process of its own; here the compiler forgets between two tests instead."""
    yield
    import torch

    torch._dynamo.reset()


def built_in_float32(folder: Path) -> core.Audit:
    runtime = plugins.load("runtimes", "pytorch")
    return runtime.describe(runtime.open_model(folder, BOOK["fp32"], "cpu"))


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.name != "tokenizer.json")


def check_recipe_on(name: str, model_type: str, models: Any, tmp_path: Path) -> None:
    recipe = BOOK[name]
    folder, batches, expected = models(model_type)
    if model_type in architectures.ALWAYS:
        built, again = build(folder, recipe, tmp_path / "out")
    else:
        try:
            built, again = build(folder, recipe, tmp_path / "out")
        except Unavailable as reason:
            pytest.skip(str(reason))
    want, found = logits_of(built, batches), logits_of(again, batches)
    exact = reload.CHANGED_KERNEL_TOLERANCE[recipe.dtype] if recipe.compile else reload.EXACT_TOLERANCE
    np.testing.assert_allclose(found, want, atol=exact * max(1.0, float(np.abs(want).max())), rtol=0)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= tolerance(name), f"relative logit error {error:.4f}"
    # a share of all bytes depends on a model's size, and these have hardly any linear weights
    expect = recipe.expect.model_copy(update={"weight_share": {}, "linear_share": {}})
    assert unmet(expect, again.audit()) == []
    linear = again.audit().linear_elements_by_dtype
    # what layers share is stored once, quantised or not
    assert sum(linear.values()) == sum(built_in_float32(folder).linear_elements_by_dtype.values())
    assert disk_bytes(tmp_path / "out") <= disk_bytes(folder)
    for dtype, least in recipe.expect.linear_share.items():
        assert linear[dtype] >= min(least, 0.85) * sum(linear.values())
    if recipe.compile:  # one for batches, one for a single text
        assert again.audit().compiled_graphs == 2


@pytest.mark.parametrize("name", EAGER)
def test_a_recipe_gives_the_logits_of_its_precision(name, models, tmp_path):
    check_recipe_on(name, "bert", models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("model_type", [m for m in architectures.ARCHITECTURES if m != "bert"])
def test_a_recipe_works_on_every_architecture(name, model_type, models, tmp_path):
    check_recipe_on(name, model_type, models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", architectures.ARCHITECTURES)
def test_every_architecture_is_captured_as_one_graph(model_type, models, tmp_path, monkeypatch):
    """Capture alone, without code generation, which takes most of the time."""
    import torch

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    check_recipe_on("fp32-compile", model_type, models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_recipe_gives_the_logits_of_its_precision(name, models, tmp_path):
    check_recipe_on(name, "bert", models, tmp_path)


def nearest_of(levels: list[float], weight: np.ndarray) -> np.ndarray:
    """Each block of 64 in a row-major weight rounded to the nearest of `levels` times the block's largest."""
    blocks = weight.reshape(-1, 64, 1)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    table = np.array(levels)
    return (table[np.abs(blocks / largest - table).argmin(-1)] * largest[..., 0]).reshape(weight.shape)


def nearest_int8(weight: np.ndarray) -> np.ndarray:
    """Symmetric int8, one scale for each row."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    return np.rint(weight / scale) * scale


@pytest.mark.parametrize(
    ("name", "rounded"),
    [
        ("bnb-nf4", lambda weight: nearest_of(NF4, weight)),
        ("bnb-nf4-double", lambda weight: nearest_of(NF4, weight)),
        ("bnb-fp4", lambda weight: nearest_of(FP4, weight)),
        ("torchao-int8-weight", nearest_int8),
    ],
)
def test_quantised_weights_are_those_of_the_definition(name, rounded, models, tmp_path):
    """A float32 model whose weights were rounded in numpy answers like the artifact, up to bf16 arithmetic."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder, batches, _ = models("bert")
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for part, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and (name.startswith("torchao") or part != "classifier"):
            base = module.weight.detach().bfloat16().float()  # what the recipes quantise from
            module.weight.data = torch.from_numpy(rounded(base.numpy())).float()
    _, loaded = build(folder, BOOK[name], tmp_path / "out")
    runtime = plugins.load("runtimes", "pytorch")
    expected = logits_of(runtime.wrap(reference, BOOK["fp32"], "cpu", 1), batches)
    found = logits_of(loaded, batches)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 2 * tolerance("bf16")


NEED_FLOAT32 = "needs weights of dtype float32"
COMBINATIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"runtime_options": {"autocast": "bfloat16"}}, None),
    ({"runtime_options": {"autocast": "float32"}}, "bfloat16 or float16"),
    ({"runtime_options": {"autocast": "bfloat16"}, "dtype": "bfloat16"}, NEED_FLOAT32),
    ({"runtime_options": {"autocast": "bfloat16"}, "dtype": "float16"}, NEED_FLOAT32),
    ({"runtime_options": {"autocast": "bfloat16"}, "compile": {"dynamic": True}}, None),
    ({"dtype": "float16", "compile": {"dynamic": True}}, None),
    ({"compile": {"dynamic": True, "mode": "fastest"}}, "mode"),
    ({"method": "torch_dynamic"}, None),
    ({"method": "torch_dynamic", "quantize": {"per_channel": False, "embeddings": True}}, None),
    ({"method": "torch_dynamic", "dtype": "bfloat16"}, "needs dtype float32"),
    ({"method": "torch_dynamic", "runtime_options": {"autocast": "bfloat16"}}, "float32 activations"),
    ({"method": "torch_dynamic", "compile": {"dynamic": True}}, "torch.compile"),
    *(
        ({"method": "torchao", "quantize": {"scheme": scheme}, "dtype": dtype}, None)
        for scheme in ("int8_weight_only", "int8_dynamic", "float8_weight_only")
        for dtype in ("float32", "bfloat16", "float16")
    ),
    (
        {
            "method": "torchao",
            "quantize": {"scheme": "int8_weight_only"},
            "runtime_options": {"autocast": "bfloat16"},
        },
        None,
    ),
    (
        {
            "method": "torchao",
            "quantize": {"scheme": "int8_weight_only"},
            "runtime_options": {"autocast": "bfloat16"},
            "compile": {"dynamic": True},
        },
        "once compiled",
    ),
    *(
        (
            {
                "method": "torchao",
                "quantize": {"scheme": scheme},
                "runtime_options": {"autocast": "bfloat16"},
            },
            "does not reach",
        )
        for scheme in ("int8_dynamic", "float8_weight_only")
    ),
    *(
        ({"method": "torchao", "quantize": {"scheme": scheme}, "compile": {"dynamic": True}}, None)
        for scheme in ("int8_weight_only", "int8_dynamic", "float8_weight_only")
    ),
    ({"method": "torchao", "quantize": {"scheme": "float8_dynamic"}}, "needs dtype bfloat16"),
    *(
        ({"method": "bitsandbytes", "quantize": quantize, "dtype": dtype}, None)
        for quantize in ({"scheme": "int8"}, {"scheme": "nf4"}, {"scheme": "fp4", "double": True})
        for dtype in ("float32", "bfloat16", "float16")
    ),
    *(
        (
            {
                "method": "bitsandbytes",
                "quantize": {"scheme": scheme},
                "runtime_options": {"autocast": "bfloat16"},
            },
            "answer in the type they are given",
        )
        for scheme in ("int8", "nf4")
    ),
    ({"method": "bitsandbytes", "quantize": {"scheme": "int8", "double": True}}, "has no blocks"),
    *(
        (
            {
                "method": "bitsandbytes",
                "quantize": {"scheme": scheme},
                "dtype": "bfloat16",
                "compile": {"dynamic": True},
            },
            None,
        )
        for scheme in ("int8", "nf4")
    ),
]
ALLOWED = [parts for parts, reason in COMBINATIONS if reason is None]


@pytest.mark.parametrize(("parts", "reason"), COMBINATIONS)
def test_parts_combine_or_are_refused_with_the_reason_before_any_work(parts, reason):
    if reason is None:
        recipes.check(recipe_of(**parts))
    else:
        with pytest.raises(QtoolError, match=reason):
            recipes.check(recipe_of(**parts))


def run_combination(parts: dict[str, Any], models: Any, tmp_path: Path) -> None:
    """The combination really runs, gives finite logits near those of float32, and what it promises is seen."""
    folder, batches, expected = models("bert")
    _, loaded = build(folder, recipe_of(**parts), tmp_path / "out")
    found, audit = logits_of(loaded, batches), loaded.audit()
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= tolerance("bnb-fp4")
    assert audit.autocast == parts.get("runtime_options", {}).get("autocast")
    # bitsandbytes unpacks its state in the first call, which costs one graph more
    assert audit.compiled_graphs in ((2, 3) if parts.get("compile") else (None,))


@pytest.mark.parametrize("parts", [parts for parts in ALLOWED if not parts.get("compile")])
def test_an_allowed_combination_runs(parts, models, tmp_path):
    run_combination(parts, models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [parts for parts in ALLOWED if parts.get("compile")])
def test_an_allowed_combination_is_captured_as_one_graph(parts, models, tmp_path, monkeypatch):
    """Capture alone, without code generation: that takes a minute for each and is tried on the recipes."""
    import torch

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    run_combination(parts, models, tmp_path)


def test_bert_without_padding_token_answers_padded_batches_as_it_answers_their_texts(models):
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder, _, _ = models("bert")
    config = AutoConfig.from_pretrained(folder, pad_token_id=None)
    module = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    loaded = plugins.load("runtimes", "pytorch").wrap(module.eval(), recipe_of(), "cpu", 1)
    rows = [{"input_ids": np.arange(5, 5 + tokens)[None]} for tokens in (4, 9, 2)]
    rows = [row | {"attention_mask": np.ones_like(row["input_ids"])} for row in rows]
    found = loaded.predict(prepare.collate(rows, {"pad": {"input_ids": 0}, "padding_side": "right"}))
    np.testing.assert_allclose(found, logits_of(loaded, rows), atol=1e-5)
