"""Shared pieces of the tests: a tiny trained-looking checkpoint, a small table, and qtool as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"
WORDS = [
    "a",
    "fine",
    "film",
    "dull",
    "plot",
    "great",
    "cast",
    "weak",
    "story",
    "moving",
    "and",
    "the",
    "of",
    "it",
    "was",
    "very",
    "not",
    "good",
    "bad",
    "awful",
    "lovely",
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache, and none reaches for a hub."""
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path_factory.getbasetemp() / "qtool-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def need(*packages: str) -> None:
    """Skip the test with a reason where a package is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def shared(*parts: str) -> Path:
    """A file or folder of the shared data; skips with a reason in a clone that has none."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {'/'.join(parts)} of the shared data, which this checkout does not have")
    return path


def make_checkpoint(
    folder: Path, architecture: str = "bert", labels: tuple[str, ...] = ("negative", "positive")
) -> Path:
    """A tiny randomly initialised classifier with a word tokenizer, saved as a Hugging Face folder."""
    need("torch", "transformers", "tokenizers")
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"]
        + (["token_type_ids"] if architecture == "bert" else []),
    )
    shape = {"vocab_size": len(vocabulary), "max_position_embeddings": 64}
    names = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "num_labels": len(labels),
    }
    if architecture == "bert":
        config = transformers.BertConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            initializer_range=0.3,
            **shape,
            **names,
        )
        model = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.DistilBertConfig(
            dim=64, n_layers=2, n_heads=4, hidden_dim=128, initializer_range=0.3, **shape, **names
        )
        model = transformers.DistilBertForSequenceClassification(config)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-bert")


def write_table(path: Path, rows: int = 48) -> Path:
    """A CSV of `rows` sentences of 3 to 12 words with alternating labels."""
    lines = ["text,label"]
    for row in range(rows):
        words = [WORDS[(row * 7 + place * (row % 5 + 1)) % len(WORDS)] for place in range(3 + row % 10)]
        lines.append(f"{' '.join(words)},{'positive' if row % 2 else 'negative'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> Path:
    return write_table(tmp_path_factory.mktemp("table") / "films.csv")


def qtool(
    *arguments: object, cwd: Path | None = None, timeout_s: float = 280, **env: str
) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "qtool.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout_s,
        env={**os.environ, **env},
        check=False,
    )


def lines_of(run: Path) -> list[dict]:
    """The measurements of a run folder as plain dictionaries."""
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
