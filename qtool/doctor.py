"""`qtool doctor`: what this machine and installation are, and what that means for which recipe.

Derives everything from the host and from the recipes it is given: it knows no recipe's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qtool import contention, host, memory
from qtool.core import Recipe
from qtool.recipes import EXTRAS

FP8_CAPABILITY = 8.9
"""The first compute capability with FP8 tensor cores, by torchao's own assert for dynamic FP8."""


@dataclass(frozen=True)
class Trait:
    """Something a CPU can or cannot do in hardware, and the recipes (by number format) that it decides about.

    `flags` by `host.family()`: any of them is enough; none at all means that no CPU of the family has it.
    """

    name: str
    formats: frozenset[str]
    flags: dict[str, tuple[str, ...]]
    yes: str
    no: str


TRAITS = (
    Trait(
        "wide vectors",
        frozenset({"float32"}),
        {"x86": ("avx512f", "avx2"), "arm": ("asimd",)},
        "fp32 arithmetic is vectorised",
        "the engines fall back to slow kernels or refuse to start",
    ),
    Trait(
        "INT8 dot products",
        frozenset({"int8"}),
        {"x86": ("amx_int8", "avx512_vnni", "avx_vnni"), "arm": ("i8mm", "asimddp")},
        "INT8 recipes run on dot-product instructions; weight-only ones still compute in their base type",
        "without VNNI, INT8 may be slower than fp32 and its sums may saturate (onnxruntime#6004): "
        "check the score as well as the speed",
    ),
    Trait(
        "BF16 arithmetic",
        frozenset({"bfloat16"}),
        {"x86": ("amx_bf16", "avx512_bf16"), "arm": ("bf16",)},
        "bf16 runs natively",
        "bf16 is emulated: it halves the size and saves little or no time",
    ),
    Trait(
        "FP16 arithmetic",
        frozenset({"float16"}),
        {"x86": ("amx_fp16", "avx512_fp16"), "arm": ("asimdhp",)},
        "fp16 has instructions; whether PyTorch uses them is its own decision, so measure",
        "fp16 on this CPU is slower than fp32: use it on a GPU",
    ),
    Trait(
        "FP8 arithmetic",
        frozenset({"float8"}),
        {},
        "",
        "fp8 weights are widened at every call: they save size, not time",
    ),
    Trait(
        "4-bit arithmetic",
        frozenset({"4-bit"}),
        {},
        "",
        "4-bit weights are unpacked at every call: smallest, and faster only where memory is the limit",
    ),
)

# Spellings in recipes and audits: torch, torchao, bitsandbytes, OpenVINO, NNCF.
SPELLINGS = {
    "int8": ("int8", "uint8", "qint8", "quint8", "i8", "u8"),
    "float8": ("float8", "fp8", "f8e4m3"),
    "4-bit": ("int4", "i4", "u4", "nf4", "fp4", "4bit"),
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "fp16", "f16"),
    "float32": ("float32", "fp32", "f32"),
}


def formats(recipe: Recipe) -> frozenset[str]:
    """Number formats a recipe stores or computes in, from its dtype, options and expected audit."""
    words = [recipe.dtype, *_strings(recipe.quantize), *_strings(recipe.runtime_options)]
    words += [*recipe.expect.weight_share, *recipe.expect.linear_share, *recipe.expect.engine.values()]
    parts = {part for word in words for part in word.lower().replace("-", "_").split("_")}
    return frozenset(name for name, spellings in SPELLINGS.items() if parts & set(spellings))


def facts(recipes: Sequence[Recipe] = (), hub_timeout_s: float = 3.0) -> dict[str, Any]:
    """Everything the report says, as JSON-able data. Sizes in bytes; imports no heavy library."""
    flags = host.cpu_flags()
    family = host.family()
    reachable, hub = host.hub_status(hub_timeout_s)
    versions = host.versions()
    gpus = host.gpus()
    return {
        "cpu": {
            "model": host.cpu_model(),
            "flags": {flag: flag in flags for flag in host.FLAGS.get(family, ())},
            "physical_cores": host.physical_cores(),
            "logical_cpus": len(host.usable_cpus()),
        },
        "memory_bytes": host.memory_bytes(),
        "gpus": gpus,
        "cuda_available": host.cuda_available(),
        "versions": versions,
        "missing": _missing(EXTRAS),
        "hub": {"reachable": reachable, "sentence": hub},
        "meaning": [_meaning(trait, family, flags, recipes) for trait in TRAITS],
        "unmet": _unmet(recipes, flags, gpus),
        "warnings": _warnings(versions, gpus),
    }


def report(recipes: Sequence[Recipe] = (), hub_timeout_s: float = 3.0) -> str:
    """The facts as lines for a terminal or a log, never cut to a width."""
    found = facts(recipes, hub_timeout_s)
    cpu = found["cpu"]
    logical = f"{cpu['physical_cores']} physical cores ({cpu['logical_cpus']} logical)"
    lines = [f"CPU       {cpu['model']}, {logical}, {found['memory_bytes'] / 2**30:.1f} GiB of memory"]
    shown = "  ".join(f"{flag} {'yes' if has else 'no'}" for flag, has in cpu["flags"].items())
    lines.append(f"flags     {shown or 'this system does not tell them'}")
    for gpu in found["gpus"]:
        size = "shared memory" if gpu["memory_bytes"] is None else f"{gpu['memory_bytes'] / 2**30:.1f} GiB"
        lines.append(
            f"GPU       {gpu['name']}, {size}, capability {gpu['capability']}, driver {gpu['driver']}"
        )
    if not found["gpus"]:
        lines.append("GPU       none: no NVIDIA driver answers, recipes for cuda are skipped")
    lines.append(f"hub       {found['hub']['sentence']}")
    lines.append("versions  " + "  ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for gap in found["missing"]:
        lines.append(f"missing   {', '.join(gap['packages'])}: {gap['install']}")
    lines += [f"warning   {warning}" for warning in found["warnings"]]
    lines += ["", "What it means for the recipes on this CPU"]
    for meaning in found["meaning"]:
        answer = f"yes ({', '.join(meaning['flags'])})" if meaning["available"] else "no"
        concerned = f" [{', '.join(meaning['recipes'])}]" if meaning["recipes"] else ""
        lines.append(f"  {meaning['trait']}: {answer} -> {meaning['sentence']}{concerned}")
    lines += [f"  {sentence}" for sentence in found["unmet"]]
    return "\n".join(lines)


def _meaning(trait: Trait, family: str, flags: frozenset[str], recipes: Sequence[Recipe]) -> dict[str, Any]:
    present = [flag for flag in trait.flags.get(family, ()) if flag in flags]
    concerned = [
        recipe.name for recipe in recipes if "cpu" in recipe.devices and formats(recipe) & trait.formats
    ]
    return {
        "trait": trait.name,
        "available": bool(present),
        "flags": present,
        "recipes": concerned,
        "sentence": trait.yes if present else trait.no,
    }


def _missing(extras: dict[str, str]) -> list[dict[str, Any]]:
    """Packages that are not installed, grouped by the extra of qtool that brings them."""
    gaps: dict[str, list[str]] = {}
    for package, extra in extras.items():
        if host.installed(package) is None:
            gaps.setdefault(extra, []).append(package)
    return [
        {"packages": packages, "install": f"pip install 'qtool[{extra}]'"} for extra, packages in gaps.items()
    ]


def _unmet(recipes: Sequence[Recipe], flags: frozenset[str], gpus: list[dict[str, Any]]) -> list[str]:
    """Recipes whose own `requires` this hardware does not meet, one sentence each."""
    sentences = []
    for recipe in recipes:
        wanted = recipe.requires.cpu_flags
        if "cpu" in recipe.devices and wanted and not flags & set(wanted):
            sentences.append(f"{recipe.name}: not on this CPU, it needs {' or '.join(wanted)}")
        least = recipe.requires.capability
        if least and gpus and max(gpu["capability"] for gpu in gpus) < least:
            sentences.append(f"{recipe.name}: not on this GPU, it needs compute capability {least}")
    if gpus and max(gpu["capability"] for gpu in gpus) < FP8_CAPABILITY:
        names = [r.name for r in recipes if "cuda" in r.devices and "float8" in formats(r)]
        sentences += [f"{name}: no FP8 arithmetic below capability {FP8_CAPABILITY}" for name in names]
    return sentences


def _warnings(versions: dict[str, str], gpus: list[dict[str, Any]]) -> list[str]:
    found = []
    if gpus and versions.get("torch", "").endswith("+cpu"):
        found.append(f"torch {versions['torch']} is a CPU build: it does not use the GPU")
    if not gpus and os.path.exists("/proc/driver/nvidia/version") and host.installed("pynvml") is None:
        found.append("an NVIDIA driver is loaded but cannot be asked: pip install 'qtool[cuda]'")
    load, cores = contention.snapshot().load_1min, host.physical_cores()
    if load is not None and load > 0.5 * cores:
        found.append(f"the load is {load:.1f} on {cores} cores: latencies measured now will be flagged")
    if reason := memory.reset_peak():
        found.append(f"peak memory cannot be measured: {reason}")
    policies = [f"{name}={os.environ[name]}" for name in host.POLICY_VARIABLES if name in os.environ]
    if policies:
        found.append(f"set in the environment, and part of every number: {', '.join(policies)}")
    return found


def _strings(value: Any) -> Iterable[str]:
    """Every string inside a recipe's options, at any depth; keys too, because `nf4: true` says it by key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value
