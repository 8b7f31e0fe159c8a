"""What a recipe's weights will take, from shapes alone, by the word of its method; and how far off that was.

Pure: imports no ML library, and knows methods only through their `weight_bytes(recipe, tensor)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qtool import plugins
from qtool.core import Recipe
from qtool.layers import Tensor


def by_tensor(recipe: Recipe, tensors: Iterable[Tensor]) -> dict[str, dict[str, int]] | None:
    """Bytes by type of each tensor's part of the artifact; None where the method does not tell."""
    tell = getattr(plugins.load("methods", recipe.method), "weight_bytes", None)
    return {tensor.name: tell(recipe, tensor) for tensor in tensors} if tell else None


def total(recipe: Recipe, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """`weight_bytes` and `weight_bytes_by_dtype` of the whole artifact, null with a reason where not estimated."""
    found = by_tensor(recipe, tensors)
    if found is None:
        reason = f"not estimated: method '{recipe.method}' has no weight_bytes"
        return {"weight_bytes": None, "weight_bytes_by_dtype": {}, "weight_bytes_reason": reason}
    by_dtype: Counter[str] = Counter()
    for sizes in found.values():
        by_dtype.update(sizes)
    return {"weight_bytes": sum(by_dtype.values()), "weight_bytes_by_dtype": dict(by_dtype)}


def error(
    told: Mapping[str, Any] | None, measured_bytes: float | None, peak_bytes: float | None = None
) -> dict[str, Any]:
    """An estimate beside the bytes that the audit found: `error_ratio` is estimate over measured, less 1.

    `peak_bytes` is the most that the process held while it answered: libraries and activations are in it too.
    """
    size = (told or {}).get("weight_bytes")
    reason = None
    if size is None:
        reason = (told or {}).get("weight_bytes_reason") or "not estimated: the run has no shapes for it"
    elif not measured_bytes:
        reason = "its weights were not measured"
    found = {"weight_bytes": size, "measured_bytes": measured_bytes, "peak_bytes": peak_bytes}
    if size is None or not measured_bytes:
        return {**found, "error_ratio": None, "error_ratio_reason": reason}
    return {**found, "error_ratio": size / measured_bytes - 1}
