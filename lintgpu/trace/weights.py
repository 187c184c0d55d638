"""Which tensors are weights, and which expression each of their dims came from.

A tensor is a weight when it is a parameter or a buffer, or computed from nothing else (a cast copy, a stack of experts, a
normalised or adapted weight).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lintgpu.trace.origin import expression
from lintgpu.trace.shadow import storage_id

Origins = tuple[str | None, ...]
"""One expression for each dim of a tensor, None where unknown."""


class Weights:
    """The storages that hold weights."""

    def __init__(self) -> None:
        """Starts with none."""
        # Each entry keeps its storage, so that an address cannot be reused by another tensor.
        self._known: dict[int, tuple[Any, tuple[tuple[int, int, str | None], ...]]] = {}

    def add(self, tensor: torch.Tensor, origins: Origins) -> None:
        """Say that `tensor` is a weight whose dims came from `origins`."""
        dims = tuple((size, stride, origin) for size, stride, origin in zip(tensor.shape, tensor.stride(), origins, strict=True))
        self._known[storage_id(tensor)] = (tensor.untyped_storage(), dims)

    def add_model(self, model: nn.Module, factories: dict[int, Origins]) -> None:
        """Register every parameter and buffer of `model`.

        `factories` has the origins of tensors by storage, as their factory call saw them; a tensor that was converted since
        (another dtype, another device) is matched with the numbers its module keeps.
        """
        for module in model.modules():
            numbers: dict[int, str] | None = None
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or self.holds(tensor):
                    continue
                origins = factories.get(storage_id(tensor), ())
                if len(origins) != tensor.dim():
                    origins = (None,) * tensor.dim()
                if None in origins:
                    numbers = traced_numbers(module) if numbers is None else numbers
                    origins = tuple(origin or numbers.get(size) for origin, size in zip(origins, tensor.shape, strict=True))
                self.add(tensor, origins)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` views a weight."""
        return storage_id(tensor) in self._known

    def origins(self, tensor: torch.Tensor) -> Origins:
        """The expression of each dim of `tensor`, a weight or a view of one."""
        entry = self._known.get(storage_id(tensor))
        if entry is None:
            unknown: Origins = (None,) * tensor.dim()
            return unknown
        return tuple(_origin(size, stride, entry[1]) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

    def derive(self, inputs: list[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Outputs computed from weights alone are weights; dims of equal shape keep their origin."""
        if not inputs or not all(self.holds(tensor) for tensor in inputs):
            return
        for output in outputs:
            if self.holds(output):
                continue
            same = [self.origins(tensor) for tensor in inputs if tensor.shape == output.shape]
            origins: Origins = (None,) * output.dim()
            for candidate in same:
                origins = tuple(mine or theirs for mine, theirs in zip(origins, candidate, strict=True))
            if not same:
                origins = self._by_value(inputs, output)
            self.add(output, origins)

    def _by_value(self, inputs: list[torch.Tensor], output: torch.Tensor) -> Origins:
        """Permuted, stacked or reduced weights: match sizes where only one origin has that size."""
        found: dict[int, set[str]] = {}
        for tensor in inputs:
            for size, origin in zip(tensor.shape, self.origins(tensor), strict=True):
                if origin is not None:
                    found.setdefault(size, set()).add(origin)
        return tuple(next(iter(found[size])) if len(found.get(size, ())) == 1 else None for size in output.shape)


def _origin(size: int, stride: int, dims: tuple[tuple[int, int, str | None], ...]) -> str | None:
    if size == 1:
        return None
    for index, (full, step, origin) in enumerate(dims):
        if step != stride or full == 1:
            continue
        if full == size:
            return origin
        if full > size:
            # An equal share of the dim, such as one of the three parts of a fused qkv weight.
            return f"({origin}//{full // size})" if origin is not None and full % size == 0 else None
        return _merged(size, index, dims)
    return None


def _merged(size: int, index: int, dims: tuple[tuple[int, int, str | None], ...]) -> str | None:
    """A dim that flattens dims[..index], such as experts x out_features."""
    full, step, origin = dims[index]
    text = origin or str(full)
    for outer_size, outer_step, outer_origin in reversed(dims[:index]):
        if outer_step != full * step:
            return None
        full *= outer_size
        text = f"({outer_origin or outer_size}*{text})"
        if full == size:
            return text
    return None


def traced_numbers(module: nn.Module) -> dict[int, str]:
    """The traced ints that `module` keeps as attributes, by value; values with two different origins are left out."""
    found: dict[int, str] = {}
    doubtful: set[int] = set()
    for value in module.__dict__.values():
        origin = expression(value)
        if origin is None or not isinstance(value, int):
            continue
        if found.setdefault(int(value), origin) != origin:
            doubtful.add(int(value))
    return {value: origin for value, origin in found.items() if value not in doubtful and value > 1}
