"""Notices, and undoes, what a module changes beyond its outputs: attributes it sets, caches and lists it fills."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_MAX_CONTAINERS = 20_000
_LEAVES = (int, float, complex, str, bytes, type, type(None), torch.Tensor, torch.dtype, torch.device, types.FunctionType, types.ModuleType)


class Snapshot:
    """The dicts, lists and sets reachable from some objects, with what they held."""

    def __init__(self, roots: Iterable[Any]) -> None:
        """Takes the snapshot; tensors are compared by identity."""
        self._held: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        stack = list(roots)
        while stack and len(self._held) < _MAX_CONTAINERS:
            item = stack.pop()
            if id(item) in seen or isinstance(item, _LEAVES):
                continue
            seen.add(id(item))
            stack.extend(self._visit(item))

    def _visit(self, item: Any) -> Iterable[Any]:
        if isinstance(item, dict):
            self._held.append((item, dict(item)))
            return item.values()
        if isinstance(item, list):
            self._held.append((item, list(item)))
            return list(item)
        if isinstance(item, set):
            self._held.append((item, set(item)))
            return ()
        if isinstance(item, tuple):
            return item
        attributes = getattr(item, "__dict__", None)
        # A config is read, not written, and is large.
        if not isinstance(attributes, dict) or (hasattr(item, "to_dict") and not isinstance(item, nn.Module)):
            return ()
        return (attributes,)

    def changed(self) -> bool:
        """Whether any of them holds something else now."""
        return any(_differs(container, held) for container, held in self._held)

    def restore(self) -> None:
        """Put everything back."""
        for container, held in self._held:
            if not _differs(container, held):
                continue
            if isinstance(container, list):
                container[:] = held
            else:
                container.clear()
                container.update(held)


def _differs(container: Any, held: Any) -> bool:
    if len(container) != len(held):
        return True
    if isinstance(container, dict):
        return any(key not in container or container[key] is not value for key, value in held.items())
    if isinstance(container, set):
        return bool(container != held)
    return any(mine is not theirs for mine, theirs in zip(container, held, strict=True))
