"""How far a recipe's outputs moved from the baseline's on the same examples, whatever became of the score."""

from __future__ import annotations

import numpy as np

from qtool.stats import Array

BINS = 15


def log_probabilities(logits: Array) -> Array:
    """Log softmax of `logits` (examples, classes)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def mean_kl(baseline: Array, logits: Array) -> float:
    """Mean over examples of KL(baseline || recipe) in nats; both (examples, classes) logits.

    Kullback & Leibler 1951 (Ann. Math. Stat. 22:79-86): what is lost by answering with the recipe's
    probabilities where the baseline's were meant.
    """
    p, q = log_probabilities(baseline), log_probabilities(logits)
    return max(0.0, float((np.exp(p) * (p - q)).sum(axis=1).mean()))


def max_logit_difference(baseline: Array, logits: Array) -> float:
    """Largest absolute difference of any logit of any example."""
    return float(np.abs(logits - baseline).max())


def calibration_error(labels: Array, logits: Array, bins: int = BINS) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal bins of confidence.

    Guo et al. 2017, "On Calibration of Modern Neural Networks", https://arxiv.org/abs/1706.04599, eq. 3 and
    its 15 bins, each open below. `labels` (examples,) are class numbers, `logits` (examples, classes).
    """
    probabilities = np.exp(log_probabilities(logits))
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(place, weights=right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(labels))
