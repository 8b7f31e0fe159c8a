"""Runs an ONNX file in ONNX Runtime: one session, one execution provider, threads as asked.

An exported `load.py` is `LOAD_SCRIPT` with `$OPTIONS` replaced by the repr of all of `Options` as a dict
(`Options(**recipe.runtime_options).model_dump()`), `$DEVICE` by the repr of the device, `$MAX_TOKENS` by the
most tokens of a text and `$ANSWERS` by what the model gives: logits or embeddings.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool.core import Audit, Batch, Loaded, Part, QtoolError, Recipe, Split, Unavailable
from qtool.runtimes import _graph, _layers, _providers

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


def settings(recipe: Recipe, threads: int) -> Any:
    """Session options for latency: `threads` threads within an operator, one operator at a time."""
    import onnxruntime as ort

    found = ort.SessionOptions()
    found.intra_op_num_threads = threads
    found.inter_op_num_threads = 1
    level = Options(**recipe.runtime_options).graph_optimization
    found.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return found


def wrap(model: Path, recipe: Recipe, device: str, threads: int) -> Loaded:
    """A session over the file `model`.

    Raises Unavailable where this onnxruntime has no provider for `device`, RuntimeError where it has one that does
    not come up, which it would otherwise replace by the CPU with no more than a warning.
    """
    import numpy as np
    import onnxruntime as ort

    provider = PROVIDERS[device]
    if provider not in ort.get_available_providers():
        raise Unavailable(f"this onnxruntime has no {provider}: install onnxruntime-gpu in its place")
    level = Options(**recipe.runtime_options).graph_optimization
    chosen = settings(recipe, threads)
    if device != "cpu":
        chosen.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # without enable_fallback=0 an error while the session is made ends in a session on the CPU
    session = ort.InferenceSession(str(model), chosen, providers=[provider], enable_fallback=0)
    session.disable_fallback()
    used = _providers.check(session.get_providers(), provider)
    assigned = {} if device == "cpu" else _providers.assigned(session.get_provider_graph_assignment_info())
    _providers.refuse_products_elsewhere(assigned, provider, PRODUCTS)
    names = [value.name for value in session.get_inputs()]

    def predict(batch: Batch, part: Part = _layers.whole) -> Any:
        with part("make_tensors"):
            inputs = _graph.pick(batch, names)
        with part("model"):
            (logits,) = session.run(["logits"], inputs)
            return np.asarray(logits, np.float32)

    def audit() -> Audit:
        import onnx

        found = describe(onnx.load(model, load_external_data=False))
        running = session.get_session_options()
        found.engine |= {
            "provider": used,
            **{f"nodes.{name}": str(sum(nodes.values())) for name, nodes in assigned.items()},
            "graph_optimization_level": running.graph_optimization_level.name,
            "intra_op_num_threads": str(running.intra_op_num_threads),
            "inter_op_num_threads": str(running.inter_op_num_threads),
            **describe_engine(model, level, provider),
        }
        return found

    inside = "inside the engine's call, which takes and gives host arrays"
    split = Split(predict, {"copy_in": inside, "copy_out": inside})
    return Loaded(predict, audit, session.get_session_options().intra_op_num_threads, split)


def operators(loaded: Loaded, job: _layers.Job) -> list[_layers.Layer]:
    """Time by node, by the engine's own profiler."""
    model = open_model(job.artifact, job.recipe, job.device)
    return _layers.onnxruntime_nodes(model, settings(job.recipe, job.threads), PROVIDERS[job.device], job)


def describe_engine(model: Path, level: str, provider: str) -> dict[str, str]:
    """What a session makes of the file, from the graph it writes down: matrix products by operator.

    `linear_layers`: the arithmetic of most products that have a stored weight, int8 or float32.
    """
    import onnx
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    settings.log_severity_level = 3  # it warns that such a file suits this machine alone
    with tempfile.TemporaryDirectory(prefix="qtool-") as scratch:
        settings.optimized_model_filepath = f"{scratch}/optimized.onnx"
        # weights apart: one protobuf file holds 2 GiB, and only the operators are read
        settings.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "weights"
        )
        ort.InferenceSession(str(model), settings, providers=[provider], enable_fallback=0)
        graph = onnx.load(settings.optimized_model_filepath, load_external_data=False).graph
    weights, ran, products = _Weights(graph), Counter[str](), Counter[str]()
    for node in graph.node:
        if node.op_type in PRODUCTS:
            ran[f"op.{node.op_type}"] += 1
            if weights.of(node) is not None:
                products["int8" if node.op_type in INTEGER_OPS else "float32"] += 1
    engine = {name: str(count) for name, count in sorted(ran.items())}
    if products:
        engine["linear_layers"] = products.most_common(1)[0][0]
    return engine


def describe_source(folder: Path) -> dict[str, Any]:
    """Of a folder with a float32 `model.onnx`: parameters, weight_bytes, inputs (names), classes and its files.

    It is opened and answers one text of two tokens. Raises QtoolError where it is damaged, quantised or no
    classifier of token ids.
    """
    import numpy as np
    import onnx
    import onnxruntime as ort
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    path = folder / "model.onnx"
    try:
        model = onnx.load(path, load_external_data=False)
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    # each kind of damage is another class of protobuf's or onnxruntime's own
    except Exception as error:  # noqa: BLE001
        raise QtoolError(
            f"cannot open {path}: {' '.join(str(error).split())[:200]}. Export it again."
        ) from None
    inputs = {
        value.name: (
            str(value.type).removeprefix("tensor(").removesuffix(")"),
            len(value.shape) == 2 and not any(isinstance(size, int) for size in value.shape),
        )
        for value in session.get_inputs()
    }
    tensors = model.graph.initializer
    beside = {ExternalDataInfo(tensor).location for tensor in tensors if uses_external_data(tensor)}
    files = sorted({path.name, *beside})
    if outside := [name for name in files if Path(name).name != name]:
        raise QtoolError(f"{path} keeps weights in {outside[0]}. Export it again, into one folder.")
    found = describe(model)
    _graph.check_source(path, found, inputs, [value.name for value in session.get_outputs()])
    (logits,) = session.run(["logits"], {name: np.ones((1, 2), np.int64) for name in inputs})
    size = found.weight_bytes_by_dtype["float32"]
    classes = np.asarray(logits).shape[1]
    return {
        "parameters": size // 4,
        "weight_bytes": size,
        "inputs": list(inputs),
        "classes": classes,
        "files": files,
    }


INTEGER_OPS = {
    "MatMulInteger": "MatMul",
    "MatMulIntegerToFloat": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
    "QLinearMatMul": "MatMul",
    "QGemm": "Gemm",
    "QAttention": "Attention",
    "ConvInteger": "Conv",
}
"""Operator of a quantised graph: what it stands for."""
PRODUCTS = {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Attention", *INTEGER_OPS} - {"ConvInteger"}
UNPACKING_OPS = {"Transpose", "Reshape", "Identity", "Cast", "Mul", "Sub", "DequantizeLinear"}
SMALL_INTEGERS = ("int8", "uint8", "int4", "uint4")


class _Weights:
    """Finds stored weights in a graph: initialisers and Constant nodes, through any chain of unpacking."""

    def __init__(self, graph: Any) -> None:
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                if attribute.name == "value":
                    self.constants[node.output[0]] = attribute.t
        self.makers = {output: node for node in graph.node for output in node.output}

    def behind(self, name: str) -> Any | None:
        """The largest constant behind `name`; None where an activation is behind it."""
        if name in self.constants:
            return self.constants[name]
        node = self.makers.get(name)
        if node is None or node.op_type not in UNPACKING_OPS:
            return None
        found = [self.behind(source) for source in node.input if source]
        return None if None in found else max(found, key=_elements)

    def of(self, node: Any) -> Any | None:
        """The weight of a matrix product or the table of a Gather: its largest constant of rank 2 or more, if any."""
        found = [tensor for name in node.input if name and (tensor := self.behind(name)) is not None]
        return max((tensor for tensor in found if len(tensor.dims) > 1), key=_elements, default=None)


def describe(model: Any) -> Audit:
    """Stored bytes by type over initialisers and Constant nodes; shapes and axes, some KB of int64, count.

    Each linear weight is counted once however many nodes read it. `engine` holds `lookup_tables`, the type of
    the largest table that a Gather reads.
    """
    weights = _Weights(model.graph)
    by_dtype: Counter[str] = Counter()
    for tensor in weights.constants.values():
        by_dtype[_dtype(tensor)] += _bytes(tensor)
    linear: dict[str, Any] = {}
    tables: list[Any] = []
    changed: Counter[str] = Counter()
    for node in model.graph.node:
        if node.op_type in PRODUCTS and (tensor := weights.of(node)) is not None:
            linear[tensor.name] = tensor
            if node.op_type not in INTEGER_OPS and _dtype(tensor) in SMALL_INTEGERS:
                changed[f"{node.op_type} -> {node.op_type}[{_dtype(tensor)}]"] += 1
        if node.op_type in INTEGER_OPS:
            changed[f"{INTEGER_OPS[node.op_type]} -> {node.op_type}"] += 1
        if node.op_type == "Gather" and (tensor := weights.of(node)) is not None:
            tables.append(tensor)
            if _dtype(tensor) in SMALL_INTEGERS:
                changed[f"Gather -> Gather[{_dtype(tensor)}]"] += 1
    elements: Counter[str] = Counter()
    for tensor in linear.values():
        elements[_dtype(tensor)] += _elements(tensor)
    engine = {"lookup_tables": _dtype(max(tables, key=_elements))} if tables else {}
    return Audit(dict(by_dtype), dict(elements), dict(changed), engine)


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


LOAD_SCRIPT = '''"""Loads this folder's ONNX model; `predict` gives float32 $ANSWERS, one row a text."""

import os
import sys
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import numpy as np
import onnxruntime as ort
from transformers import AutoTokenizer

HERE, OPTIONS, DEVICE = Path(__file__).parent, $OPTIONS, $DEVICE
tokenizer = AutoTokenizer.from_pretrained(HERE)
settings = ort.SessionOptions()
settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, OPTIONS["graph_optimization"])
provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[DEVICE]
session = ort.InferenceSession(HERE / "model.onnx", settings, providers=[provider], enable_fallback=0)
if session.get_providers()[0] != provider:
    sys.exit(f"ONNX Runtime runs on {session.get_providers()[0]}, not on {provider}: its libraries did not load")
names = [value.name for value in session.get_inputs()]


def predict(texts):
    batch = tokenizer(texts, padding=len(texts) > 1, truncation=True, max_length=$MAX_TOKENS, return_tensors="np")
    return session.run(["logits"], {name: batch[name].astype(np.int64) for name in names})[0]


if __name__ == "__main__":
    print(predict(sys.argv[1:] or ["a fine film"]))
'''
