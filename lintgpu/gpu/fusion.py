"""What torch.compile takes off: neighbouring small ops become one kernel, and misaligned GEMMs are padded.

Between two GEMMs or attention calls, Inductor reads the inputs of a run of small ops once and writes its results once, whatever the
number of ops. The figures are fits to compiled GPT-2 and Llama training steps on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lintgpu.gpu.alignment import is_aligned
from lintgpu.gpu.costs import OpCost
from lintgpu.gpu.gemms import ELEMENT_BYTES
from lintgpu.gpu.memory import traffic, transfer_us
from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import Gemm, Op

_FUSIBLE = frozenset({"pointwise", "norm", "softmax", "loss", "reduction", "copy", "random", "view"})
_BANDWIDTH = 0.72
"""Share of the bandwidth that generated kernels reach."""
_PASSES = 1.3
"""Bytes a fused run moves over those of its largest op."""
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
        us = min(before, _KERNEL_US * count + transfer_us(_PASSES * max(_moved(ops[i]) for i in launched), _BANDWIDTH, profile))
        for i in launched:
            fused[i] = _scaled(costs[i], us / before)
            kernels[i] = count / len(launched)
    return fused, kernels


def _moved(op: Op) -> float:
    return float(op.bytes_written + (op.bytes_read if traffic(op).reads else 0))


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
    """Time to copy the misaligned operands and the result into and out of padded ones."""
    size = ELEMENT_BYTES.get(dtype, 4)
    sizes = ((gemm.lda, gemm.m * gemm.k), (gemm.ldb, gemm.k * gemm.n), (gemm.ldc, gemm.m * gemm.n))
    elements = sum(count for ld, count in sizes if not is_aligned(ld, int(size)))
    return 2.0 + transfer_us(2.0 * gemm.batch * elements * size, 0.5, profile)
