"""`qtool fit`: which recipes fit where, before anything is loaded. Arithmetic on shapes; a child reads them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import host, isolate, plugins, recipes
from qtool.core import QtoolError, Recipe, cache_dir

HEADROOM = 0.9
"""Share of a device's memory that is planned with: Accelerate's own (`get_balanced_memory`)."""
NEEDS = ("torch", "transformers", "accelerate")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Question:
    """`device_bytes`: memory of a device that need not be here; None: the GPUs that are."""

    model: str
    revision: str | None
    patterns: tuple[str, ...]
    device_bytes: int | None


def answer(question: Question) -> dict[str, Any]:
    """Everything that is printed, JSON-able; sizes in bytes.

    Raises QtoolError for a model that cannot be described, an unknown recipe, and where a library is missing.
    """
    chosen = recipes.select(question.patterns)
    if missing := next((name for name in NEEDS if host.installed(name) is None), None):
        raise QtoolError(f"qtool fit needs {missing}. Try: pip install 'qtool[pytorch]'.")
    devices, host_bytes = _devices(question.device_bytes), host.available_bytes()
    values = _ask(question, chosen, host_bytes, [each["planned_bytes"] for each in devices])
    rows = [_row(recipe, values, bool(devices)) for recipe in chosen]
    return {
        "model": question.model,
        **{key: values[key] for key in ("revision", "model_type", "parameters", "float32_bytes")},
        "host_bytes": host_bytes,
        "devices": devices,
        "headroom_ratio": HEADROOM,
        "recipes": rows,
        "conclusion": conclude(rows, host_bytes, devices),
        "assumptions": list(ASSUMPTIONS),
    }


ASSUMPTIONS = (
    "Weights alone, computed from shapes. Activations grow with batch size and length and are not in it: for one pass"
    " allow up to a fifth on top (https://blog.eleuther.ai/transformer-math/, inference); libraries take some hundred"
    " MB of their own.",
    "Of a device 90 % is planned with, of this host what is free now; Accelerate also keeps room for the largest"
    " layer wherever a part is spilled.",
    "An engine may hold a second copy (repacked weights, compiled kernels): qtool sweep measures it as steady RSS.",
)


def _devices(device_bytes: int | None) -> list[dict[str, Any]]:
    """Name, memory_bytes and planned_bytes of each; a GPU that shares the host's memory has none of its own."""
    if device_bytes is not None:
        if device_bytes < 1:
            raise QtoolError("--device-memory is less than a byte. Give it as 8GB.")
        found = [("the device", device_bytes)]
    else:
        gpus = host.gpus() if host.cuda_available() else []
        found = [(gpu["name"], gpu["memory_bytes"]) for gpu in gpus if gpu["memory_bytes"]]
    return [
        {"name": name, "memory_bytes": size, "planned_bytes": int(HEADROOM * size)} for name, size in found
    ]


def _ask(
    question: Question, chosen: list[Recipe], host_bytes: int, device_bytes: list[int]
) -> dict[str, Any]:
    spec = {
        "model": question.model,
        "revision": question.revision,
        "recipes": [recipe.model_dump() for recipe in chosen],
        "host_bytes": host_bytes,
        "device_bytes": device_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="qtool-") as scratch:
        log = Path(scratch) / "fit.log"
        outcome = isolate.run("fit", spec, log=log, timeout_s=TIMEOUT_S, threads=1, offline=False)
        if outcome.status in ("user_error", "unavailable"):
            raise QtoolError(outcome.error or "")
        if outcome.status != "ok":
            kept = cache_dir() / "fit-failed.log"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, kept)
            raise QtoolError(f"reading the model's shapes failed: {outcome.error}. See {kept}.")
    return outcome.values


def _row(recipe: Recipe, values: dict[str, Any], with_devices: bool) -> dict[str, Any]:
    """A recipe's sizes and places; `not_here` says why it would not run on this machine all the same."""
    told = values["recipes"][recipe.name]
    size = told["weight_bytes"]
    row = {
        "recipe": recipe.name,
        **told,
        "float32_share": None if size is None else size / values["float32_bytes"],
        "not_here": _not_here(recipe, values["model_type"]),
    }
    for place in ("cpu", "device"):
        if ("cuda" if place == "device" else "cpu") not in recipe.devices:
            row[place] = None
            row[f"{place}_reason"] = f"runs on {' and '.join(recipe.devices)} only"
    if row["device"] is None and not with_devices:
        row["device_reason"] = "no GPU is seen and --device-memory was not given"
    if size is None:
        row |= dict.fromkeys(("cpu_reason", "device_reason"), told["weight_bytes_reason"])
    return row


def _not_here(recipe: Recipe, model_type: str) -> str | None:
    """Why it runs on none of its devices here, by machine, installation or architecture."""
    refuse = getattr(plugins.load("methods", recipe.method), "refuse", None)
    if refuse and (reason := refuse(recipe, model_type, host.physical_cores())):
        return reason
    reasons = [recipes.why_not(recipe, device, source="checkpoint") for device in recipe.devices]
    return None if None in reasons else str(reasons[0])


def conclude(rows: list[dict[str, Any]], host_bytes: int, devices: list[dict[str, Any]]) -> list[str]:
    """What follows, a sentence for each kind of memory."""
    found = []
    if devices:
        planned = sum(device["planned_bytes"] for device in devices)
        names = " and ".join(dict.fromkeys(device["name"] for device in devices))
        found.append(_sentence(f"On {names} ({_gb(planned)} planned with)", rows, "device"))
    found.append(_sentence(f"In this host's memory ({_gb(host_bytes)} free)", rows, "cpu"))
    if any(row[place] and row[place]["moved_bytes"] for row in rows for place in ("cpu", "device")):
        found.append(
            "Offload solves fit, not latency: the bytes are moved at every pass. Measure it: give the recipe a"
            " placement part and sweep."
        )
    return found


def _sentence(where: str, rows: list[dict[str, Any]], place: str) -> str:
    known = [row for row in rows if row[place]]
    if not known:
        return f"{where} no recipe of these runs."
    whole = [row["recipe"] for row in known if row[place]["fits"]]
    spilled = [row["recipe"] for row in known if row[place]["moved_bytes"]]
    others = [row["recipe"] for row in known if row["recipe"] not in (*whole, *spilled)]
    parts = []
    for names, what in ((whole, "whole"), (spilled, "only by offload"), (others, "not at all")):
        if len(names) == len(known):
            parts.append(
                f"all {len(names)} recipes fit {what}" if len(names) > 1 else f"{names[0]} fits {what}"
            )
        elif names:
            parts.append(f"{', '.join(names)} {'fit' if len(names) > 1 else 'fits'} {what}")
    return f"{where} {'; '.join(parts)}."


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
