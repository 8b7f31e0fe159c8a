"""The biggest lever, by splits written by hand."""

from __future__ import annotations

import pytest

from qtool import lever
from qtool.runtimes._layers import PYTHON

FAST = {
    "used": "fast",
    "variants": [
        {"tokenizer": "fast", "call": "one", "threads": 1, "texts_per_s": 5_000.0},
        {"tokenizer": "fast", "call": "all", "threads": 1, "texts_per_s": 12_000.0},
        {"tokenizer": "fast", "call": "all", "threads": 2, "texts_per_s": 20_000.0},
    ],
}
SLOW = {"used": "slow", "variants": []}
LINEAR = [{"name": "aten::addmm", "share": 0.71}, {"name": "aten::gelu", "share": 0.1}]


def split(batch_size: int = 1, request_ms: float = 10.0, **shares: float | None) -> dict:
    """A split whose parts have these shares of a request."""
    parts = {
        name: {"share": share, "mean_s": None if share is None else share * request_ms / 1e3}
        for name, share in shares.items()
    }
    return {"batch_size": batch_size, "parts": parts, "request": {"mean_s": request_ms / 1e3}}


@pytest.mark.parametrize(
    ("shares", "part", "words"),
    [
        (
            {"tokenise": 0.63, "make_tensors": 0.02, "model": 0.3},
            "tokenise",
            "tokenising takes 63 % of a request at batch 1 (6.30 of 10.0 ms on average):"
            " no recipe changes that; tokenising many texts in one call does 4.0 times as many a second",
        ),
        (
            {"tokenise": 0.05, "copy_in": None, "model": 0.91},
            "model",
            "the model takes 91 % of a request at batch 1 (9.10 of 10.0 ms on average):"
            " a faster recipe, a smaller model or fewer tokens is what helps;"
            " its top operator aten::addmm has 71 % of the operators' time",
        ),
        ({"tokenise": 0.2, "copy_in": 0.5, "model": 0.3}, "copy_in", "copying to the device takes 50 %"),
        ({"tokenise": 0.2, "copy_out": 0.5, "model": 0.3}, "copy_out", "copying back takes 50 %"),
        ({"tokenise": 0.1, "make_tensors": 0.6, "model": 0.3}, "make_tensors", "making tensors takes 60 %"),
        ({"tokenise": 0.1, "post_process": 0.6, "model": 0.3}, "post_process", "post-processing takes 60 %"),
    ],
)
def test_the_lever_is_the_part_with_the_largest_share(shares, part, words):
    found = lever.find([split(**shares)], LINEAR, [], FAST)
    assert (found["part"], found["share"], found["batch_size"]) == (part, shares[part], 1)
    assert words in found["sentence"]


def test_a_slow_tokenizer_is_named_as_the_reason_and_beside_a_model_that_takes_more():
    first = lever.find([split(tokenise=0.7, model=0.3)], LINEAR, [], SLOW)
    assert "this tokenizer is slow (Python): save a fast one" in first["sentence"]
    second = lever.find([split(tokenise=0.2, model=0.8)], LINEAR, [], SLOW)
    assert second["part"] == "model"
    assert second["also"] == ["tokenising takes 20 %, and this tokenizer is slow (Python): save a fast one"]


def test_a_tokenizer_that_gains_nothing_in_bulk_is_not_told_to_take_many_texts():
    even = {"used": "fast", "variants": [{**v, "texts_per_s": 100.0} for v in FAST["variants"]]}
    found = lever.find([split(tokenise=0.7, model=0.3)], LINEAR, [], even)
    assert "shorter texts do" in found["sentence"]


def test_python_between_operators_asks_for_a_compiled_recipe():
    operators = [{"name": PYTHON, "share": 0.6}, *LINEAR]
    found = lever.find([split(tokenise=0.1, model=0.9)], operators, [], FAST)
    assert "60 % of that is Python between its operators" in found["sentence"]


def test_another_part_at_a_larger_batch_and_padding_are_told_beside():
    splits = [split(tokenise=0.6, model=0.4), split(8, 100.0, tokenise=0.1, model=0.9)]
    padding = [
        {"batch_size": 8, "padded_share": 0.3, "time_saved_share": 0.24},
        {"batch_size": 32, "padded_share": 0.4, "time_saved_share": None},
        {"batch_size": 2, "padded_share": 0.1, "time_saved_share": 0.02},
    ]
    found = lever.find(splits, LINEAR, padding, FAST)
    assert found["part"] == "tokenise"
    assert found["also"] == [
        "the model takes 90 % of a request at batch 8 (90.0 of 100 ms on average)",
        "at batch 8 30 % of the tokens are padding: sorting by length would save 24 % of a request's time"
        " (predicted)",
    ]


def test_a_batch_size_that_could_not_be_split_is_passed_over_and_none_at_all_is_an_error():
    empty = {"batch_size": 1, "parts": {}}
    found = lever.find([empty, split(8, tokenise=0.1, model=0.9)], [], [], FAST)
    assert found["batch_size"] == 8
    with pytest.raises(ValueError, match="no batch size"):
        lever.find([empty], [], [], FAST)
