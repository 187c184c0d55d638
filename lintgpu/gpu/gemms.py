"""GEMMs as columns of numpy arrays, so that thousands are costed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.alignment import LARGEST, alignment_classes
from lintgpu.trace.records import Gemm

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8", "fp64")
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp8": 1, "int8": 1, "fp64": 8, "int4": 0.5, "nf4": 0.5, "fp4": 0.5}
VECTOR_BYTES = 16
"""What a tensor-core kernel loads at a time (cp.async, TMA)."""
_OUTPUT_BYTES = {"fp8": 2, "int8": 4}


@dataclass(frozen=True, eq=False)
class Gemms:
    """C[M,N] = A[M,K] @ B[K,N], `batch` times; every field is an array of one entry a GEMM."""

    dtype: IntArray
    """Index into DTYPES."""
    batch: IntArray
    m: IntArray
    n: IntArray
    k: IntArray
    a_row: BoolArray
    """A is row-major (layout N); else a transposed view (T)."""
    b_row: BoolArray
    lda: IntArray
    ldb: IntArray
    ldc: IntArray
    bias: BoolArray
    offset_class: IntArray
    """Alignment class in bytes of the worst storage offset."""
    weight_bytes: NDArray[np.float64]
    """Bytes an element of B takes in memory (less than its dtype's for a quantised weight)."""

    def __len__(self) -> int:
        return len(self.m)

    def take(self, at: IntArray | BoolArray) -> Gemms:
        """The GEMMs at the positions, or where the mask is true."""
        return Gemms(**{f.name: getattr(self, f.name)[at] for f in fields(self)})

    @property
    def element_bytes(self) -> IntArray:
        """Bytes an element of A takes."""
        return _SIZES[self.dtype]

    @property
    def output_bytes(self) -> IntArray:
        """Bytes an element of C takes."""
        return _OUTPUT_SIZES[self.dtype]

    @property
    def flops(self) -> NDArray[np.float64]:
        """2 x batch x M x N x K."""
        return np.asarray(2.0 * self.batch * self.m * self.n * self.k, dtype=np.float64)

    @property
    def bytes(self) -> NDArray[np.float64]:
        """Bytes of A, B and C, each once."""
        a = self.m * self.k * self.element_bytes.astype(np.float64)
        b = self.k * self.n * self.weight_bytes
        c = self.m * self.n * self.output_bytes.astype(np.float64)
        return np.asarray(self.batch * (a + b + c), dtype=np.float64)

    def classes(self) -> tuple[IntArray, IntArray, IntArray]:
        """Alignment class in bytes of the leading dimension of A, B and C, each no better than the storage offset's."""
        size = self.element_bytes
        a, b = alignment_classes(self.lda, size), alignment_classes(self.ldb, size)
        c = alignment_classes(self.ldc, self.output_bytes)
        return np.minimum(a, self.offset_class), np.minimum(b, self.offset_class), np.minimum(c, self.offset_class)


_SIZES = np.array([int(ELEMENT_BYTES[d]) for d in DTYPES], dtype=np.int64)
_OUTPUT_SIZES = np.array([_OUTPUT_BYTES.get(d, int(ELEMENT_BYTES[d])) for d in DTYPES], dtype=np.int64)


def gemms_of(records: Sequence[Gemm], dtypes: Sequence[str]) -> Gemms:
    """Columns of trace records; `dtypes` are those the GEMMs compute in (tf32 where fp32 tensors go through TF32).

    A grouped GEMM becomes `batch` GEMMs of its ragged dim's even share. A dtype outside DTYPES is costed as fp32.
    """
    shares = [_even_groups(g) for g in records]
    sizes = [1 if g.batch < 1 else g.batch for g in records]
    return columns(
        dtypes=[d if d in DTYPES else "fp32" for d in dtypes],
        batch=sizes,
        m=[s[0] for s in shares],
        n=[s[1] for s in shares],
        k=[s[2] for s in shares],
        layout=[g.layout for g in records],
        ld=[(g.lda, g.ldb, g.ldc) for g in records],
        bias=[g.bias for g in records],
        offset=[g.offset_bytes for g in records],
        weight_dtypes=[g.weight_dtype for g in records],
    )


def misaligned_dims(gemm: Gemm, dtype: str) -> tuple[str, ...]:
    """Which of lda, ldb and ldc rule out 16-byte loads."""
    size = ELEMENT_BYTES.get(dtype, 4)
    return tuple(dim for dim in ("lda", "ldb", "ldc") if getattr(gemm, dim) * size % VECTOR_BYTES)


def _even_groups(gemm: Gemm) -> tuple[int, int, int]:
    dims = {"M": gemm.m, "N": gemm.n, "K": gemm.k}
    if gemm.groups:
        dims[gemm.groups] = max(1, round(dims[gemm.groups] / max(1, gemm.batch)))
    return dims["M"], dims["N"], dims["K"]


def columns(
    *,
    dtypes: Sequence[str],
    batch: Sequence[int],
    m: Sequence[int],
    n: Sequence[int],
    k: Sequence[int],
    layout: Sequence[str],
    ld: Sequence[tuple[int, int, int]] | None = None,
    bias: Sequence[bool] | None = None,
    offset: Sequence[int] | None = None,
    weight_dtypes: Sequence[str] | None = None,
) -> Gemms:
    """Gemms from sequences; without `ld` the leading dimensions are those of packed tensors."""
    count = len(m)
    m_, n_, k_ = (np.asarray(x, dtype=np.int64) for x in (m, n, k))
    a_row = np.array([text[0] != "T" for text in layout], dtype=np.bool_)
    b_row = np.array([text[1] != "T" for text in layout], dtype=np.bool_)
    if ld is None:
        lda, ldb, ldc = np.where(a_row, k_, m_), np.where(b_row, n_, k_), n_
    else:
        lda, ldb, ldc = np.asarray(ld, dtype=np.int64).reshape(-1, 3).T
    code = np.array([DTYPES.index(d) for d in dtypes], dtype=np.int64)
    weight = _SIZES[code].astype(np.float64)
    if weight_dtypes is not None:
        weight = np.array([ELEMENT_BYTES.get(w, size) if w else size for w, size in zip(weight_dtypes, weight, strict=True)])
    offsets = np.zeros(count, dtype=np.int64) if offset is None else np.asarray(offset, dtype=np.int64)
    return Gemms(
        dtype=code,
        batch=np.asarray(batch, dtype=np.int64),
        m=m_,
        n=n_,
        k=k_,
        a_row=a_row,
        b_row=b_row,
        lda=lda,
        ldb=ldb,
        ldc=ldc,
        bias=np.zeros(count, dtype=np.bool_) if bias is None else np.asarray(bias, dtype=np.bool_),
        offset_class=np.where(offsets == 0, LARGEST, alignment_classes(offsets, np.ones(count, dtype=np.int64))),
        weight_bytes=weight,
    )
