"""Stores every weight in one floating-point type: the fp32 baseline and the half-precision casts.

Half precision after Micikevicius et al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from qtool import checkpoint, layers
from qtool.core import BuildJob, Recipe
from qtool.methods import _architectures

PACKAGES = ("torch", "transformers")
TITLE = "PyTorch, floating point"
refuse = _architectures.refuse
OFFLOADS: tuple[str, ...] = ("cpu", "disk")
"""Where Accelerate may keep its weights while they are not computed with."""


class Options(BaseModel):
    """A cast has no options of its own: the recipe's `dtype` says everything."""

    model_config = ConfigDict(extra="forbid")


def build(job: BuildJob) -> Any:
    """Load, cast, save as safetensors; returns the cast module. Raises Unavailable, see `_architectures`."""
    import torch

    _architectures.check(job, refuse)
    model = checkpoint.load(job.model_dir, dtype=getattr(torch, job.recipe.dtype))
    model.save_pretrained(job.out)
    return model


def weight_bytes(recipe: Recipe, tensor: layers.Tensor) -> dict[str, int]:
    """Bytes by type that the artifact holds of a tensor of the checkpoint."""
    return layers.kept(tensor, recipe.dtype)
