"""Which of ONNX Runtime's providers runs what: a silent fallback to the CPU is found here and refused.

https://onnxruntime.ai/docs/execution-providers/: a provider that does not come up is left out with a warning, and a
node without a kernel goes to the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any


def check(providers: Sequence[str], wanted: str) -> str:
    """The session's first provider. Raises RuntimeError where it is not the one that was asked for."""
    used = providers[0] if providers else "no provider"
    if used != wanted:
        raise RuntimeError(
            f"onnxruntime runs on {used}, asked for {wanted}: its CUDA or cuDNN libraries did not load, see the log."
            " Install those of its requirements page, or use --device cpu"
        )
    return used


def assigned(subgraphs: Iterable[Any]) -> dict[str, Counter[str]]:
    """Provider: its nodes by operator, from `get_provider_graph_assignment_info`."""
    found: dict[str, Counter[str]] = {}
    for subgraph in subgraphs:
        nodes = found.setdefault(subgraph.ep_name, Counter())
        nodes.update(node.op_type for node in subgraph.get_nodes())
    return found


def refuse_products_elsewhere(nodes: dict[str, Counter[str]], wanted: str, products: Set[str]) -> None:
    """Raises RuntimeError where a matrix product runs on another provider: then copies at each layer are timed.

    Arithmetic on shapes, which ONNX Runtime keeps on the CPU on purpose, is none.
    """
    for provider, operators in nodes.items():
        if provider != wanted and (away := {name: n for name, n in operators.items() if name in products}):
            told = ", ".join(f"{count} {name}" for name, count in away.items())
            raise RuntimeError(
                f"onnxruntime put {told} on {provider}, asked for {wanted}: it has no kernel for them"
            )
