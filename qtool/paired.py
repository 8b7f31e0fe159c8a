"""Scores of several recipes on the same examples: intervals, changes, flips and shifts of their stored logits.

Reads the `.npz` files of one device and aligns them by example; knows nothing of latency or wording. What
cannot be compared is kept out with its reason, never guessed.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from qtool import bootstrap, shift, stats
from qtool.bootstrap import RESAMPLES, Bootstrap
from qtool.claims import Estimate, Exact, Paired, holm
from qtool.core import BASELINE
from qtool.metrics import REGRESSION
from qtool.stats import Interval

LEAST_PAIRS = 10


class PairedScores:
    """Predictions of one device's recipes, aligned by example id.

    `problems[recipe]` says why a recipe is not among them. `metric` is the task's primary metric. Draws that take
    seconds are read where they are stored, beside the predictions; with `keep` new ones are stored there.
    """

    def __init__(
        self, metric: str, files: Mapping[str, Path | str], baseline: str = BASELINE, keep: bool = True
    ) -> None:
        self.metric, self.baseline = metric, baseline
        self.problems: dict[str, str] = {}
        self.predictions: dict[str, np.ndarray[Any, Any]] = {}
        self.logits: dict[str, np.ndarray[Any, Any]] = {}
        self.labels = np.array([])
        self.classes: int | None = None
        ids, width = None, 0
        # The baseline first: it decides which examples the others are held against.
        for recipe in sorted(files, key=lambda name: (name != baseline, name)):
            path = files[recipe]
            try:
                own_ids, labels, logits = _read(path)
            except ValueError as error:
                self.problems[recipe] = str(error)
                continue
            if ids is None:
                ids, self.labels, width = own_ids, labels, logits.shape[1]
                self.classes = None if metric in REGRESSION else logits.shape[1]
            elif not np.array_equal(ids, own_ids) or not np.array_equal(self.labels, labels):
                self.problems[recipe] = "scored on other examples than the recipes it is compared with"
                continue
            if logits.shape[1] != width:
                self.problems[recipe] = f"its logits have {logits.shape[1]} columns, the others' {width}"
                continue
            self.logits[recipe] = logits
            self.predictions[recipe] = logits[:, 0] if self.classes is None else logits.argmax(axis=1)
        self.ids = np.array([]) if ids is None else ids
        self._order = sorted(self.predictions)
        paths = [path for path in files.values() if isinstance(path, Path)]
        self._kept = paths[0].parent / "draws" if self.classes is None and paths else None
        self._keep = keep and self._kept is not None and _can_write(self._kept)
        self._bootstrap = cache(self._resample)
        self._beside = cache(self._with_baseline)
        self._undrawn = cache(lambda: self._some(self.metric, *self._order, resamples=0))
        self.change = cache(self._change)
        self.not_worse = cache(self._not_worse)
        self.single = cache(self._single)
        self.delta = cache(self._delta)
        self.near = cache(self._near)

    def _resample(self, metric: str) -> Bootstrap:
        every = np.stack([self.predictions[recipe] for recipe in self._order])
        return Bootstrap(metric, self.labels, every, None, kept=self._kept, keep=self._keep)

    def _some(self, metric: str, *recipes: str, resamples: int = RESAMPLES) -> Bootstrap:
        """Of a classifier by itself or of a pair: they have few cells, all the recipes together have thousands."""
        every = np.stack([self.predictions[recipe] for recipe in recipes])
        return Bootstrap(metric, self.labels, every, self.classes, resamples)

    def _with_baseline(self, metric: str, recipe: str) -> Bootstrap:
        """A classifier beside the baseline: its own score and the change are then of the same resamples."""
        baseline = self.baseline if self.baseline in self.predictions else recipe
        return self._some(metric, baseline, recipe)

    def drawn(self, recipes: Sequence[str], resamples: int, seed: int) -> list[np.ndarray[Any, Any]]:
        """Scores of each recipe on the same resamples of the examples; a regression's are the first of its own."""
        if self.classes is None:
            found = self._bootstrap(self.metric).reference
            return [found[self._order.index(recipe)][:resamples] for recipe in recipes]
        every = np.stack([self.predictions[recipe] for recipe in recipes])
        return Bootstrap(self.metric, self.labels, every, self.classes, resamples, seed).reference

    def _single(self, recipe: str, metric: str) -> Interval:
        """A recipe's score: Wilson for accuracy, bootstrap for the others."""
        own = self.predictions[recipe]
        if metric == "accuracy":
            return stats.wilson(int(np.sum(own == self.labels)), len(own))
        if self.too_few():
            return Interval(bootstrap.score(metric, self.labels, own))
        if self.classes is not None:
            return self._beside(metric, recipe).single(1).interval()
        return self._bootstrap(metric).single(self._order.index(recipe)).interval()

    def _change(self, recipe: str, reference: str) -> Estimate | None:
        """Primary score of `recipe` minus that of `reference`, paired by example.

        None for too few examples, and where the score is not defined for one of the two.
        """
        if recipe == reference:
            return Exact(0.0)
        if self.metric == "accuracy":
            new, old = self._right(recipe), self._right(reference)
            both, neither = int(np.sum(new & old)), int(np.sum(~new & ~old))
            return Paired(both, int(np.sum(new & ~old)), int(np.sum(old & ~new)), neither)
        if self.too_few():
            return None
        if self.classes is not None:
            if reference == self.baseline:
                change = self._beside(self.metric, recipe).change(1, 0)
            else:
                change = self._some(self.metric, reference, recipe).change(1, 0)
        else:
            order = self._order
            change = self._bootstrap(self.metric).change(order.index(recipe), order.index(reference))
        return change if math.isfinite(change.value) else None

    def _delta(self, recipe: str, reference: str) -> Interval:
        """The value and 95 % interval of `change`."""
        change = self.change(recipe, reference)
        if change is not None:
            return change.interval()
        new, old = (
            bootstrap.score(self.metric, self.labels, self.predictions[r]) for r in (recipe, reference)
        )
        return Interval(new - old)

    def _near(self, recipe: str, reference: str) -> Interval:
        """`delta` by the jackknife: for the hundreds of pairs that no claim is made about, only a frontier's ties."""
        if self.metric == "accuracy" or self.too_few():
            return self.delta(recipe, reference)
        every = self._bootstrap(self.metric) if self.classes is None else self._undrawn()
        return every.near(self._order.index(recipe), self._order.index(reference))

    def _not_worse(self, baseline: str, margin: float) -> dict[str, float]:
        """Holm-adjusted p of the claim, for every other recipe, that its score is not worse by `margin` or more.

        The recipes are one family: each claim is made beside all the others.
        """
        if baseline not in self.predictions:
            return {}
        others = [recipe for recipe in self._order if recipe != baseline]
        if self.classes is not None and self.metric != "accuracy":
            with ThreadPoolExecutor() as pool:  # drawing leaves the interpreter to the next recipe
                list(pool.map(lambda recipe: self._beside(self.metric, recipe), others))
        changes = {recipe: self.change(recipe, baseline) for recipe in others}
        p = [1.0 if change is None else change.p_above(-margin) for change in changes.values()]
        return dict(zip(changes, holm(p), strict=True))

    def too_few(self) -> bool:
        """Whether resamples of a correlation say nothing: of two or three points nearly all are alike."""
        return self.classes is None and len(self.labels) < LEAST_PAIRS

    def flips(self, recipe: str, reference: str) -> tuple[int, int]:
        """Examples that only `recipe` got right, and that only `reference` did. Classifiers only."""
        new, old = self._right(recipe), self._right(reference)
        return int(np.sum(new & ~old)), int(np.sum(old & ~new))

    def agreement(self, recipe: str, reference: str) -> Interval:
        """Share of examples with the reference's class, right or wrong; 1 for the reference itself."""
        if recipe == reference:
            return Interval(1.0, 1.0, 1.0)
        same = self.predictions[recipe] == self.predictions[reference]
        return stats.wilson(int(np.sum(same)), len(same))

    def shift(self, recipe: str, reference: str) -> dict[str, float]:
        """How far the outputs moved, whatever became of the score; without probabilities for a regression."""
        own, other = self.logits[recipe], self.logits[reference]
        found = {"max_logit_difference": shift.max_logit_difference(other, own)}
        if self.classes is not None:
            found["mean_kl"] = shift.mean_kl(other, own)
            found["calibration_error"] = shift.calibration_error(self.labels, own)
        return found

    def _right(self, recipe: str) -> np.ndarray[Any, Any]:
        return self.predictions[recipe] == self.labels


def _can_write(draws: Path) -> bool:
    """Whether the run is not read-only."""
    return os.access(draws if draws.exists() else draws.parent, os.W_OK)


def _read(path: Path | str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Ids, labels and logits (examples, outputs), sorted by id. Raises ValueError with the reason."""
    if isinstance(path, str):
        raise ValueError(path)
    try:
        stored = np.load(path, allow_pickle=False)
        ids, labels, logits = (np.atleast_1d(stored[name]) for name in ("ids", "labels", "logits"))
        logits = logits.reshape(len(ids), -1).astype(float)
        numbers = labels.astype(float)
    except (OSError, EOFError, KeyError, IndexError, TypeError, zipfile.BadZipFile, ValueError) as error:
        kind = type(error).__name__
        raise ValueError(f"its predictions cannot be read from {path.name} ({kind})") from None
    if ids.ndim > 1 or labels.shape != ids.shape or not logits.size or not np.isfinite(numbers).all():
        raise ValueError(f"its predictions in {path.name} are empty or uneven")
    if not np.isfinite(logits).all():
        raise ValueError(f"its predictions in {path.name} are not finite")
    order = np.argsort(ids, kind="stable")
    return ids[order], labels[order], logits[order]
