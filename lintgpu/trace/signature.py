"""Says which blocks of a model are alike, so that one of them can stand for all.

Two modules are alike when they have the same class, the same attributes, parameters and buffers of the same shapes, and alike
children. Numbers that only say where a block stands among its siblings do not count.
"""

from __future__ import annotations

import ctypes
import enum
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from lintgpu.trace.origin import expression
from lintgpu.trace.records import Site
from lintgpu.trace.shadow import Shadows, unmoded
from lintgpu.trace.weights import Weights

_PLAIN = (str, bytes, bool, type(None), complex, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, type)
# What nn.Module itself keeps: parameters, buffers and children are looked at below, hooks at the time of a call.
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_DEPTH = 4

Columns = list[int]
"""The ints of a module tree in a fixed order; which of them are positions shows only in comparison with its siblings."""


def alike(root: nn.Module, shadows: Shadows, weights: Weights, site_of: Callable[[nn.Module], Site | None]) -> dict[int, int]:
    """id(module) -> number of its class of alike siblings, for each child of a container that has any.

    `site_of` says where a module was constructed: blocks of different places are never alike, nor are those whose sizes came from
    different knobs.
    """
    reader = _Reader(root, shadows, weights, site_of)
    classes: dict[Hashable, int] = {}
    found: dict[int, int] = {}
    for container in root.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        siblings = [child for child in container.children() if any(True for _ in child.children())]
        if len(siblings) < 2:
            continue
        for signature, members in _groups(container, siblings, reader).items():
            number = classes.setdefault(signature, len(classes))
            if len(members) > 1:
                found.update((id(member), number) for member in members)
    return found


def _groups(container: nn.Module, siblings: list[nn.Module], reader: _Reader) -> dict[Hashable, list[nn.Module]]:
    positions = {id(child): index for index, child in enumerate(container.children())}
    by_structure: dict[int, list[tuple[nn.Module, Columns]]] = defaultdict(list)
    for child in siblings:
        columns: Columns = []
        by_structure[reader.module(child, columns)].append((child, columns))
    groups: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for structure, members in by_structure.items():
        kept = list(_not_positions([positions[id(child)] for child, _ in members], [columns for _, columns in members]))
        for child, columns in members:
            groups[(structure, tuple(columns[i] for i in kept))].append(child)
    return groups


def _not_positions(positions: list[int], rows: list[Columns]) -> Iterator[int]:
    """Columns that are not just the position in the container, counted from any start."""
    for index, column in enumerate(zip(*rows, strict=True)):
        offsets = {value - position for value, position in zip(column, positions, strict=True)}
        if len(rows) < 2 or len(offsets) > 1:
            yield index


class _Reader:
    """Turns values into hashable signatures, modules into interned numbers."""

    def __init__(self, root: nn.Module, shadows: Shadows, weights: Weights, site_of: Callable[[nn.Module], Site | None]) -> None:
        self._tree = {id(module) for module in root.modules()}
        self._held_now: list[nn.Module] = []
        self._shadows = shadows
        self._weights = weights
        self._site_of = site_of
        self._numbers: dict[Hashable, int] = {}

    def module(self, module: nn.Module, columns: Columns) -> int:
        """The number of this structure; its ints are appended to `columns`."""
        fixed: Columns = []
        own = fixed if _is_torchs(module) else columns
        attributes = tuple((name, self.value(value, own, _DEPTH)) for name, value in module.__dict__.items() if name not in _INTERNAL)
        parameters = tuple(
            (name, _meta_of(tensor), self._weights.origins(tensor)) for name, tensor in module._parameters.items() if tensor is not None
        )
        buffers = tuple((name, self.tensor(tensor)) for name, tensor in module._buffers.items() if tensor is not None)
        children = tuple((name, self.module(child, columns)) for name, child in module._modules.items() if child is not None)
        signature = (type(module), self._site_of(module), attributes, tuple(fixed), parameters, buffers, children)
        return self._numbers.setdefault(signature, len(self._numbers))

    def tensor(self, tensor: torch.Tensor) -> Hashable:
        """Shape, strides and type, and the contents where they are known."""
        value = self._shadows.value(tensor)
        contents = None if value is None else contents_hash(value)
        return _meta_of(tensor), contents

    def value(self, value: Any, columns: Columns, depth: int) -> Hashable:
        """The signature of an attribute."""
        kind = type(value)
        if isinstance(value, _PLAIN):
            return kind, value
        if isinstance(value, int):
            columns.append(int(value))
            return int, expression(value)
        if isinstance(value, float):
            return _float_class(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return self._function(value, columns, depth)
        if depth == 0:
            return id(value)
        if isinstance(value, nn.Module):
            return self._held(value, columns)
        if isinstance(value, dict):
            return kind, tuple((str(key), self.value(item, columns, depth - 1)) for key, item in value.items())
        if isinstance(value, (list, tuple, set, frozenset)):
            return kind, tuple(self.value(item, columns, depth - 1) for item in value)
        if hasattr(value, "to_dict") or not hasattr(value, "__dict__"):
            # A config is shared by all blocks; what cannot be looked into is only like itself.
            return kind, id(value)
        return kind, tuple((name, self.value(item, columns, depth - 1)) for name, item in vars(value).items())

    def _held(self, module: nn.Module, columns: Columns) -> Hashable:
        """A module kept as a plain attribute: one of the model's tree is itself, a block's own one is what it is made of."""
        if id(module) in self._tree:
            return id(module)
        if module in self._held_now:
            return "held around", self._held_now.index(module)
        self._held_now.append(module)
        number = self.module(module, columns)
        self._held_now.pop()
        return "held", number

    def _function(self, function: Any, columns: Columns, depth: int) -> Hashable:
        code = getattr(function, "__code__", None)
        if code is None:
            return id(function)
        owner = getattr(function, "__self__", None)
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        return id(code), type(owner), tuple(self.value(cell, columns, depth - 1) if depth else id(cell) for cell in cells)


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers or derived from one: its ints (strides, dilations) are never positions."""
    return any(kind is not nn.Module and kind.__module__.startswith("torch.nn.modules.") for kind in type(module).__mro__)


def _meta_of(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _float_class(value: float) -> Hashable:
    """Rates such as stochastic depth rise from block to block without changing what runs; 0 and 1 do."""
    return (float, "rate") if 0.0 < value < 1.0 else value


def contents_hash(value: torch.Tensor) -> int:
    """A hash of the elements of a CPU tensor."""
    with unmoded():
        flat = value.contiguous()
    return hash(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.itemsize))
