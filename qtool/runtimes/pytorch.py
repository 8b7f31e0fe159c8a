"""Runs a PyTorch module: host arrays to the device, one forward pass, float32 logits back on the host."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, plugins
from qtool.core import (
    Audit,
    Batch,
    Dtype,
    Loaded,
    Part,
    QtoolError,
    Recipe,
    Split,
    Unavailable,
    cache_dir,
)
from qtool.runtimes import _graphs, _layers, _offload, _placement

PACKAGES = ("torch", "transformers", "accelerate")
Placement = _placement.Options
exported_placement = _placement.exported


class Options(BaseModel):
    """`autocast`: the type in which matrix products run while the weights stay as stored."""

    model_config = ConfigDict(extra="forbid")
    autocast: Dtype | None = None


class Compile(BaseModel):
    """Options of `torch.compile`; `dynamic` shapes keep one graph for texts of every length.

    With CUDA graphs (see `_graphs.MODES`) each shape that comes is also recorded once, and then played back.
    """

    model_config = ConfigDict(extra="forbid")
    dynamic: bool = True
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None


def check(recipe: Recipe) -> None:
    """Raises QtoolError for an autocast that would change nothing, and for what `_placement.check` refuses."""
    _placement.check(recipe)
    autocast = Options(**recipe.runtime_options).autocast
    if autocast == "float32":
        raise QtoolError(
            f"recipe '{recipe.name}': autocast computes in bfloat16 or float16, found float32. Leave it out."
        )
    if autocast and recipe.dtype != "float32":
        raise QtoolError(
            f"recipe '{recipe.name}': autocast {autocast} needs weights of dtype float32, found {recipe.dtype}:"
            " they are in half precision already. Leave autocast out, or set dtype: float32."
        )
    if recipe.compile.get("mode") == "reduce-overhead" and recipe.devices != ["cuda"]:
        raise QtoolError(
            f"recipe '{recipe.name}': mode reduce-overhead records CUDA graphs, which a CPU does not have;"
            f" found devices: [{', '.join(recipe.devices)}]. Set devices: [cuda], or another mode."
        )


def open_model(artifact: Path, recipe: Recipe, device: str) -> Any:
    """Read an artifact; a method whose format `from_pretrained` cannot read brings its own `open_model`."""
    if recipe.placement:
        return _placement.open_model(artifact, recipe, device)
    own = getattr(plugins.load("methods", recipe.method), "open_model", None)
    if own is not None:
        return checkpoint.pooled(own(artifact, device), artifact)
    return checkpoint.load(artifact, dtype="auto", device_map={"": device})


def wrap(model: Any, recipe: Recipe, device: str, threads: int) -> Loaded:
    """The module as a function of host arrays. The device is synchronised by the copy of the logits.

    Raises Unavailable where the recipe compiles and there is no C++ compiler, or PyTorch has no such device.
    """
    import numpy as np
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            f"PyTorch {torch.__version__} sees no CUDA GPU: install a build for this driver's CUDA"
        )
    torch.set_num_threads(threads)
    if suit := getattr(plugins.load("methods", recipe.method), "suit", None):
        suit(model, device)
    options = Options(**recipe.runtime_options)
    run = _compiled(model, Compile(**recipe.compile)) if recipe.compile else model
    recorded = device == "cuda" and recipe.compile.get("mode") in _graphs.MODES
    if recorded:
        run = _graphs.Recorded(run)
    counters = torch._dynamo.utils.counters if recipe.compile else {"stats": Counter(), "inductor": Counter()}
    graphs_before = counters["stats"]["unique_graphs"]
    autocast = getattr(torch, options.autocast) if options.autocast else None
    seen: Counter[str] = Counter()
    watch = contextlib.nullcontext if recipe.compile else _watch_products
    unused = {"token_type_ids"} - inspect.signature(model.forward).parameters.keys()
    alone = False  # whether the model refused a batch

    def predict(batch: Batch, part: Part = _layers.whole) -> Any:
        nonlocal alone
        if len(batch["input_ids"]) == 1 or model.config.pad_token_id is not None:
            return answer(batch, part)
        try:
            if not alone:
                return answer(batch, part)
        except ValueError:
            # A causal model that finds its last token by the padding token, and has none: a text at a time.
            alone = True
        return np.concatenate([answer(row, part) for row in _rows(batch)])

    def answer(batch: Batch, part: Part) -> Any:
        with torch.inference_mode():
            with part("make_tensors"):
                inputs = {n: torch.from_numpy(array) for n, array in batch.items() if n not in unused}
            if device != "cpu":
                with part("copy_in"):
                    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            with part("model"):
                logits = forward(inputs)
            with part("copy_out"):
                return logits.float().cpu().numpy()

    def forward(inputs: Batch) -> Any:
        if autocast is None:
            return run(**inputs).logits
        if seen:
            with torch.autocast(device, dtype=autocast):
                return run(**inputs).logits
        with torch.autocast(device, dtype=autocast), watch(seen):  # the first call
            logits = run(**inputs).logits
        seen[_name(logits.dtype)] += 1  # all that is seen of a compiled module
        return logits

    def audit() -> Audit:
        found = describe(model)
        found.engine = {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
        }
        if recipe.compile:
            found.compiled_graphs = counters["stats"]["unique_graphs"] - graphs_before
            found.engine["compiled_from_cache"] = str(counters["inductor"]["fxgraph_cache_hit"])
        if device == "cuda":
            found.engine |= _graphs.gpu()
        if recorded:
            found.engine |= _graphs.found()
        if alone:
            found.engine["batches"] = "one text at a time: the model has no padding token"
        found.autocast = seen.most_common(1)[0][0] if seen else None
        return found

    def split(batch: Batch, part: Part) -> Any:
        return predict(batch, part if device == "cpu" else _layers.synchronised(part))

    absent = {"copy_in": "none on a CPU: the tensors are the host's arrays"} if device == "cpu" else {}

    def placement(batch: Batch) -> dict[str, Any]:
        return _offload.found(model, lambda: predict(batch), _plain_parts)

    return Loaded(predict, audit, torch.get_num_threads(), Split(split, absent), placement)


def operators(loaded: Loaded, job: _layers.Job) -> list[_layers.Layer]:
    """Own time by operator, by `torch.profiler`."""
    assert loaded.split is not None
    return _layers.torch_operators(loaded.split.run, job)


def _rows(batch: Batch) -> Iterator[Batch]:
    """The texts of a padded batch (rows, tokens), each as a batch (1, tokens) of its real length."""
    for index, mask in enumerate(batch["attention_mask"]):
        yield {name: array[index : index + 1, mask > 0] for name, array in batch.items()}


def _compiled(model: Any, options: Compile) -> Any:
    """The module as one graph. What cannot be in it, and one recompilation too many, is an error.

    Without `fullgraph` both would silently run eager, and the trial would report that as compiled.
    """
    import torch
    from torch._inductor import cpp_builder, exc

    # The default is a temporary folder; the sweep's later processes, and the next sweep, find the kernels here.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        first = str(error).splitlines()[0]
        raise Unavailable(f"torch.compile needs a C++ compiler ({first}): install g++ or clang++") from None
    return torch.compile(model, fullgraph=True, dynamic=options.dynamic, mode=options.mode)


def describe(model: Any) -> Audit:
    """What the module holds: bytes by storage type (each storage once), linear weights by the type that counts."""
    import torch
    from torch.ao.nn.quantized import Embedding, dynamic

    storages: dict[Any, tuple[str, int]] = {}
    linear: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    # An offloaded weight has no storage between two calls: where it is kept is its identity.
    away = {id(kept.tensor): kept.key for kept in _offload.offloaded(model)}
    for _, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        packed = isinstance(module, dynamic.Linear | Embedding)
        if packed:
            own += _unpacked(module)
        own += [part for part in (getattr(getattr(module, "state", None), "SCB", None),) if part is not None]
        for index, (kept, tensor) in enumerate(
            (away.get(id(t)), part) for t in own for part in _plain_parts(t)
        ):
            # A packed weight is unpacked anew at every look: its module is its identity.
            key = (id(module), index) if packed else tensor.data_ptr()
            key = key if kept is None else (kept, tensor.dtype, tensor.shape)
            storages[key] = (_name(tensor.dtype), tensor.numel() * tensor.element_size())
        if isinstance(module, Embedding):
            changed["QuantizedEmbedding"] += 1
        elif packed or isinstance(module, torch.nn.Linear):
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


def _unpacked(module: Any) -> list[Any]:
    """The tensors inside a packed module, made anew: weight, bias or a row's scale and zero point."""
    weight = module.weight()
    if hasattr(module, "bias"):
        return [weight] if module.bias() is None else [weight, module.bias()]
    return [weight, weight.q_per_channel_scales(), weight.q_per_channel_zero_points()]


def _plain_parts(tensor: Any) -> Iterator[Any]:
    """The plain tensors a parameter is made of: a torchao subclass's parts, a bitsandbytes weight's state."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, name))
        return
    yield tensor
    if (scales := getattr(tensor, "SCB", None)) is not None:
        yield scales
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        yield from (part for part in (state.absmax, state.code) if part is not None)
        state = getattr(state, "state2", None)  # the first call on a CPU unpacks doubly stored scales


def _stored_as(weight: Any) -> tuple[str, int]:
    """The type that says how precise a linear weight is, and its logical number of elements."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return state.quant_type, state.shape.numel()
    largest = max(_plain_parts(weight), key=lambda part: part.numel())
    return _name(largest.dtype), weight.numel()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("q")


def _watch_products(seen: Counter[str]) -> Any:
    """A context that counts matrix products by the type of their first factor: proof that autocast ran.

    The type in which a layer answers would not do: a quantised one may scale a half-precision product in float32.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__.partition(".")[0] in ("linear", "addmm", "mm"):
                factor = args[1] if func.__name__.startswith("addmm") else args[0]
                seen[_name(factor.dtype)] += 1
            return func(*args, **(kwargs or {}))

    return Watch()


LOAD_SCRIPT = '''"""Loads this folder's model; `predict` gives float32 $ANSWERS, one row a text."""

import sys
from pathlib import Path

import torch
from transformers import $AUTO_CLASS, AutoTokenizer

HERE = Path(__file__).parent
tokenizer = AutoTokenizer.from_pretrained(HERE)
$OPEN_MODEL


def predict(texts):
    with $CONTEXT:
        batch = tokenizer(texts, padding=len(texts) > 1, truncation=True, max_length=$MAX_TOKENS, return_tensors="pt"$NO_TYPES)
        batch = batch.to($DEVICE)
        $ANSWER
        return answer.float().cpu().numpy()


if __name__ == "__main__":
    print(predict(sys.argv[1:] or ["a fine film"]))
'''
