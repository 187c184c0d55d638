"""Ops bound by memory: bytes over the bandwidth they reach, or elements over the rate of kernels that load one at a time.

The figures are fits to kernel times on an H200 (torch 2.11; benchmarks/measure_ops.py), stated per SM or as shares of the
datasheet's bandwidth so that they carry over: contiguous elementwise kernels reach 0.9 of it, kernels that broadcast, cast upwards or
read strided data are limited by elements (about 2.7 G elements/s an SM), and normalisation and reductions pay for each row besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import BACKWARD, Op

FloatArray = NDArray[np.float64]

_ELEMENT_BYTES = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
L2_SHARE = 0.45
"""Of the L2, how much a tensor may fill and still be found there."""
L2_SPEEDUP = 1.6
ELEMENTS_PER_SM = 2.7e9
"""Elements a second an SM handles in kernels that load one element at a time."""


@dataclass(frozen=True)
class Traffic:
    """How a kind of kernel uses the memory."""

    share: float
    """Of the datasheet's bandwidth, on large tensors."""
    floor_us: float
    row_us: float = 0.0
    """SM-microseconds for each row that is reduced."""
    reads: bool = True
    """Whether the bytes read count; a loss that gathers one value a row reads next to nothing."""
    launches: int = 1


_KINDS = {
    "pointwise": Traffic(0.90, 0.9),
    "copy": Traffic(0.88, 0.9),
    "reduction": Traffic(0.80, 2.2),
    "norm": Traffic(0.69, 2.4, 0.16),
    "softmax": Traffic(0.45, 2.2),
    "embedding": Traffic(0.80, 2.0),
    "loss": Traffic(0.80, 8.0),
    "scatter": Traffic(0.40, 3.0),
    "sort": Traffic(0.10, 15.0),
    "random": Traffic(0.70, 1.5),
    "opaque": Traffic(0.60, 3.0),
    "view": Traffic(1.0, 0.0),
}
_OPS = {
    "native_layer_norm_backward": Traffic(0.50, 3.0, 0.42, launches=2),
    "native_batch_norm_backward": Traffic(0.55, 4.0),
    "_log_softmax": Traffic(0.52, 2.2),
    "_log_softmax_backward_data": Traffic(0.66, 2.2),
    "nll_loss_forward": Traffic(0.80, 9.0, reads=False),
    "nll_loss2d_forward": Traffic(0.80, 9.0, reads=False),
    "nll_loss_backward": Traffic(0.95, 10.0, reads=False, launches=2),
    "nll_loss2d_backward": Traffic(0.95, 10.0, reads=False, launches=2),
    "embedding_dense_backward": Traffic(0.60, 120.0, launches=20),
    "native_dropout": Traffic(0.65, 1.2),
    "gelu": Traffic(0.75, 0.9),
    "gelu_backward": Traffic(0.72, 1.2),
    "tanh": Traffic(0.82, 0.9),
}
_COLUMN_SUM = Traffic(0.83, 7.0, 0.08)
"""A sum over all rows, as for the gradient of a bias."""
_LOADS_SINGLY = frozenset(
    {"clone", "slice_backward", "masked_fill", "repeat", "roll", "flip", "tril", "triu", "constant_pad_nd", "index_select"}
)


def traffic(op: Op) -> Traffic:
    """How the kernel of `op` uses the memory."""
    if op.kind == "reduction" and op.name == "sum" and op.phase == BACKWARD and (not op.shape or op.shape[-1] != 1):
        return _COLUMN_SUM
    return _OPS.get(op.name, _KINDS.get(op.kind, _KINDS["opaque"]))


def memory_us(ops: Sequence[Op], profile: Profile) -> FloatArray:
    """Time in microseconds of one occurrence of each op."""
    return np.array([_one(op, profile) for op in ops], dtype=np.float64)


def _one(op: Op, profile: Profile) -> float:
    kind = traffic(op)
    if op.kind == "view":
        return 0.0
    moved = float(op.bytes_written + (op.bytes_read if kind.reads else 0))
    us = transfer_us(moved, kind.share, profile)
    if kind.row_us:
        us += kind.row_us * _rows(op) / profile.sms
    if _loads_singly(op):
        us = max(us, math.prod(op.shape) / (ELEMENTS_PER_SM * profile.sms) * 1e6)
    return kind.floor_us + us


def transfer_us(moved: float, share: float, profile: Profile) -> float:
    """Microseconds to move `moved` bytes at `share` of the DRAM bandwidth, the part that fits L2 faster."""
    rate = profile.bandwidth_gbps * 1e3 * share
    cached = min(moved, L2_SHARE * profile.l2_mb * 1e6)
    return cached / (rate * L2_SPEEDUP) + (moved - cached) / rate


def _rows(op: Op) -> float:
    size = _ELEMENT_BYTES.get(op.dtype, 4)
    if op.kind == "reduction":
        return op.bytes_read / max(1, op.bytes_written)
    width = op.shape[-1] if op.shape else 1
    return op.bytes_read / (size * max(1, width)) / (2 if op.phase == BACKWARD else 1)


def _loads_singly(op: Op) -> bool:
    """Broadcast operands, upward casts and strided reads: the vectorised kernels do not take them."""
    if op.name in _LOADS_SINGLY:
        return True
    if op.kind not in ("pointwise", "copy") or not op.shape:
        return False
    whole = math.prod(op.shape) * _ELEMENT_BYTES.get(op.dtype, 4)
    casts_up = op.name == "_to_copy" and op.bytes_read < op.bytes_written
    mixed = op.kind == "pointwise" and op.name != "where" and whole > 0 and op.bytes_read % whole != 0
    return casts_up or mixed
