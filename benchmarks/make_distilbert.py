"""Write a classifier of DistilBERT-base's shape with random weights, for sizes and speeds without a download.

    python benchmarks/make_distilbert.py OUT
    qtool sweep OUT --no-score

Target: 66 to 67 million parameters, the same bytes at every run. Six layers, width 768, 12 heads, 512
positions, as in Sanh et al. 2019, https://arxiv.org/abs/1910.01108; the vocabulary of 30,522 word pieces is
the demo's. Its answers mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtool import demo
from qtool.core import QtoolError, Unavailable

SEED = 0
LABELS = ("negative", "positive")


def main(text: str | None = __doc__, maker: Callable[[Path, Path], int] | None = None) -> None:
    """The command line, of this script or of another one with its own words and maker."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="a new model folder")
    out = parser.parse_args().out
    if out.exists():
        raise SystemExit(f"{out} exists already: name a new folder")
    try:
        base = demo.find_base()
    except (QtoolError, Unavailable) as error:
        raise SystemExit(str(error)) from None
    parameters = (maker or write)(out, base)
    print(f"{out}: {parameters / 1e6:.1f} million parameters")


def write(out: Path, base: Path) -> int:
    """Save a model and `base`'s tokenizer to `out`; the number of parameters."""
    import torch
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    words = tokenizer(base)
    torch.manual_seed(SEED)
    config = DistilBertConfig(
        vocab_size=len(words),
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(out)
    words.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def tokenizer(base: Path) -> Any:
    """The tokenizer of `base` for a model that has no token types."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer.from_file(str(base / "tokenizer.json"))
    # the base's file pads and cuts every text to 128 tokens
    pieces.no_padding()
    pieces.no_truncation()
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")},
    )


if __name__ == "__main__":
    main()
