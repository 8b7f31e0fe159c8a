"""Runs an OpenVINO IR on the CPU with one stream, and reads back what the engine made of the request.

An exported `load.py` is `LOAD_SCRIPT` with `$OPTIONS` replaced by the repr of all of `Options` as a dict
(`Options(**recipe.runtime_options).model_dump()`), `$MAX_TOKENS` by the most tokens of a text and `$ANSWERS`
by what the model gives: logits or embeddings.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from qtool.core import Audit, Batch, Loaded, Part, QtoolError, Recipe, Split, Unavailable
from qtool.runtimes import _graph, _layers

PACKAGES = ("openvino",)

# openvino reports its use to a server at import, and uses a stub of its own without this package.
sys.modules.setdefault("openvino_telemetry", cast(Any, None))


class Options(BaseModel):
    """The arithmetic is always named: left alone it is bf16 on CPUs that have it and f32 on others.

    `dynamic_quantization_group_size` concerns models with compressed weights: activations are quantised in
    groups of this size, 0 leaves them alone; 32 is what the engine does by itself.
    https://docs.openvino.ai/2025/openvino-workflow/running-inference/optimize-inference/precision-control.html
    """

    model_config = ConfigDict(extra="forbid")
    inference_precision: Literal["f32", "bf16", "f16"] = "f32"
    dynamic_quantization_group_size: int = Field(32, ge=0)


def open_model(artifact: Path, recipe: Recipe, device: str) -> Any:
    """The `openvino.Model` of a folder, its weights mapped. Raises QtoolError where a file is missing."""
    import openvino as ov

    for name in ("openvino_model.xml", "openvino_model.bin"):
        if not (artifact / name).is_file():
            raise QtoolError(f"{artifact} has no {name}. Build the artifact again.")
    return ov.Core().read_model(artifact / "openvino_model.xml")


def settings(options: Options, threads: int) -> dict[str, Any]:
    """Properties of a compilation for latency: one stream, `threads` threads, nothing left to the engine."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": options.inference_precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": options.dynamic_quantization_group_size,
    }


def check_precision(compiled: Any, options: Options) -> None:
    """Raises Unavailable where the engine answers with another precision than asked for."""
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if precision != options.inference_precision:
        raise Unavailable(
            f"this CPU computes in {precision} where {options.inference_precision} was asked for:"
            f" set inference_precision: {precision} in the recipe's runtime_options"
        )


def wrap(model: Any, recipe: Recipe, device: str, threads: int) -> Loaded:
    """Compile for the CPU: latency hint, one stream, `threads` threads.

    Raises Unavailable for another device, and where the engine answers with another precision than asked for.
    """
    import numpy as np
    import openvino as ov

    if device != "cpu":
        raise Unavailable(f"the openvino runtime runs on a CPU, asked for {device}: use --device cpu")
    options = Options(**recipe.runtime_options)
    compiled = ov.Core().compile_model(
        model,
        "CPU",
        settings(options, threads),
    )
    check_precision(compiled, options)
    request = compiled.create_infer_request()
    names = [port.get_any_name() for port in compiled.inputs]
    output = [port.get_any_name() for port in compiled.outputs].index("logits")

    def predict(batch: Batch, part: Part = _layers.whole) -> Any:
        # Tensors over the caller's memory, then one copy out of the engine's, which the next call overwrites:
        # 18 microseconds a call less than compiled(batch) with its dictionaries.
        with part("make_tensors"):
            arrays = [np.ascontiguousarray(array, np.int64) for array in _graph.pick(batch, names).values()]
            for index, array in enumerate(arrays):
                request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
        with part("model"):
            request.infer(share_outputs=True)
        with part("copy_out"):
            return request.get_output_tensor(output).data.copy()

    def audit() -> Audit:
        found = describe(model)
        found.engine |= describe_engine(compiled)
        return found

    split = Split(predict, {"copy_in": "none: the engine reads the host's arrays where they are"})
    return Loaded(predict, audit, compiled.get_property("INFERENCE_NUM_THREADS"), split)


def operators(loaded: Loaded, job: _layers.Job) -> list[_layers.Layer]:
    """Time by layer, by the engine's own counters."""
    model = open_model(job.artifact, job.recipe, job.device)
    return _layers.openvino_layers(model, settings(Options(**job.recipe.runtime_options), job.threads), job)


def describe_source(folder: Path) -> dict[str, Any]:
    """Of a folder with a float32 `openvino_model.xml`: parameters, weight_bytes, inputs (names), classes and its files.

    It is compiled and answers one text of two tokens. Raises QtoolError where it is damaged, quantised or no
    classifier of token ids.
    """
    import numpy as np
    import openvino as ov

    path = folder / "openvino_model.xml"
    try:
        model = ov.Core().read_model(path)
        compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except RuntimeError as error:  # whatever is wrong with the files
        raise QtoolError(
            f"cannot open {path}: {' '.join(str(error).split())[:200]}. Export it again."
        ) from None
    inputs = {}
    for port in model.inputs:
        shape, dtype = port.get_partial_shape(), port.get_element_type().to_string()
        free = shape.rank.is_static and len(shape) == 2 and all(size.is_dynamic for size in shape)
        inputs[port.get_any_name()] = (DTYPES.get(dtype, dtype), free)
    found = describe(model)
    _graph.check_source(path, found, inputs, [name for port in model.outputs for name in port.get_names()])
    classes = compiled({name: np.ones((1, 2), np.int64) for name in inputs})["logits"].shape[1]
    size = found.weight_bytes_by_dtype["float32"]
    return {
        "parameters": size // 4,
        "weight_bytes": size,
        "inputs": list(inputs),
        "classes": classes,
        "files": [path.name, "openvino_model.bin"],
    }


DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i4": "int4",
    "u4": "uint4",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
    "boolean": "bool",
}
UNPACKING_OPS = {"Convert", "Multiply", "Subtract", "Reshape", "Transpose", "FakeQuantize"}


def describe(model: Any) -> Audit:
    """Stored bytes by type over all constants, before compilation; shapes and axes, some KB of int64, count.

    A linear weight is the largest constant behind an input of a MatMul, through any chain of unpacking; each
    is counted once however many nodes read it. `engine` holds `lookup_tables`, the type of the largest table
    that a Gather reads.
    """
    constants: dict[str, Any] = {}
    linear: dict[str, Any] = {}
    tables: list[Any] = []
    changed: Counter[str] = Counter()
    for node in model.get_ops():
        kind = node.get_type_name()
        if kind == "Constant":
            constants[node.get_name()] = node
        elif kind == "FakeQuantize":
            changed[kind] += 1
        elif kind in ("MatMul", "Gather"):
            ports = range(2 if kind == "MatMul" else 1)
            weights = [weight for port in ports if (weight := _weight(node.input_value(port).get_node()))]
            weights = [weight for weight in weights if len(weight.get_output_shape(0)) > 1]
            for weight in weights:
                if kind == "MatMul":
                    linear[weight.get_name()] = weight
                else:
                    tables.append(weight)
                if _dtype(weight) not in ("float32", "int64", "int32"):
                    changed[f"{kind}[{_dtype(weight)}]"] += 1
    by_dtype: Counter[str] = Counter()
    for node in constants.values():
        by_dtype[_dtype(node)] += node.get_byte_size()
    elements: Counter[str] = Counter()
    for node in linear.values():
        elements[_dtype(node)] += _elements(node)
    engine = {"lookup_tables": _dtype(max(tables, key=_elements))} if tables else {}
    return Audit(dict(by_dtype), dict(elements), dict(changed), engine)


def describe_engine(compiled: Any) -> dict[str, str]:
    """What was compiled: properties, layers by the precision they run in, constants by the type in memory.

    `FullyConnected.i8`: how many linear layers take i8 inputs; `linear_layers`: the precision of most of
    them, int8 for i8 and u8 together; `constant_bytes.f32` is above the file's where weights were unpacked.
    """
    engine = {
        "INFERENCE_PRECISION_HINT": compiled.get_property("INFERENCE_PRECISION_HINT").to_string(),
        "EXECUTION_DEVICES": ",".join(compiled.get_property("EXECUTION_DEVICES")),
        "PERFORMANCE_HINT": str(compiled.get_property("PERFORMANCE_HINT")),
    }
    for name in ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "DYNAMIC_QUANTIZATION_GROUP_SIZE"):
        engine[name] = str(compiled.get_property(name))
    if "RUNTIME_REQUIREMENTS" in compiled.get_property("SUPPORTED_PROPERTIES"):
        engine["RUNTIME_REQUIREMENTS"] = str(compiled.get_property("RUNTIME_REQUIREMENTS"))
    layers: Counter[str] = Counter()
    precisions: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        kind = info["layerType"].value
        if kind in ("FullyConnected", "MatMul"):
            precision = info["runtimePrecision"].value
            layers[f"{kind}.{precision}"] += 1
            if kind == "FullyConnected":
                precisions["int8" if precision in ("i8", "u8") else precision] += 1
        elif kind == "Const" and node.get_output_partial_shape(0).is_static:
            element = node.get_output_element_type(0)
            if element.is_static():
                held[element.to_string()] += (_elements(node) * element.bitwidth + 7) // 8
    engine |= {name: str(count) for name, count in sorted(layers.items())}
    engine |= {f"constant_bytes.{name}": str(size) for name, size in sorted(held.items())}
    if precisions:
        engine["linear_layers"] = precisions.most_common(1)[0][0]
    return engine


def _weight(node: Any) -> Any | None:
    """The largest constant behind `node`; None where an activation is behind it."""
    if node.get_type_name() == "Constant":
        return node
    if node.get_type_name() not in UNPACKING_OPS:
        return None
    behind = [_weight(value.get_node()) for value in node.input_values()]
    return None if None in behind else max(behind, key=_elements)


def _dtype(node: Any) -> str:
    name = str(node.get_output_element_type(0).to_string())
    return DTYPES.get(name, name)


def _elements(node: Any) -> int:
    import math

    return math.prod(node.get_output_shape(0))


LOAD_SCRIPT = '''"""Loads this folder's OpenVINO model; `predict` gives float32 $ANSWERS, one row a text."""

import sys
from pathlib import Path

sys.modules.setdefault("openvino_telemetry", None)  # openvino then reports its use to nobody
import numpy as np
import openvino as ov
from transformers import AutoTokenizer

HERE = Path(__file__).parent
OPTIONS = $OPTIONS
tokenizer = AutoTokenizer.from_pretrained(HERE)
settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": OPTIONS["inference_precision"]}
settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = OPTIONS["dynamic_quantization_group_size"]
model = ov.Core().compile_model(HERE / "openvino_model.xml", "CPU", settings)
names = [port.get_any_name() for port in model.inputs]


def predict(texts):
    batch = tokenizer(texts, padding=len(texts) > 1, truncation=True, max_length=$MAX_TOKENS, return_tensors="np")
    return model({name: batch[name].astype(np.int64) for name in names})["logits"]


if __name__ == "__main__":
    print(predict(sys.argv[1:] or ["a fine film"]))
'''
