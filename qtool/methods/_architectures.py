"""What an architecture cannot do in PyTorch, checked by running each: every PyTorch method asks before its work."""

from __future__ import annotations

import json

from qtool.core import BuildJob, Unavailable

NO_HALF = {
    "deberta": "transformers' DeBERTa (not v2, v3) keeps query biases in float32 and masks with float32's smallest number"
}
"""By `model_type`: why it cannot compute in half precision, as transformers 5.24 is."""
NO_COMPILE = {
    "deberta": "torch 2.13 loses track of the sizes of its relative positions (PendingUnbackedSymbolNotFound)"
}
"""By `model_type`: why it is not one graph."""


def check(job: BuildJob) -> None:
    """Raises Unavailable for a model that cannot run in the recipe's half-precision type, or compiled."""
    recipe = job.recipe
    model_type = json.loads((job.model_dir / "config.json").read_text("utf-8")).get("model_type")
    wanted = recipe.runtime_options.get("autocast") or recipe.dtype
    if wanted != "float32" and (reason := NO_HALF.get(model_type)):
        raise Unavailable(
            f"model_type {model_type} cannot compute in {wanted}: {reason}: use a float32 recipe"
        )
    if recipe.compile and (reason := NO_COMPILE.get(model_type)):
        raise Unavailable(
            f"model_type {model_type} cannot be compiled: {reason}: use a recipe without compile"
        )
