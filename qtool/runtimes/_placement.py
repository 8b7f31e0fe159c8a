"""Where the weights of a PyTorch recipe lie: the `placement` part, in Accelerate's own names.

A model that is spread over several places runs through Accelerate's hooks, which bring the weights of a module to
the device that computes it, at every call, and drop them behind it. One that is on one device has no hooks.
https://huggingface.co/docs/accelerate/concept_guides/big_model_inference
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from qtool import checkpoint, host, plugins
from qtool.core import QtoolError, Recipe, Unavailable, did_you_mean
from qtool.goals import BYTES, quantity
from qtool.methods._architectures import NO_OFFLOAD
from qtool.runtimes import _offload

PLACES = ("cpu", "disk", "cuda")
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
Place = Literal["cpu", "disk", "cuda"] | Annotated[int, Field(ge=0)]
RUNS_HERE = "qtool runs here"
"""A key that is no module's name: Accelerate computes on the first GPU that its map names."""


GPU_SHARE = 0.9
"""Of a GPU's free memory without a limit: the rest is for activations. Accelerate plans so where it is given no limits
at all (`get_balanced_memory`); given some, as here, it would fill the last byte."""


class Options(BaseModel):
    """`device_map`: a strategy of Accelerate, or a place for each module, '' for the whole model.

    `max_memory` by place (cpu or a GPU's number), such as 200MB; what does not fit goes to the next: the GPUs in
    their order, cpu, disk. `offload_buffers`: a module that is offloaded takes its buffers along.
    """

    model_config = ConfigDict(extra="forbid")
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Place] = "auto"
    max_memory: dict[str, str] = {}
    offload_buffers: bool = False

    @field_validator("device_map", mode="before")
    @classmethod
    def _known_place(cls, value: Any) -> Any:
        places = value.values() if isinstance(value, dict) else []
        if wrong := [p for p in places if p not in PLACES and not (type(p) is int and p >= 0)]:
            raise ValueError(
                f"'{wrong[0]}' is no place of a module: {', '.join(PLACES)} or a GPU's number are"
            )
        if not isinstance(value, dict) and value not in STRATEGIES:
            raise ValueError(f"'{value}' is neither {', '.join(STRATEGIES)} nor a place for each module")
        return value

    @field_validator("max_memory", mode="before")
    @classmethod
    def _with_unit(cls, value: Any) -> Any:
        if isinstance(value, dict) and (bare := [x for x in value.values() if isinstance(x, int | float)]):
            raise ValueError(f"the unit of {bare[0]} is missing, such as 200MB or 8GB")
        return value

    @field_validator("device_map")
    @classmethod
    def _some_place(cls, value: Any) -> Any:
        if value == {}:
            raise ValueError("name a place, such as {'': disk}")
        if isinstance(value, dict):
            return {name: 0 if place == "cuda" else place for name, place in value.items()}
        return value

    @field_validator("max_memory")
    @classmethod
    def _some_limit(cls, value: dict[str, str]) -> dict[str, str]:
        for place, size in value.items():
            if place != "cpu" and not place.isdecimal():
                raise ValueError(f"'{place}' is neither cpu nor a GPU's number")
            quantity(size, BYTES, f"placement, max_memory of {place}")
        return value

    @property
    def places(self) -> set[str | int]:
        """What an explicit map names."""
        return set(self.device_map.values()) if isinstance(self.device_map, dict) else set()

    @property
    def gpus(self) -> set[int]:
        """GPUs that the map or the limits name."""
        limited = {int(place) for place in self.max_memory if place != "cpu"}
        return limited | {place for place in self.places if isinstance(place, int)}

    def limits(self) -> dict[str | int, int]:
        """`max_memory` in bytes, as Accelerate takes it."""
        return {
            place if place == "cpu" else int(place): int(quantity(size, BYTES, "max_memory"))
            for place, size in self.max_memory.items()
        }


def check(recipe: Recipe) -> None:
    """Raises QtoolError for a placement that contradicts itself or the rest of the recipe."""
    if not recipe.placement:
        return
    options, where = Options(**recipe.placement), f"recipe '{recipe.name}': placement"
    if options.gpus and "cpu" in recipe.devices:
        raise QtoolError(f"{where} names GPU {min(options.gpus)}, and devices has cpu. Set devices: [cuda].")
    if options.places and options.max_memory:
        raise QtoolError(
            f"{where}: max_memory has no effect beside a place for each module."
            " Leave it out, or set device_map: auto."
        )
    if hasattr(plugins.load("methods", recipe.method), "open_model"):
        raise QtoolError(
            f"{where}: method '{recipe.method}' packs its weights out of Accelerate's sight. Leave placement out."
        )
    for device in recipe.devices:
        if problem := _refusal(recipe, options.places, device):
            raise QtoolError(f"{where}: {problem}")


def check_names(recipe: Recipe, model: Any) -> None:
    """Raises QtoolError where the map of a recipe does not go with the modules of `model`, which may be empty."""
    device_map = Options(**recipe.placement).device_map if recipe.placement else None
    if isinstance(device_map, dict):
        try:
            for _ in flatten(model, device_map, recipe.devices[0]):
                pass
        except Unavailable as error:
            raise QtoolError(f"recipe '{recipe.name}': {str(error).rstrip('?')}.") from None


def _refusal(recipe: Recipe, places: set[str | int], device: str) -> str | None:
    """Why a recipe cannot have its weights at `places`, with what would work; None where it can."""
    away = places & ({"disk"} if device == "cpu" else {"disk", "cpu"})
    able = getattr(plugins.load("methods", recipe.method), "OFFLOADS", ())
    if beyond := sorted(map(str, away.difference(able))):
        fix = f"{' and '.join(able)} only" if able else "nowhere: give it room, or use another method"
        return f"weights of method '{recipe.method}' cannot be offloaded to {beyond[0]}, {fix}."
    if recipe.compile and (away or len(places) > 1):
        return (
            "Accelerate's hooks cannot be in one compiled graph. Leave compile out, or put all on one device."
        )
    return None


def open_model(artifact: Path, recipe: Recipe, device: str) -> Any:
    """Read an artifact and put its weights where the recipe says; disk is the artifact's own file.

    Raises Unavailable where a place is not there, or does not take this method's weights.
    """
    options = Options(**recipe.placement)
    able = getattr(plugins.load("methods", recipe.method), "OFFLOADS", ())
    try:
        model = checkpoint.load(artifact, dtype="auto", **arguments(options, artifact, device))
    except ValueError as error:
        if "disk" in able:
            raise
        # a library that refuses the places which its own strategy came to
        first = str(error).partition(". ")[0]
        raise Unavailable(
            f"placement is refused by the library ({first[:160]}): give it more memory"
        ) from None
    # a model that is on one device has no map
    spread = getattr(model, "hf_device_map", None) or {"": model.device}
    places = {_offload.place(each) for each in spread.values()}
    if problem := _refusal(recipe, places, device):
        raise Unavailable(f"placement: {problem}")
    kind = model.config.model_type
    if kind in NO_OFFLOAD and any(True for _ in _offload.offloaded(model)):
        raise Unavailable(f"{kind} cannot be offloaded, {NO_OFFLOAD[kind]}: give it more memory")
    if device == "cuda" and not any(isinstance(each, int) for each in places):
        raise Unavailable("placement: max_memory leaves nothing to a GPU: give GPU 0 room for a layer")
    return model


def exported(recipe: Recipe, device: str) -> dict[str, Any]:
    """What a script that loads the artifact by itself gives `from_pretrained`.

    Raises QtoolError for a map that Accelerate does not take as it stands: see `flatten`.
    """
    options = Options(**recipe.placement)
    given: dict[str, Any] = {"device_map": options.device_map}
    if isinstance(options.device_map, dict):
        if "" in options.device_map and (len(options.device_map) > 1 or device == "cuda"):
            raise QtoolError(
                f"recipe '{recipe.name}' places '', the whole model, in a way that only qtool's loader takes."
                " Name its modules instead of '' and sweep again to export it."
            )
    elif options.max_memory or device == "cpu":
        # without a limit Accelerate would use a GPU that is there
        given["max_memory"] = options.limits() or {"cpu": 10**12}
    return given | ({"offload_buffers": True} if options.offload_buffers else {})


def arguments(options: Options, artifact: Path, device: str) -> dict[str, Any]:
    """What `from_pretrained` is given for a placement on `device`."""
    given: dict[str, Any] = {"offload_buffers": options.offload_buffers}
    if isinstance(options.device_map, dict):
        flat = dict(flatten(checkpoint.empty(artifact), options.device_map, device))
        here = {RUNS_HERE: 0} if device == "cuda" and not options.gpus else {}
        return given | {"device_map": flat | here}
    return given | {"device_map": options.device_map, "max_memory": room(options.limits(), device)}


def room(limits: dict[str | int, int], device: str) -> dict[str | int, int]:
    """Bytes that may be used by place. What has no limit may use what is free, of a GPU `GPU_SHARE` of it; the
    unnamed GPUs are left out where any is named. On a CPU no GPU is used, whatever the machine has.
    """
    found = {"cpu": host.available_bytes()} | limits
    if device == "cuda" and not any(isinstance(place, int) for place in limits):
        import torch

        gpus = range(torch.cuda.device_count())
        found = {number: int(GPU_SHARE * torch.cuda.mem_get_info(number)[0]) for number in gpus} | found
    return found


def flatten(model: Any, device_map: Mapping[str, Any], device: str) -> Iterator[tuple[str, Any]]:
    """A map of the same places in which no name contains another, as Accelerate's hooks need it.

    Raises Unavailable for the name of no module, and for a module without a place.
    """
    modules = dict(model.named_modules())
    for name in device_map:
        if name not in modules:
            near = did_you_mean(name, modules) if name else ""
            parts = ", ".join(child for child, _ in model.named_children())
            near = near.strip() if near.startswith(" Did") else f"its parts are {parts}, and '' for all"
            raise Unavailable(f"placement names '{name}', which is no module of this model: {near}")

    def split(name: str, place: Any) -> Iterator[tuple[str, Any]]:
        place = device_map.get(name, place)
        inside = [key for key in device_map if key != name and (not name or key.startswith(f"{name}."))]
        # Accelerate keeps the weights of '' on the CPU for no GPU: it looks for names that begin with '.'
        if not inside and (name or device == "cpu"):
            if place is None:
                raise Unavailable(f"placement has no place for '{name}': name it, or '' for the rest")
            yield name, place
            return
        for own in (*modules[name]._parameters, *modules[name]._buffers):
            yield f"{name}.{own}".lstrip("."), place
        for child, module in modules[name].named_children():
            if len(module.state_dict()):
                yield from split(f"{name}.{child}".lstrip("."), place)

    yield from split("", None)
