"""Intervals and paired comparisons: pure functions on arrays, each with the source of its formula.

Knows nothing of recipes, files or units. Every interval is two-sided, 95 % unless told otherwise; bounds are
None where the samples cannot carry one. Scores are written on weighted examples, so that the point value (all
weights one) and a bootstrap resample (weights = how often an example was drawn) are one formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PERCENTILE_CONFIDENCE = 0.99
AGREEING_ROUNDS = 1.05
"""Processes agree when their p50 lie within 5 %: two halves of one process were seen to differ by 2 %."""


@dataclass(frozen=True)
class Interval:
    value: float
    low: float | None = None
    high: float | None = None


def _around(value: float, low: float, high: float) -> Interval:
    """An interval that holds its value: a median of rounds may lie outside the interval of their mean."""
    return Interval(float(value), float(min(low, value)), float(max(high, value)))


def _z(confidence: float) -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + confidence) / 2))


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion: Wilson 1927 (JASA 22:209); Newcombe 1998 (Stat Med 17:857), method 3.

    Raises ValueError when there are no examples.
    """
    if n <= 0:
        raise ValueError("a proportion needs at least one example")
    z, p = _z(confidence), successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return _around(p, max(0.0, middle - half), min(1.0, middle + half))


def paired_difference(gained: int, lost: int, n: int, confidence: float = 0.95) -> Interval:
    """Difference of two proportions on the same `n` examples: (gained - lost) / n.

    Adjusted Wald interval of Bonett & Price 2012 (J. Educ. Behav. Stat. 37:479-488): one example is added to
    each discordant cell, so that it keeps a width when no prediction changed. Raises ValueError for n = 0.
    """
    if n <= 0:
        raise ValueError("a difference of proportions needs at least one example")
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _z(confidence) * np.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return _around((gained - lost) / n, max(-1.0, up - down - half), min(1.0, up - down + half))


def mcnemar(gained: int, lost: int) -> float:
    """p of the exact conditional McNemar test (Fagerland et al. 2013, BMC Med Res Methodol 13:91)."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0


def _t_half_width(values: Array, confidence: float) -> float:
    from scipy.stats import t

    n = len(values)
    return float(t.ppf((1 + confidence) / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n))


def t_mean(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean with its Student t interval (Student 1908, Biometrika 6:1-25); no bounds for a single value."""
    x = np.asarray(values, float)
    if len(x) < 2:
        return Interval(float(x.mean()))
    half = _t_half_width(x, confidence)
    return _around(x.mean(), x.mean() - half, x.mean() + half)


def t_log(values: Sequence[float], value: float | None = None, confidence: float = 0.95) -> Interval:
    """t interval on logarithms of positive `values`, one a process: the interval of their geometric mean.

    `value` is what is reported (default: the geometric mean); the interval is widened to hold it. No bounds
    for a single process. Processes, not calls, are the unit: Kalibera & Jones 2013 ("Rigorous benchmarking in
    reasonable time", ISMM); logs, because times are compared by factors. Raises ValueError unless positive.
    """
    x = np.asarray(values, float)
    if not np.all(x > 0):
        raise ValueError(f"a ratio needs positive values, found {float(x.min())}")
    logs = np.log(x)
    value = float(np.exp(logs.mean())) if value is None else value
    if len(logs) < 2:
        return Interval(value)
    half = _t_half_width(logs, confidence)
    return _around(value, np.exp(logs.mean() - half), np.exp(logs.mean() + half))


def t_ratio(tops: Sequence[float], bottoms: Sequence[float], confidence: float = 0.95) -> Interval:
    """Geometric mean of the paired ratios tops[i] / bottoms[i] with a t interval on their logarithms."""
    return t_log(list(np.asarray(tops, float) / np.asarray(bottoms, float)), None, confidence)


def least_samples(share: float, confidence: float = PERCENTILE_CONFIDENCE) -> int:
    """Fewest samples that support the percentile `share` (0.95 = p95): 64 for p90, 130 for p95, 662 for p99.

    The smallest n with n q^(n-1) - (n-1) q^n <= 1 - confidence: with that confidence at least two samples lie
    above the percentile, so the second largest bounds it. It is the sample size of Wilks 1941 (Ann. Math.
    Stat. 12:91-96) for a two-sided tolerance interval, and MLPerf's early-stopping minimum (64 and 662).
    """
    n = 2
    while n * share ** (n - 1) - (n - 1) * share**n > 1 - confidence:
        n += 1
    return n


def percentile(samples: Sequence[float], share: float) -> float:
    """The percentile by linear interpolation (Hyndman & Fan 1996, type 7, numpy's default)."""
    return float(np.quantile(np.asarray(samples, float), share))


def percentile_interval(samples: Sequence[float], share: float, confidence: float = 0.95) -> Interval:
    """A percentile with its order-statistic interval, free of any distribution (David & Nagaraja 2003, 7.1).

    The bounds are the ranks between which Binomial(n, share) falls with the confidence, equal tails; a bound
    whose rank lies outside the samples is None. For the samples of one process, or of processes that agree.
    """
    from scipy.stats import binom

    x, tail = np.sort(np.asarray(samples, float)), (1 - confidence) / 2
    n, value = len(x), percentile(samples, share)
    # P(rank r is at or below the percentile) = P(Binomial >= r); ppf is the first count past the tail.
    low = int(binom.ppf(tail, n, share))
    high = int(binom.ppf(1 - tail, n, share)) + 1
    return Interval(
        value,
        float(min(x[low - 1], value)) if low >= 1 else None,
        float(max(x[high - 1], value)) if high <= n else None,
    )


def rounds_agree(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether processes are alike enough to pool their samples: largest over smallest p50 at most 1.05."""
    medians = [percentile(samples, 0.5) for samples in rounds]
    return max(medians) <= AGREEING_ROUNDS * min(medians)


# Scores: `weights` is (resamples, examples), labels and predictions (examples,), the answer (resamples,).


def _divide(top: Array, bottom: Array, otherwise: float) -> Array:
    return np.divide(top, bottom, out=np.full(np.shape(top), otherwise, float), where=bottom != 0)


def _accuracy(weights: Array, labels: Array, predictions: Array) -> Array:
    return weights @ (labels == predictions) / weights.sum(axis=1)


def _f1(weights: Array, labels: Array, predictions: Array) -> Array:
    """F1 of class 1 of two; 0 where neither labels nor predictions hold it, as scikit-learn does."""
    hits = weights @ ((labels == 1) & (predictions == 1))
    return _divide(2 * hits, weights @ (labels == 1) + weights @ (predictions == 1), 0.0)


def _matthews(weights: Array, labels: Array, predictions: Array) -> Array:
    """Multi-class Matthews correlation (Gorodkin 2004, Comput. Biol. Chem. 28:367-374); 0 where undefined."""
    classes = np.union1d(labels, predictions)
    n, right = weights.sum(axis=1), weights @ (labels == predictions)
    true, guess = weights @ (labels[:, None] == classes), weights @ (predictions[:, None] == classes)
    spread = (n**2 - (true**2).sum(axis=1)) * (n**2 - (guess**2).sum(axis=1))
    return _divide(right * n - (true * guess).sum(axis=1), np.sqrt(spread), 0.0)


def _pearson(weights: Array, labels: Array, predictions: Array) -> Array:
    return _correlation(weights, labels[None, :] - labels.mean(), predictions[None, :] - predictions.mean())


def _spearman(weights: Array, labels: Array, predictions: Array) -> Array:
    """Pearson correlation of midranks, ranked anew within every resample."""
    return _correlation(weights, _midranks(weights, labels), _midranks(weights, predictions))


def _correlation(weights: Array, x: Array, y: Array) -> Array:
    n = weights.sum(axis=1, keepdims=True)
    x = x - (weights * x).sum(axis=1, keepdims=True) / n
    y = y - (weights * y).sum(axis=1, keepdims=True) / n
    spread = (weights * x * x).sum(axis=1) * (weights * y * y).sum(axis=1)
    return _divide((weights * x * y).sum(axis=1), np.sqrt(spread), np.nan)


def _midranks(weights: Array, values: Array) -> Array:
    """Average rank of each example in the resample that `weights` describes, (resamples, examples)."""
    order = np.argsort(values, kind="stable")
    _, starts, group = np.unique(values[order], return_index=True, return_inverse=True)
    sizes = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks = np.empty_like(weights)
    ranks[:, order] = (np.cumsum(sizes, axis=1) - (sizes - 1) / 2)[:, group]
    return ranks


SCORE_FUNCTIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}


def score(metric: str, labels: Array, predictions: Array) -> float:
    """A metric of `predictions` (examples,) against `labels` (examples,): NaN where it is undefined.

    Classes are whole numbers from 0; pearson and spearman take values. Raises KeyError for an unknown metric.
    """
    return float(SCORE_FUNCTIONS[metric](np.ones((1, len(labels))), labels, predictions)[0])


def resample(
    metric: str, labels: Array, predictions: Array, classes: int | None, resamples: int = 2000, seed: int = 0
) -> Array:
    """Scores of every model on the same bootstrap resamples of the examples, (2, models, resamples).

    `predictions` is (models, examples); the change from model a to b is draws[1, b] - draws[0, a]: index 0 is
    a model as the reference, 1 as the compared. They differ for classifiers (`classes` given) only: two
    pseudo-examples are added, one that the reference alone gets right and one that the compared alone does,
    spread over the classes. That carries the adjustment of Bonett & Price 2012 to metrics without a closed
    form: a plain bootstrap of two models that never differ would have no width at all.
    Percentile bootstrap: Efron & Tibshirani 1993, ch. 13; paired by resample: Koehn 2004 (EMNLP).
    """
    function, rng = SCORE_FUNCTIONS[metric], np.random.default_rng(seed)
    n, models = len(labels), len(predictions)
    right = np.arange(classes or 0, dtype=labels.dtype)
    wrong = (right + 1) % (classes or 1)
    all_labels = np.concatenate([labels, right, right])
    extra = (np.concatenate([right, wrong]), np.concatenate([wrong, right]))
    draws = np.empty((2, models, resamples))
    step = max(1, 4_000_000 // max(n, 1))
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        if classes:
            weights = np.hstack([weights, rng.poisson(1 / classes, (rows, 2 * classes))])
        weights = weights.astype(float)
        for model in range(models):
            for role in (0, 1) if classes else (0,):
                told = np.concatenate([predictions[model], extra[role].astype(predictions.dtype)])
                draws[role, model, start : start + rows] = function(weights, all_labels, told)
    if not classes:
        draws[1] = draws[0]
    return draws


def from_draws(value: float, draws: Array, confidence: float = 0.95) -> Interval:
    """`value` with the percentile interval of its bootstrap `draws`, less those where it is undefined."""
    defined = draws[np.isfinite(draws)]
    if not len(defined):
        return Interval(value)
    low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
    return _around(value, low, high)
