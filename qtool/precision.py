"""In which number format a trial's linear layers are stored, held in memory and multiplied, as far as it can be told.

Read from the audit and the recipe's content, never from its name; None where neither tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qtool.traits import TRAITS, named

FLOATS = ("float32", "bfloat16", "float16")
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "float8": 1.0, "4-bit": 0.5}
"""Of one weight by format; scales and zero points, a few per cent, are left out."""
CONSTANTS = "constant_bytes."
"""What an engine that lists its constants after loading calls them in the audit, with their type behind it."""

Audit = Mapping[str, Any]


def format_of(name: str | None) -> str | None:
    """The number format that one library's name stands for."""
    return next(iter(sorted(named([name]))), None) if name else None


def linear_elements(audit: Audit) -> int:
    return sum((audit.get("linear_elements_by_dtype") or {}).values())


def stored(audit: Audit) -> str | None:
    """The format of most linear weights in the artifact."""
    return format_of(stored_name(audit))


def stored_name(audit: Audit) -> str | None:
    """The type of most linear weights as the audit spells it: nf4 where the format is 4-bit."""
    elements = audit.get("linear_elements_by_dtype") or {}
    return max(elements, key=elements.__getitem__) if elements else None


def held(audit: Audit) -> str | None:
    """The format in which the engine holds most linear weights: it may have unpacked them once, while loading."""
    engine, kind = audit.get("engine") or {}, stored(audit)
    sizes = {name.removeprefix(CONSTANTS): int(engine[name]) for name in engine if name.startswith(CONSTANTS)}
    if not sizes or kind is None:
        return kind
    kinds = {name: format_of(name) for name in sizes}
    least = 0.9 * linear_elements(audit)
    large = {other for name, other in kinds.items() if other and sizes[name] >= least * BYTES[other]}
    if kind in large and all(BYTES[other] <= BYTES[kind] for other in large):
        return kind
    return large.pop() if len(large) == 1 else None


def linear_bytes(audit: Audit) -> float | None:
    """Bytes of linear weights that every call reads, as held; embedding tables, read by the row, are left out."""
    kind = held(audit)
    if kind is None:
        return None
    if kind != stored(audit):
        return BYTES[kind] * linear_elements(audit)
    elements = audit.get("linear_elements_by_dtype") or {}
    return sum(BYTES[format_of(name) or kind] * count for name, count in elements.items())


def arithmetic(recipe: Mapping[str, Any], audit: Audit, flags: frozenset[str]) -> str | None:
    """The format in which most linear layers multiply. `recipe` is its content; `flags` are the CPU's."""
    engine, kind = audit.get("engine") or {}, stored(audit)
    if audit.get("autocast"):
        return format_of(audit["autocast"])
    if "linear_layers" in engine:
        ran = format_of(engine["linear_layers"])
        if ran in FLOATS and kind not in FLOATS and engine.get("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0") != "0":
            # OpenVINO then quantises activations inside the layer, whose output's type it reports, and does
            # so only where the CPU has dot-product instructions.
            return "int8" if present("int8", flags) else None
        return ran
    if kind in FLOATS:
        return kind
    if any(name.startswith("DynamicQuantized") for name in audit.get("changed_modules") or {}):
        return "int8"
    words = set(str((recipe.get("quantize") or {}).get("scheme", "")).split("_"))
    if {"weight", "only"} <= words or kind == "4-bit":
        return format_of(recipe.get("dtype"))
    return kind if words & {"dynamic", "static"} else None


def converted(audit: Audit, into: str | None) -> bool:
    """Whether linear weights are converted to the float format `into` at every call.

    An engine that reports its arithmetic and not its constants may have unpacked them once: that is a no.
    """
    engine, kind = audit.get("engine") or {}, stored(audit)
    told = "linear_layers" not in engine or any(name.startswith(CONSTANTS) for name in engine)
    return told and kind is not None and into in FLOATS and into != kind and held(audit) == kind


def present(kind: str, flags: frozenset[str]) -> list[str]:
    """The CPU's flags that make arithmetic in the format `kind` native."""
    decisive = {
        name for trait in TRAITS if kind in trait.formats for each in trait.flags.values() for name in each
    }
    return sorted(decisive & flags)
