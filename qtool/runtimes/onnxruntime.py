"""Runs an ONNX file in ONNX Runtime: one session, one execution provider, threads as asked.

An exported `load.py` is `LOAD_SCRIPT` with `$OPTIONS` replaced by the repr of all of `Options` as a dict
(`Options(**recipe.runtime_options).model_dump()`) and `$DEVICE` by the repr of the device.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool.core import Audit, Batch, Loaded, QtoolError, Recipe, Unavailable

PACKAGES = ("onnxruntime",)
Level = Literal["ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL"]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

# Since 1.29 the Linux wheels send usage data, on a thread of their own, unless this is set before the first
# import (https://github.com/microsoft/onnxruntime/pull/27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


class Options(BaseModel):
    """`graph_optimization` is a name of onnxruntime's GraphOptimizationLevel.

    https://onnxruntime.ai/docs/performance/model-optimizations/graph-optimizations.html
    """

    model_config = ConfigDict(extra="forbid")
    graph_optimization: Level = "ORT_ENABLE_ALL"


def open_model(artifact: Path, recipe: Recipe, device: str) -> Path:
    """The path of the model: the session reads the file itself, so that it is in memory once.

    Raises QtoolError where the file is missing.
    """
    path = artifact / "model.onnx"
    if not path.is_file():
        raise QtoolError(f"{artifact} has no model.onnx. Build the artifact again.")
    return path


def wrap(model: bytes | Path, recipe: Recipe, device: str, threads: int) -> Loaded:
    """A session over a file or its bytes.

    Raises Unavailable where this onnxruntime has no provider for `device` or does not use it.
    """
    import numpy as np
    import onnxruntime as ort

    provider = PROVIDERS[device]
    if provider not in ort.get_available_providers():
        raise Unavailable(f"this onnxruntime has no {provider}: install onnxruntime-gpu in its place")
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    level = Options(**recipe.runtime_options).graph_optimization
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    source = model if isinstance(model, bytes) else str(model)
    session = ort.InferenceSession(source, settings, providers=[provider])
    session.disable_fallback()
    used = session.get_providers()[0]
    if used != provider:
        raise Unavailable(f"onnxruntime runs on {used}, asked for {provider}: see its warning in the log")
    names = [value.name for value in session.get_inputs()]

    def predict(batch: Batch) -> Any:
        (logits,) = session.run(["logits"], _feed(batch, names))
        return np.asarray(logits, np.float32)

    def audit() -> Audit:
        import onnx

        found = describe(onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model))
        running = session.get_session_options()
        found.engine = {
            "provider": used,
            "graph_optimization_level": running.graph_optimization_level.name,
            "intra_op_num_threads": str(running.intra_op_num_threads),
            "inter_op_num_threads": str(running.inter_op_num_threads),
        }
        return found

    return Loaded(predict, audit, session.get_session_options().intra_op_num_threads)


def _feed(batch: Batch, names: list[str]) -> Batch:
    """The model's inputs out of `batch`. Only token_type_ids may be left over: not every model uses them."""
    if batch.keys() - {"token_type_ids"} - set(names) or not batch.keys() >= set(names):
        raise QtoolError(f"the model takes {names}, found {sorted(batch)}. Use the model's own tokenizer.")
    return {name: batch[name] for name in names}


INTEGER_OPS = {
    "MatMulInteger": "MatMul",
    "QLinearMatMul": "MatMul",
    "QGemm": "Gemm",
    "MatMulNBits": "MatMul",
    "ConvInteger": "Conv",
}
"""Operator of a quantised graph: what it stands for."""
LINEAR_OPS = {"MatMul", "Gemm", "DynamicQuantizeMatMul", *INTEGER_OPS} - {"ConvInteger"}
UNPACKING_OPS = {"Transpose", "Reshape", "Identity", "Cast", "Mul", "Sub", "DequantizeLinear"}


def describe(model: Any) -> Audit:
    """Stored bytes by type over initialisers and Constant nodes; shapes and axes, some KB of int64, count.

    A linear weight is the largest constant of rank 2 or more that feeds a matrix product, through any chain
    of transposing and unpacking; each is counted once however many nodes read it.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                constants[node.output[0]] = attribute.t
    makers = {output: node for node in graph.node for output in node.output}

    def weight(name: str) -> str | None:
        """The largest constant behind `name`; None where an activation is behind it."""
        if name in constants:
            return name
        node = makers.get(name)
        if node is None or node.op_type not in UNPACKING_OPS:
            return None
        behind = [weight(source) for source in node.input if source]
        return None if None in behind else max(behind, key=lambda one: _elements(constants[one]))

    by_dtype: Counter[str] = Counter()
    for tensor in constants.values():
        by_dtype[_dtype(tensor)] += _bytes(tensor)
    linear: dict[str, Any] = {}
    changed: Counter[str] = Counter()
    for node in graph.node:
        if node.op_type in LINEAR_OPS:
            found = [constants[name] for name in map(weight, filter(None, node.input)) if name]
            found = [tensor for tensor in found if len(tensor.dims) > 1]
            if found:
                tensor = max(found, key=_elements)
                linear[tensor.name] = tensor
        if node.op_type in INTEGER_OPS:
            changed[f"{INTEGER_OPS[node.op_type]} -> {node.op_type}"] += 1
        if node.op_type == "Gather" and node.input[0] in constants:
            kind = _dtype(constants[node.input[0]])
            if kind in ("int8", "uint8", "int4", "uint4"):
                changed[f"Gather -> Gather[{kind}]"] += 1
    elements: Counter[str] = Counter()
    for tensor in linear.values():
        elements[_dtype(tensor)] += _elements(tensor)
    return Audit(dict(by_dtype), dict(elements), dict(changed))


def _dtype(tensor: Any) -> str:
    from onnx import TensorProto

    name = TensorProto.DataType.Name(tensor.data_type).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _elements(tensor: Any) -> int:
    import math

    return math.prod(tensor.dims)


def _bytes(tensor: Any) -> int:
    """Stored bytes: half a byte an element for the 4-bit types, two elements a byte."""
    from onnx import helper

    if _dtype(tensor) in ("int4", "uint4", "float4e2m1"):
        return (_elements(tensor) + 1) // 2
    return _elements(tensor) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


LOAD_SCRIPT = '''"""Loads this folder's ONNX model; `predict` gives float32 logits, one row a text."""

import os
import sys
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import numpy as np
import onnxruntime as ort
from transformers import AutoTokenizer

HERE = Path(__file__).parent
OPTIONS, DEVICE = $OPTIONS, $DEVICE
tokenizer = AutoTokenizer.from_pretrained(HERE)
settings = ort.SessionOptions()
settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, OPTIONS["graph_optimization"])
provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[DEVICE]
session = ort.InferenceSession(HERE / "model.onnx", settings, providers=[provider])
names = [value.name for value in session.get_inputs()]


def predict(texts):
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="np")
    return session.run(["logits"], {name: batch[name].astype(np.int64) for name in names})[0]


if __name__ == "__main__":
    print(predict(sys.argv[1:] or ["a fine film"]))
'''
