"""The child's part of `qtool fit`: a model without weights, and where Accelerate would put it. Loads nothing.

Accelerate's own functions decide, on a module of the same tree whose tensors have the bytes of the artifact
instead of the checkpoint's shapes. https://huggingface.co/docs/accelerate/concept_guides/big_model_inference
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool import checkpoint, estimate, graphs, layers, models, plugins, resolve
from qtool.core import QtoolError, Recipe
from qtool.runtimes import _placement

HUB_FILES = ("*.json",)
"""All that shapes need: of a hub model no weights are fetched."""


def fit(spec: dict[str, Any]) -> dict[str, Any]:
    """Weights of every recipe by type, and their places in `host_bytes` and on devices of `device_bytes`."""
    folder, revision = resolve.resolve(spec["model"], spec["revision"], HUB_FILES)
    if kind := graphs.kind(folder):
        raise QtoolError(
            f"{folder} holds an exported graph ({kind}), and qtool fit reads the shapes of a checkpoint."
            " Give the checkpoint it was made from."
        )
    config = models.read_config(folder)
    model = empty(folder)
    tensors = layers.describe(model)
    recipes = [Recipe(**content) for content in spec["recipes"]]
    for recipe in recipes:
        _placement.check_names(recipe, model)
    return {
        "revision": revision,
        "model_type": config["model_type"],
        "parameters": sum(tensor.elements for tensor in tensors if tensor.part != "buffer"),
        "float32_bytes": sum(sum(layers.kept(tensor, "float32").values()) for tensor in tensors),
        "recipes": {
            recipe.name: estimate.total(recipe, tensors) | _places(model, recipe, tensors, spec)
            for recipe in recipes
        },
    }


def totals(folder: Path, recipes: Sequence[Recipe]) -> dict[str, Any]:
    """`estimate.total` by recipe, of the checkpoint in `folder`.

    Raises QtoolError for a placement that names no module of it.
    """
    model = empty(folder)
    for recipe in recipes:
        _placement.check_names(recipe, model)
    tensors = layers.describe(model)
    return {recipe.name: estimate.total(recipe, tensors) for recipe in recipes}


def empty(folder: Path) -> Any:
    """The float32 module of a checked config on the meta device. Raises QtoolError for a config that makes none."""
    import torch
    from huggingface_hub.errors import StrictDataclassError

    try:
        return checkpoint.empty(folder, dtype=torch.float32)
    # as for a checkpoint: transformers raises whatever the config's values lead to
    except (
        *(ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError, ZeroDivisionError),
        StrictDataclassError,
    ) as error:
        raise QtoolError(
            f"cannot make the model of {folder / 'config.json'}: {models.first_line(error)}. Check its values."
        ) from None


def _places(
    model: Any, recipe: Recipe, tensors: Sequence[layers.Tensor], spec: Mapping[str, Any]
) -> dict[str, Any]:
    sizes = {
        name: sum(by_dtype.values()) for name, by_dtype in (estimate.by_tensor(recipe, tensors) or {}).items()
    }
    if not sizes:
        return {"largest_layer": None, "cpu": None, "device": None}
    stand_in(model, sizes)
    spills = getattr(plugins.load("methods", recipe.method), "OFFLOADS", None)
    host: dict[int | str, int] = {"cpu": spec["host_bytes"]}
    devices: dict[int | str, int] = dict(enumerate(spec["device_bytes"]))
    return {
        "largest_layer": largest_layer(model),
        "cpu": place(model, sizes, host, spills),
        "device": place(model, sizes, {**devices, **host}, spills) if devices else None,
    }


def stand_in(model: Any, sizes: Mapping[str, int]) -> None:
    """Replace, in place, each tensor of a meta module by one of `sizes` bytes by name; what is tied stays tied."""
    import torch

    old = [*model.named_parameters(), *model.named_buffers()]
    new = {}
    for name, tensor in old:
        raw = torch.empty(sizes[name], dtype=torch.uint8, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        new[id(tensor)] = torch.nn.Parameter(raw, requires_grad=False) if is_parameter else raw
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for leaf, tensor in own.items():
                if tensor is not None:
                    own[leaf] = new[id(tensor)]


def largest_layer(model: Any) -> dict[str, Any]:
    """Name and bytes of the largest layer that stays together, by Accelerate's `calculate_maximum_sizes`."""
    from accelerate.utils.modeling import calculate_maximum_sizes

    _, (size, names) = calculate_maximum_sizes(model)
    return {"name": names[0] if names else "", "bytes": int(size)}


def place(
    model: Any,
    sizes: Mapping[str, int],
    memory: Mapping[int | str, int],
    spills: Sequence[str] | None,
) -> dict[str, Any]:
    """Whether a stand-in fits into the first places of `memory` (devices by number, else `cpu`), and what spills.

    `spills`: where this method's weights may be kept instead, of cpu and disk; None: one engine holds them whole.
    `moved_bytes` are fetched at every pass: Accelerate's hook copies a spilled module's parameters in before its
    forward and drops them behind it. They are null, with a reason, where it cannot be spilled.
    """
    devices = [key for key in memory if key != "cpu"]
    if spills is None:
        room = max(memory[key] for key in devices or ["cpu"])
        fits = sum(sizes.values()) <= room
        return _whole(sizes) if fits else _nowhere("one engine holds this method's weights whole")
    from accelerate.utils.modeling import infer_auto_device_map

    found = infer_auto_device_map(
        model,
        max_memory=dict(memory),
        no_split_module_classes=list(getattr(model, "_no_split_modules", None) or []),
    )
    elsewhere = ("cpu", "disk") if devices else ("disk",)
    away = {where: [name for name, at in found.items() if at == where] for where in elsewhere}
    if not any(away.values()):
        return _whole(sizes)
    if set(found.values()) <= set(elsewhere):
        return _nowhere("its largest layer and what stays beside it are more than there is")
    if refused := [where for where, names in away.items() if names and where not in spills]:
        return _nowhere(f"this method's weights cannot be kept on {refused[0]}")
    buffers = {name for name, _ in model.named_buffers()}  # they stay where the computing is done
    placed = dict.fromkeys(elsewhere, 0)
    for name, size in sizes.items():
        at = _device(found, name)
        if at in placed and name not in buffers:
            placed[at] += size
    moved = sum(placed.values())
    return {
        "fits": False,
        "resident_bytes": sum(sizes.values()) - moved,
        "cpu_bytes": placed.get("cpu", 0),
        "disk_bytes": placed["disk"],
        "moved_bytes": moved,
        "modules": {where: names for where, names in away.items() if names},
    }


def _device(device_map: Mapping[str, Any], name: str) -> Any:
    """The place of a tensor: that of the longest name in the map that it lies under."""
    under = [key for key in device_map if key in ("", name) or name.startswith(f"{key}.")]
    return device_map[max(under, key=len)]


def _whole(sizes: Mapping[str, int]) -> dict[str, Any]:
    none = {"cpu_bytes": 0, "disk_bytes": 0, "moved_bytes": 0, "modules": {}}
    return {"fits": True, "resident_bytes": sum(sizes.values()), **none}


def _nowhere(reason: str) -> dict[str, Any]:
    sizes = dict.fromkeys(("resident_bytes", "cpu_bytes", "disk_bytes", "moved_bytes"))
    return {"fits": False, **sizes, "moved_bytes_reason": reason, "modules": {}}
