"""A causal classifier in OpenVINO: its forward gives a cache beside the logits, and the last token decides."""

from __future__ import annotations

import json

import numpy as np

from qtool import plugins, recipes
from qtool.core import BuildJob
from tests import architectures
from tests.conftest import need


def test_a_causal_classifier_computes_in_openvino_what_it_does_in_pytorch(tmp_path):
    need("torch", "transformers", "openvino", "nncf")
    import torch
    from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

    source, out = tmp_path / "model", tmp_path / "artifact"
    out.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(source)
    architectures.tokenizer("distilbert").save_pretrained(source)
    recipe, _ = recipes.find("openvino-fp32")
    built = plugins.load("methods", "openvino").build(BuildJob(source, out, recipe, [], 1))
    loaded = plugins.load("runtimes", "openvino").wrap(built, recipe, "cpu", 1)
    plain = AutoModelForSequenceClassification.from_pretrained(source).eval()
    rng = np.random.default_rng(0)
    for lengths in ([3], [1], [9, 4, 1], [33, 2]):
        mask = np.array([[1] * n + [0] * (max(lengths) - n) for n in lengths], np.int64)
        batch = {"input_ids": rng.integers(5, 100, mask.shape) * mask, "attention_mask": mask}
        with torch.inference_mode():
            expected = plain(**{name: torch.from_numpy(array) for name, array in batch.items()}).logits
        assert np.allclose(loaded.predict(batch), expected.numpy(), atol=1e-5), lengths
    assert json.loads((out / "config.json").read_text())["use_cache"] is True
