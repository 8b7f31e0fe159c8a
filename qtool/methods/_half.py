"""Which architectures cannot compute in half precision, checked by running each: every PyTorch method asks first."""

from __future__ import annotations

import json

from qtool.core import BuildJob, Unavailable

NO_HALF = {
    "deberta": "transformers' DeBERTa (not v2, v3) keeps query biases in float32 and masks with float32's smallest number",
}
"""By `model_type`: the reason, as transformers 5.24 is."""


def check(job: BuildJob) -> None:
    """Raises Unavailable, before any work, for a model that cannot run in the recipe's half-precision type."""
    recipe = job.recipe
    wanted = recipe.runtime_options.get("autocast") or recipe.dtype
    if wanted == "float32":
        return
    model_type = json.loads((job.model_dir / "config.json").read_text("utf-8")).get("model_type")
    if reason := NO_HALF.get(model_type):
        raise Unavailable(
            f"model_type {model_type} cannot compute in {wanted}: {reason}: use a float32 recipe"
        )
