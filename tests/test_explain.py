"""Sentences that explain a row, for machines and rows made up here; every number in them is counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qtool import precision, roofline
from qtool.explain import explain

OLD, NEW = ["avx2", "avx512f"], ["amx_bf16", "amx_int8", "avx2", "avx512_bf16", "avx512_fp16", "avx512_vnni"]
# 10 million linear weights; copying 20 GB a second reads their 40 MB in 2 ms, and 200 GFLOP/s multiply them
# with 20 tokens (400 MFLOP) in 2 ms
ELEMENTS = 10_000_000
CEILINGS = {"copy_bytes_per_s": 20e9, "fp32_flop_per_s": 200e9, "threads": 2}
PLAIN = {"runtime": "pytorch", "compile": {}, "dtype": "float32", "quantize": {}}
RECIPES = {
    "base": PLAIN,
    "half": PLAIN | {"dtype": "bfloat16"},
    "small-half": PLAIN | {"dtype": "float16"},
    "weights": PLAIN | {"dtype": "bfloat16", "quantize": {"scheme": "float8_weight_only"}},
    "mixed": PLAIN | {"runtime_options": {"autocast": "bfloat16"}},
    "dynamic": PLAIN | {"quantize": {"per_channel": True}},
    "graph": PLAIN | {"runtime": "graphs"},
    "graph-eight": PLAIN | {"runtime": "graphs", "quantize": {"scheme": "dynamic"}},
}
STORED = {
    "base": "float32",
    "half": "bfloat16",
    "small-half": "float16",
    "weights": "float8_e4m3fn",
    "mixed": "float32",
    "dynamic": "int8",
    "graph": "float32",
    "graph-eight": "int8",
}
AUDITS: dict[str, dict[str, Any]] = {
    "mixed": {"autocast": "bfloat16"},
    "dynamic": {"changed_modules": {"DynamicQuantizedLinear": 38}},
    "graph": {"engine": {"linear_layers": "float32"}},
    "graph-eight": {"engine": {"linear_layers": "int8"}},
}
Ratio = tuple[float, float | None, float | None]


def cell(value: float | None, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high}


def around(value: float) -> dict[str, Any]:
    return cell(value, 0.95 * value, 1.05 * value)


def row(
    recipe: str, p50_ms: float, *, batch: int = 1, device: str = "cpu", speedup: float | None = None
) -> dict[str, Any]:
    metrics = {
        "latency_p50_s": around(p50_ms / 1e3),
        "throughput_per_s": around(batch / p50_ms * 1e3),
        "speedup": cell(None) if speedup is None else around(speedup),
        "tokenize_share": around(0.05),
    }
    audit = {"linear_elements_by_dtype": {STORED[recipe]: ELEMENTS}} | AUDITS.get(recipe, {})
    found = {"recipe": recipe, "device": device, "batch_size": batch, "status": "ok"}
    return found | {"metrics": metrics, "audit": audit}


def run(flags: list[str] = NEW, **changes: Any) -> dict[str, Any]:
    model = {"parameters": 2 * ELEMENTS, "model_type": "bert"}
    found = {"recipes": RECIPES, "host": {"cpu_flags": flags}, "baseline": "base", "model_info": model}
    return found | changes


def of(subject: dict[str, Any], *others: dict[str, Any], run: dict[str, Any], **facts: Any) -> list[str]:
    facts.setdefault("latency_s", {})
    return explain(subject, [subject, *others], run, **facts)


def flat(tokens: list[int], constant_ms: float, per_token_ms: float) -> dict[int, list[float]]:
    """Three rounds of two passes whose noise cancels: every call's median lies on the line."""
    each = [(constant_ms + per_token_ms * count) / 1e3 for count in tokens]
    return {number: [0.99 * s for s in each] + [1.01 * s for s in each] for number in (1, 2, 3)}


TOKENS = list(range(10, 31))  # median 20


# --- formats: what the CPU has


def test_int8_without_dot_products_is_told_with_the_speed_and_without_them_native_is_not_claimed() -> None:
    (sentence,) = of(row("dynamic", 8.0, speedup=1.25), row("base", 10.0), run=run(OLD))
    assert "no INT8 dot products (amx_int8 or avx512_vnni or avx_vnni)" in sentence
    assert "1.25x the speed of base, the same engine in float32" in sentence


def test_native_arithmetic_is_told_only_where_the_recipe_gains() -> None:
    (sentence,) = of(row("half", 5.0), row("base", 10.0), run=run())
    assert "bfloat16, which this CPU does natively (amx_bf16, avx512_bf16)" in sentence
    assert "2.00x the speed of base" in sentence
    assert of(row("half", 9.8), row("base", 10.0), run=run()) == []  # the intervals overlap


def test_half_precision_is_called_emulated_only_where_nothing_is_gained() -> None:
    (sentence,) = of(row("small-half", 20.0), row("base", 10.0), run=run(OLD))
    assert "no FP16 arithmetic (amx_fp16 or avx512_fp16), so float16 is emulated: 0.500x" in sentence
    assert of(row("small-half", 5.0), row("base", 10.0), run=run(OLD)) == []


def test_an_arm_cpu_is_told_by_arm_names() -> None:
    (sentence,) = of(row("dynamic", 8.0, speedup=1.2), run=run(["asimd"]))
    assert "(i8mm or asimddp)" in sentence


def test_against_another_engine_the_sentence_says_that_the_engine_changed() -> None:
    alone = of(row("graph-eight", 2.5, speedup=4.0), row("base", 10.0), run=run())
    assert alone[0].endswith("4.00x the speed of base, what the engine changes included.")
    beside = of(row("graph-eight", 2.5, speedup=4.0), row("base", 10.0), row("graph", 5.0), run=run())
    assert beside[0].endswith("2.00x the speed of graph, the same engine in float32.")


def test_the_paired_speed_up_is_preferred_where_the_baseline_is_the_plain_recipe() -> None:
    (sentence,) = of(row("dynamic", 8.0, speedup=1.3), row("base", 10.0), run=run())
    assert sentence.endswith("1.30x the speed of base, the same engine in float32.")


def test_nothing_is_said_of_instructions_on_a_gpu_or_an_unknown_cpu() -> None:
    assert of(row("dynamic", 8.0, speedup=1.2), run=run([])) == []
    assert of(row("dynamic", 8.0, speedup=1.2, device="cuda"), run=run(OLD)) == []


# --- weights converted at every call


def test_narrow_weights_over_float_arithmetic_are_widened_and_compared_with_plain_ones() -> None:
    (sentence,) = of(row("weights", 50.0), row("half", 10.0), row("base", 12.0), run=run())
    assert sentence == (
        "10.0 million weights are stored as float8_e4m3fn and widened to bfloat16 at every call:"
        " 50.0 ms against 10.0 ms for half, which needs none of that."
    )
    (same,) = of(row("weights", 10.2), row("half", 10.0), run=run())
    assert "not told apart from noise: 10.2 ms against 10.0 ms" in same


def test_autocast_casts_its_stored_weights_at_every_call() -> None:
    found = of(row("mixed", 20.0), row("half", 10.0), run=run())
    assert found[0].startswith(
        "10.0 million weights are stored as float32 and cast to bfloat16 at every call"
    )


def test_integer_arithmetic_on_integer_weights_converts_nothing() -> None:
    assert not precision.converted(row("dynamic", 1.0)["audit"], "int8")


def audit(stored: str, **engine: str) -> dict[str, Any]:
    return {"linear_elements_by_dtype": {stored: ELEMENTS}, "engine": engine}


def test_weights_that_the_engine_unpacked_while_loading_are_not_converted_at_every_call() -> None:
    names = {"linear_layers": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    packed = audit("int8", **names, **{"constant_bytes.i8": "10000000", "constant_bytes.f32": "1000"})
    unpacked = audit("int8", **names, **{"constant_bytes.f32": "40000000"})
    assert precision.arithmetic({}, packed, frozenset(NEW)) == "float32"
    assert precision.converted(packed, "float32")
    assert not precision.converted(unpacked, "float32")
    assert (precision.linear_bytes(packed), precision.linear_bytes(unpacked)) == (10e6, 40e6)
    # int8 tables beside unpacked weights would look the same as packed weights beside float tables
    unclear = audit("int8", **names, **{"constant_bytes.i8": "12000000", "constant_bytes.f32": "40000000"})
    assert precision.held(unclear) is None
    assert not precision.converted(unclear, "float32")


def test_activations_quantised_inside_a_layer_make_it_integer_where_the_cpu_has_dot_products() -> None:
    grouped = audit("int4", linear_layers="f32", DYNAMIC_QUANTIZATION_GROUP_SIZE="32")
    assert precision.arithmetic({}, grouped, frozenset(NEW)) == "int8"
    assert precision.arithmetic({}, grouped, frozenset(OLD)) is None


def test_a_scheme_that_says_neither_weights_only_nor_dynamic_is_not_judged() -> None:
    recipe = {"dtype": "bfloat16", "quantize": {"scheme": "int8"}}
    assert precision.arithmetic(recipe, audit("int8"), frozenset(NEW)) is None
    assert precision.arithmetic(recipe, audit("nf4"), frozenset(NEW)) == "bfloat16"
    assert precision.arithmetic({}, audit("nf4"), frozenset(NEW)) is None


def test_bytes_of_linear_weights_are_counted_by_their_types() -> None:
    mixed = {"linear_elements_by_dtype": {"nf4": 1000, "bfloat16": 10}}
    assert precision.linear_bytes(mixed) == 1000 / 2 + 10 * 2


# --- the part that does not grow with the text


def test_the_line_is_least_squares_and_its_error_is_the_textbooks() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 80, 40)
    times = 3.0 + 0.1 * tokens + rng.normal(0, 0.2, 40)
    (slope, constant), covariance = np.polyfit(tokens, times, 1, cov=True)
    line = roofline.fit(tokens.tolist(), {1: times.tolist()})
    assert line is not None
    assert line.constant_s == pytest.approx(constant)
    assert line.per_token_s == pytest.approx(slope)
    assert line.constant_error_s == pytest.approx(covariance[1, 1] ** 0.5)
    assert (line.calls, line.fewest, line.most) == (40, tokens.min(), tokens.max())


def test_passes_and_rounds_are_taken_by_medians_so_that_one_slow_pass_changes_nothing() -> None:
    samples = flat(TOKENS, 3.0, 0.1)
    samples[2] = [9.0] * len(TOKENS) + samples[2] + samples[2]
    for line in (roofline.fit(TOKENS, flat(TOKENS, 3.0, 0.1)), roofline.fit(TOKENS, samples)):
        assert line is not None
        assert line.constant_s == pytest.approx(3e-3, rel=0.03)


@pytest.mark.parametrize(
    ("tokens", "calls"), [([20] * 30, 30), (list(range(5, 14)), 9), (TOKENS, 20), (TOKENS, 0)]
)
def test_lengths_alike_few_calls_or_a_broken_pass_give_no_line(tokens: list[int], calls: int) -> None:
    assert roofline.fit(tokens, {1: [0.01] * calls}) is None


def test_a_call_that_hardly_grows_is_overhead_where_reading_weights_is_far_quicker() -> None:
    # 8 ms + 0.1 ms a token: 10 ms at the median; the weights are read in 2 ms
    found = of(row("base", 10.0), run=run(), latency_s=flat(TOKENS, 8.0, 0.1), tokens_by_call=TOKENS)
    assert found == [
        "8.00 ms of the 10.0 ms (80 %) do not grow with the text (least squares over 21 calls of 10 to 30"
        " tokens): overhead or the reading of weights takes most of the time."
    ]
    facts = {"latency_s": flat(TOKENS, 8.0, 0.1), "tokens_by_call": TOKENS, "ceilings": CEILINGS}
    (known,) = of(row("base", 10.0), run=run(), **facts)
    assert "reading the weights once takes 2.00 ms at the copy ceiling: bound by overhead" in known
    facts["latency_s"] = flat(TOKENS, 2.1, 0.05)
    facts["ceilings"] = CEILINGS | {"fp32_flop_per_s": 800e9}
    reading, *_ = of(row("base", 3.1), run=run(), **facts)
    assert "2.10 ms of the 3.10 ms (68 %)" in reading
    assert reading.endswith("bound by the reading of weights.")


def test_a_call_that_grows_with_its_text_or_an_unsure_line_is_not_called_overhead() -> None:
    facts = {"latency_s": flat(TOKENS, 4.0, 0.3), "tokens_by_call": TOKENS}
    assert of(row("base", 10.0), run=run(), **facts) == []
    noise = np.random.default_rng(0).normal(0, 4, len(TOKENS))
    noisy = {1: [(8.0 + 0.1 * count + add) / 1e3 for count, add in zip(TOKENS, noise, strict=True)]}
    assert of(row("base", 10.0), run=run(), latency_s=noisy, tokens_by_call=TOKENS) == []


def test_a_line_that_leaves_no_time_for_the_products_and_a_disturbed_run_say_nothing() -> None:
    # 8 ms do not grow, but the products alone take 4 ms of the 10 at 100 GFLOP/s
    facts = {"latency_s": flat(TOKENS, 8.0, 0.1), "tokens_by_call": TOKENS}
    facts["ceilings"] = CEILINGS | {"fp32_flop_per_s": 100e9}
    (sentence,) = of(row("base", 10.0), run=run(), **facts)
    assert sentence.startswith("Nearer to the bound of arithmetic")
    assert of(row("base", 10.0) | {"contended": True}, run=run(), **facts) == []


# --- ceilings


def bounds(subject: dict[str, Any], **facts: Any) -> list[str]:
    known = {"tokens_by_call": [20] * 30, "ceilings": CEILINGS, "run": run()}
    return of(subject, **(known | facts))


def test_the_nearer_of_the_two_ceilings_is_named_with_its_share() -> None:
    slow_memory, slow_core = CEILINGS | {"copy_bytes_per_s": 10e9}, CEILINGS | {"fp32_flop_per_s": 100e9}
    (memory,) = bounds(row("base", 5.0), ceilings=slow_memory)  # 40 MB at 10 GB/s: 4 ms
    assert memory == (
        "Memory-bound: reading 40.0 MB of linear weights takes 4.00 ms at the copy ceiling of 10.0 GB/s,"
        " 80 % of its 5.00 ms."
    )
    (compute,) = bounds(row("base", 5.0), ceilings=slow_core)  # 400 MFLOP at 100 GFLOP/s: 4 ms
    assert compute == (
        "Compute-bound: the products of linear weights with 20 tokens take 4.00 ms at the fp32 ceiling of 100 GFLOP/s,"
        " 80 % of its 5.00 ms."
    )
    (between,) = bounds(row("base", 10.0), ceilings=slow_core)
    assert between.startswith("Nearer to the bound of arithmetic")
    assert between.endswith("40 % of its 10.0 ms.")


def test_far_from_both_ceilings_something_else_takes_the_time() -> None:
    (sentence,) = bounds(row("base", 20.0))
    assert sentence.startswith("Far from both ceilings: reading 40.0 MB of linear weights takes 2.00 ms")
    assert sentence.endswith("it takes 20.0 ms: the rest is other work.")


def test_narrow_arithmetic_beyond_the_fp32_ceiling_is_told_and_wide_is_not() -> None:
    (sentence,) = bounds(row("dynamic", 1.0))  # 400 MFLOP in 1 ms
    assert sentence == (
        "Linear layers reach 400 GFLOP/s, above the fp32 ceiling of 200 GFLOP/s: int8 does more at once."
    )
    assert (
        bounds(row("base", 1.0)) == []
    )  # a better library than the ceiling's, or fewer products than thought


def test_narrow_arithmetic_is_not_called_bound_by_the_fp32_ceiling() -> None:
    assert bounds(row("dynamic", 2.5)) == []  # 2 of its 2.5 ms at the fp32 ceiling
    (sentence,) = bounds(row("dynamic", 2.5), ceilings=CEILINGS | {"copy_bytes_per_s": 5e9})  # 10 MB in 2 ms
    assert sentence.startswith("Memory-bound: reading 10.0 MB")


def test_models_whose_products_the_audit_does_not_hold_are_not_held_against_ceilings() -> None:
    shared = {"parameters": ELEMENTS, "model_type": "albert"}
    elsewhere = {"parameters": 20 * ELEMENTS, "model_type": "gpt2"}
    for model in (shared, elsewhere):
        assert bounds(row("base", 5.0), run=run(model_info=model)) == []
    assert bounds(row("base", 5.0, device="cuda")) == []


# --- the rest


def test_a_larger_batch_with_clearly_more_texts_a_second_says_that_this_one_is_too_small() -> None:
    # 8 texts in 20 ms are 400 a second, one in 10 ms 100
    others = [row("base", 20.0, batch=8), row("base", 12.0, batch=2), row("dynamic", 1.0, batch=8)]
    (sentence,) = of(row("base", 10.0), *others, run=run())
    assert sentence == (
        "A batch of 1 is too small to use the device well: a batch of 8 answers 400 texts/s against 100 (4.00x)."
    )
    assert of(row("base", 10.0), row("base", 70.0, batch=8), run=run()) == []  # 114 a second
    assert of(row("base", 20.0, batch=8), row("base", 10.0), run=run()) == []


def test_one_round_must_differ_twofold_before_it_counts() -> None:
    def one_round(*given: Any, **named: Any) -> dict[str, Any]:
        made = row(*given, **named)
        for found in made["metrics"].values():
            found |= {"low": None, "high": None}
        return made

    assert of(one_round("base", 10.0), one_round("base", 45.0, batch=8), run=run()) == []  # 1.8x
    assert len(of(one_round("base", 10.0), one_round("base", 35.0, batch=8), run=run())) == 1  # 2.3x


def test_tokenising_and_the_harness_are_told_where_they_matter() -> None:
    subject = row("base", 1.0)
    assert of(subject, run=run(), overhead_s=9e-6) == []
    subject["metrics"]["tokenize_share"] = around(0.41)
    tokenising, harness = of(subject, run=run(), overhead_s=20e-6)
    assert tokenising == "Tokenising takes 41 % of the time from text to answer."
    assert harness.startswith("20.0 us of its 1.00 ms (2.0 %) are the harness")


def test_at_most_four_sentences_the_most_telling_first() -> None:
    subject = row("weights", 50.0)
    subject["metrics"]["tokenize_share"] = around(0.35)
    facts = {"latency_s": flat(TOKENS, 45.0, 0.25), "tokens_by_call": TOKENS, "ceilings": CEILINGS}
    others = [row("half", 10.0), row("base", 12.0), row("weights", 200.0, batch=8)]
    found = of(subject, *others, run=run(OLD), overhead_s=1e-3, **facts)
    assert len(found) == 4
    assert found[0].startswith("This CPU has no BF16 arithmetic")
    assert "bound by converting weights and by overhead" in found[1]  # 90 %
    assert "widened" in found[2]  # 1 - 10 / 50
    assert "too small to use" in found[3]  # 1 - 20 / 40


def test_old_runs_and_failed_rows_say_what_they_can() -> None:
    assert of(row("half", 5.0), row("base", 10.0), run={}) == []
    failed = row("base", 5.0) | {"status": "failed", "metrics": {}}
    assert of(failed, run=run()) == []
