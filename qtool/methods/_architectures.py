"""What an architecture cannot do in PyTorch, checked by running each, and how every method says so.

A method's `refuse(recipe, model_type, threads)` gives the reason and what would work, "REASON: FIX", or None. The
plan asks it before any work, and `check` asks it in a build, for those who call a method by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from qtool.core import BuildJob, Recipe, Unavailable

Refuse = Callable[[Recipe, str, int], str | None]

NO_HALF = {
    "deberta": "transformers' DeBERTa (not v2, v3) keeps query biases in float32 and masks with float32's smallest number"
}
"""By `model_type`: why it cannot compute in half precision, as transformers 5.24 is."""
NO_COMPILE = {
    "deberta": "torch 2.13 loses track of the sizes of its relative positions (PendingUnbackedSymbolNotFound)"
}
"""By `model_type`: why it is not one graph."""
NO_OFFLOAD = dict.fromkeys(
    ("deberta", "deberta-v2"),
    "transformers reads the weights of its relative positions without calling their module, so that Accelerate's"
    " hooks do not bring them",
)
"""By `model_type`: why its weights must lie on the device that computes."""


def refuse(recipe: Recipe, model_type: str, threads: int) -> str | None:
    """Why a PyTorch recipe cannot run in its half-precision type, or compiled."""
    wanted = recipe.runtime_options.get("autocast") or recipe.dtype
    if wanted != "float32" and model_type in NO_HALF:
        return f"{model_type} cannot compute in {wanted}, {NO_HALF[model_type]}: use a float32 recipe"
    if recipe.compile and model_type in NO_COMPILE:
        return f"{model_type} cannot be compiled, {NO_COMPILE[model_type]}: use a recipe without compile"
    placed = recipe.placement.get("device_map")
    if isinstance(placed, dict) and "disk" in placed.values() and model_type in NO_OFFLOAD:
        return f"{model_type} cannot be offloaded, {NO_OFFLOAD[model_type]}: use a recipe without placement"
    return None


def check(job: BuildJob, refuse: Refuse) -> None:
    """Raises Unavailable where `refuse` has a reason against the model in `job`."""
    config = json.loads((job.model_dir / "config.json").read_text("utf-8"))
    if reason := refuse(job.recipe, str(config.get("model_type")), job.threads):
        raise Unavailable(reason)
