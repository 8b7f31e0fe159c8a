"""What `models.check` accepts and refuses beyond the plain classifier: lengths, padding, class names, one output."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool import checkpoint as opener
from qtool import models, plugins, prepare, recipes, worker
from qtool.core import QtoolError
from qtool.tasks._table import Table
from tests.conftest import make_checkpoint

pytest.importorskip("torch", reason="needs torch: pip install 'qtool[all]'")


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "model")


def configure(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_position_table_shorter_than_the_tokenizers_length_is_the_bound(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 5000}))
    assert models.check(folder, None).max_tokens == 64


@pytest.mark.parametrize("causal", [False, True])
def test_a_tokenizer_without_a_padding_token_scores_in_batches_as_one_by_one(folder, tmp_path, causal):
    if causal:  # finds a text's last token by its config's own padding token, here one that is not 0
        import torch
        from transformers import GPT2Config, GPT2ForSequenceClassification

        torch.manual_seed(0)
        shape = {"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
        GPT2ForSequenceClassification(GPT2Config(**shape, pad_token_id=3)).save_pretrained(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text())
            settings.pop("pad_token", None)
            (folder / name).write_text(json.dumps(settings))
    model = models.check(folder, None)
    texts = ["a fine film", "dull", "the plot of the story was not very good"]
    options = {"score": False, "seq_len": None, "task": "text", "calibration_rows": 0}
    table = Table(texts, None, None, "t")
    prepare.prepare(options, prepare.make_task(options), model, (table, [0, 1, 2], None), tmp_path / "data")
    rows, _ = prepare.load_ragged(tmp_path / "data" / "inputs.npz")
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    recipe = next(
        recipe for recipe in recipes.load_all() if recipe.method == "torch_cast" and not recipe.compile
    )
    loaded = plugins.load("runtimes", "pytorch").wrap(opener.load(folder), recipe, "cpu", 1)
    together = worker.evaluate(loaded, rows, meta, 3)
    np.testing.assert_allclose(together, worker.evaluate(loaded, rows, meta, 1), atol=1e-5)


def test_classes_come_in_the_order_of_their_numbers_whatever_their_type(folder):
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        transformers.BertConfig(id2label={0: "no", 1: 7})
    except StrictDataclassError:
        pytest.skip("this transformers refuses a class whose name is a number")
    configure(folder, id2label={"1": 7, "0": "no"}, label2id={"no": 0, "7": 1})
    assert list(models.check(folder, None).id2label.items()) == [(0, "no"), (1, "7")]


@pytest.mark.parametrize(
    "names", [{"1": "a", "2": "b"}, {"0": "Yes", "1": "yes "}, {"0": "a", "1": "b", "3": "c"}, ["a", "b"], {}]
)
def test_class_names_that_fit_no_output_are_refused_in_one_line(folder, names):
    configure(folder, id2label=names)
    with pytest.raises(QtoolError) as caught:
        models.check(folder, None)
    assert "\n" not in str(caught.value)


def test_a_regression_head_has_one_output(tmp_path):
    model = models.check(make_checkpoint(tmp_path / "rating", labels=("LABEL_0",)), None)
    assert model.id2label == {0: "LABEL_0"}
    assert not model.embeds
    assert model.token_types
    assert not models.check(make_checkpoint(tmp_path / "distil", "distilbert"), None).token_types
    assert replace(model, embeds=True) != model
