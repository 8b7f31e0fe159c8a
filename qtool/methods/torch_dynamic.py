"""PyTorch's dynamic INT8: weights stored as int8 with one scale an output channel, activations at every call.

https://docs.pytorch.org/docs/stable/quantization.html#dynamic-quantization. `torch.ao.quantization` is
deprecated in favour of torchao, whose eager INT8 has no fused CPU kernel of the same speed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, layers
from qtool.core import BuildJob, QtoolError, Recipe

PACKAGES = ("torch", "transformers", "safetensors")
TITLE = "PyTorch dynamic INT8"


class Options(BaseModel):
    """`per_channel` is the accurate choice: one scale a tensor lost 4 points of agreement on MiniLM.

    `embeddings`: the word embeddings too, as uint8 with a scale and a zero point for each word's row.
    """

    model_config = ConfigDict(extra="forbid")
    per_channel: bool = True
    embeddings: bool = False


def check(recipe: Recipe) -> None:
    """Raises QtoolError: the packed kernels take float32 activations only and cannot be traced."""
    where = f"recipe '{recipe.name}': torch_dynamic"
    if recipe.dtype != "float32":
        raise QtoolError(f"{where} needs dtype float32, found {recipe.dtype}.")
    if autocast := recipe.runtime_options.get("autocast"):
        raise QtoolError(
            f"{where} computes from float32 activations, which autocast {autocast} would replace."
            " Leave autocast out, or use method torchao."
        )
    if recipe.compile:
        raise QtoolError(
            f"{where} packs its weights out of torch.compile's sight. Leave compile out, or use method torchao."
        )


def build(job: BuildJob) -> Any:
    """Quantise every Linear and save integers, scales and the rest as plain safetensors, without pickle."""
    import torch
    from safetensors.torch import save_file
    from torch.ao.quantization import qconfig
    from torch.ao.quantization.quantize import quantize_dynamic

    options = Options(**job.recipe.quantize)
    model = checkpoint.load(job.model_dir, dtype=torch.float32)
    linear = qconfig.per_channel_dynamic_qconfig if options.per_channel else qconfig.default_dynamic_qconfig
    wanted: dict[Any, Any] = {torch.nn.Linear: linear}
    if options.embeddings:
        # This one by its name: with all of them by their type, tables read whole instead of by row crash.
        words = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is words)
        wanted[name] = qconfig.float_qparams_weight_only_qconfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecation is known, see above
        quantized = quantize_dynamic(model, wanted, dtype=torch.qint8)
    tensors = {name: tensor.detach().contiguous() for name, tensor in plain_tensors(quantized).items()}
    save_file(tensors, job.out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(job.out)
    return quantized


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the artifact holds of a tensor: int8 with float64 scales, rows of words as uint8."""
    options = Options(**recipe.quantize)
    if tensor.part == "linear":
        return {"int8": tensor.elements, "float64": 8 * (tensor.rows if options.per_channel else 1)}
    if tensor.words and options.embeddings:
        return {"uint8": tensor.elements, "float32": 4 * tensor.rows + 4 * tensor.rows}  # scales, zero points
    return layers.kept(tensor, "float32")


def plain_tensors(model: Any) -> dict[str, Any]:
    """What the file holds, by name: of a packed module its integers, scales and zero points."""
    import torch
    from torch.ao.nn.quantized import Embedding
    from torch.ao.nn.quantized.dynamic import Linear

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            weight = module.weight()
            tensors[f"{name}.weight_uint8"] = weight.int_repr()
            tensors[f"{name}.weight_scale"] = weight.q_per_channel_scales()
            tensors[f"{name}.weight_zero"] = weight.q_per_channel_zero_points()
        elif isinstance(module, Linear):
            weight = module.weight()
            per_channel = weight.qscheme() == torch.per_channel_affine
            scales = weight.q_per_channel_scales() if per_channel else torch.tensor([weight.q_scale()])
            tensors[f"{name}.weight_int8"] = weight.int_repr()
            tensors[f"{name}.weight_scale"] = scales.to(torch.float64)
            if module.bias() is not None:
                tensors[f"{name}.bias"] = module.bias()
    return tensors


def open_model(artifact: Path, device: str) -> Any:
    """Rebuild the quantised module from `config.json` and `model.safetensors`; runs on a CPU only."""
    import torch
    import transformers
    from safetensors.torch import load_file
    from torch.ao.nn.quantized import Embedding
    from torch.ao.nn.quantized.dynamic import Linear

    tensors = load_file(artifact / "model.safetensors")
    with torch.device("meta"):  # every tensor is in the file: nothing needs to be initialised
        config = transformers.AutoConfig.from_pretrained(artifact)
        model = getattr(transformers, (config.architectures or [])[0])(config)
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
    for name in [key.removesuffix(".weight_uint8") for key in tensors if key.endswith(".weight_uint8")]:
        ints, scale, zero = (tensors.pop(f"{name}.weight_{part}") for part in ("uint8", "scale", "zero"))
        weight = torch._make_per_channel_quantized_tensor(ints, scale, zero, 0)  # pyright: ignore
        model.set_submodule(name, Embedding(ints.shape[0], ints.shape[1], _weight=weight))
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    return model.eval()
