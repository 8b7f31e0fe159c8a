"""Opens a checked checkpoint as a PyTorch module whose forward pass gives `.logits`: what every method starts from.

A sentence-embedding checkpoint (`modules.json`, the layout of sentence-transformers) is an encoder, a pooling
and perhaps a normalisation: its embeddings (batch, dim) are its `.logits`.
Reimers & Gurevych 2019, "Sentence-BERT", section 3, https://arxiv.org/abs/1908.10084.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.core import QtoolError

MODULES, POOLING, LENGTHS = "modules.json", "config.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
POOLINGS = ("mean", "cls", "max")


@dataclass(frozen=True)
class Sentence:
    """How a sentence-embedding checkpoint gets one vector from its tokens; `files` are named from its folder."""

    pooling: str
    normalize: bool
    max_tokens: int | None
    files: tuple[str, ...]


def load(folder: Path, **kwargs: Any) -> Any:
    """The module in evaluation mode; `kwargs` are those of `from_pretrained`."""
    return pooled(auto_class(folder).from_pretrained(folder, **kwargs).eval(), folder)


def empty(folder: Path, **kwargs: Any) -> Any:
    """The module's shape alone: its tensors are on the meta device and hold nothing; `kwargs` as of `from_config`."""
    import torch
    from transformers import AutoConfig

    with torch.device("meta"):
        return pooled(auto_class(folder).from_config(AutoConfig.from_pretrained(folder), **kwargs), folder)


def pooled(model: Any, folder: Path) -> Any:
    """`model` itself; that of a sentence-embedding checkpoint answers with its float32 embeddings from now on."""
    sentence = read_sentence(folder)
    if sentence is None:
        return model
    import inspect

    from transformers.modeling_outputs import SequenceClassifierOutput

    place = list(inspect.signature(model.forward).parameters).index("attention_mask")

    def pool(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        mask = kwargs["attention_mask"] if "attention_mask" in kwargs else args[place]
        return SequenceClassifierOutput(logits=embed(output.last_hidden_state, mask, sentence))

    # A hook keeps the model's class, signature and save_pretrained, and goes along where it is copied or traced.
    model.register_forward_hook(pool, with_kwargs=True)
    return model


def embed(states: Any, mask: Any, sentence: Sentence) -> Any:
    """Embeddings (batch, dim) from hidden states (batch, tokens, dim) and a mask (batch, tokens), in float32."""
    import torch

    states, mask = states.float(), mask[..., None]
    if sentence.pooling == "mean":
        vectors = (states * mask).sum(1) / mask.sum(1)
    elif sentence.pooling == "max":
        vectors = torch.where(mask > 0, states, -1e9).amax(1)
    else:
        vectors = states[:, 0]
    return torch.nn.functional.normalize(vectors, dim=1) if sentence.normalize else vectors


def read_sentence(folder: Path) -> Sentence | None:
    """What `modules.json` says; None for a folder without one, which holds a classifier.

    Raises QtoolError for a module, a pooling or a setting that qtool does not have.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    modules = _json(path)
    try:
        steps = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (TypeError, KeyError):
        raise QtoolError(f"{path} is not a list of modules with type and path. Restore it.") from None
    kinds = [kind for kind, _ in steps]
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise QtoolError(
                f"{path} has a module {kind}, which qtool does not run."
                " Use a model of Transformer, Pooling and Normalize alone."
            )
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or steps[0][1]:
        raise QtoolError(
            f"{path} has the modules {', '.join(f'{kind} in {at!r}' for kind, at in steps)}. Expected Transformer"
            " in '', Pooling and perhaps Normalize: save it with a newer sentence-transformers."
        )
    pooling = Path(steps[1][1]) / POOLING
    if ".." in pooling.parts or pooling.is_absolute():
        raise QtoolError(f"{path} names the folder {steps[1][1]}. Use one inside the model's.")
    lengths = _json(folder / LENGTHS) if (folder / LENGTHS).is_file() else {}
    if lengths.get("do_lower_case"):
        raise QtoolError(
            f"{folder / LENGTHS} sets do_lower_case, which only sentence-transformers does to a text."
            " Set it in the tokenizer instead."
        )
    prompts = _json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    if prompts.get("default_prompt_name"):
        raise QtoolError(
            f"{folder / PROMPTS} puts the prompt '{prompts['default_prompt_name']}' before every text, which qtool"
            " does not do. Use a model without a default prompt."
        )
    files = [MODULES, str(pooling)] + [LENGTHS] * bool(lengths)
    return Sentence(
        _pooling(folder / pooling), "Normalize" in kinds, lengths.get("max_seq_length"), tuple(files)
    )


def copy_sentence(folder: Path, to: Path) -> None:
    """Put what makes `folder` a sentence-embedding checkpoint, if it is one, beside the weights in `to`."""
    sentence = read_sentence(folder)
    for name in sentence.files if sentence else ():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, to / name)


def _pooling(path: Path) -> str:
    """The one pooling of a config in the old form (`pooling_mode_cls_token` and so on) or the new one."""
    if not path.is_file():
        raise QtoolError(f"there is no {path}, which says how to pool. Restore it from the checkpoint.")
    config = _json(path)
    flags = {name.removeprefix("pooling_mode_"): on for name, on in config.items() if "pooling_mode_" in name}
    old = [name.removesuffix("_tokens").removesuffix("_token") for name, on in flags.items() if on]
    named = config.get("pooling_mode") or old
    found = [named] if isinstance(named, str) else list(named)
    if len(found) != 1 or found[0] not in POOLINGS:
        raise QtoolError(
            f"{path} asks for the pooling {' and '.join(map(str, found)) or 'of nothing'}, qtool has one of"
            f" {', '.join(POOLINGS)}. Use another model."
        )
    return found[0]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise QtoolError(f"{path} is not valid JSON ({error}). Restore it from the checkpoint.") from None


def auto_class(folder: Path) -> Any:
    import transformers

    embeds = (folder / MODULES).is_file()
    return transformers.AutoModel if embeds else transformers.AutoModelForSequenceClassification
