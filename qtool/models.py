"""Turns MODEL (a folder, a hub id or an alias) into a checked local folder. Runs in the probe child only."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool import demo, host
from qtool.aliases import ALIASES, Alias
from qtool.core import QtoolError, Unavailable, cache_dir, content_hash, did_you_mean, file_hash

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
)
TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
# Everything a classifier needs and nothing that is executed: no .bin pickles, no .py files.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


@dataclass(frozen=True)
class Model:
    """A checked checkpoint. `id2label` has one entry a class; a regression head has one class."""

    folder: Path
    revision: str | None
    content: str
    parameters: int
    weight_bytes: int
    id2label: dict[int, str]
    max_tokens: int
    vocabulary: int
    model_type: str


def resolve(name: str, revision: str | None) -> tuple[Path, str | None]:
    """The local folder of MODEL and the hub revision it came from.

    Raises QtoolError when there is no such folder, hub repository or revision, or the hub cannot be asked.
    """
    hub_id = ALIASES.get(name, Alias(name, "")).hub_id
    if hub_id is None:
        return _demo_folder(), None
    if name not in ALIASES:
        if Path(name).is_dir():
            if revision is not None:
                raise QtoolError(
                    f"--revision is for hub ids; {name} is a local folder. Leave --revision out."
                )
            return Path(name).resolve(), None
        if name.startswith((".", "/", "~")) or Path(name).exists() or name.count("/") > 1:
            raise QtoolError(
                f"{name} is not a model folder. Give a folder with config.json, a hub id or an alias."
            )
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
            raise QtoolError(
                f"'{name}' is neither a folder nor a hub id. Give a folder, owner/name or an alias."
            )
    return _from_hub(hub_id, revision, name)


def check(folder: Path, revision: str | None) -> Model:
    """Load the checkpoint once and make sure that it is whole and trained.

    Raises QtoolError for a missing or corrupt config, weights or tokenizer, for custom code, for a model that
    is no sequence classifier and for a head that would be initialised at random.
    """
    config = _config(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {pickles[0]}, a pickle" if pickles else "no .safetensors file"
        raise QtoolError(f"{folder} has no usable weights: found {found}. Save the model with safetensors.")
    tokenizers = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not tokenizers:
        # transformers would answer with an empty vocabulary instead of an error
        raise QtoolError(
            f"{folder} has no tokenizer: found none of {', '.join(TOKENIZER_FILES)}. Save it beside the model."
        )
    model, missing = _load(folder, weights)
    if missing:
        raise QtoolError(
            f"the checkpoint in {folder} lacks {len(missing)} weights ({', '.join(sorted(missing)[:3])}): they would be"
            " initialised at random. Fine-tune a sequence classifier first."
        )
    tokens = _tokenizer(folder)
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(tokens) > vocabulary:
        raise QtoolError(
            f"the tokenizer in {folder} has {len(tokens)} tokens, the model {vocabulary}."
            " They do not belong together; save the right tokenizer beside the model."
        )
    extras = [folder / name for name in TOKENIZER_EXTRAS if (folder / name).is_file()]
    hashed = [folder / "config.json", *weights, *sorted(folder.glob("*.index.json")), *tokenizers, *extras]
    return Model(
        folder=folder,
        revision=revision,
        content=content_hash({path.name: file_hash(path) for path in hashed}),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        id2label={int(index): str(label) for index, label in model.config.id2label.items()},
        max_tokens=_max_tokens(model.config, tokens),
        vocabulary=vocabulary,
        model_type=str(config["model_type"]),
    )


def copy_tokenizer(folder: Path, to: Path) -> None:
    """Copy the tokenizer's files byte for byte, with the config that names its class."""
    to.mkdir()
    for name in (*TOKENIZER_FILES, *TOKENIZER_EXTRAS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)


def _config(folder: Path) -> dict[str, Any]:
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
    if "quantization_config" in config:
        raise QtoolError(
            f"{folder} is quantised already ({config['quantization_config'].get('quant_method')}). Give the original checkpoint."
        )
    return config


def _load(folder: Path, weights: list[Path]) -> tuple[Any, set[str]]:
    import torch
    from safetensors import SafetensorError, safe_open
    from transformers import AutoModelForSequenceClassification

    for path in weights:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise QtoolError(
                f"{path} is damaged ({str(error).splitlines()[0][:120]}). Copy or download it again."
            ) from None
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
        )
    # transformers raises whatever the config's values lead to; the message is the user's best lead
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError, SafetensorError) as error:
        raise QtoolError(
            f"cannot load the model in {folder}: {_first_line(error)}. Check its config.json and weights."
        ) from None
    if info.get("mismatched_keys"):
        name = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])[0]
        raise QtoolError(
            f"the weights in {folder} do not fit its config.json (shape of {name}). Restore the matching pair."
        )
    return model, set(info["missing_keys"])


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # a damaged file surfaces as a bare Exception of the Rust tokenizer library
    except Exception as error:  # noqa: BLE001
        raise QtoolError(
            f"cannot load the tokenizer in {folder}: {_first_line(error)}. Restore its files."
        ) from None


def _max_tokens(config: Any, tokenizer: Any) -> int:
    """Most tokens a text may have: the tokenizer's bound and the position table's, less RoBERTa's offset."""
    positions = getattr(config, "max_position_embeddings", None) or 10**9
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= config.pad_token_id + 1
    return int(min(tokenizer.model_max_length, positions, 10**9))


def _demo_folder() -> Path:
    folder = cache_dir() / "models" / f"demo-{file_hash(demo.DELTA)[:12]}"
    if not folder.is_dir():
        try:
            demo.build_model(folder)
        except Unavailable as error:
            raise QtoolError(str(error)) from None
    return folder


def _from_hub(hub_id: str, revision: str | None, asked: str) -> tuple[Path, str | None]:
    import huggingface_hub
    from huggingface_hub import errors

    offline = host.hub_switched_off() is not None
    if not offline:
        up, sentence = host.hub_status()
        if not up:
            raise QtoolError(
                f"'{asked}' is no local folder, and as a hub id it cannot be fetched: {sentence}."
                f" Give a model folder, or HF_HUB_OFFLINE=1 where it is cached.{_near_alias(asked)}"
            )
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(HUB_FILES), local_files_only=offline
        )
    except errors.GatedRepoError:
        raise QtoolError(
            f"hub model '{hub_id}' is gated. Ask for access on its page and log in with `hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise QtoolError(
            f"hub model '{hub_id}' has no revision '{revision}'. Leave --revision out for the newest."
        ) from None
    except errors.RepositoryNotFoundError:
        raise QtoolError(
            f"there is no model '{hub_id}' on the hub and no such folder.{_near_alias(asked)} Check the name."
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise QtoolError(
            f"'{hub_id}' is not in the local cache and HF_HUB_OFFLINE is set.{_near_alias(asked)} Unset it, or give a model folder."
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise QtoolError(
            f"cannot fetch '{hub_id}': {_first_line(error)}. Try again, or give a model folder."
        ) from None
    path = Path(folder)
    return path, path.name


def _near_alias(name: str) -> str:
    hint = did_you_mean(name, ALIASES)
    return hint if hint.startswith(" Did") else ""


def _first_line(error: Exception) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0][:200].rstrip(".")
    return type(error).__name__
