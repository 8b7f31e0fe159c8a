"""Has Optimum export the model to OpenVINO IR and, if asked, quantise it to INT8 from real texts.

Optimum's own exporter and defaults, for those who deploy with it: what `openvino` does by hand is beside it in
the same report. It needs an older transformers than the default set: constraints-optimum.txt.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, layers
from qtool.core import Batch, BuildJob, QtoolError, Recipe, Unavailable
from qtool.methods import _architectures

TITLE = "Optimum"
PACKAGES = ("optimum.intel", "torch", "transformers", "openvino", "nncf")
RUNTIME = "optimum"

KEPT_IN_FLOAT = {
    "deberta": "Optimum leaves its position projections, about a seventh of the linear weights,"
    " in float32: use an openvino recipe"
}
"""model_type: what a static scheme leaves undone, checked with the pinned versions."""

# openvino and nncf report their use to a server at import, and use a stub of their own without this package.
sys.modules.setdefault("openvino_telemetry", cast(Any, None))


class Options(BaseModel):
    """`static`: weights and activations to int8 with Optimum's default settings."""

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["none", "static"] = "none"


def check(recipe: Recipe) -> None:
    """Raises QtoolError: what is exported is the float32 model; the arithmetic is the runtime's option."""
    if recipe.dtype != "float32":
        raise QtoolError(f"recipe '{recipe.name}': optimum needs dtype float32, found {recipe.dtype}.")


def refuse(recipe: Recipe, model_type: str, threads: int) -> str | None:
    """Why Optimum's quantiser is not used on this architecture."""
    if Options(**recipe.quantize).scheme == "static" and model_type in KEPT_IN_FLOAT:
        return f"{model_type} would not be INT8, {KEPT_IN_FLOAT[model_type]}"
    return None


def NEEDS_CALIBRATION(recipe: Recipe) -> bool:
    """Whether the recipe's scheme looks at texts."""
    return Options(**recipe.quantize).scheme == "static"


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the IR stores of a tensor: as `openvino` does, int8 with a float32 scale a row."""
    if Options(**recipe.quantize).scheme == "static" and tensor.part in ("linear", "lookup"):
        return {"int8": tensor.elements, "float32": 4 * tensor.rows}
    return layers.kept(tensor, "float32")


def build(job: BuildJob) -> Any:
    """Export, quantise, save; returns the `OVModelForSequenceClassification`, not compiled yet.

    Raises Unavailable for a sentence-embedding checkpoint, for a transformers that is too new, and where a
    static scheme has no calibration rows or leaves linear weights in float32.
    """
    check(job.recipe)
    options = Options(**job.recipe.quantize)
    if checkpoint.read_sentence(job.model_dir) is not None:
        raise Unavailable("Optimum's class for classifiers does not pool embeddings: use an openvino recipe")
    if options.scheme == "static" and not job.calibration:
        raise Unavailable("static quantisation needs calibration rows, found none: give --calibration PATH")
    _architectures.check(job, refuse)
    from qtool.runtimes import optimum

    # Left alone, models above 1e9 parameters would get int8 weights.
    model = optimum.model_class().from_pretrained(
        job.model_dir, export=True, compile=False, load_in_8bit=False, local_files_only=True
    )
    if options.scheme == "static":
        _quantize(model, job.calibration)
    model.save_pretrained(job.out)
    return model


def _quantize(model: Any, calibration: list[Batch]) -> None:
    """Optimum's post-training quantisation in place, ranges from one pass over all of `calibration`.

    https://huggingface.co/docs/optimum-intel/openvino/optimization#full-quantization
    """
    import nncf
    from optimum.intel import OVConfig, OVQuantizationConfig, OVQuantizer  # type: ignore[reportMissingImports]

    batches = [
        {name: array for name, array in batch.items() if name in model.input_names} for batch in calibration
    ]
    OVQuantizer.from_pretrained(model).quantize(
        calibration_dataset=nncf.Dataset(batches),
        ov_config=OVConfig(quantization_config=OVQuantizationConfig(num_samples=len(batches))),
    )
