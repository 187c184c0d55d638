"""What torch.compile takes off: neighbouring small ops become one kernel, and misaligned GEMMs are padded.

Between two GEMMs or attention calls, Inductor reads the inputs of a run of small ops once and writes its results once: what one op of the
run writes and the next one reads never reaches memory. The figures are fits to compiled GPT-2 training steps on an H200
(benchmarks/whole_steps.py holds them against the measured ones).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lintgpu.gpu.alignment import is_aligned
from lintgpu.gpu.costs import OpCost
from lintgpu.gpu.gemms import ELEMENT_BYTES
from lintgpu.gpu.memory import traffic, transfer_us
from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import BACKWARD, Gemm, Op

_REDUCING = frozenset({"norm", "softmax", "loss", "reduction"})
_FUSIBLE = frozenset({"pointwise", "norm", "softmax", "loss", "reduction", "copy", "random", "view"})
_BANDWIDTH = 0.52
"""Share of the bandwidth that generated kernels reach."""
_LARGEST_ROW = 16384
"""A softmax over longer rows reads its input twice: once for the largest value and the sum, once more for the result."""
_TENSORS_IN = 3
"""Of one size that a run reads: what it works on, a saved tensor, a residual. The rest is computed anew from these."""
_LARGEST_RUN = 24
_KERNELS_A_RUN = 2.0
_KERNEL_US = 1.5


def runs(ops: Sequence[Op]) -> Iterator[list[int]]:
    """Positions of the ops that fuse with each other: neighbours of one phase that occur equally often."""
    current: list[int] = []
    for i, op in enumerate(ops):
        fits = op.kind in _FUSIBLE and (not current or _alike(ops[current[-1]], op)) and len(current) < _LARGEST_RUN
        if not fits and current:
            yield current
            current = []
        if op.kind in _FUSIBLE:
            current.append(i)
    if current:
        yield current


def _alike(a: Op, b: Op) -> bool:
    return a.count == b.count and a.phase == b.phase


def fuse(ops: Sequence[Op], costs: Sequence[OpCost], profile: Profile) -> tuple[list[OpCost], list[float]]:
    """(cost of each op once its run is fused, kernels each op still launches). A run's time is shared out by what its ops took before."""
    fused = list(costs)
    kernels = [0.0 if op.kind in _FUSIBLE else 1.0 for op in ops]
    for run in runs(ops):
        launched = [i for i in run if ops[i].kind != "view"]
        before = sum(costs[i].us for i in launched)
        if before == 0:
            continue
        count = min(float(len(launched)), _KERNELS_A_RUN)
        us = min(before, _KERNEL_US * count + transfer_us(moved([ops[i] for i in launched]), _BANDWIDTH, profile))
        for i in launched:
            fused[i] = _scaled(costs[i], us / before)
            kernels[i] = count / len(launched)
    return fused, kernels


def moved(run: Sequence[Op]) -> float:
    """Bytes that the kernels of a fused run read and write."""
    read: dict[int, list[float]] = defaultdict(list)
    kept: list[_Written] = []
    again = 0.0
    for op in run:
        left = float(op.bytes_read if traffic(op).reads else 0)
        size = math.prod(op.shape)
        for i in reversed(range(len(kept))):
            if kept[i].bytes <= left and (kept[i].elements == size or op.kind in _REDUCING):
                left -= kept[i].bytes
                kept[i] = replace(kept[i], taken=True)
        if op.kind == "reduction":
            again += left  # Sums over rows and over columns are kernels of their own.
        else:
            read[size].append(left)
        again += _read_again(op, left)
        kept.append(_Written(size, float(op.bytes_written)))
    inputs = sum(sum(sorted(sizes)[:_TENSORS_IN]) for sizes in read.values())
    return inputs + again + sum(written.bytes for written in kept if not written.taken)


@dataclass(frozen=True)
class _Written:
    """What an op of the run writes; `taken` by a later one it stays in registers."""

    elements: int
    bytes: float
    taken: bool = False


def _read_again(op: Op, external: float) -> float:
    if op.kind == "norm" and op.phase == BACKWARD:
        return float(op.bytes_read)  # The gradients of its weight and bias are sums over columns.
    if op.kind == "softmax" and op.shape and op.shape[-1] > _LARGEST_ROW:
        return external
    return 0.0


def _scaled(cost: OpCost, factor: float) -> OpCost:
    return replace(cost, us=cost.us * factor, low=cost.low * factor, high=cost.high * factor)


def padded(op: Op) -> Op | None:
    """The op with its GEMM's dims padded to 16 bytes, as Inductor would; None where it pads nothing."""
    gemm = op.gemm
    if gemm is None or op.kind != "gemm" or gemm.groups or gemm.weight_dtype:
        return None
    size = int(ELEMENT_BYTES.get(op.dtype, 4))
    if size < 2 or all(is_aligned(ld, size) for ld in (gemm.lda, gemm.ldb, gemm.ldc)):
        return None
    step = 16 // size
    m, n, k = (-(-dim // step) * step for dim in (gemm.m, gemm.n, gemm.k))
    lda, ldb = (k if gemm.layout[0] != "T" else m), (n if gemm.layout[1] != "T" else k)
    return replace(op, gemm=replace(gemm, m=m, n=n, k=k, lda=lda, ldb=ldb, ldc=n, offset_bytes=0))


def padding_us(gemm: Gemm, dtype: str, profile: Profile) -> float:
    """Time to write the misaligned operands into padded memory; the result is a view of a padded one."""
    size = ELEMENT_BYTES.get(dtype, 4)
    sizes = ((gemm.lda, gemm.m * gemm.k), (gemm.ldb, gemm.k * gemm.n))
    elements = sum(count for ld, count in sizes if not is_aligned(ld, int(size)))
    return 2.0 + transfer_us(gemm.batch * elements * size, _BANDWIDTH, profile)
