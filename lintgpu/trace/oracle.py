"""Answers to questions about values that depend on weights or data, which a trace cannot know.

A bool is True, a number is 1, a boolean mask selects everything, `unique` finds everything different. Where the values are
known to fall into classes (expert indices out of a top-k, one-hot masks), a class gets its even share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lintgpu.trace.shadow import storage_id, unmoded

SHAPE_DEPENDENT = frozenset(
    ["nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave", "bincount", "nonzero_static"]
)


class EvenSizes(list[int]):
    """Sizes that depend on data: made to fit where they are used as split sizes."""


class Classes:
    """Which integer tensors hold class indices, and which masks select one class of several; by storage."""

    def __init__(self) -> None:
        """Starts with none."""
        self._indices: dict[int, tuple[Any, int]] = {}
        self._masks: dict[int, tuple[Any, int]] = {}

    def classes_of(self, tensor: torch.Tensor) -> int:
        """How many classes the indices in `tensor` range over, 0 where unknown."""
        return self._indices.get(storage_id(tensor), (None, 0))[1]

    def share_of(self, mask: torch.Tensor) -> int:
        """One in how many elements of `mask` is set; 1 where unknown."""
        return self._masks.get(storage_id(mask), (None, 1))[1]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """`target` stands for `source`."""
        for table in (self._indices, self._masks):
            known = table.get(storage_id(source))
            if known is not None:
                self._put(table, target, known[1])

    def note(self, name: str, args: Sequence[Any], output: Any) -> None:
        """Follow class indices and masks through the op `name`."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return
        if name in ("topk", "sort", "max", "argmax", "argsort", "multinomial"):
            self._note_selection(name, args, first, output)
        elif name in ("eq", "one_hot", "scatter", "scatter_"):
            self._note_mask(name, args, first, output)
        elif isinstance(output, torch.Tensor) and output.shape == first.shape:
            self._follow(first, output)

    def _note_selection(self, name: str, args: Sequence[Any], first: torch.Tensor, output: Any) -> None:
        indices = output if isinstance(output, torch.Tensor) else output[1]
        inherited = self.classes_of(first)
        if first.dtype.is_floating_point and first.dim():
            position = 2 if name == "topk" else 1
            dim = args[position] if len(args) > position and isinstance(args[position], int) else -1
            self._put(self._indices, indices, first.shape[dim])
        elif name == "sort" and inherited:
            self._put(self._indices, output[0], inherited)

    def _note_mask(self, name: str, args: Sequence[Any], first: torch.Tensor, output: Any) -> None:
        if name == "eq":
            other = args[1]
            count = self.classes_of(first)
            if not count and isinstance(other, torch.Tensor):
                count = self.classes_of(other)
            if count:
                self._put(self._masks, output, count)
        elif name.startswith("scatter") and len(args) > 3 and isinstance(args[2], torch.Tensor):
            # one_hot is zeros.scatter_(-1, index, 1): one of its last dim's elements is set.
            count = self.classes_of(args[2])
            if count and isinstance(args[3], (bool, int, float)) and args[3] == 1 and args[2].shape[-1] == 1:
                self._put(self._masks, output, count)

    def _follow(self, source: torch.Tensor, output: torch.Tensor) -> None:
        for table in (self._indices, self._masks):
            known = table.get(storage_id(source))
            if known is not None and not output.dtype.is_floating_point:
                self._put(table, output, known[1])

    @staticmethod
    def _put(table: dict[int, tuple[Any, int]], tensor: torch.Tensor, count: int) -> None:
        if count > 1:
            table[storage_id(tensor)] = (StorageWeakRef(tensor.untyped_storage()), count)


def scalar(tensor: torch.Tensor) -> bool | int | float:
    """The answer for `.item()`."""
    if tensor.dtype == torch.bool:
        return True
    return 0.5 if tensor.dtype.is_floating_point else 1


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """The answer for `.tolist()` and `.numpy()`: a CPU tensor full of `scalar`."""
    with unmoded():
        return torch.full(tensor.shape, scalar(tensor), dtype=tensor.dtype, device="cpu")


def shape_of(name: str, args: Sequence[Any], kwargs: dict[str, Any], classes: Classes) -> Any:
    """Meta outputs for an op of SHAPE_DEPENDENT."""
    tensor = args[0]
    selected = tensor.numel() // classes.share_of(tensor)
    if name == "nonzero":
        return _indices(selected, tensor.dim())
    if name == "nonzero_static":
        return _indices(kwargs["size"], tensor.dim())
    if name == "masked_select":
        full = torch.broadcast_shapes(tensor.shape, args[1].shape)
        return torch.empty((full.numel() // classes.share_of(args[1]),), dtype=tensor.dtype, device="meta")
    if name == "repeat_interleave":
        return _indices(kwargs.get("output_size") or tensor.numel())
    if name == "bincount":
        minimum = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        return _indices(max(1, minimum, classes.classes_of(tensor)))
    return _unique(name, args)


def _unique(name: str, args: Sequence[Any]) -> Any:
    tensor = args[0]
    if name == "unique_dim":
        count = tensor.shape[args[1]]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), _indices(count), _indices(count)
    return torch.empty((tensor.numel(),), dtype=tensor.dtype, device="meta"), _indices(*tensor.shape), _indices(tensor.numel())


def _indices(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def index_all(args: Sequence[Any], classes: Classes) -> list[Any]:
    """The arguments of aten::index with boolean masks replaced by as many integer indices as they are taken to select."""
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            selected = index.numel() // classes.share_of(index)
            indices += [_indices(selected) for _ in range(index.dim())]
        else:
            indices.append(index)
    return [args[0], indices, *args[2:]]
