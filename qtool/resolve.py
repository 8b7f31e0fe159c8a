"""Turns MODEL (a folder, a hub id or an alias) into a local folder. Runs in the probe child only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qtool import demo, host
from qtool.aliases import ALIASES, Alias
from qtool.core import QtoolError, Unavailable, cache_dir, did_you_mean, file_hash
from qtool.models import first_line

GRAPH_FILES = ("model.onnx", "model.onnx_data", "model.onnx.data", "openvino_model.xml", "openvino_model.bin")
# Everything a classifier needs and nothing that is executed: no pickles, no .py files.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", *GRAPH_FILES)


def resolve(name: str, revision: str | None, files: Sequence[str] = HUB_FILES) -> tuple[Path, str | None]:
    """The local folder of MODEL and the hub revision it came from; of a hub model, `files` are fetched.

    Raises QtoolError when there is no such folder, hub repository or revision, or the hub cannot be asked.
    """
    hub_id = ALIASES.get(name, Alias(name, "")).hub_id
    if hub_id is None:
        if revision is not None:
            raise QtoolError(f"--revision is for hub ids; '{name}' ships with qtool. Leave --revision out.")
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
    return _from_hub(hub_id, revision, name, files)


def _demo_folder() -> Path:
    folder = cache_dir() / "models" / f"demo-{file_hash(demo.DELTA)[:12]}"
    if not folder.is_dir():
        try:
            demo.build_model(folder)
        except Unavailable as error:
            raise QtoolError(str(error)) from None
    return folder


def _from_hub(hub_id: str, revision: str | None, asked: str, files: Sequence[str]) -> tuple[Path, str | None]:
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
            hub_id, revision=revision, allow_patterns=list(files), local_files_only=offline
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
            f"cannot fetch '{hub_id}': {first_line(error)}. Try again, or give a model folder."
        ) from None
    path = Path(folder)
    return path, path.name


def _near_alias(name: str) -> str:
    hint = did_you_mean(name, ALIASES)
    return hint if hint.startswith(" Did") else ""
