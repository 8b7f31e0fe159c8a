"""The PyTorch runtime on small modules: what compiles is one graph, and a missing padding token is got around."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qtool import core, plugins, prepare
from qtool.core import Batch, Loaded, Recipe, Unavailable

pytest.importorskip("torch", reason="needs torch: pip install 'qtool[all]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'qtool[all]'")


def recipe_of(**parts: Any) -> Recipe:
    own = {"name": "t", "description": "t", "source": "t", "method": "torch_cast", "runtime": "pytorch"}
    return Recipe.model_validate(own | parts)


@pytest.fixture(autouse=True)
def _one_process_for_each_compiled_model():
    """qtool gives every trial a process of its own; here the compiler forgets between two tests instead."""
    yield
    import torch

    torch._dynamo.reset()


class Doubler:
    """Made in a function, because torch is imported there: a module with one weight for each of 100 tokens."""

    @staticmethod
    def make(breaks: bool = False) -> Any:
        import torch
        from transformers.modeling_outputs import SequenceClassifierOutput

        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.config = SimpleNamespace(pad_token_id=0)
                self.words = torch.nn.Embedding(100, 3)

            def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
                if breaks:
                    torch._dynamo.graph_break()
                return SequenceClassifierOutput(logits=2 * self.words(input_ids).sum(1))

        return Module().eval()


@pytest.fixture
def quick_compiler(monkeypatch):
    """`torch.compile` without code generation, which takes a minute."""
    import torch

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def ids(rows: int, tokens: int) -> Batch:
    return {
        "input_ids": np.ones((rows, tokens), np.int64),
        "attention_mask": np.ones((rows, tokens), np.int64),
    }


def compiled(module: Any) -> Loaded:
    runtime = plugins.load("runtimes", "pytorch")
    return runtime.wrap(module, recipe_of(compile={"dynamic": True}), "cpu", 1)


@pytest.mark.usefixtures("quick_compiler")
def test_texts_of_every_length_share_one_graph_and_batch_one_has_its_own():
    loaded = compiled(Doubler.make())
    for tokens in range(3, 40):
        loaded.predict(ids(2 + tokens % 3, tokens))
    assert loaded.audit().compiled_graphs == 1
    for tokens in range(3, 40):
        loaded.predict(ids(1, tokens))
    assert loaded.audit().compiled_graphs == 2


@pytest.mark.usefixtures("quick_compiler")
def test_a_module_that_would_silently_run_eager_is_an_error():
    import torch

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Doubler.make(breaks=True)).predict(ids(2, 5))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        loaded = compiled(Doubler.make())
        loaded.predict(ids(2, 5))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            loaded.predict(ids(1, 5))


@pytest.mark.usefixtures("quick_compiler")
def test_compiled_kernels_go_to_the_users_place_or_else_to_qtools_cache(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled(Doubler.make())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(core.cache_dir() / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    compiled(Doubler.make())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_compiling_without_a_compiler_is_unavailable(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(Unavailable, match=r"install g\+\+"):
        compiled(Doubler.make())


def test_a_causal_model_without_padding_token_answers_batches_as_it_answers_their_texts():
    import torch
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2)
    assert config.pad_token_id is None
    runtime = plugins.load("runtimes", "pytorch")
    loaded = runtime.wrap(GPT2ForSequenceClassification(config).eval(), recipe_of(), "cpu", 1)
    rows = [{"input_ids": np.arange(1, 1 + tokens)[None] * 7 % 100} for tokens in (4, 9, 2)]
    rows = [row | {"attention_mask": np.ones_like(row["input_ids"])} for row in rows]
    meta = {"pad": {"input_ids": 0}, "padding_side": "right"}  # as for a tokenizer without one
    found = loaded.predict(prepare.collate(rows, meta))
    np.testing.assert_allclose(found, np.concatenate([loaded.predict(row) for row in rows]), atol=1e-6)
    assert "one text at a time" in loaded.audit().engine["batches"]
