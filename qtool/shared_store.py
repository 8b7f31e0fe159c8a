"""Folders that travel between machines through a URL that all of them reach, by the hashes of their files.

`URL/KIND/NAME/...` holds the files and `URL/KIND/NAME.json` their SHA-256; the latter is written last, so a folder
without it is no folder yet. Anything fsspec opens is such a URL: a mounted folder, s3://, gs://.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from qtool.artifacts import place
from qtool.core import QtoolError, content_hash, file_hash, hashes


def name_of(files: Mapping[str, str]) -> str:
    """What a folder of these files is called: 16 hex digits."""
    return content_hash(dict(files))[:16]


class SharedStore:
    """The folders under a URL. Every method raises QtoolError where the URL cannot be used."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise QtoolError("--shared needs fsspec: pip install 'qtool[ray]'.") from None
        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise QtoolError(
                f"--shared {url} is no folder or URL that fsspec opens: {error}. Give a folder or s3://BUCKET/PATH."
            ) from None

    def has(self, kind: str, name: str) -> bool:
        return bool(self._do("look into", lambda: self.files.exists(self._index(kind, name))))

    def put(self, kind: str, name: str, folder: Path) -> None:
        """Copy a folder to its place, unless it is there."""
        if self.has(kind, name):
            return
        found = hashes(folder)

        def copy() -> None:
            for path in found:
                target = f"{self.root}/{kind}/{name}/{path}"
                self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self.files.put_file(str(folder / path), target)
            with self.files.open(self._index(kind, name), "w") as file:
                json.dump(found, file)

        self._do("write to", copy)

    def get(self, kind: str, name: str, to: Path) -> None:
        """Copy a folder from its place to `to`, whole and as it was put, or not at all."""
        if not self.has(kind, name):
            raise QtoolError(f"--shared {self.url} holds no {kind}/{name}. Was it emptied? Sweep again.")
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()

            def copy() -> dict[str, str]:
                with self.files.open(self._index(kind, name), "r") as file:
                    wanted = self._safe(json.load(file), f"{kind}/{name}")
                for path in wanted:
                    (made / path).parent.mkdir(parents=True, exist_ok=True)
                    self.files.get_file(f"{self.root}/{kind}/{name}/{path}", str(made / path))
                return wanted

            wanted = self._do("read from", copy)
            if damaged := [path for path, digest in wanted.items() if file_hash(made / path) != digest]:
                raise QtoolError(
                    f"--shared {self.url}: {kind}/{name}/{damaged[0]} is not what was put there."
                    f" Delete {kind}/{name}.json there, then sweep again."
                )
            if to.is_dir():  # it is asked for because what lies there is not whole
                shutil.rmtree(to)
            place(made, to)

    def _index(self, kind: str, name: str) -> str:
        return f"{self.root}/{kind}/{name}.json"

    def _safe(self, content: Any, where: str) -> dict[str, str]:
        """Others write to the URL too: no path may lead out of the folder that is made."""
        if not isinstance(content, dict) or not all(
            isinstance(digest, str) and _stays_below(path) for path, digest in content.items()
        ):
            raise QtoolError(f"--shared {self.url}: {where}.json is no list of files. Delete it there.")
        return content

    def _do(self, what: str, action: Any) -> Any:
        """What a file system raises depends on it: OSError mostly, its client's own errors else."""
        try:
            return action()
        except QtoolError:
            raise
        except Exception as error:  # noqa: BLE001 - every backend of fsspec has exceptions of its own
            raise QtoolError(
                f"cannot {what} --shared {self.url}: {type(error).__name__}: {error}. Check the URL and its rights."
            ) from None


def _stays_below(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith(("/", "\\")) and ".." not in parts and "\\" not in path
