"""Opens an artifact in a fresh process and holds it against the model that was built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtool import plugins
from qtool.core import Audit, Loaded, Recipe, unmet

# Float sums differ by kernel and device; a wrongly reloaded model differs by whole logits.
EXACT_TOLERANCE = 1e-4
CHANGED_KERNEL_TOLERANCE = {"float32": 0.05, "bfloat16": 0.2, "float16": 0.2}


def open_artifact(spec: dict[str, Any], recipe: Recipe) -> Loaded:
    runtime = plugins.load("runtimes", recipe.runtime)
    model = runtime.open_model(Path(spec["artifact"]) / "model", recipe, spec["device"])
    return runtime.wrap(model, recipe, spec["device"], spec["threads"])


def audit(loaded: Loaded, spec: dict[str, Any], recipe: Recipe) -> Audit:
    """What the artifact turned out to be. Raises RuntimeError where that is not what the recipe says."""
    found = loaded.audit()
    problems = unmet(recipe.expect, found)
    if loaded.threads not in (None, spec["threads"]):
        problems.append(f"the engine runs {loaded.threads} threads, asked for {spec['threads']}")
    if problems:
        raise RuntimeError("the artifact is not what the recipe says: " + "; ".join(problems))
    return found


def check(loaded: Loaded, spec: dict[str, Any], recipe: Recipe) -> float:
    """Largest difference between this process's logits and the built model's on the check batch.

    A compiled model fuses operations and rounds elsewhere than the eager one that was built: on a CPU its weights
    are opened once more, uncompiled, and held to exactness; once, where the artifact is scored. Where it is
    timed at one text a call it is checked on one text: any other number would compile another graph, for a minute.
    Raises RuntimeError when the logits are not the same model's.
    """
    timed_at = spec.get("batch_size")
    if recipe.compile and spec["device"] == "cpu" and timed_at is None:
        eager = recipe.model_copy(update={"compile": {}})
        _compare(open_artifact(spec, eager), spec, EXACT_TOLERANCE)
    same_kernels = spec["device"] == "cpu" and not recipe.compile
    computed_in = recipe.runtime_options.get("autocast") or recipe.dtype
    tolerance = EXACT_TOLERANCE if same_kernels else CHANGED_KERNEL_TOLERANCE[computed_in]
    return _compare(loaded, spec, tolerance, rows=1 if recipe.compile and timed_at == 1 else None)


def _compare(loaded: Loaded, spec: dict[str, Any], tolerance: float, rows: int | None = None) -> float:
    import numpy as np

    with np.load(Path(spec["artifact"]) / "check.npz", allow_pickle=False) as file:
        expected = file["logits"][:rows]
        batch = {name.removeprefix("input."): file[name][:rows] for name in file.files if name != "logits"}
    found = loaded.predict(batch)
    if found.shape != expected.shape or found.dtype != np.float32:
        raise RuntimeError(
            f"logits have shape {found.shape} and type {found.dtype}, the built model's {expected.shape}"
        )
    scale = max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(found - expected).max())
    if not difference <= tolerance * scale:
        raise RuntimeError(
            f"the reloaded artifact's logits differ from the built model's by {difference:.4g}"
        )
    return difference
