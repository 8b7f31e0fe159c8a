"""Weight-only quantisation through torchao's tensor subclasses: int8 or float8 weights over a base type.

torchao: https://docs.pytorch.org/ao/stable/; float8 formats: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", https://arxiv.org/abs/2209.05433. Weights are dequantised at every call.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool.core import BuildJob

PACKAGES = ("torch", "transformers", "torchao", "accelerate")


class Options(BaseModel):
    """`scheme` names the type of the stored weights."""

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["int8_weight_only", "float8_weight_only"]


def build(job: BuildJob) -> Any:
    """Quantise at load and save as safetensors; `from_pretrained` reads the artifact back by its config."""
    import torch
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import AutoModelForSequenceClassification, TorchAoConfig

    scheme = Options(**job.recipe.quantize).scheme
    config = Int8WeightOnlyConfig() if scheme == "int8_weight_only" else Float8WeightOnlyConfig()
    model = AutoModelForSequenceClassification.from_pretrained(
        job.model_dir,
        dtype=getattr(torch, job.recipe.dtype),
        quantization_config=TorchAoConfig(config),
        device_map="cpu",
    ).eval()
    model.save_pretrained(job.out)
    return model
