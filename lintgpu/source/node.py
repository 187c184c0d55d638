"""Values of a JSON, YAML or TOML file with the place where each is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lintgpu.finding import Span

Key = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """One value and its children. `value` is the plain Python value: dict, list, str, int, float, bool or None."""

    value: Any
    span: Span
    key_span: Span | None = None
    """The key in front of the value; None for the root and for items of a list."""
    children: Mapping[Key, Node] = field(default_factory=dict)
    """By key of a mapping or index of a list."""
    tag: str = ""
    """An application's YAML tag such as "!new:pkg.Class", empty without one."""

    def get(self, path: str) -> Node | None:
        """The node at a dotted path such as "text_config.layers.0.size", or None. A dot inside a key is written as `\\.`."""
        node: Node | None = self
        for part in split_path(path):
            node = node._child(part) if node else None
        return node

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every node below this one with its dotted path, in the order of the file, parents first."""
        for key, child in self.children.items():
            part = escape_key(key)
            yield part, child
            for path, node in child.walk():
                yield f"{part}.{path}", node

    def _child(self, part: str) -> Node | None:
        if part in self.children:
            return self.children[part]
        return next((child for key, child in self.children.items() if not isinstance(key, str) and str(key) == part), None)


def escape_key(key: Key) -> str:
    """A key as one part of a dotted path."""
    return str(key).replace("\\", "\\\\").replace(".", "\\.")


def split_path(path: str) -> tuple[str, ...]:
    """The keys of a dotted path, with escapes undone."""
    parts = [""]
    characters = iter(path)
    for character in characters:
        if character == "\\":
            parts[-1] += next(characters, "\\")
        elif character == ".":
            parts.append("")
        else:
            parts[-1] += character
    return tuple(parts)
