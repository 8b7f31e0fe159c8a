"""What padding costs: tokens that are computed and thrown away, and what batches of like length would save.

Pure functions on lengths and times. A batch takes as many tokens a text as its longest text has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def waste(lengths: Sequence[int], size: int, fixed: int | None = None) -> dict[str, Any]:
    """Tokens of batches of `size` consecutive texts, and of the same texts sorted by length, longest first.

    `lengths` are in tokens, in the order in which texts come; `fixed` is the length all are padded to, if any.
    """
    real = sum(lengths)
    come, by_length = (_computed(order, size, fixed) for order in (lengths, sorted(lengths, reverse=True)))
    return {
        "batch_size": size,
        "real_tokens": real,
        "computed_tokens": come,
        "sorted_tokens": by_length,
        "padded_share": 1 - real / come,
        "sorted_padded_share": 1 - real / by_length,
        "tokens_saved_share": 1 - by_length / come,
        "batches": -(-len(lengths) // size),
    }


def _computed(lengths: Sequence[int], size: int, fixed: int | None) -> int:
    batches = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    return sum(len(batch) * (fixed or max(batch)) for batch in batches)


def seconds_a_token(tokens: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Slope of the least-squares line of a call's seconds over its tokens; None where all have as many.

    `seconds` are whole passes over calls of `tokens`. A call's time is the median of its passes.
    Attention's quadratic part is small at the lengths of sentences, so a line is enough.
    """
    from statistics import linear_regression, median

    calls = [median(seconds[index :: len(tokens)]) for index in range(len(tokens))]
    if len(set(tokens)) < 2:
        return None
    return linear_regression(tokens, calls).slope


def time_saved_share(found: dict[str, Any], slope_s: float | None, request_s: float) -> float | None:
    """Share of the requests' time that sorting would save, by the slope; `request_s` is a request's mean.

    None where the time of a call was not seen to grow with its tokens.
    """
    if slope_s is None or slope_s <= 0:
        return None
    saved_s = slope_s * (found["computed_tokens"] - found["sorted_tokens"])
    # a slope so steep that a call without tokens would take less than nothing is noise
    return min(found["tokens_saved_share"], saved_s / (found["batches"] * request_s))
