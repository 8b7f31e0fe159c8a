"""Quantisation through torchao's tensor subclasses: int8 or float8 weights over a base type, perhaps activations too.

torchao: https://docs.pytorch.org/ao/stable/; float8 formats: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", https://arxiv.org/abs/2209.05433. Weights alone are dequantised at every call; with activations
quantised at every call (one scale a token) the products are integer or float8 ones.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, layers
from qtool.core import BuildJob, QtoolError, Recipe
from qtool.methods import _architectures

PACKAGES = ("torch", "transformers", "torchao", "accelerate")
TITLE = "torchao"
refuse = _architectures.refuse
SPILLS = ("cpu",)
"""As transformers' loader allows: a quantised artifact is not read from disk at every pass."""


class Options(BaseModel):
    """`scheme`: `weight_only` names the type of the stored weights, `dynamic` that of the activations too."""

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["int8_weight_only", "int8_dynamic", "float8_weight_only", "float8_dynamic"]


def check(recipe: Recipe) -> None:
    """Raises QtoolError for a base type or an autocast that the scheme's kernels do not take."""
    scheme = Options(**recipe.quantize).scheme
    autocast = recipe.runtime_options.get("autocast")
    if autocast and (scheme != "int8_weight_only" or recipe.compile):
        # seen by watching every product: see runtimes/pytorch.py
        raise QtoolError(
            f"recipe '{recipe.name}': autocast {autocast} does not reach the layers of torchao's {scheme}"
            f"{' once compiled' if recipe.compile else ''}. Leave autocast out and set dtype: {autocast}."
        )
    if scheme == "float8_dynamic" and recipe.dtype != "bfloat16":
        raise QtoolError(
            f"recipe '{recipe.name}': torchao's {scheme} with a scale for each row needs dtype bfloat16,"
            f" found {recipe.dtype}."
        )


def build(job: BuildJob) -> Any:
    """Quantise at load and save as safetensors; `from_pretrained` reads the artifact back by its config."""
    import torch
    from transformers import TorchAoConfig

    _architectures.check(job, refuse)
    model = checkpoint.load(
        job.model_dir,
        dtype=getattr(torch, job.recipe.dtype),
        quantization_config=TorchAoConfig(_config(Options(**job.recipe.quantize).scheme)),
        device_map="cpu",
    )
    model.save_pretrained(job.out)
    return model


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the artifact holds of a tensor: a float32 scale a row, for int8 a zero point too."""
    if tensor.part != "linear":
        return layers.kept(tensor, recipe.dtype)
    scales = {"float32": 4 * tensor.rows}
    if Options(**recipe.quantize).scheme.startswith("int8"):
        return {"int8": tensor.elements + tensor.rows} | scales
    return {"float8_e4m3fn": tensor.elements} | scales


def _config(scheme: str) -> Any:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    if scheme == "float8_dynamic":
        return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    return {
        "int8_weight_only": Int8WeightOnlyConfig,
        "int8_dynamic": Int8DynamicActivationInt8WeightConfig,
        "float8_weight_only": Float8WeightOnlyConfig,
    }[scheme]()
