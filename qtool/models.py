"""Checks a local folder with a PyTorch checkpoint. Runs in the probe child only."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import checkpoint
from qtool.core import QtoolError, content_hash, did_you_mean, file_hash

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
)
TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")


@dataclass(frozen=True)
class Model:
    """A checked checkpoint. `id2label` has one entry a class; a regression head and a sentence embedding have one.

    `embeds`: its outputs are sentence embeddings; `token_types`: its forward pass takes `token_type_ids`.
    """

    folder: Path
    revision: str | None
    content: str
    parameters: int
    weight_bytes: int
    id2label: dict[int, str]
    max_tokens: int
    vocabulary: int
    model_type: str
    source: str = "checkpoint"
    """What MODEL is: a key of `core.BASELINES`."""
    embeds: bool = False
    pad_id: int | None = None
    """The config's padding token, by which a causal classifier finds a text's last token."""
    token_types: bool = True


def check(folder: Path, revision: str | None) -> Model:
    """Load the checkpoint once and make sure that it is whole and trained.

    Raises QtoolError for a missing or corrupt config, weights or tokenizer, for custom code, for a model that
    is neither a sequence classifier nor a sentence-embedding model, for weights that would be initialised at
    random and for classes without a name of their own.
    """
    config = read_config(folder)
    sentence = checkpoint.read_sentence(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {pickles[0]}, a pickle" if pickles else "no .safetensors file"
        raise QtoolError(f"{folder} has no usable weights: found {found}. Save the model with safetensors.")
    tokenizers = find_tokenizer(folder)
    model, missing = _load(folder, weights)
    if sentence is not None:
        # made for classifiers, and not on the way to the embedding: many such checkpoints do not store it
        missing = {name for name in missing if not name.startswith("pooler.")}
    if missing:
        remedy = "Restore them" if sentence is not None else "Fine-tune a sequence classifier first"
        raise QtoolError(
            f"the checkpoint in {folder} lacks {len(missing)} weights ({', '.join(sorted(missing)[:3])}): they would be"
            f" initialised at random. {remedy}."
        )
    tokens = load_tokenizer(folder)
    if sentence is not None and sentence.pooling == "cls" and tokens.padding_side == "left":
        raise QtoolError(
            f"{folder} takes its embedding from the first token, which its tokenizer pads. Set padding_side to right."
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(tokens) > vocabulary:
        raise QtoolError(
            f"the tokenizer in {folder} has {len(tokens)} tokens, the model {vocabulary}."
            " They do not belong together; save the right tokenizer beside the model."
        )
    extras = [folder / name for name in sentence.files] if sentence is not None else []
    hashed = [folder / "config.json", *weights, *sorted(folder.glob("*.index.json")), *tokenizers, *extras]
    return Model(
        folder=folder,
        revision=revision,
        content=content_hash({str(path.relative_to(folder)): file_hash(path) for path in hashed}),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        id2label={0: "score"} if sentence is not None else classes(folder, model.config),
        max_tokens=min(max_tokens(model.config, tokens), (sentence and sentence.max_tokens) or 10**9),
        vocabulary=vocabulary,
        model_type=str(config["model_type"]),
        embeds=sentence is not None,
        pad_id=model.config.pad_token_id,
        token_types="token_type_ids" in inspect.signature(model.forward).parameters,
    )


def find_tokenizer(folder: Path) -> list[Path]:
    """The tokenizer's files. Raises QtoolError where there is none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        # transformers would answer with an empty vocabulary instead of an error
        raise QtoolError(
            f"{folder} has no tokenizer: found none of {', '.join(TOKENIZER_FILES)}. Save it beside the model."
        )
    names = (*TOKENIZER_FILES, *TOKENIZER_EXTRAS)
    return [folder / name for name in names if (folder / name).is_file()]


def copy_tokenizer(folder: Path, to: Path) -> None:
    """Copy the tokenizer's files byte for byte, with the config that names its class."""
    to.mkdir()
    for path in find_tokenizer(folder):
        shutil.copyfile(path, to / path.name)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, of a classifier or encoder of transformers' own in floating point, else QtoolError."""
    path = folder / "config.json"
    if not path.is_file():
        raise QtoolError(f"{folder} has no config.json. Give a Hugging Face model folder.")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise QtoolError(f"{path} is not valid JSON ({error}). Restore it from the checkpoint.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise QtoolError(f"{path} names no model_type. Give the config of a transformers model.")
    if "auto_map" in config:
        raise QtoolError(
            f"{folder} needs custom code (auto_map), which qtool does not run. Use a model of transformers' own."
        )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as known,
    )

    if config["model_type"] not in known:
        hint = did_you_mean(config["model_type"], known) if config["model_type"] else ""
        hint = hint if hint.startswith(" Did") else ""
        raise QtoolError(
            f"model_type '{config['model_type']}' has no sequence classifier in transformers.{hint} Use another model."
        )
    if config.get("is_encoder_decoder") and (folder / checkpoint.MODULES).is_file():
        raise QtoolError(f"{folder} embeds with an encoder-decoder. Use a model that is an encoder alone.")
    if "quantization_config" in config:
        raise QtoolError(
            f"{folder} is quantised already ({config['quantization_config'].get('quant_method')}). Give the original checkpoint."
        )
    return config


def _load(folder: Path, weights: list[Path]) -> tuple[Any, set[str]]:
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError, safe_open

    for path in weights:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise QtoolError(
                f"{path} is damaged ({str(error).splitlines()[0][:120]}). Copy or download it again."
            ) from None
    try:
        model, info = checkpoint.auto_class(folder).from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
        )
    # transformers raises whatever the config's values lead to; the message is the user's best lead
    except (
        *(ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError),
        *(SafetensorError, StrictDataclassError),
    ) as error:
        raise QtoolError(
            f"cannot load the model in {folder}: {first_line(error)}. Check its config.json and weights."
        ) from None
    if info.get("mismatched_keys"):
        name = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])[0]
        raise QtoolError(
            f"the weights in {folder} do not fit its config.json (shape of {name}). Restore the matching pair."
        )
    return model, set(info["missing_keys"])


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises QtoolError where its files are damaged."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # a damaged file surfaces as a bare Exception of the Rust tokenizer library
    except Exception as error:  # noqa: BLE001
        raise QtoolError(
            f"cannot load the tokenizer in {folder}: {first_line(error)}. Restore its files."
        ) from None


def classes(folder: Path, config: Any) -> dict[int, str]:
    """The names of the outputs, in their order. Raises QtoolError where they are not one name an output."""
    names = {int(index): str(label) for index, label in sorted(config.id2label.items())}
    plain = [name.strip().casefold() for name in names.values()]
    if list(names) != list(range(len(names))) or len(set(plain)) != len(plain):
        raise QtoolError(
            f"{folder / 'config.json'} has the id2label {names}. Number the classes from 0 and give each its own name."
        )
    return names


def max_tokens(config: Any, tokenizer: Any) -> int:
    """Most tokens a text may have: the tokenizer's bound and the position table's, less RoBERTa's offset."""
    positions = getattr(config, "max_position_embeddings", None) or 10**9
    if (
        config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet")
        and config.pad_token_id is not None
    ):
        positions -= config.pad_token_id + 1
    return int(min(tokenizer.model_max_length, positions, 10**9))


def first_line(error: Exception) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0][:200].rstrip(".")
    return type(error).__name__
