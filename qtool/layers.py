"""What a checkpoint is made of before anything is loaded: name, shape and part of every tensor.

Methods say from it what their artifacts will weigh (`weight_bytes`); it knows no method and no recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["linear", "lookup", "buffer", "other"]
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer, once however many modules share it.

    `part`: the weight (out, in) of a linear layer, the table (rows, width) of a lookup, a buffer, or what is left
    (biases, norms). `head`: outside the base model; `words`: the table of the word embeddings.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    part: Part = "other"
    head: bool = False
    words: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Output channels of a linear layer, entries of a table."""
        return self.shape[0] if self.shape else 1


def kept(tensor: Tensor, dtype: str) -> dict[str, int]:
    """Bytes by type of a tensor that is cast to `dtype` and nothing else; buffers stay as they are."""
    if tensor.part == "buffer" or tensor.dtype not in FLOAT_BYTES:
        return {tensor.dtype: tensor.elements * tensor.itemsize}
    return {dtype: tensor.elements * FLOAT_BYTES[dtype]}


def describe(model: Any) -> list[Tensor]:
    """The tensors of a PyTorch module, on the meta device too, in its order; tied ones under their first name."""
    import torch

    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    words = model.get_input_embeddings().weight
    parts: dict[int, Part] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            parts[id(module.weight)] = "linear"
        elif isinstance(module, torch.nn.Embedding):
            parts[id(module.weight)] = "lookup"
    found: list[Tensor] = []
    kinds: tuple[tuple[Part, Any], ...] = (
        ("other", model.named_parameters()),
        ("buffer", model.named_buffers()),
    )
    for kind, tensors in kinds:
        for name, tensor in tensors:
            found.append(
                Tensor(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    itemsize=tensor.element_size(),
                    part=parts.get(id(tensor), kind),
                    head=not name.startswith(prefix),
                    words=tensor is words,
                )
            )
    return found
