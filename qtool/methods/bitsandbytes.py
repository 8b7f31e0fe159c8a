"""bitsandbytes: 4-bit NormalFloat or float weights, dequantised in blocks at every call; heads stay as they are.

NF4: Dettmers et al. 2023, "QLoRA", section 3, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool.core import BuildJob

PACKAGES = ("torch", "transformers", "bitsandbytes", "accelerate")


class Options(BaseModel):
    """`scheme` names the type of the stored weights."""

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["nf4"]


def build(job: BuildJob) -> Any:
    """Quantise at load and save before any forward pass: a 4-bit model saved after one reloads wrong."""
    import torch
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

    dtype = getattr(torch, job.recipe.dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=Options(**job.recipe.quantize).scheme,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=heads(job.model_dir),
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        job.model_dir, dtype=dtype, quantization_config=config, device_map="cpu"
    ).eval()
    model.save_pretrained(job.out)
    return model


def heads(model_dir: Path) -> list[str]:
    """Names of the modules outside the base model: a narrow 4-bit head has no CPU kernel and costs accuracy."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(model_dir))
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]
