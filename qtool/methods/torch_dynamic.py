"""PyTorch's dynamic INT8: weights stored as int8 with one scale an output channel, activations at every call.

https://docs.pytorch.org/docs/stable/quantization.html#dynamic-quantization. `torch.ao.quantization` is
deprecated in favour of torchao, whose eager INT8 has no fused CPU kernel of the same speed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from qtool.core import BuildJob, QtoolError, Recipe

PACKAGES = ("torch", "transformers", "safetensors")


class Options(BaseModel):
    """`per_channel` is the accurate choice: one scale a tensor lost 4 points of agreement on MiniLM."""

    model_config = ConfigDict(extra="forbid")
    per_channel: bool = True


def check(recipe: Recipe) -> None:
    """Raises QtoolError: the packed kernels take float32 activations only."""
    if recipe.dtype != "float32":
        raise QtoolError(f"recipe '{recipe.name}': torch_dynamic needs dtype float32, found {recipe.dtype}.")


def build(job: BuildJob) -> Any:
    """Quantise every Linear and save int8 weights, scales and the rest as plain safetensors, without pickle."""
    import torch
    from safetensors.torch import save_file
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization.qconfig import default_dynamic_qconfig, per_channel_dynamic_qconfig
    from torch.ao.quantization.quantize import quantize_dynamic
    from transformers import AutoModelForSequenceClassification

    options = Options(**job.recipe.quantize)
    model = AutoModelForSequenceClassification.from_pretrained(job.model_dir, dtype=torch.float32).eval()
    config = per_channel_dynamic_qconfig if options.per_channel else default_dynamic_qconfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecation is known, see above
        quantized = quantize_dynamic(model, {torch.nn.Linear: config}, dtype=torch.qint8)
    tensors = dict(quantized.named_parameters()) | dict(quantized.named_buffers())
    for name, module in quantized.named_modules():
        if isinstance(module, Linear):
            weight = module.weight()
            per_channel = weight.qscheme() == torch.per_channel_affine
            scales = weight.q_per_channel_scales() if per_channel else torch.tensor([weight.q_scale()])
            tensors[f"{name}.weight_int8"] = weight.int_repr()
            tensors[f"{name}.weight_scale"] = scales.to(torch.float64)
            if module.bias() is not None:
                tensors[f"{name}.bias"] = module.bias()
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, job.out / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(job.out)
    return quantized


def open_model(artifact: Path, device: str) -> Any:
    """Rebuild the quantised module from `config.json` and `model.safetensors`; runs on a CPU only."""
    import torch
    from safetensors.torch import load_file
    from torch.ao.nn.quantized.dynamic import Linear
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tensors = load_file(artifact / "model.safetensors")
    with torch.device("meta"):  # every tensor is in the file: nothing needs to be initialised
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(artifact))
    for name in [key.removesuffix(".weight_int8") for key in tensors if key.endswith(".weight_int8")]:
        ints, scale = tensors.pop(f"{name}.weight_int8"), tensors.pop(f"{name}.weight_scale")
        if len(scale) == len(ints):
            zeros = torch.zeros(len(scale), dtype=torch.int64)
            weight = torch._make_per_channel_quantized_tensor(ints, scale, zeros, 0)  # pyright: ignore
        else:
            weight = torch._make_per_tensor_quantized_tensor(ints, float(scale), 0)  # pyright: ignore
        linear = Linear(ints.shape[1], ints.shape[0])
        linear.set_weight_bias(weight, tensors.pop(f"{name}.bias", None))
        model.set_submodule(name, linear)
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    return model.eval()
