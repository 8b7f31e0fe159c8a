"""Exports the model to ONNX and, if asked, stores its weights as INT8 for dynamic quantisation.

The folder is laid out as Optimum's ORTModelForSequenceClassification reads it: `model.onnx`, `config.json`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool.core import BuildJob, QtoolError, Recipe

PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
RUNTIME = "onnxruntime"

MAX_FILE_BYTES = 2**31 - 1
"""A protobuf message, and so an ONNX file with its weights inside, ends here."""

# Since 1.29 the Linux wheels send usage data unless this is set before the first import
# (https://github.com/microsoft/onnxruntime/pull/27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class Options(BaseModel):
    """`dynamic`: int8 weights, activations quantised at every call; `embeddings`: lookup tables as int8 too.

    `reduce_range` keeps weights to 7 bits for x86 without VNNI, where sums of 8-bit products saturate
    (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
    """

    model_config = ConfigDict(extra="forbid")
    scheme: Literal["none", "dynamic"] = "none"
    per_channel: bool = True
    reduce_range: bool = False
    embeddings: bool = True


def check(recipe: Recipe) -> None:
    """Raises QtoolError: the exported graph is computed in float32."""
    if recipe.dtype != "float32":
        raise QtoolError(f"recipe '{recipe.name}': onnx needs dtype float32, found {recipe.dtype}.")


def build(job: BuildJob) -> bytes:
    """Export, quantise, save; returns the bytes of `model.onnx`.

    Raises QtoolError for a model whose weights do not fit into one ONNX file (2 GiB).
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check(job.recipe)
    options = Options(**job.recipe.quantize)
    # Eager attention exports to 217 nodes on MiniLM, SDPA to 289: it guards against rows masked as a whole.
    module = AutoModelForSequenceClassification.from_pretrained(
        job.model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    size = sum(parameter.nbytes for parameter in module.parameters())
    if size >= MAX_FILE_BYTES:
        raise QtoolError(
            f"the weights have {size} bytes and an ONNX file holds at most {MAX_FILE_BYTES}."
            " Use a recipe of another method, such as openvino."
        )
    path = job.out / "model.onnx"
    tokenizer = AutoTokenizer.from_pretrained(job.model_dir)
    _export(module, input_names(module, tokenizer), path)
    _tidy(path)
    if options.scheme == "dynamic":
        _quantize(path, options)
    module.config.save_pretrained(job.out)
    return path.read_bytes()


def input_names(module: Any, tokenizer: Any) -> list[str]:
    """What the tokenizer makes and the model's `forward` takes, in the tokenizer's order."""
    import inspect

    taken = inspect.signature(module.forward).parameters
    return [name for name in tokenizer.model_input_names if name in taken]


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
    first: dict[Any, str] = {}
    same = {}
    for tensor in graph.initializer:
        content = hashlib.sha256(tensor.raw_data).digest()
        same[tensor.name] = first.setdefault((tensor.data_type, tuple(tensor.dims), content), tensor.name)
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = same.get(name, name)
    kept = [tensor for tensor in graph.initializer if same[tensor.name] == tensor.name]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _quantize(path: Path, options: Options) -> None:
    """Rewrite the file: MatMul to MatMulInteger behind DynamicQuantizeLinear, lookup tables to int8 rows."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    # Lookup tables are left to quantize_lookups: the library stores them as uint8 with one scale a table.
    # Its quant_pre_process is not used: on MiniLM it changed neither a logit nor the speed.
    quantize_dynamic(
        path,
        path,
        op_types_to_quantize=["MatMul"],
        per_channel=options.per_channel,
        reduce_range=options.reduce_range,
        extra_options={"MatMulConstBOnly": True},
    )
    if options.embeddings:
        model = onnx.load(path)
        quantize_lookups(model)
        onnx.save(model, path)


def quantize_lookups(model: Any) -> None:
    """Store every float32 table (rows, width) read by Gather as int8, one scale a row, in place.

    Symmetric, scale = max|row| / 127: Krishnamoorthi 2018, section 3.1, https://arxiv.org/abs/1806.08342.
    Gather reads the int8 row and its scale, so that the whole table is never unpacked in memory.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    tables = {table.name: table for table in graph.initializer}
    nodes, done = [], {}
    for node in graph.node:
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if table is None or table.data_type != TensorProto.FLOAT or len(table.dims) != 2 or axis != 0:
            nodes.append(node)
            continue
        name, indices, result = table.name, node.input[1], node.output[0]
        if name not in done:
            rows = numpy_helper.to_array(table)
            scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
            scale[scale == 0] = 1
            ints = np.clip(np.rint(rows / scale), -127, 127).astype(np.int8)
            done[name] = {"int8": ints, "scale": scale}
        nodes += [
            helper.make_node("Gather", [f"{name}_int8", indices], [f"{result}_int8"]),
            helper.make_node("Gather", [f"{name}_scale", indices], [f"{result}_scale"]),
            helper.make_node("Cast", [f"{result}_int8"], [f"{result}_cast"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{result}_cast", f"{result}_scale"], [result]),
        ]
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name not in done or tensor.name in used]
    for name, parts in done.items():
        kept += [numpy_helper.from_array(array, f"{name}_{part}") for part, array in parts.items()]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
