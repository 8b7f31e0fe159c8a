"""Makes a model's forward pass traceable by `torch.jit.trace` in the range of transformers that qtool supports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def traceable() -> Iterator[None]:
    """Trace inside it; afterwards transformers is as before.

    A traced length is a tensor without axes. Before 5.6, `sdpa_mask` takes any tensor there for the positions
    that older releases passed in the place of the length, and fails: it gets those positions.
    """
    import torch
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 6):
        yield
        return
    original = MASKS["sdpa"]

    def mask(*args: Any, **kwargs: Any) -> Any:
        length = kwargs.get("q_length")
        if isinstance(length, torch.Tensor) and length.ndim == 0:
            kwargs["q_length"] = torch.arange(length)  # type: ignore[reportCallIssue]
        return original(*args, **kwargs)

    MASKS["sdpa"] = mask
    try:
        yield
    finally:
        del MASKS["sdpa"]
