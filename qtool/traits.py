"""What CPUs can do in hardware and which number formats that decides about. Knows no recipe's name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qtool.core import Recipe


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


def named(words: Iterable[str]) -> frozenset[str]:
    """The number formats that `words` name in any library's spelling."""
    parts = {part for word in words for part in word.lower().replace("-", "_").split("_")}
    return frozenset(name for name, spellings in SPELLINGS.items() if parts & set(spellings))


def formats(recipe: Recipe) -> frozenset[str]:
    """Number formats a recipe stores or computes in, from its dtype, options and expected audit."""
    words = [recipe.dtype, *_strings(recipe.quantize), *_strings(recipe.runtime_options)]
    words += [*recipe.expect.weight_share, *recipe.expect.linear_share, *recipe.expect.engine.values()]
    return named(words)


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
