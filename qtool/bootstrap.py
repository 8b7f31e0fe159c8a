"""Scores of several models on the same resamples of the same examples: the paired bootstrap.

Every score is a function of sums over examples, so a resample costs one row of a matrix product, and
leaving one example out (for BCa's acceleration) costs a subtraction; `ranks` does the same for Spearman.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist

import numpy as np

from qtool import ranks
from qtool.claims import Draws
from qtool.stats import Array, Interval, around

RESAMPLES = 10_000
CHUNK = 30_000
"""Weights of a block of resamples: they stay in a core's own cache (ten times as many took twice as long), and
their number is fixed, so that a seed means one answer."""


def score(metric: str, labels: Array, predictions: Array) -> float:
    """A metric of `predictions` (examples,) against `labels` (examples,): NaN where it is undefined.

    Classes are whole numbers from 0; pearson and spearman take values. Raises KeyError for an unknown metric.
    """
    classes = None if metric in CORRELATIONS else int(max(labels.max(), predictions.max())) + 1
    features = _features(metric, labels, predictions, classes)
    return float(COMBINE[metric](features.sum(axis=0)))


class Bootstrap:
    """Draws of one metric for `predictions` (models, examples) against `labels` (examples,).

    `classes` is None for a regression. The change from model a to b is compared[b] - reference[a]. The two
    differ for classifiers: two pseudo-examples are added, one that the reference alone gets right and one that
    the compared alone does, spread over the classes. That carries the adjustment of Bonett & Price 2012
    (J. Educ. Behav. Stat. 37:479-488) to metrics without a closed form: a plain bootstrap of two models that
    never differ would have no width at all. With about four flips expected (1 % of 400 examples) the interval
    covers 95 to 96 % in simulation, unevenly: it misses on one side in 4 % of runs.
    Resampling whole examples, paired by resample: Koehn 2004 (EMNLP). A regression's draws take seconds: with a
    folder `kept` they are stored there under the hash of all that decides them, and read again; without `keep`
    they are only read.
    """

    def __init__(
        self,
        metric: str,
        labels: Array,
        predictions: Array,
        classes: int | None,
        resamples: int = RESAMPLES,
        seed: int = 0,
        kept: Path | None = None,
        keep: bool = True,
    ) -> None:
        self.metric, self.n, self.combine = metric, len(labels), COMBINE[metric]
        self.values = [score(metric, labels, told) for told in predictions]
        if classes is None:
            self._resample_examples(labels, predictions, resamples, seed, kept, keep)
        else:
            self._resample_cells(labels, predictions, classes, resamples, seed)

    def single(self, model: int) -> Draws:
        """The score of one model."""
        left_out = self.combine(self.sums[0][model] - self.features[0][model])
        return self._draws(self.values[model], self.reference[model], self._whole(0, model), left_out)

    def change(self, new: int, old: int) -> Draws:
        """Score of model `new` less that of model `old`."""
        whole = self._whole(1, new) - self._whole(0, old)
        return self._draws(
            self.values[new] - self.values[old],
            self.compared[new] - self.reference[old],
            whole,
            self._left_out(new, old),
        )

    def near(self, new: int, old: int, confidence: float = 0.95) -> Interval:
        """The change with a normal interval of the jackknife's standard error, for which nothing is resampled.

        Efron & Tibshirani 1993, eq. 11.5. It covers 94 to 96 % in simulation and misses up to 4.4 % on one side,
        so ties may be told by it and claims are not. No bounds where leaving an example out leaves a score undefined.
        """
        left_out, n = self._left_out(new, old), self.counts.sum()
        if not np.isfinite(left_out).all():
            return Interval(self.values[new] - self.values[old])
        gaps = left_out - np.average(left_out, weights=self.counts)
        error = float(np.sqrt((n - 1) / n * (self.counts * gaps**2).sum()))
        half, whole = (
            NormalDist().inv_cdf((1 + confidence) / 2) * error,
            self._whole(1, new) - self._whole(0, old),
        )
        return around(self.values[new] - self.values[old], whole - half, whole + half)

    def _left_out(self, new: int, old: int) -> Array:
        """The change without one example of each cell."""
        without = [
            sums[model] - features[model]
            for sums, features, model in (
                (self.sums[1], self.features[1], new),
                (self.sums[0], self.features[0], old),
            )
        ]
        return self.combine(without[0]) - self.combine(without[1])

    def _whole(self, role: int, model: int) -> float:
        return float(self.combine(self.sums[role][model]))

    def _draws(self, value: float, draws: Array, centre: float, left_out: Array) -> Draws:
        """Acceleration by the jackknife: Efron 1987 (JASA 82:171-185); Efron & Tibshirani 1993, eq. 14.15."""
        known = np.isfinite(left_out)
        weights, left_out = self.counts[known], left_out[known]
        gaps = np.average(left_out, weights=weights) - left_out if len(left_out) else left_out
        scale = float((weights * gaps**2).sum())
        skew = float((weights * gaps**3).sum()) / (6 * scale**1.5) if scale > 0 else 0.0
        return Draws(value, centre, draws[np.isfinite(draws)], skew, self.n)

    def _resample_cells(
        self, labels: Array, predictions: Array, classes: int, resamples: int, seed: int
    ) -> None:
        """Examples that all models answer alike are one cell; a resample is a multinomial draw of the cells."""
        told, counts = _cells(np.vstack([labels, predictions]).astype(int), classes)
        right = np.arange(classes)
        wrong = (right + 1) % classes
        self.counts = np.concatenate([counts, np.full(2 * classes, 1 / classes)])
        rng = np.random.default_rng(seed)
        share = self.counts / self.counts.sum()
        weights = rng.multinomial(len(labels) + 2, share, size=resamples).astype(float)
        self.features: list[list[Array]] = []
        self.sums: list[list[Array]] = []
        found = []
        for extra in (np.concatenate([right, wrong]), np.concatenate([wrong, right])):
            true = np.concatenate([told[0], right, right])
            features = [
                _features(self.metric, true, np.concatenate([row, extra]), classes) for row in told[1:]
            ]
            self.features.append(features)
            self.sums.append([self.counts @ each for each in features])
            drawn = weights @ np.concatenate(features, axis=1)
            parts = np.split(drawn, len(features), axis=1)
            found.append([self.combine(part) for part in parts])
        self.reference, self.compared = found

    def _resample_examples(
        self, labels: Array, predictions: Array, resamples: int, seed: int, kept: Path | None, keep: bool
    ) -> None:
        """Values differ from example to example, so a resample is how often each example was drawn."""
        self.counts = np.ones(len(labels))
        if self.metric == "spearman":
            parts = [ranks.left_out(labels, told) for told in predictions]
            sums, features = [part[0] for part in parts], [part[1] for part in parts]
        else:
            features = [_features(self.metric, labels, told, None) for told in predictions]
            sums = [each.sum(axis=0) for each in features]
        self.features, self.sums = [features] * 2, [sums] * 2
        # a model's draws depend on no other model: the resamples are the same for all
        places = [_place(kept, self.metric, labels, told, resamples, seed) for told in predictions]
        stored = ((place, _read(place, resamples)) for place in places if place)
        found = {place: drawn for place, drawn in stored if drawn is not None}
        new = [i for i, place in enumerate(places) if place is None or place not in found]
        made: dict[int, Array] = {}
        if new:
            drawn = _correlations(self.metric, labels, predictions[new], resamples, seed)
            made = dict(zip(new, drawn, strict=True))
            for i, place in enumerate(places):
                if keep and place and i in made:
                    place.parent.mkdir(exist_ok=True)
                    np.save(place, made[i])
        self.reference = self.compared = [
            made[i] if place is None or i in made else found[place] for i, place in enumerate(places)
        ]


def _cells(answers: Array, classes: int) -> tuple[Array, Array]:
    """The distinct columns of (rows, examples) and how many examples have each, in lexical order."""
    shape = (classes,) * len(answers)
    if (possible := classes ** len(answers)) > CHUNK:
        return np.unique(answers, axis=1, return_counts=True)
    # a pair of models has few possible columns: counting them is a tenth of the time of sorting
    counts = np.bincount(np.ravel_multi_index(tuple(answers), shape), minlength=possible)
    seen = np.flatnonzero(counts)
    return np.stack(np.unravel_index(seen, shape)), counts[seen]


def _place(
    kept: Path | None, metric: str, labels: Array, told: Array, resamples: int, seed: int
) -> Path | None:
    if kept is None:
        return None
    decides = hashlib.sha256(f"1 {metric} {resamples} {seed}".encode())
    for values in (labels, told):
        decides.update(np.ascontiguousarray(values, float).tobytes())
    return kept / f"{decides.hexdigest()[:16]}.npy"


def _read(place: Path, resamples: int) -> Array | None:
    """Stored draws; None where there are none, or not whole ones: another process may be writing them."""
    try:
        drawn = np.load(place)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return None
    return drawn if isinstance(drawn, np.ndarray) and drawn.shape == (resamples,) else None


def _correlations(metric: str, labels: Array, predictions: Array, resamples: int, seed: int) -> Array:
    """Draws of a correlation, (models, resamples), block by block on all cores."""
    n = len(labels)
    if metric == "spearman":
        orders = [ranks.Order(x) for x in (labels, *predictions)]

        def combine(weights: Array) -> Array:
            return ranks.weighted_correlations(weights.astype(float), orders)
    else:
        features = [_features(metric, labels, told, None) for told in predictions]

        def combine(weights: Array) -> Array:
            # one product a model: equal predictions get equal sums to the last digit
            drawn = weights.astype(float)
            return np.stack([_correlation(drawn @ each) for each in features])

    block = max(1, CHUNK // n)

    def draw(number: int) -> Array:
        rows = min(block, resamples - number * block)
        rng = np.random.default_rng([seed, number])
        drawn = rng.integers(0, n, (rows, n), dtype=np.int32)
        drawn += (n * np.arange(rows, dtype=np.int32))[:, None]
        return combine(np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n))

    with ThreadPoolExecutor() as pool:
        return np.concatenate(list(pool.map(draw, range(-(-resamples // block)))), axis=1)


def _features(metric: str, labels: Array, told: Array, classes: int | None) -> Array:
    """What a metric sums over examples: (examples, features)."""
    if metric in CORRELATIONS:
        # centred, so that sums of squares do not lose the digits that decide
        if metric == "spearman":
            once = np.ones((1, len(labels)))
            x, y = (ranks.Order(v).centred(once)[0][0] for v in (labels, told))
        else:
            x, y = (v - v.mean() for v in (labels.astype(float), told.astype(float)))
        return np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y], axis=1)
    right = (labels == told).astype(float)
    if metric == "accuracy":
        return np.stack([right, np.ones(len(right))], axis=1)
    if metric == "f1":
        hit = (labels == 1) & (told == 1)
        return np.stack([hit, (labels == 1).astype(float) + (told == 1)], axis=1)
    every = np.arange(classes or 0)
    parts = [right[:, None], np.ones((len(right), 1)), labels[:, None] == every, told[:, None] == every]
    return np.concatenate(parts, axis=1)


def _divide(top: Array, bottom: Array, otherwise: float) -> Array:
    top, bottom = np.broadcast_arrays(top, bottom)
    return np.divide(top, bottom, out=np.full(top.shape, otherwise, float), where=bottom > 0)


def _accuracy(sums: Array) -> Array:
    return _divide(sums[..., 0], sums[..., 1], np.nan)


def _f1(sums: Array) -> Array:
    """F1 of class 1 of two; 0 where neither labels nor predictions hold it, as scikit-learn does."""
    return _divide(2 * sums[..., 0], sums[..., 1], 0.0)


def _matthews(sums: Array) -> Array:
    """Multi-class Matthews correlation (Gorodkin 2004, Comput. Biol. Chem. 28:367-374); 0 where undefined."""
    classes = (sums.shape[-1] - 2) // 2
    right, n, true, guess = sums[..., 0], sums[..., 1], sums[..., 2 : 2 + classes], sums[..., 2 + classes :]
    spread = (n**2 - (true**2).sum(axis=-1)) * (n**2 - (guess**2).sum(axis=-1))
    return _divide(right * n - (true * guess).sum(axis=-1), np.sqrt(np.maximum(spread, 0.0)), 0.0)


def _correlation(sums: Array) -> Array:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    n = np.maximum(n, 1)  # nothing is left of a single example: undefined like any constant
    spread = np.maximum(xx - x * x / n, 0.0) * np.maximum(yy - y * y / n, 0.0)
    return _divide(xy - x * y / n, np.sqrt(spread), np.nan)


CORRELATIONS = ("pearson", "spearman")
COMBINE: dict[str, Callable[[Array], Array]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _correlation,
    "spearman": _correlation,
}
