"""Shadow values: CPU twins of meta tensors whose contents are known.

A twin belongs to a storage, not to a tensor, so views and in-place writes through them stay right without further care:
every view of a meta storage sees the same twin storage. A storage loses its twin when something unknown is written into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MAX_BYTES = 16 << 20
MAX_FLOAT_BYTES_OF_BUILD = 32 << 10
"""While a model is built, floats are mostly weights, whose first values say nothing."""

_SWEEP_BYTES = 64 << 20


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage that `tensor` views, for as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)


class Shadows:
    """The twins of all living meta storages."""

    def __init__(self) -> None:
        """Starts with nothing known."""
        self.max_float_bytes = MAX_FLOAT_BYTES_OF_BUILD
        self._twins: dict[int, tuple[Any, torch.UntypedStorage]] = {}
        self._added = 0

    def wants(self, shape: Any, dtype: torch.dtype) -> bool:
        """Whether contents of this size are worth keeping."""
        limit = self.max_float_bytes if dtype.is_floating_point or dtype.is_complex else MAX_BYTES
        return bool(math.prod(shape) * dtype.itemsize <= limit)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the contents of `tensor` are known."""
        return not tensor.is_meta or storage_id(tensor) in self._twins

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The contents of `tensor` as a CPU tensor that shares the twin's storage, or None where unknown."""
        if not tensor.is_meta:
            return tensor.detach() if tensor.requires_grad else tensor
        entry = self._twins.get(storage_id(tensor))
        if entry is None or tensor.is_conj() or tensor.is_neg():
            return None
        return _view(entry[1], tensor)

    def attach(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Say that the meta tensor `tensor`, which fills its own storage, holds `value`."""
        storage = tensor.untyped_storage()
        twin = value.untyped_storage()
        if value.stride() != tensor.stride() or value.storage_offset() != tensor.storage_offset() or twin.nbytes() != storage.nbytes():
            twin = torch.UntypedStorage(storage.nbytes())
            with unmoded():
                _view(twin, tensor).copy_(value)
        self._put(storage, twin)

    def start(self, tensor: torch.Tensor) -> bool:
        """Give an unknown storage a twin of undefined contents, about to be overwritten through `tensor`.

        Refuses, with False, where `tensor` does not cover its whole storage or is too large.
        """
        storage = tensor.untyped_storage()
        covered = tensor.numel() * tensor.itemsize == storage.nbytes() and all(
            stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
        )
        if not covered or not self.wants(tensor.shape, tensor.dtype):
            return False
        self._put(storage, torch.UntypedStorage(storage.nbytes()))
        return True

    def forget(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into the storage of `tensor`."""
        self._twins.pop(storage_id(tensor), None)

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        """A meta tensor with the known contents of a CPU tensor."""
        with unmoded():
            tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if self.wants(value.shape, value.dtype):
            self.attach(tensor, value.detach())
        return tensor

    def _put(self, storage: torch.UntypedStorage, twin: torch.UntypedStorage) -> None:
        self._twins[int(storage._cdata)] = (StorageWeakRef(storage), twin)
        self._added += twin.nbytes()
        if self._added > _SWEEP_BYTES:
            # The weak reference keeps the address from being reused, so a dead entry can wait for the sweep.
            self._twins = {key: entry for key, entry in self._twins.items() if not entry[0].expired()}
            self._added = 0


@contextmanager
def unmoded() -> Iterator[None]:
    """Call torch past every mode, whatever is active."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> Any:
    with unmoded():
        empty = torch.empty(0, dtype=like.dtype, device="cpu")
        return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
