"""Matches a table's labels with the classes of a checkpoint, by meaning and never by luck."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qtool.core import QtoolError

if TYPE_CHECKING:
    import numpy as np

# Spellings of one meaning in the label names of checkpoints; yes, no, true and false mean nothing by themselves.
SYNONYMS = (
    ("negative", "neg"),
    ("positive", "pos"),
    ("entailment", "entail", "entails", "entailed"),
    ("contradiction", "contradict", "contradicts", "contradictory"),
    ("equivalent", "paraphrase", "paraphrased", "duplicate", "duplicated", "is_duplicate"),
    ("acceptable", "grammatical"),
)
NEGATED = {"entailment": ("not", "non"), "equivalent": ("not", "non"), "acceptable": ("not", "non", "un")}
LEAST_GAIN = 0.2
SIGNIFICANT = 0.01


def match(
    found: Sequence[Any],
    documented: Sequence[str] | None,
    id2label: dict[int, str],
    kinds: Sequence[Any] = (),
) -> tuple[list[int], list[str]]:
    """Class index of the model for each label of the table, and notes on what was assumed.

    `found` are the table's labels as written, `kinds` all that its file has where `found` is a part, `documented` the task's names in the order of its class numbers.
    Whole numbers are class numbers (in a table without documented names only where 0 is among them, with a
    note); words are matched with `id2label` whatever their case, their separators and their common synonyms. A
    checkpoint that names its classes LABEL_0, LABEL_1, ... is taken in the task's documented order, with a note.
    Raises QtoolError showing both lists when a label has no class in the model, or more than one.
    """
    notes: list[str] = []
    keys, names = list(id2label), list(id2label.values())
    numbered = _numbered(id2label)
    numbers = {label: number_of(label) for label in dict.fromkeys(found)}
    # numbers from 1 are ratings or other codes, not class numbers: those would be off by one
    from_zero = 0 in [number_of(label) for label in (*kinds, *numbers)]
    mapping: dict[Any, int] = {}
    for label, number in numbers.items():
        name = str(label)
        if number is not None and documented is not None:
            if not 0 <= number < len(documented):
                _refuse(label, documented, id2label)
            name = documented[number]
        place = find(name, names)
        index = keys[place] if place is not None else None
        if index is None and documented is not None and numbered:
            place = find(name, documented)
            index = numbered.get(place) if place is not None else None
        elif index is None and documented is None and number is not None and from_zero:
            index = numbered.get(number) if numbered else number
        if index is None or index not in id2label:
            _refuse(label, documented or list(numbers), id2label, name)
        else:
            mapping[label] = index
    if documented is None and all(find(str(label), names) is None for label in numbers):
        order = ", ".join(f"{index}={name}" for index, name in id2label.items())
        notes.append(
            f"the table's labels are numbers: they were taken as the model's class numbers ({order})"
        )
    if documented is not None and numbered:
        order = ", ".join(f"{index}={name}" for index, name in enumerate(documented))
        notes.append(
            f"the checkpoint does not name its classes: the task's documented order was taken ({order})"
        )
    return [mapping[label] for label in found], notes


def find(label: str, names: Sequence[str]) -> int | None:
    """Place of the one name that is spelled like `label`, or else means the same; None without exactly one."""
    for same in (_plain, meaning):
        places = [place for place, name in enumerate(names) if same(name) == same(label)]
        if places:
            return places[0] if len(places) == 1 else None
    return None


def meaning(name: str) -> str:
    """One word for all spellings of a label: NOT-Entailment, nonentailment and not entailed give the same."""
    plain = re.sub(r"[\s_-]+", "_", _plain(name))
    return _MEANINGS.get(plain, plain)


def number_of(label: Any) -> int | None:
    """The whole number that a label is or is written as, or None."""
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, int):
        return label
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    written = re.fullmatch(r"(\d{1,9})(\.0+)?", str(label).strip(), re.ASCII)
    return int(written[1]) if written else None


def permutation_suspicion(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> str | None:
    """A sentence where another assignment of the classes would be right far more often, else None.

    `logits` are (rows, classes) in the task's class order, `labels` (rows,) class numbers, `names` the task's
    names of the first classes. The best assignment comes from the confusion table (Kuhn 1955, "The Hungarian
    method", https://doi.org/10.1002/nav.3800020109). It is suspected where it gains more than 0.2 of accuracy and
    where two exact binomial tests at 0.01 agree: it is right on more of the rows on which the two differ
    (McNemar 1947, https://doi.org/10.1007/BF02295996; times the number of assignments it was chosen from,
    Bonferroni), and it beats answering the commonest label, so that a model that always says the same is not
    suspected. A model that is honestly worse than chance, as is common on WNLI, looks the same.
    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment
    from scipy.special import gammaln
    from scipy.stats import binom

    rows, classes = logits.shape
    if classes < 2 or not rows or not np.isfinite(logits).all():
        return None
    said = logits.argmax(axis=1)
    told = np.asarray(labels).astype(int)
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (said, told), 1)
    _, best = linear_sum_assignment(counts, maximize=True)
    right, right_if_moved = said == told, best[said] == told
    gain = (int(right_if_moved.sum()) - int(right.sum())) / rows
    if gain <= LEAST_GAIN:
        return None
    gained, lost = int((right_if_moved & ~right).sum()), int((right & ~right_if_moved).sum())
    log_p = binom.logsf(gained - 1, gained + lost, 0.5) + gammaln(classes + 1)
    commonest = np.bincount(told).max() / rows
    log_p_constant = binom.logsf(int(right_if_moved.sum()) - 1, rows, commonest)
    if max(log_p, log_p_constant) >= np.log(SIGNIFICANT):
        return None
    called = [*names, *(f"class {index}" for index in range(len(names), classes))]
    moved = [index for index in range(classes) if best[index] != index and counts[index].sum()]
    return (
        f"the labels look permuted: accuracy is {right.mean():.3f} as mapped and would be"
        f" {right_if_moved.mean():.3f} if what is read as {', '.join(called[index] for index in moved)} meant"
        f" {', '.join(called[best[index]] for index in moved)}. Check id2label in the checkpoint's config.json"
    )


def _numbered(id2label: dict[int, str]) -> dict[int, int]:
    """Class index by the number in its name where names are LABEL_0, LABEL_1, ... or 0, 1, ...; else empty."""
    found = [re.fullmatch(r"(?:label|class)?[\s_-]*(\d{1,9})", _plain(name)) for name in id2label.values()]
    numbers = {int(name[1]): index for name, index in zip(found, id2label, strict=True) if name}
    return numbers if sorted(numbers) == list(range(len(id2label))) else {}


def _refuse(label: Any, table: Sequence[Any], id2label: dict[int, str], name: str | None = None) -> None:
    called = f" ({name})" if name not in (None, str(label)) else ""
    raise QtoolError(
        f"label {label!r}{called} has no class in the model. The task's labels: {', '.join(map(str, table))[:200]}."
        f" The model's: {', '.join(id2label.values())[:200]}. Rename one side or choose another --task."
    )


def _plain(name: Any) -> str:
    return str(name).strip().casefold()


def _spellings() -> dict[str, str]:
    """Every known spelling with separators as underscores, by the meaning it stands for."""
    made = {}
    for first, *others in SYNONYMS:
        for word in (first, *others):
            made[word] = first
            for prefix in NEGATED.get(first, ()):
                for between in ("_", "", "_a_", "_an_"):
                    made[f"{prefix}{between}{word}"] = f"not {first}"
    return made


_MEANINGS = _spellings()
