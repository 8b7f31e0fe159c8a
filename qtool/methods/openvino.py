"""Converts the model to OpenVINO IR and, if asked, stores weights in 8 or 4 bits or quantises activations as well.

MODEL may be converted already: a folder with a float32 `openvino_model.xml`. The artifact is laid out as
Optimum's OVModelForSequenceClassification reads it: `openvino_model.xml`, its `.bin` and `config.json`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from qtool import checkpoint, layers
from qtool.core import Batch, BuildJob, QtoolError, Recipe, Unavailable
from qtool.methods import _architectures, _exported, _tracing

PACKAGES = ("torch", "transformers", "openvino", "nncf")
TITLE = "OpenVINO"
RUNTIME = "openvino"
READS = ("checkpoint", "openvino")

BF16_ON_ONE_THREAD = {
    "modernbert": "OpenVINO 2026.4 divides by zero when it compiles it in bf16 for one thread"
}
"""model_type: why; seen on a CPU with AMX, with two threads it runs."""

# openvino and nncf report their use to a server at import, and use a stub of their own without this package.
sys.modules.setdefault("openvino_telemetry", cast(Any, None))


class Options(BaseModel):
    """`static`: NNCF post-training quantisation; `preset` mixed = symmetric weights, asymmetric activations.

    `int8_weight` and `int4_weight` store weights alone, embeddings as well: int8 with a scale a row, int4 with
    a scale for every `group_size` weights of a row. `fp16_weights` stores what is left of the floating-point
    weights in half precision.
    """

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["none", "static", "int8_weight", "int4_weight"] = "none"
    preset: Literal["mixed", "performance"] = "mixed"
    group_size: int = Field(32, ge=16, multiple_of=16)
    fp16_weights: bool = False


USED = {
    "none": ("fp16_weights",),
    "static": ("preset", "fp16_weights"),
    "int8_weight": ("fp16_weights",),
    "int4_weight": ("group_size", "fp16_weights"),
}


def check(recipe: Recipe) -> None:
    """Raises QtoolError for what does not combine.

    What is traced is the float32 model; the arithmetic is the runtime's option.
    """
    if recipe.dtype != "float32":
        raise QtoolError(f"recipe '{recipe.name}': openvino needs dtype float32, found {recipe.dtype}.")
    if "cuda" in recipe.devices:
        raise QtoolError(f"recipe '{recipe.name}': openvino runs on a CPU. Remove cuda from devices.")
    scheme = Options(**recipe.quantize).scheme
    _exported.refuse_idle(recipe, scheme, USED[scheme])


def refuse(recipe: Recipe, model_type: str, threads: int) -> str | None:
    """Why the engine cannot run the recipe on this architecture."""
    bf16 = recipe.runtime_options.get("inference_precision") == "bf16"
    if bf16 and threads == 1 and model_type in BF16_ON_ONE_THREAD:
        return f"{model_type} does not run, {BF16_ON_ONE_THREAD[model_type]}: use --threads 2"
    return None


def NEEDS_CALIBRATION(recipe: Recipe) -> bool:
    """Whether the recipe's scheme looks at texts."""
    return Options(**recipe.quantize).scheme == "static"


LEAST_GROUP = 32
"""NNCF looks for no smaller group; a row that none divides is stored in 8 bits with a zero point."""


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the IR stores of a tensor; constants of a few KB that are no weights are left out.

    Weights alone: float16 scales, one a row, for int4 one a group. Static: float32 scales, one a row; SmoothQuant's
    vectors and the ranges of activations, under 1 %, are left out.
    """
    options = Options(**recipe.quantize)
    rest = "float16" if options.fp16_weights else "float32"
    if options.scheme == "none" or tensor.part not in ("linear", "lookup"):
        return layers.kept(tensor, rest)
    if options.scheme == "static":
        return {"int8": tensor.elements, rest: layers.FLOAT_BYTES[rest] * tensor.rows}
    if options.scheme == "int8_weight":
        return {"int8": tensor.elements, "float16": 2 * tensor.rows}
    group = _group(tensor.shape[-1], options.group_size)
    if group is None:
        return {"uint8": tensor.elements + tensor.rows, "float16": 2 * tensor.rows}
    return {"int4": -(-tensor.elements // 2), "float16": 2 * tensor.elements // group}


def _group(width: int, wanted: int) -> int | None:
    """The group size that NNCF takes for rows of `width`: as asked, else the largest smaller power of 2 that divides."""
    smaller = [2**power for power in range(wanted.bit_length()) if LEAST_GROUP <= 2**power < wanted]
    return next((size for size in (wanted, *reversed(smaller)) if width % size == 0), None)


def build(job: BuildJob) -> Any:
    """Convert or copy, quantise, save; returns the `openvino.Model`.

    Raises Unavailable where a static scheme has no calibration rows and for an architecture that the engine
    cannot compile; QtoolError for a converted MODEL that is quantised already.
    """
    import openvino as ov

    check(job.recipe)
    options = Options(**job.recipe.quantize)
    if options.scheme == "static" and not job.calibration:
        raise Unavailable("static quantisation needs calibration rows, found none: give --calibration PATH")
    _architectures.check(job, refuse)
    path = job.out / "openvino_model.xml"
    if _exported.holds(job.model_dir, path.name):
        model = _take(job.model_dir, job.out)
    else:
        model = _trace(job.model_dir, job.out)
    if options.scheme == "static":
        model = _quantize(model, job.calibration, options)
        keep_lookups_int8(model)
    elif options.scheme != "none":
        model = _compress(model, options)
    ov.save_model(model, path, compress_to_fp16=options.fp16_weights)
    # save_model rounds the file's weights to half precision, not the model's in memory.
    return ov.Core().read_model(path) if options.fp16_weights else model


def _take(source: Path, out: Path) -> Any:
    """The model of a folder that holds an IR."""
    import openvino as ov

    from qtool.runtimes import openvino

    openvino.describe_source(source)
    shutil.copyfile(source / "config.json", out / "config.json")
    return ov.Core().read_model(source / "openvino_model.xml")


def _trace(source: Path, out: Path) -> Any:
    """The IR with int64 inputs (batch, tokens) of any size and the output `logits` (batch, classes)."""
    import openvino as ov
    import torch
    from transformers import AutoTokenizer

    module = checkpoint.load(source, dtype=torch.float32)
    names = _exported.input_names(module, AutoTokenizer.from_pretrained(source))
    # Sizes above 1 and a row with padding, so that the trace keeps broadcasting and the mask.
    example = {name: torch.ones(2, 7, dtype=torch.int64) for name in names}
    if "attention_mask" in example:
        example["attention_mask"][1, 4:] = 0
    inputs = [(name, [-1, -1], ov.Type.i64) for name in names]
    cache = getattr(module.config, "use_cache", None)
    if cache:  # a causal model would answer with the keys and values of its tokens too
        module.config.use_cache = False
    with _tracing.traceable():
        model = ov.convert_model(module, example_input=example, input=inputs)
    if [output.get_any_name() for output in model.outputs] != ["logits"]:
        raise RuntimeError(f"the converted model has the outputs {model.outputs}, expected logits alone")
    if cache:
        module.config.use_cache = cache
    module.config.save_pretrained(out)
    return model


def _compress(model: Any, options: Options) -> Any:
    """Every weight, lookup tables and head too, to symmetric integers behind a multiplication, in place.

    https://docs.openvino.ai/2025/openvino-workflow/model-optimization-guide/weight-compression.html
    """
    import nncf

    if options.scheme == "int8_weight":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM,
        group_size=options.group_size,
        ratio=1.0,
        all_layers=True,
        # a table narrower than a group, such as MPNet's of relative positions, is stored in 8 bits
        advanced_parameters=nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
        ),
    )


def _quantize(model: Any, calibration: list[Batch], options: Options) -> Any:
    """FakeQuantize before every MatMul, int8 weights; ranges from one pass over all of `calibration`.

    The transformer model type sets the fusing patterns and SmoothQuant; without it agreement fell to 0.715.
    https://docs.openvino.ai/2025/openvino-workflow/model-optimization-guide/quantizing-models-post-training.html
    """
    import nncf

    wanted = {name for port in model.inputs for name in port.get_names()}
    batches = [{name: array for name, array in batch.items() if name in wanted} for batch in calibration]
    return nncf.quantize(
        model,
        nncf.Dataset(batches),
        preset=nncf.QuantizationPreset(options.preset),
        subset_size=len(batches),
        model_type=nncf.ModelType.TRANSFORMER,
    )


def keep_lookups_int8(model: Any) -> None:
    """Gather first and unpack after, in place; the numbers are the same.

    Beside FakeQuantize the CPU plugin folds Gather(Convert(int8 table) * scale) into a float32 table when it
    compiles: 47 MB instead of 12 on MiniLM, in a model that has 23 MB on disk.
    """
    from openvino import opset13 as ops

    for gather in model.get_ordered_ops():
        if gather.get_type_name() != "Gather":
            continue
        multiply, indices, axis = (gather.input_value(port) for port in range(3))
        parts = _int8_rows(multiply.get_node())
        if parts is None or axis.get_node().get_data().item() != 0:
            continue
        table, scale = parts
        row_scale = ops.gather(scale, indices, axis) if scale.get_shape()[0] > 1 else scale
        unpacked = ops.multiply(ops.convert(ops.gather(table, indices, axis), "f32"), row_scale)
        unpacked.set_friendly_name(gather.get_friendly_name())
        for reader in gather.output(0).get_target_inputs():
            reader.replace_source_output(unpacked.output(0))
    model.validate_nodes_and_infer_types()


def _int8_rows(multiply: Any) -> tuple[Any, Any] | None:
    """The int8 table (rows, width) and its scale (rows or 1, 1) of Convert(table) * scale, else None."""
    if multiply.get_type_name() != "Multiply":
        return None
    convert, scale = (multiply.input_value(port).get_node() for port in range(2))
    if convert.get_type_name() != "Convert" or scale.get_type_name() != "Constant":
        return None
    table = convert.input_value(0).get_node()
    if table.get_type_name() != "Constant" or table.get_element_type().to_string() != "i8":
        return None
    if len(table.get_output_shape(0)) != 2 or len(scale.get_output_shape(0)) != 2:
        return None
    return table.output(0), scale.output(0)
