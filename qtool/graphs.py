"""Checks a MODEL that is an exported graph: a folder as Optimum's ORTModel and OVModel classes save it."""

from __future__ import annotations

from pathlib import Path

from qtool import host, models, plugins
from qtool.core import QtoolError, content_hash, file_hash
from qtool.methods import _exported

FILES = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}


def kind(folder: Path) -> str | None:
    """Which exported graph MODEL is, a key of `FILES`; None where it has weights for PyTorch, or neither."""
    return next((kind for kind, name in FILES.items() if _exported.holds(folder, name)), None)


def check(folder: Path, revision: str | None, kind: str) -> models.Model:
    """Open the graph once and make sure that it is a float32 classifier that fits its config and tokenizer.

    Raises QtoolError where it is damaged, quantised already, or does not belong to what lies beside it.
    """
    config = models.read_config(folder)
    tokenizer_files = models.find_tokenizer(folder)
    runtime = plugins.load("runtimes", RUNTIMES[kind])
    if absent := [package for package in (*runtime.PACKAGES, kind) if host.installed(package) is None]:
        raise QtoolError(f"{folder} is an {kind} model and needs {absent[0]}: pip install 'qtool[{kind}]'.")
    facts = runtime.describe_source(folder)
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(folder)
    names, tokens = models.classes(folder, settings), models.load_tokenizer(folder)
    if facts["classes"] != len(names):
        raise QtoolError(
            f"{folder / FILES[kind]} has {facts['classes']} outputs, config.json names {len(names)} classes"
            f" ({', '.join(names.values())}). Put the config it was exported with beside it."
        )
    if missing := sorted(set(facts["inputs"]) - set(tokens.model_input_names)):
        raise QtoolError(
            f"{folder / FILES[kind]} takes {', '.join(missing)}, which its tokenizer does not make."
            " Put the tokenizer it was exported with beside it."
        )
    hashed = [folder / "config.json", *(folder / name for name in facts["files"]), *tokenizer_files]
    return models.Model(
        folder=folder,
        revision=revision,
        content=content_hash({path.name: file_hash(path) for path in hashed}),
        parameters=facts["parameters"],
        weight_bytes=facts["weight_bytes"],
        id2label=names,
        max_tokens=models.max_tokens(settings, tokens),
        vocabulary=settings.vocab_size,
        model_type=str(config["model_type"]),
        source=kind,
    )
