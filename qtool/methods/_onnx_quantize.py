"""Rewrites an ONNX file with INT8 weights: for activations quantised at every call, or by ranges seen before.

https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qtool.core import Batch


def quantize_dynamic(path: Path, *, per_channel: bool, reduce_range: bool) -> None:
    """In place: every MatMul or Gemm with a stored weight to MatMulInteger behind DynamicQuantizeLinear."""
    from onnxruntime.quantization import quantize_dynamic

    # Lookup tables are left to quantize_lookups: the library stores them as uint8 with one scale a table.
    # Its quant_pre_process is not used: on MiniLM it changed neither a logit nor the speed.
    quantize_dynamic(
        path,
        path,
        op_types_to_quantize=["MatMul"],
        per_channel=per_channel,
        reduce_range=reduce_range,
        extra_options={"MatMulConstBOnly": True},
    )


def quantize_static(path: Path, calibration: list[Batch], *, per_channel: bool, reduce_range: bool) -> None:
    """In place: QuantizeLinear and DequantizeLinear around the inputs of every MatMul with a stored weight.

    Ranges are the extremes over all of `calibration`. Excluded as sensitive: products of two activations, and the
    rounding of every product's result, which stays float32 for the addition behind it.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as quantize
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = onnx.load(path)
    ONNXModel(model).replace_gemm_with_matmul()
    onnx.save(model, path)
    names = [value.name for value in model.graph.input]
    stored = {tensor.name for tensor in model.graph.initializer}
    # MatMulConstBOnly does not keep the library from these in this format
    attention = [
        node.name for node in model.graph.node if node.op_type == "MatMul" and not stored & set(node.input)
    ]

    class Rows(CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[Batch] = iter(calibration)

        def get_next(self) -> Any:
            batch = next(self.left, None)
            return None if batch is None else {name: batch[name] for name in names}

    # it advises on the root logger to preprocess the file, which changed nothing here
    logging.getLogger().addFilter(_no_advice)
    try:
        quantize(
            path,
            path,
            Rows(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            per_channel=per_channel,
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=attention,
            extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )
    finally:
        logging.getLogger().removeFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()


def quantize_lookups(path: Path) -> None:
    """In place: lookup tables to int8 rows."""
    import onnx

    model = onnx.load(path)
    lookups_to_int8(model)
    onnx.save(model, path)


def lookups_to_int8(model: Any) -> None:
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
