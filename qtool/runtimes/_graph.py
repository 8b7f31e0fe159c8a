"""What the runtimes of exported graphs share: a batch's way into named inputs, and what MODEL's graph may be."""

from __future__ import annotations

from pathlib import Path

from qtool.core import Audit, Batch, QtoolError


def pick(batch: Batch, names: list[str]) -> Batch:
    """The inputs called `names` out of `batch`, in that order.

    Only token_type_ids may be left over: not every model uses them. Raises QtoolError for anything else.
    """
    if batch.keys() - {"token_type_ids"} - set(names) or not batch.keys() >= set(names):
        raise QtoolError(f"the model takes {names}, found {sorted(batch)}. Use the model's own tokenizer.")
    return {name: batch[name] for name in names}


def check_source(path: Path, found: Audit, inputs: dict[str, tuple[str, bool]], outputs: list[str]) -> None:
    """Raises QtoolError where the graph in `path` is no float32 classifier that takes token ids of any size.

    `inputs` maps a name to the type (numpy's name) and whether batch and tokens are free.
    """
    if "logits" not in outputs:
        raise QtoolError(f"{path} has the outputs {outputs}, expected logits. Export a sequence classifier.")
    for name, (dtype, free) in inputs.items():
        if dtype != "int64" or not free:
            shape = "any size" if free else "a fixed size"
            raise QtoolError(
                f"input {name} of {path} is {dtype} of {shape}, expected int64 of any size."
                " Export with dynamic axes for batch and tokens."
            )
    other = sorted(found.linear_elements_by_dtype.keys() - {"float32"})
    if other or found.changed_modules:
        what = ", ".join([*other, *(f"{count} {name}" for name, count in found.changed_modules.items())])
        raise QtoolError(
            f"{path} is no float32 model: found {what}. Export it without quantisation or compression."
        )
    if not found.linear_elements_by_dtype:
        raise QtoolError(f"{path} has no linear layer with a stored weight. Give an exported transformer.")
