"""`qtool doctor`: what this machine and installation are, and what that means for which recipe.

Derives everything from the host and from the recipes it is given: it knows no recipe's name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtool import contention, host, isolate, memory, topology
from qtool.core import Recipe
from qtool.recipes import EXTRAS
from qtool.traits import TRAITS, Trait, formats
from qtool.units import significant

FP8_CAPABILITY = 8.9
"""The first compute capability with FP8 tensor cores, by torchao's own assert for dynamic FP8."""


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


def report(recipes: Sequence[Recipe] = (), hub_timeout_s: float = 3.0, measure: bool = False) -> str:
    """The facts as lines for a terminal or a log, never cut to a width; with `measure` the ceilings too."""
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
    lines += [f"topology  {line}" for line in topology.lines(topology.read())]
    if not found["gpus"]:
        lines.append("GPU       none: no NVIDIA driver answers, recipes for cuda are skipped")
    lines.append(f"hub       {found['hub']['sentence']}")
    if measure:
        lines += _ceilings(host.physical_cores())
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


def _ceilings(threads: int) -> list[str]:
    """What this machine does at most, taken now in a child, in two lines and what follows from them."""
    with tempfile.TemporaryDirectory(prefix="qtool-") as scratch:
        log = Path(scratch) / "ceilings.log"
        outcome = isolate.run("ceilings", {"threads": threads}, log=log, timeout_s=120.0, threads=threads)
    if outcome.status != "ok":
        return [f"copy      not measured: {outcome.error}", "fp32      not measured, for the same reason"]
    copy, product = outcome.values["copy_bytes_per_s"], outcome.values["fp32_flop_per_s"]
    on = f"on {threads} thread{'s' if threads > 1 else ''}"
    array = outcome.values["copy_array_bytes"] / 1e6
    balance = significant(product / copy)
    return [
        f"copy      {significant(copy / 1e9)} GB/s {on}, read and written, arrays of {array:,.0f} MB",
        f"fp32      {significant(product / 1e9)} GFLOP/s {on}, a product of two matrices",
        f"balance   {balance} FLOP a byte: work that does fewer on each byte it fetches from memory waits for"
        " memory, work that does more waits for arithmetic",
        *(f"link      {line}" for line in _links(outcome.values)),
    ]


def _links(ceilings: dict[str, Any]) -> list[str]:
    """What offloaded weights come over, at most."""
    names = {
        "disk_read": "a mapped file read from disk",
        "page_cache_read": "a mapped file read from the page cache",
        "pinned_copy": "from pinned host memory to the GPU",
        "pageable_copy": "from pageable host memory to the GPU",
    }
    found = []
    for name, words in names.items():
        rate, reason = (ceilings.get(f"{name}_bytes_per_s{end}") for end in ("", "_reason"))
        found.append(
            f"{significant(rate / 1e9)} GB/s {words}" if rate else f"{words}: not measured, {reason}"
        )
    return found


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
