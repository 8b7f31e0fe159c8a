"""Sentence-embedding checkpoints: pooling against NumPy, cosine against SciPy, every recipe, and the real MiniLM."""

from __future__ import annotations

import functools
import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool import checkpoint as opener
from qtool import (
    cli,
    core,
    demo,
    isolate,
    measure,
    models,
    plugins,
    prepare,
    recipes,
    timing,
    worker,
)
from qtool import sweep as sweeping
from qtool.core import Audit, BuildJob, Loaded, QtoolError, Unavailable
from qtool.tasks._table import Table
from tests.conftest import WORDS, make_checkpoint, need, shared
from tests.test_sweep import run_here

pytest.importorskip("torch", reason="needs torch: pip install 'qtool[all]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'qtool[all]'")

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}


def make_embedder(folder: Path, classifier: Path, pooling: str = "mean", normalize: bool = True) -> Path:
    """The encoder of a tiny classifier in the layout of sentence-transformers 2 to 5."""
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(classifier).save_pretrained(folder)
    AutoTokenizer.from_pretrained(classifier).save_pretrained(folder)
    kinds = ["Pooling", "Normalize"] if normalize else ["Pooling"]
    steps = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds, 1)
    ]
    write(folder, "modules.json", [TRANSFORMER, *steps])
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    config = {f"pooling_mode_{name}": kind == pooling for kind, name in flags.items()}
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": 64, **config})
    return folder


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def embedder(checkpoint, tmp_path) -> Path:
    return make_embedder(tmp_path / "tiny", checkpoint)


def padded_batch() -> dict[str, np.ndarray]:
    ids = np.array([[2, 5, 6, 7, 3], [2, 9, 3, 0, 0]], np.int64)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).astype(np.int64),
        "token_type_ids": np.zeros_like(ids),
    }


def tensors(batch: dict[str, np.ndarray]) -> dict:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_pooling_is_that_of_a_loop_over_the_attended_tokens(pooling, normalize, checkpoint, tmp_path):
    import torch
    from transformers import AutoModel

    folder, batch = make_embedder(tmp_path / "tiny", checkpoint, pooling, normalize), padded_batch()
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder).eval()(**tensors(batch)).last_hidden_state.numpy()
        found = opener.load(folder)(**tensors(batch)).logits.numpy()
    for row, mask in enumerate(batch["attention_mask"]):
        tokens = [states[row, place] for place in range(len(mask)) if mask[place]]
        expected = {"mean": np.mean(tokens, 0), "cls": tokens[0], "max": np.max(tokens, 0)}[pooling]
        if normalize:
            expected = expected / np.sqrt(np.sum(expected**2))
        np.testing.assert_allclose(found[row], expected, atol=1e-6)
    assert found.dtype == np.float32


def test_the_new_form_of_the_pooling_config_is_read(embedder):
    write(embedder, "1_Pooling/config.json", {"embedding_dimension": 64, "pooling_mode": "cls"})
    assert read(embedder).pooling == "cls"


def read(folder: Path) -> opener.Sentence:
    sentence = opener.read_sentence(folder)
    assert sentence is not None
    return sentence


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("modules.json", [TRANSFORMER, {"path": "1_Pooling", "type": "a.Pooling"}, {"path": "2", "type": "a.b.Dense"}], "module Dense"),
        ("modules.json", [TRANSFORMER], "Expected Transformer"),
        ("modules.json", [TRANSFORMER | {"path": "0_BERT"}, {"path": "1_Pooling", "type": "a.Pooling"}], "0_BERT"),
        ("modules.json", [TRANSFORMER, {"path": "../1", "type": "a.Pooling"}], "inside the model's"),
        ("modules.json", [TRANSFORMER, {"path": "elsewhere", "type": "a.Pooling"}], "no .*elsewhere/config.json"),
        ("modules.json", {"a": 1}, "not a list"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls and mean"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "lasttoken"),
        ("1_Pooling/config.json", {}, "of nothing"),
        ("sentence_bert_config.json", {"max_seq_length": 9, "do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "prompt 'query'"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(embedder, name, content, words):
    write(embedder, name, content)
    with pytest.raises(QtoolError, match=words) as caught:
        models.check(embedder, None)
    assert "\n" not in str(caught.value)


def test_the_check_finds_an_embedder_its_length_and_hashes_its_pooling(embedder):
    write(embedder, "sentence_bert_config.json", {"max_seq_length": 9})
    model = models.check(embedder, None)
    assert (model.embeds, model.max_tokens, model.id2label) == (True, 9, {0: "score"})
    write(embedder, "1_Pooling/config.json", {"pooling_mode": "max"})
    assert models.check(embedder, None).content != model.content


def test_an_encoder_saved_without_its_pooler_is_accepted_and_one_without_a_layer_is_not(embedder):
    from safetensors.torch import load_file, save_file

    path = embedder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("pooler.")}
    save_file(kept, path, metadata={"format": "pt"})
    assert models.check(embedder, None).embeds
    save_file({n: t for n, t in kept.items() if "layer.1." not in n}, path, metadata={"format": "pt"})
    with pytest.raises(QtoolError, match=r"lacks 16 weights .*Restore them"):
        models.check(embedder, None)


def test_a_first_token_that_may_be_padding_is_refused(embedder):
    write(embedder, "1_Pooling/config.json", {"pooling_mode": "cls"})
    settings = json.loads((embedder / "tokenizer_config.json").read_text())
    write(embedder, "tokenizer_config.json", settings | {"padding_side": "left"})
    with pytest.raises(QtoolError, match="padding_side"):
        models.check(embedder, None)


def test_cosine_is_scipys():
    distance = pytest.importorskip("scipy.spatial.distance")
    vectors = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    rows = [
        {"input_ids": np.full((1, 1 + n % 3), n)} for n in range(8)
    ]  # of different lengths: they are sorted
    loaded = Loaded(lambda batch: vectors[batch["input_ids"].max(axis=1)], Audit)
    found = worker.similarity(loaded, rows[:4], rows[4:], {"pad": {"input_ids": 0}, "padding_side": "right"})
    expected = [1 - distance.cosine(vectors[n], vectors[n + 4]) for n in range(4)]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)


def options(**own) -> dict:
    return {"task": "stsb", "score": True, "seq_len": None, "calibration_rows": 0, **own}


@pytest.mark.parametrize("task", ["sst2", "mrpc", "demo"])
def test_a_task_that_rates_no_similarity_is_refused_before_any_work(embedder, task):
    made = prepare.make_task(options(task=task))
    with pytest.raises(QtoolError, match=f"task {task} .*--task stsb, or --no-score"):
        prepare.check_task(options(task=task), made, embedder)
    prepare.check_task(options(task=task, score=False), made, embedder)


def test_the_two_texts_of_a_pair_are_inputs_of_their_own(embedder, tmp_path):
    model = replace(models.check(embedder, None), max_tokens=6)
    table = Table(["a film", "a cast"], ["the plot of the film was dull", "a story"], ["5.0", "1.5"], "t")
    calibration = Table(["a film", "a story", "very good"], ["x", "y", "z"], None, "t")
    task = prepare.make_task(options())
    facts = prepare.prepare(options(), task, model, (table, [1, 0], calibration), tmp_path / "data")
    first, arrays = prepare.load_ragged(tmp_path / "data" / "inputs.npz")
    second, _ = prepare.load_ragged(tmp_path / "data" / "second.npz")
    ids = {word: 5 + n for n, word in enumerate(WORDS)}
    assert [row["input_ids"].tolist() for row in first] == [
        [[2, ids["a"], ids[w], 3]] for w in ("film", "cast")
    ]
    cut = [ids[word] for word in ("the", "plot", "of", "the")]
    assert second[0]["input_ids"].tolist() == [[2, *cut, 3]]
    assert arrays["labels"].tolist() == [5.0, 1.5]
    assert facts.truncated == 1
    assert facts.notes[-1] == "1 of 4 texts were cut to 6 tokens"
    assert json.loads((tmp_path / "data" / "texts.json").read_text()) == {
        "texts": table.texts,
        "pairs": None,
        "second": table.pairs,
    }
    assert facts.calibration_rows == 1  # the other two are scored texts, whatever they were paired with


def tiny_stsb(folder: Path) -> Path:
    """A GLUE folder: 24 pairs whose rating is the share of words in common, and 12 to calibrate on."""
    (folder / "STS-B").mkdir(parents=True)
    for name, count, shift in (("dev", 24, 0), ("train", 12, 7)):
        lines = ["index\tsentence1\tsentence2\tscore"]
        for row in range(count):
            first = [WORDS[(row * 5 + shift + place) % len(WORDS)] for place in range(3 + row % 4)]
            second = first[: row % 4] + [WORDS[(row * 3 + 11 + place) % len(WORDS)] for place in range(3)]
            rating = 5 * len({*first} & {*second}) / len({*first} | {*second})
            lines.append(f"{row}\t{' '.join(first)}\t{' '.join(second)}\t{rating:.3f}")
        (folder / "STS-B" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def quick(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Stages in this process, with few calls."""
    patch.setenv("QTOOL_CACHE", str(cache))
    patch.setattr(measure, "CALLS", 4)
    patch.setattr(measure, "MIN_TIME_S", 0.0)
    patch.setattr(timing, "warm_up", functools.partial(timing.warm_up, min_time_s=0.0, max_time_s=0.1))
    patch.setattr(isolate, "run", run_here)
    patch.setattr(sweeping, "AT_ONCE", 1)  # the libraries' lazy imports are not made for two threads


def swept(model: Path, data: Path, out: Path, *more: str) -> dict[str, dict]:
    cli.run(
        ["sweep", str(model), "--task", "stsb", "--data", str(data), "--rounds", "1", "--threads", "1",
         "--out", str(out), *more]
    )  # fmt: skip
    return {row["recipe"]: row for row in json.loads((out / "summary.json").read_text())["rows"]}


def own_cosines(model: Path, tsv: Path) -> tuple[list[float], list[float]]:
    """Mean pooling by hand, one text at a time, the cosines by SciPy, and the ratings."""
    import torch
    from scipy.spatial import distance
    from transformers import AutoModel, AutoTokenizer

    encoder, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)

    def embed(text: str) -> np.ndarray:
        with torch.inference_mode():
            return encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy().mean(axis=0)

    rows = [line.split("\t") for line in tsv.read_text().splitlines()[1:]]
    return [1 - distance.cosine(embed(row[1]), embed(row[2])) for row in rows], [
        float(row[3]) for row in rows
    ]


def test_a_sweep_scores_the_cosine_and_an_export_gives_the_embeddings(embedder, tmp_path, monkeypatch):
    need("scipy", "evaluate", "sklearn", "accelerate")
    from scipy import stats

    quick(monkeypatch, tmp_path / "cache")
    data, run = tiny_stsb(tmp_path / "glue"), tmp_path / "run"
    rows = swept(embedder, data, run, "--recipe", "fp32", "--recipe", "int8-dynamic")
    assert {name: row["status"] for name, row in rows.items()} == {"fp32": "ok", "int8-dynamic": "ok"}
    cosines, ratings = own_cosines(embedder, data / "STS-B" / "dev.tsv")
    with np.load(run / "predictions" / "fp32-cpu.npz") as file:
        scored = file["logits"]
    assert scored.shape == (24, 1)
    np.testing.assert_allclose(scored[:, 0], cosines, atol=1e-5)
    metrics = rows["fp32"]["metrics"]
    assert metrics["spearman"]["value"] == pytest.approx(stats.spearmanr(scored[:, 0], ratings)[0])
    assert metrics["pearson"]["value"] == pytest.approx(stats.pearsonr(scored[:, 0], ratings)[0])
    assert metrics["agreement"]["reason"] == "a regression has no classes to agree on"
    for name in rows:
        same_embeddings(run, name, tmp_path / name)


def same_embeddings(run: Path, name: str, to: Path) -> None:
    """The exported script's embeddings have the cosines that were scored."""
    assert cli.run(["export", str(run), name, str(to)]) == 0
    lines = (run.parent / "glue" / "STS-B" / "dev.tsv").read_text().splitlines()[1:]
    predict = runpy.run_path(str(to / "load.py"))["predict"]
    first, second = (predict([line.split("\t")[column] for line in lines]) for column in (1, 2))
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    with np.load(run / "predictions" / f"{name}-cpu.npz") as file:
        scored = file["logits"][:, 0]
    # int8 activations are scaled by batch, and the script sees other batches than the scoring did
    assert np.abs(np.sum(first * second, axis=1) / norms - scored).max() <= (1e-5 if name == "fp32" else 0.03)
    assert "sentence embedding a text" in (to / "README.md").read_text()


@pytest.mark.slow
def test_every_recipe_runs_an_embedder_and_its_export_embeds_alike(embedder, tmp_path, monkeypatch):
    need("scipy", "evaluate", "sklearn", "accelerate")
    quick(monkeypatch, tmp_path / "cache")
    book = [r for r in recipes.load_all() if not r.compile]  # compiled, they differ in the wrapper alone
    flags = [part for recipe in book for part in ("--recipe", recipe.name)]
    rows = swept(embedder, tiny_stsb(tmp_path / "glue"), tmp_path / "run", *flags)
    for recipe in book:
        if recipes.why_not(recipe, "cpu") is None:
            assert (rows[recipe.name]["status"], rows[recipe.name]["cause"]) == ("ok", None), recipe.name
            same_embeddings(tmp_path / "run", recipe.name, tmp_path / recipe.name)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_sentence_transformers_gives_the_same_embeddings_and_reads_the_artifact(
    checkpoint, tmp_path, pooling
):
    need("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    folder = make_embedder(tmp_path / "tiny", checkpoint, pooling)
    texts = ["a fine film", "dull plot and weak story"]
    model = models.check(folder, None)
    task = prepare.make_task(options())
    prepare.prepare(
        options(score=False), task, model, (Table(texts, None, None, "t"), [0, 1], None), tmp_path / "data"
    )
    recipe = next(recipe for recipe in recipes.load_all() if recipe.name == core.BASELINE)
    spec = {
        "recipe": recipe.model_dump(),
        "model_dir": str(folder),
        "data": str(tmp_path / "data"),
        "threads": 1,
    }
    worker.build({**spec, "out": str(tmp_path / "out")})
    with np.load(tmp_path / "out" / "check.npz") as file:
        found = file["logits"]
    np.testing.assert_allclose(found, SentenceTransformer(str(folder)).encode(texts), atol=1e-5)
    shutil.copytree(tmp_path / "out" / "tokenizer", tmp_path / "deployed")
    shutil.copytree(tmp_path / "out" / "model", tmp_path / "deployed", dirs_exist_ok=True)
    np.testing.assert_allclose(
        found, SentenceTransformer(str(tmp_path / "deployed")).encode(texts), atol=1e-5
    )


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
@pytest.mark.parametrize("method", ["torch_cast", "torch_dynamic"])
def test_an_artifact_opens_as_it_was_built(method, architecture, tmp_path):
    folder = make_embedder(tmp_path / "tiny", make_checkpoint(tmp_path / "classifier", architecture))
    recipe = next(
        r for r in recipes.load_all() if r.method == method and r.dtype == "float32" and not r.compile
    )
    out = tmp_path / "out"
    out.mkdir()
    built = plugins.load("methods", method).build(BuildJob(folder, out, recipe, [], 1))
    opener.copy_sentence(folder, out)
    runtime, batch = plugins.load("runtimes", recipe.runtime), padded_batch()
    if architecture != "bert":
        del batch["token_type_ids"]
    expected = runtime.wrap(built, recipe, "cpu", 1).predict(batch)
    found = runtime.wrap(runtime.open_model(out, recipe, "cpu"), recipe, "cpu", 1).predict(batch)
    assert found.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_minilm_has_its_published_score_on_the_stsb_validation_split(tmp_path, monkeypatch):
    need("scipy", "evaluate", "sklearn", "accelerate")
    data = shared("data", "glue")
    try:
        model = demo.find_base()
    except Unavailable as error:
        pytest.skip(str(error))
    quick(monkeypatch, tmp_path / "cache")
    row = swept(model, data, tmp_path / "run", "--recipe", "fp32")["fp32"]
    assert row["status"] == "ok", row["cause"]
    assert round(row["metrics"]["spearman"]["value"], 4) == 0.8672
