"""Exports the model to ONNX and, if asked, quantises it to INT8: activations at every call or by ranges seen before.

MODEL may be exported already: a folder with a float32 `model.onnx`. The artifact is laid out as Optimum's
ORTModelForSequenceClassification reads it: `model.onnx`, `config.json`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, layers
from qtool.core import BuildJob, QtoolError, Recipe, Unavailable
from qtool.methods import _exported, _onnx_quantize

PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
TITLE = "ONNX Runtime"
RUNTIME = "onnxruntime"
READS = ("checkpoint", "onnx")

MAX_FILE_BYTES = 2**31 - 1
"""A protobuf message, and so an ONNX file with its weights inside, ends here."""

# Since 1.29 the Linux wheels send usage data unless this is set before the first import
# (https://github.com/microsoft/onnxruntime/pull/27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class Options(BaseModel):
    """`dynamic`: int8 weights, activations quantised at every call; `static`: by ranges of calibration texts.

    `embeddings`: lookup tables as int8 too. `reduce_range` keeps weights to 7 bits for x86 without VNNI, where
    sums of 8-bit products saturate
    (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
    """

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["none", "dynamic", "static"] = "none"
    per_channel: bool = True
    reduce_range: bool = False
    embeddings: bool = True


USED = {"none": (), "dynamic": ("per_channel", "reduce_range", "embeddings")}
USED["static"] = USED["dynamic"]


def check(recipe: Recipe) -> None:
    """Raises QtoolError for what does not combine: the exported graph is float32, and int8 products need a CPU."""
    if recipe.dtype != "float32":
        raise QtoolError(f"recipe '{recipe.name}': onnx needs dtype float32, found {recipe.dtype}.")
    scheme = Options(**recipe.quantize).scheme
    _exported.refuse_idle(recipe, scheme, USED[scheme])
    if scheme != "none" and "cuda" in recipe.devices:
        raise QtoolError(
            f"recipe '{recipe.name}': onnxruntime's CUDA provider has no kernel for products of int8."
            " Remove cuda from devices."
        )


def NEEDS_CALIBRATION(recipe: Recipe) -> bool:
    """Whether the recipe's scheme looks at texts."""
    return Options(**recipe.quantize).scheme == "static"


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the graph stores of a tensor; constants of a few KB that are no weights are left out.

    A float32 scale and an int8 zero point for each output channel, a float32 scale for each row of a table.
    """
    options = Options(**recipe.quantize)
    if options.scheme != "none" and tensor.part == "linear":
        scales = tensor.rows if options.per_channel else 1
        return {"int8": tensor.elements + scales, "float32": 4 * scales}
    if options.scheme != "none" and options.embeddings and tensor.part == "lookup":
        return {"int8": tensor.elements, "float32": 4 * tensor.rows}
    return layers.kept(tensor, "float32")


def build(job: BuildJob) -> Path:
    """Export or copy, quantise, save; returns the path of the artifact's `model.onnx`.

    Raises QtoolError for a model whose weights do not fit into one ONNX file (2 GiB) and for an exported MODEL
    that is quantised already; Unavailable where a static scheme has no calibration rows and for an
    architecture that cannot be exported.
    """
    check(job.recipe)
    options = Options(**job.recipe.quantize)
    if options.scheme == "static" and not job.calibration:
        raise Unavailable("static quantisation needs calibration rows, found none: give --calibration PATH")
    path = job.out / "model.onnx"
    if _exported.holds(job.model_dir, "model.onnx"):
        _take(job.model_dir, job.out, one_file=options.scheme != "none")
    else:
        _trace(job.model_dir, job.out)
    ranges = {"per_channel": options.per_channel, "reduce_range": options.reduce_range}
    if options.scheme == "dynamic":
        _onnx_quantize.quantize_dynamic(path, **ranges)
    elif options.scheme == "static":
        _onnx_quantize.quantize_static(path, job.calibration, **ranges)
    if options.scheme != "none" and options.embeddings:
        _onnx_quantize.quantize_lookups(path)
    return path


def _take(source: Path, out: Path, *, one_file: bool) -> None:
    """Copy an exported model into `out`, weights that lie beside it too; `one_file` takes those inside."""
    import onnx

    from qtool.runtimes import onnxruntime

    facts = onnxruntime.describe_source(source)
    _check_size(facts["weight_bytes"] if one_file else 0)
    shutil.copyfile(source / "config.json", out / "config.json")
    if one_file:
        onnx.save(onnx.load(source / "model.onnx"), out / "model.onnx")
        return
    for name in facts["files"]:
        shutil.copyfile(source / name, out / name)


def _trace(source: Path, out: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    # Eager attention exports to 217 nodes on MiniLM, SDPA to 289: it guards against rows masked as a whole.
    module = checkpoint.load(source, dtype=torch.float32, attn_implementation="eager")
    _check_size(sum(parameter.nbytes for parameter in module.parameters()))
    names = _exported.input_names(module, AutoTokenizer.from_pretrained(source))
    _export(module, names, out / "model.onnx")
    _tidy(out / "model.onnx")
    module.config.save_pretrained(out)


def _check_size(size: int) -> None:
    if size >= MAX_FILE_BYTES:
        raise QtoolError(
            f"the weights have {size} bytes and an ONNX file holds at most {MAX_FILE_BYTES}."
            " Use a recipe of another method, such as openvino."
        )


def _export(module: Any, names: list[str], path: Path) -> None:
    """Trace `module` with inputs (batch, tokens) of any size and the one output `logits` (batch, classes)."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            return self.module(**dict(zip(names, tensors, strict=True))).logits

    # Sizes other than 0 and 1, which torch.export would take as constants.
    example = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    torch.onnx.export(
        Logits().eval(),
        example,
        str(path),
        dynamo=True,
        external_data=False,
        input_names=names,
        output_names=["logits"],
        dynamic_shapes=(tuple({0: "batch", 1: "tokens"} for _ in names),),
        verbose=False,
    )


def _tidy(path: Path) -> None:
    """Merge equal weights; drop the exporter's notes: stack traces with local paths, 0.7 MB on MiniLM.

    Raises RuntimeError when the export fixed the size of an input.
    """
    import onnx

    model = onnx.load(path)
    graph = model.graph
    for value in graph.input:
        fixed = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        if fixed:
            raise RuntimeError(f"the export fixed a size of input {value.name} to {fixed}")
    _merge_equal_weights(graph)
    del model.metadata_props[:], graph.metadata_props[:]
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    onnx.save(model, path)


def _merge_equal_weights(graph: Any) -> None:
    """Store once what layers share, in place: the exporter transposes ALBERT's weights anew for every layer.

    https://github.com/microsoft/onnxruntime/issues/10340
    """
    from onnx import numpy_helper

    first: dict[Any, str] = {}
    same = {}
    for tensor in graph.initializer:
        content = hashlib.sha256(numpy_helper.to_array(tensor).tobytes()).digest()
        same[tensor.name] = first.setdefault((tensor.data_type, tuple(tensor.dims), content), tensor.name)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = same.get(name, name)
    kept = [tensor for tensor in graph.initializer if same[tensor.name] == tensor.name]
    del graph.initializer[:]
    graph.initializer.extend(kept)
