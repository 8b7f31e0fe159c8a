"""Names the biggest lever: the part of a request with the largest share, in a sentence with its number.

Pure: reads what `profile.assemble` made of the samples, and knows nothing of recipes, files or engines.
"""

from __future__ import annotations

from typing import Any

from qtool.parts import PARTS
from qtool.runtimes._layers import PYTHON
from qtool.units import significant

WORTH = 0.05
"""Smaller savings are not told: they are within what runs differ by."""
DOING = {
    "tokenise": "tokenising takes",
    "make_tensors": "making tensors takes",
    "copy_in": "copying to the device takes",
    "model": "the model takes",
    "copy_out": "copying back takes",
    "post_process": "post-processing takes",
}


def find(
    splits: list[dict[str, Any]],
    operators: list[dict[str, Any]],
    padding: list[dict[str, Any]],
    tokenizer: dict[str, Any],
) -> dict[str, Any]:
    """The lever (part, share, batch_size, sentence) of the first batch size, and `also`: what else is worth it.

    Raises ValueError where no batch size has a split.
    """
    told = [split for split in splits if split["parts"]]
    if not told:
        raise ValueError("no batch size has a split")
    part, cell = biggest(told[0])
    advice = _tokenise_advice(tokenizer) if part == "tokenise" else _advice(part, operators)
    return {
        "part": part,
        "share": cell["share"],
        "batch_size": told[0]["batch_size"],
        "sentence": f"{_claim(part, cell, told[0])}: {advice}",
        "also": [
            *(_claim(*biggest(split), split) for split in told[1:] if biggest(split)[0] != part),
            *_padding_advice(padding),
            *_slow_advice(part, told[0], tokenizer),
        ],
    }


def biggest(split: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The part with the largest share, and its figures."""
    measured = {name: cell for name, cell in split["parts"].items() if cell["share"] is not None}
    return max(measured.items(), key=lambda item: item[1]["share"])


def percent(share: float) -> str:
    """Whole percents, one digit more below ten."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def _claim(part: str, cell: dict[str, Any], split: dict[str, Any]) -> str:
    means = f"{significant(1e3 * cell['mean_s'])} of {significant(1e3 * split['request']['mean_s'])} ms"
    return (
        f"{DOING[part]} {percent(cell['share'])} of a request at batch {split['batch_size']}"
        f" ({means} on average)"
    )


def _advice(part: str, operators: list[dict[str, Any]]) -> str:
    if part == "model":
        advice = "a faster recipe, a smaller model or fewer tokens is what helps"
        if not operators:
            return advice
        top = operators[0]
        if top["name"] == PYTHON:
            return (
                f"{percent(top['share'])} of that is Python between its operators, which a compiled recipe or"
                " an engine of its own (ONNX Runtime, OpenVINO) takes away"
            )
        return f"{advice}; its top operator {top['name']} has {percent(top['share'])} of the operators' time"
    if part in ("copy_in", "copy_out"):
        return "larger batches copy less often; a smaller model belongs on the CPU"
    return f"no recipe changes that, so {PARTS[part]} less: larger batches, or beside the model in another thread"


def _tokenise_advice(tokenizer: dict[str, Any]) -> str:
    """What makes tokenising faster: a fast tokenizer, many texts a call, threads; else shorter texts."""
    if tokenizer["used"] == "slow":
        return "this tokenizer is slow (Python): save a fast one (tokenizer.json) with the checkpoint"
    rate = {(v["tokenizer"], v["call"], v["threads"]): v["texts_per_s"] for v in tokenizer["variants"]}
    one = max((r for (kind, call, _), r in rate.items() if kind == "fast" and call == "one"), default=None)
    all_ = max((r for (kind, call, _), r in rate.items() if kind == "fast" and call == "all"), default=None)
    if one and all_ and all_ / one >= 1 + WORTH:
        return (
            f"no recipe changes that; tokenising many texts in one call does {significant(all_ / one, 2)} times"
            " as many a second"
        )
    return "no recipe changes that: shorter texts do, or tokenising beside the model in another thread"


def _padding_advice(padding: list[dict[str, Any]]) -> list[str]:
    return [
        f"at batch {found['batch_size']} {percent(found['padded_share'])} of the tokens are padding: sorting by"
        f" length would save {percent(found['time_saved_share'])} of a request's time (predicted)"
        for found in padding
        if found["time_saved_share"] is not None and found["time_saved_share"] >= WORTH
    ]


def _slow_advice(part: str, split: dict[str, Any], tokenizer: dict[str, Any]) -> list[str]:
    """A slow tokenizer matters beside a larger part too."""
    share = split["parts"]["tokenise"]["share"]
    if part == "tokenise" or tokenizer["used"] != "slow" or share < WORTH:
        return []
    return [f"tokenising takes {percent(share)}, and this tokenizer is slow (Python): save a fast one"]
