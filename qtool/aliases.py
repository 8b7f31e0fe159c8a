"""Short names of models: where the weights come from and which task they were trained for."""

from __future__ import annotations

from typing import NamedTuple


class Alias(NamedTuple):
    """`hub_id` is None for the model that ships with qtool."""

    hub_id: str | None
    task: str


ALIASES = {
    "demo": Alias(None, "demo"),
    "distilbert": Alias("distilbert/distilbert-base-uncased-finetuned-sst-2-english", "sst2"),
}
