"""One artifact on several hosts: whether it gives the same answers, and what the hosts' processors differ in.

Counts and values alone: nothing here is tested or pooled across hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtool.paired import PairedScores

INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""Instructions without which 8-bit products may saturate: then a score of INT8 differs for that reason."""


@dataclass(frozen=True)
class Scored:
    """One recipe's scored artifact on one device of one host."""

    label: str
    recipe: str
    device: str
    fingerprint: str
    score: float | None
    predictions: Path | str
    host: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.label} {self.device}"


def compare(metric: str, every: Sequence[Scored]) -> list[dict[str, Any]]:
    """Each artifact that was scored more than once, every later time held against the first, JSON-able.

    `changed` counts the examples whose class differs, `gained` and `lost` those of them that it made right or wrong;
    they are None with a reason for a regression and where predictions cannot be read.
    """
    by_print: dict[tuple[str, str], list[Scored]] = {}
    for scored in every:
        by_print.setdefault((scored.recipe, scored.fingerprint), []).append(scored)
    return [_pair(metric, first, other) for first, *others in by_print.values() for other in others]


def _pair(metric: str, first: Scored, other: Scored) -> dict[str, Any]:
    names = first.name, f"{other.name} again" if other.name == first.name else other.name
    scores = PairedScores(
        metric, {names[0]: first.predictions, names[1]: other.predictions}, names[0], keep=False
    )
    told: dict[str, Any] = {
        "recipe": first.recipe,
        "fingerprint": first.fingerprint,
        "first": {"hardware": first.label, "device": first.device, "score": first.score},
        "other": {"hardware": other.label, "device": other.device, "score": other.score},
        "examples": None,
        **dict.fromkeys(("changed", "gained", "lost", "max_logit_difference", "changed_reason")),
        "instructions": instructions(first, other),
    }
    missing = [name for name in names if name not in scores.predictions]
    if missing:
        return told | {"changed_reason": scores.problems.get(missing[0], "its predictions were not stored")}
    a, b = (scores.predictions[name] for name in names)
    difference = float(np.max(np.abs(scores.logits[names[0]] - scores.logits[names[1]])))
    told |= {"examples": len(scores.labels), "max_logit_difference": difference}
    if scores.classes is None:
        return told | {"changed_reason": "a regression has no classes"}
    gained, lost = scores.flips(names[1], names[0])
    return told | {"changed": int(np.sum(a != b)), "gained": gained, "lost": lost}


def instructions(first: Scored, other: Scored) -> dict[str, list[str]]:
    """CPU flags that one of the two hosts has alone, of answers that were computed on CPUs."""
    if {first.device, other.device} != {"cpu"}:
        return {"first_only": [], "other_only": []}
    told = [host.get("cpu_flags") for host in (first.host, other.host)]
    one, two = (set(map(str, flags)) if isinstance(flags, list) else set() for flags in told)
    return {"first_only": sorted(one - two), "other_only": sorted(two - one)}


def differs(told: Mapping[str, Any]) -> bool:
    """Whether an artifact did not give the same answers, or the same score, both times."""
    scores = [told[side]["score"] for side in ("first", "other")]
    return bool(told["changed"]) or (None not in scores and scores[0] != scores[1])


def known(told: Mapping[str, Any]) -> bool:
    """Whether the answers themselves were compared."""
    return told["max_logit_difference"] is not None


def sentence(told: Mapping[str, Any]) -> str:
    """What changed for one artifact, and what may be why."""
    first, other = told["first"], told["other"]
    a, b = (f"{side['hardware']} ({side['device']})" for side in (first, other))
    if told["changed"] is None:
        answers = f"changed answers not counted: {told['changed_reason']}"
    else:
        answers = (
            f"{told['changed']:,} of {told['examples']:,} predictions changed"
            f" ({told['gained']} became right, {told['lost']} wrong)"
        )
    why = f"; {_why(told, a, b)}" if differs(told) else ""
    return f"{told['recipe']}, the same artifact, from {a} to {b}: {answers}{why}"


def _why(told: Mapping[str, Any], a: str, b: str) -> str:
    devices = [told[side]["device"] for side in ("first", "other")]
    if devices[0] != devices[1]:
        return f"the kernels of {devices[0]} and {devices[1]} are not the same"
    if devices[0] != "cpu":
        return "devices, library versions or their kernels differ"
    only = told["instructions"]
    parts = [
        f"only {who} has {', '.join(flags)}"
        for who, flags in ((a, only["first_only"]), (b, only["other_only"]))
        if flags
    ]
    if not parts:
        return "the processors' instruction sets are the same: devices, library versions or threads differ"
    eight = any(flag in INT8_FLAGS for flags in only.values() for flag in flags)
    return "; ".join(parts) + (" (8-bit products take another path without them)" if eight else "")
