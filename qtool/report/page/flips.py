"""Which examples a recipe answers otherwise than the baseline, with both answers' probabilities and the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtool.evidence import Evidence
from qtool.paired import PairedScores
from qtool.report import text
from qtool.shift import log_probabilities

MOST = 50
# The second text of an example: read together with the first, or apart by a sentence-embedding model.
SECOND = ("pairs", "second")
# All texts of a page together; each is cut so that they fit, but never below the least.
TEXT_BUDGET, LONGEST_TEXT, SHORTEST_TEXT = 300_000, 400, 60


def flips(evidence: Evidence, recipes: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """By device and number of the recipe in `recipes`: how many examples changed and the first `MOST` of them,
    the most confident first (both answers' probabilities added); notes on what could not be shown.

    An entry is [example, baseline's answer, its probability, recipe's answer, its probability], answers as
    class numbers; of a regression [example, baseline's value, recipe's value], the largest change first.
    `examples` tells of each its number in the file and its label, `texts` its texts where the run kept them.
    """
    devices: dict[str, dict[int, Any]] = {}
    compared: dict[str, PairedScores] = {}
    for (host, on), scores in evidence.scores.items():
        device = text.place({"host": host, "device": on})
        if evidence.baseline not in scores.predictions:
            continue
        devices[device] = {
            recipes.index(recipe): of_recipe(scores, recipe, evidence.baseline)
            for recipe in scores.predictions
            if recipe != evidence.baseline and recipe in recipes
        }
        compared[device] = scores
    shown = {
        device: sorted({entry[0] for recipe in found.values() for entry in recipe["first"]})
        for device, found in devices.items()
    }
    rows = max((len(scores.labels) for scores in compared.values()), default=0)
    told, notes = read_texts(evidence.run_dir, rows)
    classes = next((scores.classes for scores in compared.values()), None)
    return {
        "classes": None if classes is None else _class_names(evidence.run, classes),
        "devices": devices,
        "examples": {
            device: {i: [str(compared[device].ids[i]), float(compared[device].labels[i])] for i in numbers}
            for device, numbers in shown.items()
        },
        "texts": _texts(told, sorted({i for numbers in shown.values() for i in numbers})),
    }, notes


def of_recipe(scores: PairedScores, recipe: str, baseline: str) -> dict[str, Any]:
    """What changed for one recipe: `changed` in all, `gained`, `lost`, and the `first` ones."""
    if scores.classes is None:
        old, new = scores.predictions[baseline], scores.predictions[recipe]
        order = np.argsort(-np.abs(new - old), kind="stable")[:MOST]
        first = [[int(i), float(f"{old[i]:.5g}"), float(f"{new[i]:.5g}")] for i in order if new[i] != old[i]]
        return {"changed": int(np.sum(new != old)), "gained": None, "lost": None, "first": first}
    old_p, new_p = (np.exp(log_probabilities(scores.logits[name])) for name in (baseline, recipe))
    old, new = scores.predictions[baseline], scores.predictions[recipe]
    changed = np.flatnonzero(old != new)
    confidence = old_p[changed, old[changed]] + new_p[changed, new[changed]]
    first = changed[np.argsort(-confidence, kind="stable")][:MOST]
    gained, lost = scores.flips(recipe, baseline)
    return {
        "changed": len(changed),
        "gained": gained,
        "lost": lost,
        "first": [
            [
                int(i),
                int(old[i]),
                round(float(old_p[i, old[i]]), 4),
                int(new[i]),
                round(float(new_p[i, new[i]]), 4),
            ]
            for i in first
        ],
    }


def read_texts(run_dir: Path, rows: int) -> tuple[dict[str, Any] | None, list[str]]:
    """The scored texts in the order of the predictions, and a note where there are none that fit."""
    path = run_dir / "texts.json"
    if not path.is_file() or not rows:
        return None, []
    try:
        told = json.loads(path.read_text("utf-8"))
        lists = [told["texts"], *(told[key] for key in SECOND if told.get(key) is not None)]
        if all(len(each) == rows and all(isinstance(text, str) for text in each) for each in lists):
            return told, []
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass  # said below, as of texts of another number
    return None, [
        f"{path.name} does not hold the {rows} texts that were scored: examples are shown by number"
    ]


def _texts(told: Mapping[str, Any] | None, shown: Sequence[int]) -> dict[int, list[str]]:
    if told is None:
        return {}
    longest = max(SHORTEST_TEXT, min(LONGEST_TEXT, TEXT_BUDGET // max(1, len(shown))))
    kept = [told[key] for key in ("texts", *SECOND) if told.get(key)]
    return {i: [_cut(texts[i], longest) for texts in kept] for i in shown}


def _cut(words: str, longest: int) -> str:
    return words if len(words) <= longest else words[:longest].rstrip() + " …"


def _class_names(run: Mapping[str, Any], classes: int) -> list[str]:
    """The task's names in the order of the logits' columns; a class it does not name is its number."""
    names = (run.get("data") or {}).get("class_names")
    names = [str(name) for name in names] if isinstance(names, list) else []
    return [names[i] if i < len(names) else f"class {i}" for i in range(classes)]
