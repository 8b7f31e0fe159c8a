"""Tiny random classifiers of every architecture that qtool is tried on, each with a word tokenizer of its own habits.

64 wide, 128 inside, 2 layers, 100 words: the least that 4-bit blocks of 64 and the packed kernels take. Weights
have a standard deviation of 1/sqrt(64), which keeps the variance of activations (LeCun et al. 1998, "Efficient
BackProp", section 4.6): with larger ones attention is a hard maximum, and any rounding flips it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.core import Batch
from tests.conftest import need

HIDDEN, INNER, LAYERS, HEADS, VOCABULARY, POSITIONS = 64, 128, 2, 4, 100, 64
STD = HIDDEN**-0.5


@dataclass(frozen=True)
class Architecture:
    """`special` in the order of their ids: padding, start, separator, unknown are found by what they are."""

    special: tuple[str, ...]
    token_types: bool
    double_separator: bool = False
    offset: int = 0
    """Positions start behind the padding token's id: RoBERTa and its kin."""


BERT_LIKE = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DEBERTA_LIKE = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
ROBERTA_LIKE = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")

ARCHITECTURES = {
    "bert": Architecture(BERT_LIKE, True),
    "distilbert": Architecture(BERT_LIKE, False),
    "roberta": Architecture(ROBERTA_LIKE, False, double_separator=True, offset=2),
    "albert": Architecture(("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), True),
    "deberta": Architecture(DEBERTA_LIKE, True),
    "deberta-v2": Architecture(DEBERTA_LIKE, True),
    "electra": Architecture(BERT_LIKE, True),
    "mpnet": Architecture(ROBERTA_LIKE, False, double_separator=True, offset=2),
    "xlm-roberta": Architecture(ROBERTA_LIKE, False, double_separator=True, offset=2),
    "modernbert": Architecture(BERT_LIKE, False),
}
"""By `model_type`; the checkpoints called DeBERTa-v3 are of type deberta-v2, with the settings given below."""

# What DeBERTa-v3's published checkpoints set; the library's defaults switch relative attention off.
RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": HIDDEN, "num_hidden_groups": 1},
    "deberta": {**RELATIVE, "max_relative_positions": POSITIONS},
    "deberta-v2": {**RELATIVE, "position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "electra": {"embedding_size": HIDDEN},
    "mpnet": {"relative_attention_num_buckets": 32},
    "xlm-roberta": {"type_vocab_size": 1},
    "roberta": {"type_vocab_size": 1},
    # the first layer attends globally, the second in a window shorter than the longest text
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16},
}
ALWAYS = ("bert", "distilbert", "roberta", "electra", "mpnet", "xlm-roberta")
"""The architectures that every recipe family must manage."""


def make(folder: Path, model_type: str, labels: tuple[str, ...] = ("negative", "positive")) -> Path:
    """Save a random model of `model_type`, the same at every call, and its tokenizer into `folder`."""
    need("torch", "transformers", "tokenizers")
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind = ARCHITECTURES[model_type]
    start, pad, end = _special(kind)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    # DistilBERT has the names above as aliases of its own, except for the inner size
    sizes |= {"hidden_dim": INNER} if model_type == "distilbert" else {"intermediate_size": INNER}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS + kind.offset,
        initializer_range=STD,
        pad_token_id=pad,
        bos_token_id=start,
        cls_token_id=start,
        eos_token_id=end,
        sep_token_id=end,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        **sizes,
        **OWN_SETTINGS.get(model_type, {}),
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():  # trained models have biases; at initialisation they are zero
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=STD)
    model.save_pretrained(folder)
    tokenizer(model_type).save_pretrained(folder)
    return folder


def tokenizer(model_type: str) -> Any:
    """Splits at blanks; words `w0`, `w1`, ...; frames single texts and pairs as the architecture's own does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    kind = ARCHITECTURES[model_type]
    start, pad, end = _special(kind)
    names = {id: token for id, token in enumerate(kind.special)}
    words = [*kind.special, *(f"w{index}" for index in range(VOCABULARY - len(kind.special)))]
    unknown = next(token for token in kind.special if "unk" in token.lower())
    raw = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=unknown))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    first, last = names[start], names[end]
    between = f"{last} {last}" if kind.double_separator else last
    second = 1 if kind.token_types else 0
    raw.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{first} $A {last}",
        pair=f"{first} $A {between} $B:{second} {last}:{second}",
        special_tokens=[(first, start), (last, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=names[pad],
        unk_token=unknown,
        cls_token=first,
        sep_token=last,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", *(["token_type_ids"] if kind.token_types else []), "attention_mask"],
    )


def _special(kind: Architecture) -> tuple[int, int, int]:
    """Ids of the tokens that start a text, pad it and end it."""
    lower = [token.lower() for token in kind.special]
    start = next(id for id, token in enumerate(lower) if token in ("[cls]", "<s>"))
    pad = next(id for id, token in enumerate(lower) if "pad" in token)
    end = next(id for id, token in enumerate(lower) if token in ("[sep]", "</s>"))
    return start, pad, end


def texts(count: int, words: int, seed: int) -> list[str]:
    """`count` texts of at most `words` random words; the first has exactly that many, the last has one."""
    import random

    rng = random.Random(seed)
    lengths = [words, *(rng.randint(1, words) for _ in range(count - 2)), 1][:count]
    return [" ".join(f"w{rng.randrange(90)}" for _ in range(length)) for length in lengths]


def batches(folder: Path) -> list[Batch]:
    """Inputs as the folder's own tokenizer makes them: one text, several padded, one pair, several pairs padded."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder)
    made = []
    for rows, words in ((1, 5), (4, 20), (1, 61)):
        made.append(own(texts(rows, words, seed=words), padding=True, return_tensors="np"))
    for rows in (1, 3):
        made.append(own(texts(rows, 9, seed=1), texts(rows, 12, seed=2), padding=True, return_tensors="np"))
    return [{name: batch[name] for name in own.model_input_names} for batch in made]
