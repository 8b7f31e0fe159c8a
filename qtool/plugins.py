"""Finds the method, runtime and task files: the folder listing is the registry, entry points add outside ones.

Knows nothing of what a plug-in does; importing one is cheap because heavy libraries are imported in functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from types import ModuleType
from typing import Literal

from qtool.core import QtoolError, did_you_mean

Kind = Literal["methods", "runtimes", "tasks"]


def names(kind: Kind) -> list[str]:
    """Every plug-in of a kind: the files of `qtool/<kind>/` and the entry points of group `qtool.<kind>`."""
    package = importlib.import_module(f"qtool.{kind}")
    own = {
        module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")
    }
    return sorted(own | set(_entry_points(kind)))


def load(kind: Kind, name: str) -> ModuleType:
    """Import one plug-in. Raises QtoolError with a suggestion when there is none of that name."""
    if name not in names(kind):
        raise QtoolError(f"unknown {kind[:-1]} '{name}'.{did_you_mean(name, names(kind))}")
    outside = _entry_points(kind)
    if name in outside:
        return outside[name].load()
    return importlib.import_module(f"qtool.{kind}.{name}")


@functools.cache
def _entry_points(kind: Kind) -> dict[str, importlib.metadata.EntryPoint]:
    # cached: the scan reads the metadata of every installed package
    return {point.name: point for point in importlib.metadata.entry_points(group=f"qtool.{kind}")}
