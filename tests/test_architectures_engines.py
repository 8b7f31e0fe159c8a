"""Every ONNX Runtime and OpenVINO recipe on every architecture: what is built, reloaded, and how far it is from fp32.

An export takes seconds and does not depend on the recipe: each architecture is exported once by a family's fp32
recipe, and the others start from that folder, as from a MODEL that is exported already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool import plugins, recipes, reload
from qtool.core import Audit, Batch, BuildJob, Loaded, Recipe, Unavailable, unmet
from tests import architectures
from tests.architectures import ARCHITECTURES, HIDDEN, INNER, LAYERS
from tests.conftest import need

BOOK = {recipe.name: recipe for recipe in recipes.load_all() if recipe.runtime in ("onnxruntime", "openvino")}
PLAIN = {"onnx": "onnx-fp32", "openvino": "openvino-fp32"}
PRODUCTS = LAYERS * 6 + 2

# Relative error of one matrix product whose operands are normal: rounding to steps of s has a standard deviation
# of s / sqrt(12) (Widrow & Kollar 2008, "Quantization Noise", section 4.1), and the largest of n normal numbers is
# about sqrt(2 ln n) standard deviations out. Weights: 2 * 127 or 2 * 7 steps over a row or a group of 32.
# Activations: 255 steps over a text. bf16 rounds both operands and the result to
# 8 bits, 2^-9 at most. The errors of products add in squares.
INT8 = np.hypot(np.sqrt(2 * np.log(HIDDEN)) / 127, np.sqrt(2 * np.log(20 * INNER)) / 127.5) / np.sqrt(12)
INT4 = np.sqrt(2 * np.log(32)) / 7 / np.sqrt(12)
ONE_PRODUCT = {"float32": 2.0**-23, "bf16": 2.0**-9 * 3**0.5, "int8": INT8, "int4": INT4}


def tolerance(recipe: Recipe) -> float:
    """Twice the expected error: the norms after each block spread it unevenly.

    Six times for static ranges: other texts lie outside them, and OpenVINO rounds attention's products as well.
    """
    arithmetic = recipe.runtime_options.get("inference_precision")
    stored = next(iter(recipe.expect.linear_share))
    kind = "bf16" if arithmetic == "bf16" else stored
    return (6 if recipe.calibration else 2) * ONE_PRODUCT[kind] * PRODUCTS**0.5


@dataclass(frozen=True)
class Made:
    """One artifact: the model in memory after building, the folder, and both answers to the test's batches."""

    recipe: Recipe
    folder: Path
    built: list[Any]
    reloaded: list[Any]
    audit: Audit


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of an architecture, made once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(kind: str) -> Path:
        folder = root / kind
        return folder if folder.is_dir() else architectures.make(folder, kind)

    return make


@pytest.fixture(scope="module")
def make(
    sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Made]:
    """The artifact of a recipe for an architecture; Unavailable where the method says so."""
    need("onnx", "onnxruntime", "openvino", "nncf")
    root = tmp_path_factory.mktemp("artifacts")
    made: dict[tuple[str, str], Made] = {}

    def make(name: str, kind: str) -> Made:
        if (name, kind) not in made:
            recipe, source = BOOK[name], sources(kind)
            if name != PLAIN[recipe.method]:
                source = make(PLAIN[recipe.method], kind).folder
            made[name, kind] = build(recipe, source, sources(kind), root / f"{name}-{kind}")
        return made[name, kind]

    return make


def build(recipe: Recipe, source: Path, checkpoint: Path, out: Path) -> Made:
    out.mkdir()
    calibration = rows(checkpoint, 32) if recipe.calibration else []
    built = plugins.load("methods", recipe.method).build(BuildJob(source, out, recipe, calibration, 1))
    batches = architectures.batches(checkpoint)
    runtime = plugins.load("runtimes", recipe.runtime)
    fresh = runtime.wrap(built, recipe, "cpu", 1)
    loaded: Loaded = runtime.wrap(runtime.open_model(out, recipe, "cpu"), recipe, "cpu", 1)
    first, second = ([one.predict(batch) for batch in batches] for one in (fresh, loaded))
    return Made(recipe, out, first, second, loaded.audit())


def rows(checkpoint: Path, count: int) -> list[Batch]:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(checkpoint)
    encoded = [own([text], return_tensors="np") for text in architectures.texts(count, 20, seed=9)]
    return [{name: one[name] for name in own.model_input_names} for one in encoded]


def torch_logits(checkpoint: Path) -> list[Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    module = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        batches = architectures.batches(checkpoint)
        inputs = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches]
        return [module(**batch).logits.numpy() for batch in inputs]


def case(name: str, kind: str) -> Any:
    fast = kind == "bert" and name != "openvino-bf16"
    return pytest.param(name, kind, marks=() if fast else pytest.mark.slow, id=f"{name}-{kind}")


MATRIX = [case(name, kind) for kind in ARCHITECTURES for name in BOOK]


@pytest.mark.parametrize(("name", "kind"), MATRIX)
def test_a_recipe_runs_on_an_architecture_as_built_and_near_fp32_or_says_why_not(name, kind, make, sources):
    why = recipes.why_not(BOOK[name], "cpu")
    if why is not None:
        pytest.skip(str(why))
    try:
        made = make(name, kind)
    except Unavailable:
        if kind in architectures.ALWAYS:
            raise
        return
    expected = torch_logits(sources(kind))
    for built, reloaded in zip(made.built, made.reloaded, strict=True):
        assert reloaded.dtype == np.float32
        np.testing.assert_allclose(reloaded, built, atol=reload.EXACT_TOLERANCE * max(1, np.abs(built).max()))
    found, wanted = (np.concatenate(logits) for logits in (made.reloaded, expected))
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    print(f"{name} {kind}: relative error {error:.5f}, at most {tolerance(made.recipe):.5f}")
    assert error <= max(tolerance(made.recipe), 1e-5)
    assert unmet(made.recipe.expect, made.audit) == []


ALBERT = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER + HIDDEN * HIDDEN + HIDDEN * HIDDEN + 2 * HIDDEN
"""Elements of its linear weights: embedding projection, one layer that all share, pooler, head of two classes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOK)
def test_the_weights_that_albert_shares_are_stored_once(name, make):
    if recipes.why_not(BOOK[name], "cpu") is not None:
        pytest.skip("not on this CPU")
    made = make(name, "albert")
    assert sum(made.audit.linear_elements_by_dtype.values()) == ALBERT
