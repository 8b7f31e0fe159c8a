"""bitsandbytes: 8-bit or 4-bit weights, unpacked in blocks or multiplied as integers; heads stay as they are.

LLM.int8: Dettmers et al. 2022, "LLM.int8()", section 3, https://arxiv.org/abs/2208.07339. NF4 and double
quantisation: Dettmers et al. 2023, "QLoRA", section 3, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, layers
from qtool.core import BuildJob, QtoolError, Recipe
from qtool.methods import _architectures

PACKAGES = ("torch", "transformers", "bitsandbytes", "accelerate")
TITLE = "bitsandbytes"
refuse = _architectures.refuse
OFFLOADS: tuple[str, ...] = ()
"""Nowhere: transformers 5.24 refuses to offload weights that are packed already."""

# LLM.int8 warns at every call of every layer that it casts activations to half precision.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class Options(BaseModel):
    """`scheme` names the type of the stored weights; `double` stores the 4-bit blocks' scales in 8 bits too."""

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["int8", "nf4", "fp4"]
    double: bool = False


def check(recipe: Recipe) -> None:
    """Raises QtoolError for what only the 4-bit schemes have, and for an autocast."""
    options = Options(**recipe.quantize)
    if autocast := recipe.runtime_options.get("autocast"):
        raise QtoolError(
            f"recipe '{recipe.name}': bitsandbytes' layers answer in the type they are given, whatever autocast"
            f" {autocast} says. Leave autocast out and set dtype: {autocast}."
        )
    if options.double and options.scheme == "int8":
        raise QtoolError(
            f"recipe '{recipe.name}': double quantisation is for nf4 and fp4, found int8: it has no blocks."
        )


def build(job: BuildJob) -> Any:
    """Quantise at load and save before any forward pass: a 4-bit model saved after one reloads wrong."""
    import torch
    from transformers import BitsAndBytesConfig

    _architectures.check(job, refuse)
    options = Options(**job.recipe.quantize)
    dtype = getattr(torch, job.recipe.dtype)
    kind: dict[str, Any] = {"load_in_8bit": True}
    if options.scheme != "int8":
        kind = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": options.scheme,
            "bnb_4bit_use_double_quant": options.double,
            "bnb_4bit_compute_dtype": dtype,
        }
    config = BitsAndBytesConfig(**kind, llm_int8_skip_modules=heads(job.model_dir))
    model = checkpoint.load(job.model_dir, dtype=dtype, quantization_config=config, device_map=job.device)
    model.save_pretrained(job.out)
    return model


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the artifact holds of a tensor.

    int8: a float32 scale a row. 4-bit: two weights a byte, a float32 scale for each block of
    64 and the 16 values of the code; doubly quantised, the scales are bytes with a float32 scale for each 256 of
    them, a code of 256 values and an offset (QLoRA, section 3). A CPU's first call turns these into plain bfloat16
    or float32 scales, at most 6 % of the weights.
    """
    options = Options(**recipe.quantize)
    if tensor.part != "linear" or tensor.head:
        return layers.kept(tensor, recipe.dtype)
    if options.scheme == "int8":
        return {"int8": tensor.elements, "float32": 4 * tensor.rows}
    packed, blocks = -(-tensor.elements // 2), -(-tensor.elements // 64)
    if options.double:
        return {"uint8": packed + blocks, "float32": 4 * -(-blocks // 256) + 4 * (256 + 16 + 1)}
    return {"uint8": packed, "float32": 4 * blocks + 4 * 16}


def heads(model_dir: Path) -> list[str]:
    """Names of the modules outside the base model: a narrow 4-bit head has no CPU kernel and costs accuracy."""
    model = checkpoint.empty(model_dir)
    if model.base_model is model:  # an encoder alone: it has no head, and all of it is quantised
        return []
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]
