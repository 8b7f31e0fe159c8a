"""Runs a PyTorch module: host arrays to the device, one forward pass, float32 logits back on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from qtool import plugins
from qtool.core import Audit, Batch, Dtype, Loaded, Recipe

PACKAGES = ("torch", "transformers", "accelerate")


class Options(BaseModel):
    """`autocast`: the type in which matrix products run while the weights stay as stored."""

    model_config = ConfigDict(extra="forbid")
    autocast: Dtype | None = None


class Compile(BaseModel):
    """Options of `torch.compile`; `dynamic` shapes keep one graph for texts of every length."""

    model_config = ConfigDict(extra="forbid")
    dynamic: bool = True
    mode: str | None = None


def open_model(artifact: Path, recipe: Recipe, device: str) -> Any:
    """Read an artifact; a method whose format `from_pretrained` cannot read brings its own `open_model`."""
    own = getattr(plugins.load("methods", recipe.method), "open_model", None)
    if own is not None:
        return own(artifact, device)
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        artifact, dtype="auto", device_map={"": device}
    )
    return model.eval()


def wrap(model: Any, recipe: Recipe, device: str, threads: int) -> Loaded:
    """The module as a function of host arrays. The device is synchronised by the copy of the logits."""
    import torch

    torch.set_num_threads(threads)
    options = Options(**recipe.runtime_options)
    run = torch.compile(model, **Compile(**recipe.compile).model_dump()) if recipe.compile else model
    autocast = getattr(torch, options.autocast) if options.autocast else None
    seen = _watch_first_linear(model) if autocast is not None else {}

    def predict(batch: Batch) -> Any:
        with torch.inference_mode():
            inputs = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
            if autocast is None:
                logits = run(**inputs).logits
            else:
                with torch.autocast(device, dtype=autocast):
                    logits = run(**inputs).logits
            return logits.float().cpu().numpy()

    def audit() -> Audit:
        found = describe(model)
        found.engine = {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
        }
        if recipe.compile:
            found.compiled_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.autocast = seen.get("dtype")
        return found

    return Loaded(predict, audit, torch.get_num_threads())


def describe(model: Any) -> Audit:
    """What the module holds: bytes by storage type (each storage once), linear weights by the type that counts."""
    import torch
    from torch.ao.nn.quantized import dynamic

    storages: dict[int, tuple[str, int]] = {}
    linear: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for _, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        packed = isinstance(module, dynamic.Linear)
        if packed:
            own += [tensor for tensor in (module.weight(), module.bias()) if tensor is not None]
        for tensor in (part for whole in own for part in _plain_parts(whole)):
            # A packed weight is unpacked anew at every look: its module is its identity.
            key = id(module) if packed and tensor.is_quantized else tensor.data_ptr()
            storages[key] = (_name(tensor.dtype), tensor.numel() * tensor.element_size())
        if packed or isinstance(module, torch.nn.Linear):
            weight = module.weight() if packed else module.weight
            kind, elements = _stored_as(weight)
            linear[kind] += elements
            if packed or type(module) is not torch.nn.Linear:
                changed[type(module).__name__ if not packed else "DynamicQuantizedLinear"] += 1
            elif type(weight) is not torch.nn.Parameter:
                changed[f"Linear[{type(weight).__name__}]"] += 1
    by_dtype: Counter[str] = Counter()
    for dtype, size in storages.values():
        by_dtype[dtype] += size
    return Audit(dict(by_dtype), dict(linear), dict(changed))


def _plain_parts(tensor: Any) -> Iterator[Any]:
    """The plain tensors a parameter is made of: a torchao subclass's parts, a bitsandbytes weight's state."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))
        return
    yield tensor
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (part for part in (state.absmax, state.code) if part is not None)
        state = state.state2


def _stored_as(weight: Any) -> tuple[str, int]:
    """The type that says how precise a linear weight is, and its logical number of elements."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return state.quant_type, state.shape.numel()
    largest = max(_plain_parts(weight), key=lambda part: part.numel())
    return _name(largest.dtype), weight.numel()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").replace("qint8", "int8")


def _watch_first_linear(model: Any) -> dict[str, str]:
    """Note the type in which the first linear layer of the first call answers: proof that autocast ran."""
    import torch

    seen: dict[str, str] = {}
    first = next((m for m in model.modules() if isinstance(m, torch.nn.Linear)), None)
    if first is not None:

        def note(module: Any, inputs: Any, output: Any) -> None:
            seen["dtype"] = _name(output.dtype)
            handle.remove()

        handle = first.register_forward_hook(note)
    return seen


LOAD_SCRIPT = '''"""Loads this folder's model; `predict` gives float32 logits, one row a text."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(__file__).parent
tokenizer = AutoTokenizer.from_pretrained(HERE)
$OPEN_MODEL


def predict(texts):
    with torch.inference_mode():
        batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return model(**batch.to(model.device)).logits.float().cpu().numpy()


if __name__ == "__main__":
    print(predict(sys.argv[1:] or ["a fine film"]))
'''
