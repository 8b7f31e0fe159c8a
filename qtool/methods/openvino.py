"""Converts the model to OpenVINO IR and, if asked, quantises weights and activations to INT8 from real texts.

The folder is laid out as Optimum's OVModelForSequenceClassification reads it: `openvino_model.xml`, its
`.bin` and `config.json`.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from qtool.core import Batch, BuildJob, QtoolError, Recipe, Unavailable

PACKAGES = ("torch", "transformers", "openvino", "nncf")
RUNTIME = "openvino"

# openvino and nncf report their use to a server at import, and use a stub of their own without this package.
sys.modules.setdefault("openvino_telemetry", cast(Any, None))


class Options(BaseModel):
    """`static`: NNCF post-training quantisation; `preset` mixed = symmetric weights, asymmetric activations.

    `fp16_weights` stores what is left of the floating-point weights in half precision.
    """

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["none", "static"] = "none"
    preset: Literal["mixed", "performance"] = "mixed"
    fp16_weights: bool = False


def check(recipe: Recipe) -> None:
    """Raises QtoolError: what is traced is the float32 model; the arithmetic is the runtime's option."""
    if recipe.dtype != "float32":
        raise QtoolError(f"recipe '{recipe.name}': openvino needs dtype float32, found {recipe.dtype}.")


def NEEDS_CALIBRATION(recipe: Recipe) -> bool:
    """Whether the recipe's scheme looks at texts."""
    return Options(**recipe.quantize).scheme == "static"


def build(job: BuildJob) -> Any:
    """Convert, quantise, save; returns the `openvino.Model`.

    Raises Unavailable where a static scheme has no calibration rows.
    """
    import openvino as ov
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check(job.recipe)
    options = Options(**job.recipe.quantize)
    if options.scheme == "static" and not job.calibration:
        raise Unavailable("static quantisation needs calibration rows, found none: give --calibration PATH")
    module = AutoModelForSequenceClassification.from_pretrained(job.model_dir, dtype=torch.float32).eval()
    model = _convert(module, AutoTokenizer.from_pretrained(job.model_dir))
    if options.scheme == "static":
        model = _quantize(model, job.calibration, options)
        keep_lookups_int8(model)
    path = job.out / "openvino_model.xml"
    ov.save_model(model, path, compress_to_fp16=options.fp16_weights)
    module.config.save_pretrained(job.out)
    # save_model rounds the file's weights to half precision, not the model's in memory.
    return ov.Core().read_model(path) if options.fp16_weights else model


def _convert(module: Any, tokenizer: Any) -> Any:
    """The IR with int64 inputs (batch, tokens) of any size and the output `logits` (batch, classes)."""
    import inspect

    import openvino as ov
    import torch

    taken = inspect.signature(module.forward).parameters
    names = [name for name in tokenizer.model_input_names if name in taken]
    # Sizes above 1 and a row with padding, so that the trace keeps broadcasting and the mask.
    example = {name: torch.ones(2, 7, dtype=torch.int64) for name in names}
    if "attention_mask" in example:
        example["attention_mask"][1, 4:] = 0
    inputs = [(name, [-1, -1], ov.Type.i64) for name in names]
    model = ov.convert_model(module, example_input=example, input=inputs)
    if [output.get_any_name() for output in model.outputs] != ["logits"]:
        raise RuntimeError(f"the converted model has the outputs {model.outputs}, expected logits alone")
    return model


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
