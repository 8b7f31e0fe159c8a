"""CUDA graphs under torch.compile: demanded, told when a call begins, and counted.

Inductor compiles once with dynamic shapes and records a CUDA graph for each shape that comes
(https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html). Where it cannot, it says so in a log
and runs without: here that is an error. A graph's outputs lie in memory that the next call writes into: whoever
calls must have copied them, as `predict` does to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODES = ("reduce-overhead", "max-autotune")
"""Modes of `torch.compile` that record CUDA graphs."""
CALLS = 3
"""A shape's first call warms up, its second records, its third is the first one played back."""


class Recorded:
    """A compiled module that has recorded a shape before it answers it for the first time.

    So no later call of that shape pays for it, whichever call that is: a warm-up that has seen every shape once is
    enough. What a call gives is overwritten by the next.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        import torch
        import torch._inductor.config as inductor

        # for the whole process: a graph that cannot be recorded raises, instead of running without one
        inductor.triton.cudagraph_or_error = True
        # a graph for each length of a text is what is wanted: no warning at the ninth
        inductor.triton.cudagraph_dynamic_shape_warn_limit = None
        self._run, self._shapes = run, set()
        self._begin = torch.compiler.cudagraph_mark_step_begin

    def __call__(self, **inputs: Any) -> Any:
        shape = tuple(inputs["input_ids"].shape)
        output = None
        for _ in range(1 if shape in self._shapes else CALLS):
            self._begin()  # what earlier calls gave is not needed any more
            output = self._run(**inputs)
        self._shapes.add(shape)
        return output


def found() -> dict[str, str]:
    """Facts for an audit: `cuda_graphs` is 'recorded', or why it is not, and how many there are."""
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    if skips := counters["inductor"]["cudagraph_skips"]:
        return {"cuda_graphs": f"left out {skips} times"}
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return count(manager)


def count(manager: Any) -> dict[str, str]:
    """`found` of PyTorch's manager of recorded graphs, None where nothing was ever recorded."""
    nodes = [] if manager is None else [node for roots in manager.roots.values() for node in roots]
    recorded = 0
    while nodes:
        node = nodes.pop()
        recorded += 1
        nodes += [child for children in node.children.values() for child in children]
    if not recorded:
        return {"cuda_graphs": "none recorded"}
    return {"cuda_graphs": "recorded", "cuda_graphs_recorded": str(recorded)}


def gpu() -> dict[str, str]:
    """Name and compute capability of the GPU that this process uses, and PyTorch's CUDA version."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda_capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
    }
