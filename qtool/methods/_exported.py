"""What the methods for exported graphs share: inputs to trace, MODEL folders that hold a graph, refusals."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from qtool.core import QtoolError, Recipe


def input_names(module: Any, tokenizer: Any) -> list[str]:
    """What the tokenizer makes and the model's `forward` takes, in the tokenizer's order."""
    import inspect

    taken = inspect.signature(module.forward).parameters
    return [name for name in tokenizer.model_input_names if name in taken]


def holds(folder: Path, file: str) -> bool:
    """Whether MODEL is a folder with the exported graph `file` and no weights for PyTorch beside it."""
    return (folder / file).is_file() and not any(folder.glob("*.safetensors"))


def refuse_idle(recipe: Recipe, scheme: str, used: Collection[str]) -> None:
    """Raises QtoolError for a key of `quantize` that does nothing under `scheme`."""
    idle = sorted(recipe.quantize.keys() - {"scheme", *used})
    if idle:
        raise QtoolError(
            f"recipe '{recipe.name}': {recipe.method} with scheme {scheme} has no use for {', '.join(idle)}. Remove it."
        )
