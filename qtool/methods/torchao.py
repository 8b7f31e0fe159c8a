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
OFFLOADS: tuple[str, ...] = ("cpu",)
"""Where Accelerate may keep its weights; transformers 5.24 refuses torchao's on disk."""


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


def needs_gpu(recipe: Recipe) -> bool:
    """Whether no CPU can quantise or compute it: torchao demands a GPU for dynamic float8."""
    return Options(**recipe.quantize).scheme == "float8_dynamic"


def build(job: BuildJob) -> Any:
    """Quantise at load and save as safetensors; `from_pretrained` reads the artifact back by its config."""
    import torch
    from transformers import TorchAoConfig

    _architectures.check(job, refuse)
    model = checkpoint.load(
        job.model_dir,
        dtype=getattr(torch, job.recipe.dtype),
        quantization_config=TorchAoConfig(_config(Options(**job.recipe.quantize).scheme)),
        device_map=job.device,
    )
    model.save_pretrained(job.out)
    return model


def suit(model: Any, device: str) -> None:
    """On a GPU, let the layers whose activations become int8 multiply 16 rows of zeros as well: they are cut off again.

    cuBLAS multiplies int8 matrices of more than 16 rows alone, and a pooled vector or a short text has fewer
    ("self.size(0) needs to be greater than 16", https://github.com/pytorch/ao/issues/2376). An exported script has
    this function's source, so it stands alone.
    """
    if device != "cuda":
        return
    import torch
    from torchao.quantization import Int8Tensor

    class PaddedLinear(torch.nn.Linear):
        def forward(self, input: Any) -> Any:
            rows = input.reshape(-1, input.shape[-1])
            more = torch.nn.functional.pad(rows, (0, 0, 0, 16))
            found = torch.nn.functional.linear(more, self.weight, self.bias)
            return found[:-16].reshape(*input.shape[:-1], found.shape[-1])

    for module in model.modules():
        weight = getattr(module, "weight", None) if type(module) is torch.nn.Linear else None
        if isinstance(weight, Int8Tensor) and weight.act_quant_kwargs is not None:
            module.__class__ = PaddedLinear
            if hasattr(module, "_old_forward"):  # what a hook of Accelerate calls
                vars(module)["_old_forward"] = PaddedLinear.forward.__get__(module)


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
