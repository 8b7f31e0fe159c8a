"""`qtool.yaml`: what a team demands of a run, read and checked before anything is judged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from qtool import goals, host, strict_yaml
from qtool.core import QtoolError, did_you_mean
from qtool.goals import Drop

CONFIDENCE = 0.95
TOLERANCE = 0.10
MOST_CONFIDENCE = 0.9999
LIMITS = (
    "max_drop",
    "min_speedup",
    "max_p50",
    "max_p95",
    "min_throughput",
    "max_memory",
    "max_disk",
    "confidence",
)
TOP = (
    "baseline",
    "confidence",
    "inconclusive",
    "all",
    "recipes",
    "expected_failures",
    "reference",
    "target_cpu_flags",
)


@dataclass(frozen=True)
class Limits:
    """What one recipe must keep, in base units; None is not checked."""

    max_drop: Drop | None = None
    min_speedup: float | None = None
    max_p50_s: float | None = None
    max_p95_s: float | None = None
    min_throughput_per_s: float | None = None
    max_memory_bytes: float | None = None
    max_disk_bytes: float | None = None
    confidence: float | None = None

    def over(self, other: Limits) -> Limits:
        """These limits, with the other's where these say nothing."""
        own = {key: value for key, value in vars(self).items() if value is not None}
        return replace(other, **own)


@dataclass(frozen=True)
class Policy:
    """The whole file. `tolerance` is the allowed relative fall against a stored reference."""

    path: Path
    baseline: str | None = None
    confidence: float = CONFIDENCE
    inconclusive: Literal["pass", "fail"] = "pass"
    everywhere: Limits | None = None
    recipes: Mapping[str, Limits] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    reference_drop: Drop | None = None
    target_cpu_flags: tuple[str, ...] = ()

    def limits(self, recipe: str) -> Limits | None:
        """What is demanded of a recipe: its own limits before those for all; None where nothing is."""
        found = self.everywhere
        # a stable sort: patterns in the file's order, then the recipe's very name
        for pattern, own in sorted(self.recipes.items(), key=lambda item: item[0] == recipe):
            if fnmatchcase(recipe, pattern):
                found = own.over(found) if found else own
        return found

    def expected(self, recipe: str) -> str | None:
        """Why a recipe may fail, if it may."""
        reasons = (why for pattern, why in self.expected_failures.items() if fnmatchcase(recipe, pattern))
        return next(reasons, None)

    def named(self, recipe: str) -> bool:
        """Whether the policy names this very recipe: then it may not be skipped in silence."""
        return recipe in self.recipes

    def check_names(self, recipes: Collection[str], baseline: str) -> None:
        """Raises QtoolError for a name that none of a run's `recipes` answers to, or limits that nothing does.

        A pattern of expected failures may fit nothing: one policy serves sweeps of different recipes.
        """
        names = [name for name in self.expected_failures if not set(name) & set("*?[")]
        for name in (*self.recipes, *names):
            if not any(fnmatchcase(recipe, name) for recipe in recipes):
                raise QtoolError(
                    f"{self.path}: recipe '{name}' is not in the run.{did_you_mean(name, recipes)}"
                )
        if self.baseline not in (None, baseline):
            raise QtoolError(
                f"{self.path}: baseline '{self.baseline}', but the run was measured against '{baseline}'."
                " Name that one, or leave baseline out."
            )

    def check_sweep(self, recipes: Collection[str], baseline: str, scored: bool) -> None:
        """Raises QtoolError for what would come to light only after hours of measuring."""
        self.check_names(recipes, baseline)
        judged = [self.limits(r) for r in recipes if r != baseline or self.named(r)]
        if not any(judged):
            raise QtoolError(
                f"{self.path}: no limit speaks of a recipe of this sweep ({', '.join(recipes)})."
                " Add one, or gate later with qtool gate --reference."
            )
        if not scored and any(limits and limits.max_drop for limits in judged):
            raise QtoolError(f"{self.path}: max_drop needs scores. Leave out --no-score, or max_drop.")


def read(path: Path) -> Policy:
    """The policy in a YAML file. Raises QtoolError naming the key and what would work."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise QtoolError(f"cannot read the policy {path}: {why}. Give a YAML file.") from None
    try:
        content = strict_yaml.load(text)
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        raise QtoolError(f"{path} is not valid YAML: {' '.join(str(error).split())[:160]}.") from None
    whole = _mapping(content, f"{path}", TOP)
    if not {"all", "recipes", "reference"} & whole.keys():
        raise QtoolError(
            f"{path} demands nothing: give limits under 'all' or 'recipes', such as max_drop: 1%."
        )
    recipes = {
        _text(name, f"{path}: recipes"): _limits(own, f"{path}: recipes: {name}")
        for name, own in _any_mapping(whole.get("recipes", {}), f"{path}: recipes").items()
    }
    failures = {
        _text(name, f"{path}: expected_failures"): _text(
            why, f"{path}: expected_failures: {name}: the reason"
        )
        for name, why in _any_mapping(
            whole.get("expected_failures", {}), f"{path}: expected_failures"
        ).items()
    }
    reference = _mapping(whole.get("reference", {}), f"{path}: reference", ("tolerance", "max_drop"))
    inconclusive = whole.get("inconclusive", "pass")
    if inconclusive not in ("pass", "fail"):
        raise QtoolError(f"{path}: inconclusive is '{inconclusive}', expected pass or fail.")
    return Policy(
        path=path,
        baseline=_text(whole["baseline"], f"{path}: baseline") if "baseline" in whole else None,
        confidence=_confidence(whole.get("confidence", CONFIDENCE), f"{path}: confidence"),
        inconclusive=inconclusive,
        everywhere=_limits(whole["all"], f"{path}: all") if "all" in whole else None,
        recipes=recipes,
        expected_failures=failures,
        tolerance=_tolerance(reference["tolerance"], f"{path}: reference: tolerance")
        if "tolerance" in reference
        else TOLERANCE,
        reference_drop=goals.drop(reference["max_drop"], f"{path}: reference: max_drop")
        if "max_drop" in reference
        else None,
        target_cpu_flags=_flags(whole.get("target_cpu_flags", []), f"{path}: target_cpu_flags"),
    )


def _limits(content: Any, where: str) -> Limits:
    found = _mapping(content, where, LIMITS)
    if not found:
        raise QtoolError(f"{where} demands nothing: give a limit such as max_drop: 1%.")

    def amount(key: str, units: dict[str, float]) -> float | None:
        return goals.quantity(found[key], units, f"{where}: {key}") if key in found else None

    return Limits(
        max_drop=goals.drop(found["max_drop"], f"{where}: max_drop") if "max_drop" in found else None,
        min_speedup=_speedup(found["min_speedup"], f"{where}: min_speedup")
        if "min_speedup" in found
        else None,
        max_p50_s=amount("max_p50", goals.SECONDS),
        max_p95_s=amount("max_p95", goals.SECONDS),
        min_throughput_per_s=amount("min_throughput", goals.RATES),
        max_memory_bytes=amount("max_memory", goals.BYTES),
        max_disk_bytes=amount("max_disk", goals.BYTES),
        confidence=_confidence(found["confidence"], f"{where}: confidence")
        if "confidence" in found
        else None,
    )


def _tolerance(value: Any, where: str) -> float:
    found = goals.share(value, where)
    if found == 1:
        raise QtoolError(f"{where}: '{value}' allows everything, expected less than 100%.")
    return found


def _speedup(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise QtoolError(f"{where}: '{value}', expected a factor against the baseline such as 1.5.")
    if not 0 < value < 1e6:
        raise QtoolError(f"{where}: {value} is out of range, expected more than 0.")
    return float(value)


def _confidence(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.5 < value <= MOST_CONFIDENCE:
        raise QtoolError(
            f"{where}: '{value}', expected a number over 0.5, at most {MOST_CONFIDENCE}, such as 0.95."
        )
    return float(value)


def _flags(value: Any, where: str) -> tuple[str, ...]:
    known = {flag for flags in host.FLAGS.values() for flag in flags}
    if not isinstance(value, list):
        raise QtoolError(f"{where} is {type(value).__name__}, expected a list of CPU flags such as [avx2].")
    for flag in value:
        if not isinstance(flag, str) or flag not in known:
            raise QtoolError(f"{where}: unknown CPU flag '{flag}'.{did_you_mean(str(flag), known)}")
    return tuple(value)


def _mapping(content: Any, where: str, keys: Collection[str]) -> dict[str, Any]:
    found = _any_mapping(content, where)
    for key in found:
        if key not in keys:
            raise QtoolError(f"{where}: unknown key '{key}'.{did_you_mean(str(key), keys)}")
    return found


def _any_mapping(content: Any, where: str) -> dict[Any, Any]:
    if not isinstance(content, dict):
        raise QtoolError(f"{where} holds {type(content).__name__}, expected keys and values.")
    return content


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise QtoolError(f"{where} is {value!r}, expected text.")
    return value
