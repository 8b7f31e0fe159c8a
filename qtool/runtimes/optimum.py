"""Runs an OpenVINO IR through Optimum's OVModelForSequenceClassification, as a user of that class does.

The engine is that of runtime `openvino`, with the same settings and the same facts read back; what differs is
the Python around it. An exported `load.py` is `LOAD_SCRIPT`, filled in as that runtime's is.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from qtool.core import Audit, Batch, Loaded, QtoolError, Recipe, Unavailable
from qtool.runtimes import _graph
from qtool.runtimes.openvino import Options, check_precision, describe, describe_engine, settings

PACKAGES = ("optimum.intel", "openvino")

# openvino reports its use to a server at import, and uses a stub of its own without this package.
sys.modules.setdefault("openvino_telemetry", cast(Any, None))


def open_model(artifact: Path, recipe: Recipe, device: str) -> Any:
    """The `OVModelForSequenceClassification` of a folder, not compiled. Raises QtoolError for a missing file."""
    for name in ("config.json", "openvino_model.xml", "openvino_model.bin"):
        if not (artifact / name).is_file():
            raise QtoolError(f"{artifact} has no {name}. Build the artifact again.")
    return model_class().from_pretrained(artifact, compile=False, local_files_only=True)


def model_class() -> Any:
    """`OVModelForSequenceClassification`. Raises Unavailable beside a transformers that optimum-intel cannot use."""
    try:
        from optimum.intel import OVModelForSequenceClassification  # type: ignore[reportMissingImports]
    except ImportError as error:
        intel, found = metadata.version("optimum-intel"), metadata.version("transformers")
        raise Unavailable(
            f"optimum-intel {intel} cannot be imported beside transformers {found} ({error.msg}): make an"
            " environment of its own with pip install -c constraints-optimum.txt 'qtool[optimum]'"
        ) from error
    return OVModelForSequenceClassification


def wrap(model: Any, recipe: Recipe, device: str, threads: int) -> Loaded:
    """Compile for the CPU: latency hint, one stream, `threads` threads.

    Raises Unavailable for another device, and where the engine answers with another precision than asked for.
    """
    import numpy as np

    if device != "cpu":
        raise Unavailable(f"the optimum runtime runs on a CPU, asked for {device}: use --device cpu")
    options = Options(**recipe.runtime_options)
    model.ov_config |= settings(options, threads)
    model.clear_requests()
    model.compile()
    compiled = model.request
    check_precision(compiled, options)
    names = [port.get_any_name() for port in compiled.inputs]

    def predict(batch: Batch) -> Any:
        inputs = _graph.pick(batch, names)
        return model(**{name: np.ascontiguousarray(array, np.int64) for name, array in inputs.items()}).logits

    def audit() -> Audit:
        found = describe(model.model)
        found.engine |= describe_engine(compiled)
        return found

    return Loaded(predict, audit, compiled.get_property("INFERENCE_NUM_THREADS"))


LOAD_SCRIPT = '''"""Loads this folder's model with Optimum; `predict` gives float32 $ANSWERS, one row a text."""

import sys
from pathlib import Path

sys.modules.setdefault("openvino_telemetry", None)  # openvino then reports its use to nobody
from optimum.intel import OVModelForSequenceClassification
from transformers import AutoTokenizer

HERE = Path(__file__).parent
OPTIONS = $OPTIONS
tokenizer = AutoTokenizer.from_pretrained(HERE)
settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": OPTIONS["inference_precision"]}
settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = OPTIONS["dynamic_quantization_group_size"]
model = OVModelForSequenceClassification.from_pretrained(HERE, ov_config=settings)


def predict(texts):
    batch = tokenizer(texts, padding=len(texts) > 1, truncation=True, max_length=$MAX_TOKENS, return_tensors="np")
    return model(**batch).logits


if __name__ == "__main__":
    print(predict(sys.argv[1:] or ["a fine film"]))
'''
