"""Spearman's correlation of weighted and of left-out examples, without ranking every resample anew.

One sort a model is enough: a resample only says how often each example of that order was drawn.
"""

from __future__ import annotations

import numpy as np

from qtool.stats import Array


class Order:
    """The order of some values (examples,), and which of them are equal."""

    def __init__(self, values: Array) -> None:
        distinct, self.group, self.sizes = np.unique(values, return_inverse=True, return_counts=True)
        self.tied = len(distinct) < len(values)
        self.order = np.argsort(self.group, kind="stable")
        self.starts = np.cumsum(self.sizes) - self.sizes

    def centred(self, weights: Array) -> tuple[Array, Array]:
        """Average ranks less their mean, and their sum of squares, in each resample.

        `weights` (resamples, examples) says how often each example was drawn; ranks are of the same shape. With
        ties of t the squares sum to (n^3 - sum t^3) / 12 (Kendall 1948, Rank Correlation Methods, chapter 3).
        """
        drawn = weights.take(self.order, axis=1)
        if self.tied:
            drawn = np.add.reduceat(drawn, self.starts, axis=1)
        n = weights[0].sum()
        ranks = np.cumsum(drawn, axis=1)
        squares = (n**3 - np.einsum("rg,rg,rg->r", drawn, drawn, drawn)) / 12
        drawn /= 2
        ranks -= drawn
        ranks -= n / 2
        return ranks.take(self.group, axis=1), squares

    def signed(self, values: Array) -> Array:
        """For each example j the sum over i of values[i] sign(x[i] - x[j])."""
        own = np.bincount(self.group, weights=values)
        below = np.cumsum(own) - own
        return (own.sum() - own - 2 * below)[self.group]


def weighted_correlations(weights: Array, orders: list[Order]) -> Array:
    """Spearman of orders[1:] with orders[0] in each resample, (models, resamples): NaN where undefined.

    `weights` (resamples, examples) are floats and sum to the same number in every resample.
    """
    labels, spread = orders[0].centred(weights)
    labels *= weights
    found = np.full((len(orders) - 1, len(weights)), np.nan)
    for i, order in enumerate(orders[1:]):
        ranks, own = order.centred(weights)
        both = np.sqrt(spread * own)
        np.divide(np.einsum("re,re->r", labels, ranks), both, out=found[i], where=both > 0)
    return found


def left_out(labels: Array, told: Array) -> tuple[Array, Array]:
    """Sums (6,) of Pearson's features over the ranks, and what each example takes with it, (examples, 6).

    Without example j every centred rank c[i] of the others is c[i] - sign(x[i] - x[j]) / 2: the sums of squares
    and products follow from sums of signs, and no rank is counted anew.
    """
    x, y, n = Order(labels), Order(told), len(labels)
    once = np.ones((1, n))
    c, d = x.centred(once)[0][0], y.centred(once)[0][0]
    xx = c * c + x.signed(c) - (n - x.sizes[x.group]) / 4
    yy = d * d + y.signed(d) - (n - y.sizes[y.group]) / 4
    xy = c * d + (x.signed(d) + y.signed(c)) / 2 - _concordance(x.group, y.group) / 4
    none = np.zeros(n)
    return np.array([n, 0, 0, c @ c, d @ d, c @ d]), np.stack([np.ones(n), none, none, xx, yy, xy], axis=1)


def _concordance(x: Array, y: Array) -> Array:
    """For each example j the sum over i of sign(x[i] - x[j]) sign(y[i] - y[j]); values are whole numbers."""
    return _below(x, y) + _below(-x, -y) - _below(x, -y) - _below(-x, y)


def _below(x: Array, y: Array) -> Array:
    """How many examples lie below each of them both in x and in y: a merge sort in the order of x that counts."""
    n, place = len(x), np.arange(len(x))
    by_x = np.lexsort((-y, x))  # of equal x the largest y first: none of them is counted for another
    value = y[by_x] - y.min()
    found, width = np.zeros(n), 1
    while width < n:
        run, left = place // (2 * width), (place // width) % 2 == 0
        # of equal y the right half first: it is not above the left one
        order = np.argsort((run * (value.max() + 1) + value) * 2 + left)
        lower = np.cumsum(left[order]) - run[order] * width
        found[order] += np.where(left[order], 0, lower)
        width *= 2
    back = np.empty(n)
    back[by_x] = found
    return back
