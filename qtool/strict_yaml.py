"""YAML that people write for qtool, recipes and policies: safe, without aliases, no key twice."""

from __future__ import annotations

from typing import Any

import yaml

# libyaml's parser is ten times faster than the one in Python, and `qtool recipes` reads the whole book
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class StrictLoader(_SafeLoader):
    """Safe YAML without aliases (a bomb needs them, a file of ours does not) and without repeated keys."""

    def get_single_node(self) -> Any:
        root = super().get_single_node()
        seen, left = set(), [root] if root is not None else []
        while left:
            node = left.pop()
            if id(node) in seen:
                raise yaml.YAMLError("aliases (*name) are not allowed here")
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                left += [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                left += node.value
        return root

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key is not a plain word (line {key.start_mark.line + 1})")
            if key.value in seen:
                raise yaml.YAMLError(f"key '{key.value}' stands twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Raises yaml.YAMLError, and whatever a value that is none (a date, say) makes the parser raise."""
    return yaml.load(text, Loader=StrictLoader)
