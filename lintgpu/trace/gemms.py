"""Reads the GEMM out of an op's operands: dims, layout, leading dims, and in a backward pass which gradient it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lintgpu.trace.records import Conv, Gemm
from lintgpu.trace.shadow import storage_id

Dims = tuple[int, int, int]
Names = tuple[str | None, str | None, str | None]


@dataclass(frozen=True)
class Operands:
    """The operands of C[M,N] = A[M,K] @ B[K,N]: two tensors whose last two dims are the matrices."""

    a: torch.Tensor
    b: torch.Tensor
    batch: int
    m: int
    n: int
    k: int
    bias: bool = False
    groups: str = ""
    output: torch.Tensor | None = None
    weight_dtype: str = ""
    """How B is stored where its tensor's dtype does not say: nf4, int4."""


@dataclass(frozen=True)
class ForwardGemm:
    """What a backward op has to know about the forward GEMM it differentiates."""

    a_storage: int
    b_storage: int
    a_is_weight: bool
    b_is_weight: bool
    m: str | None
    n: str | None
    k: str | None
    sizes: Dims


def layout_of(matrix: torch.Tensor) -> tuple[str, int]:
    """(letter, leading dim) of the last two dims: N = row-major, T = a transposed view, X = neither (copied first)."""
    if matrix.dim() == 1:
        return ("N", 1) if matrix.stride(0) == 1 else ("X", matrix.stride(0))
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    if column_stride == 1 and (row_stride >= columns or rows == 1):
        return "N", max(row_stride, columns)
    if row_stride == 1 and (column_stride >= rows or columns == 1):
        return "T", max(column_stride, rows)
    if columns == 1 and row_stride >= 1:
        return "N", row_stride
    if rows == 1 and column_stride >= 1:
        return "T", column_stride
    return "X", columns


def offset_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The alignment that the least aligned operand's start has within its storage: 0 when all are at a multiple of 128 bytes."""
    worst = 0
    for tensor in tensors:
        offset = tensor.storage_offset() * tensor.itemsize % 128
        if offset and (not worst or offset & -offset < worst & -worst):
            worst = offset
    return worst


def gemm_of(operands: Operands, origins: Sequence[tuple[str, str]]) -> Gemm:
    """The record of a GEMM; `origins` are (dim, expression) for batch, m, n and k."""
    letter_a, lda = layout_of(operands.a)
    letter_b, ldb = layout_of(operands.b)
    ldc = operands.n
    if operands.output is not None and operands.output.dim() >= 2:
        ldc = layout_of(operands.output)[1]
    named = dict(origins)
    contiguous = {"lda": ("k" if letter_a != "T" else "m", lda), "ldb": ("n" if letter_b != "T" else "k", ldb), "ldc": ("n", ldc)}
    sizes = {"m": operands.m, "n": operands.n, "k": operands.k}
    leading = [(name, named[dim]) for name, (dim, value) in contiguous.items() if dim in named and sizes[dim] == value]
    return Gemm(
        batch=int(operands.batch),
        m=int(operands.m),
        n=int(operands.n),
        k=int(operands.k),
        layout=letter_a + letter_b,
        lda=int(lda),
        ldb=int(ldb),
        ldc=int(ldc),
        bias=operands.bias,
        offset_bytes=offset_bytes((operands.a, operands.b)),
        groups=operands.groups,
        origins=(*origins, *(pair for pair in leading if pair[0] not in named)),
    )


def _mm(a: torch.Tensor, b: torch.Tensor, output: Any, bias: bool = False) -> Operands:
    return Operands(a, b, 1, a.shape[0], b.shape[1], a.shape[1], bias, output=output)


def _bmm(a: torch.Tensor, b: torch.Tensor, output: Any, bias: bool = False) -> Operands:
    return Operands(a, b, a.shape[0], a.shape[1], b.shape[2], a.shape[2], bias, output=output)


def _mv(a: torch.Tensor, b: torch.Tensor, output: Any, bias: bool = False) -> Operands:
    return Operands(a, b.unsqueeze(1), 1, a.shape[0], 1, a.shape[1], bias)


def _grouped(args: Sequence[Any], output: Any) -> Operands:
    """_grouped_mm: which of the operands is 2-D says which dim is ragged over the groups."""
    a, b = args[0], args[1]
    if a.dim() == 2 and b.dim() == 3:
        return Operands(a, b, b.shape[0], a.shape[0], b.shape[2], a.shape[1], groups="M", output=output)
    if a.dim() == 3 and b.dim() == 2:
        return Operands(a, b, a.shape[0], a.shape[1], b.shape[1], a.shape[2], groups="N", output=output)
    if a.dim() == 2:
        return Operands(a, b, output.shape[0], a.shape[0], b.shape[1], a.shape[1], groups="K", output=output)
    return _bmm(a, b, output)


READERS: dict[str, Callable[[Sequence[Any], Any], Operands]] = {
    "mm": lambda args, out: _mm(args[0], args[1], out),
    "_int_mm": lambda args, out: _mm(args[0], args[1], out),
    "_scaled_mm": lambda args, out: _mm(args[0], args[1], out),
    "_scaled_mm_v2": lambda args, out: _mm(args[0], args[1], out),
    "lintgpu::quantised_mm": lambda args, out: replace(_mm(args[0], args[1], out, bias=args[3] is not None), weight_dtype=args[2]),
    "addmm": lambda args, out: _mm(args[1], args[2], out, bias=True),
    "addmm_": lambda args, out: _mm(args[1], args[2], out, bias=True),
    "_addmm_activation": lambda args, out: _mm(args[1], args[2], out, bias=True),
    "bmm": lambda args, out: _bmm(args[0], args[1], out),
    "baddbmm": lambda args, out: _bmm(args[1], args[2], out, bias=True),
    "baddbmm_": lambda args, out: _bmm(args[1], args[2], out, bias=True),
    "addbmm": lambda args, out: _bmm(args[1], args[2], None, bias=True),
    "mv": lambda args, out: _mv(args[0], args[1], out),
    "addmv": lambda args, out: _mv(args[1], args[2], out, bias=True),
    "addmv_": lambda args, out: _mv(args[1], args[2], out, bias=True),
    "dot": lambda args, out: Operands(args[0].unsqueeze(0), args[1].unsqueeze(1), 1, 1, 1, args[0].shape[0]),
    "vdot": lambda args, out: Operands(args[0].unsqueeze(0), args[1].unsqueeze(1), 1, 1, 1, args[0].shape[0]),
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
}
"""Op name -> (arguments, output) -> its operands."""


def backward_dims(forward: ForwardGemm, operands: Operands) -> tuple[bool | None, Names]:
    """(whether the gradient is that of a weight, origins of m, n, k) of a GEMM in the backward pass of `forward`.

    Of grad_A[M,K] = grad_C @ B^T the saved operand is B; of grad_B[K,N] = A^T @ grad_C it is A. Either may come out
    transposed, which shows in the place of the saved operand. None where neither operand is the saved one.
    """
    first, second = storage_id(operands.a), storage_id(operands.b)
    m, n, k = forward.m, forward.n, forward.k
    if second == forward.b_storage:
        return forward.a_is_weight, (m, k, n)
    if first == forward.a_storage:
        return forward.b_is_weight, (k, n, m)
    if first == forward.b_storage:
        return forward.a_is_weight, (k, m, n)
    if second == forward.a_storage:
        return forward.b_is_weight, (n, k, m)
    return _by_size(forward, (operands.m, operands.n, operands.k))


def _by_size(forward: ForwardGemm, sizes: Dims) -> tuple[bool | None, Names]:
    m, n, k = forward.sizes
    names = {"m": forward.m, "n": forward.n, "k": forward.k}
    roles = {(m, k, n): "mkn", (k, n, m): "knm", (k, m, n): "kmn", (n, k, m): "nkm"}
    role = roles.get(sizes)
    if role is None:
        return None, (None, None, None)
    weight = forward.a_is_weight if role in ("mkn", "kmn") else forward.b_is_weight
    return weight, (names[role[0]], names[role[1]], names[role[2]])


def conv_of(input_: Any, weight: Any, output: Sequence[int], stride: Sequence[int], groups: int, transposed: bool) -> Conv:
    """The record of a convolution over `input_` [N, C, ...] with `weight` that gives a tensor of shape `output`."""
    return Conv(
        input=tuple(int(size) for size in input_.shape),
        weight=tuple(int(size) for size in weight.shape),
        output=tuple(int(size) for size in output),
        stride=tuple(int(step) for step in stride),
        groups=int(groups),
        transposed=bool(transposed),
        channels_last=is_channels_last(input_),
    )


def is_channels_last(tensor: Any) -> bool:
    """Whether the channels of [N, C, ...] lie next to each other in memory."""
    return bool(tensor.dim() > 3 and tensor.shape[1] > 1 and tensor.stride(1) == 1)


def conv_gemms(conv: Conv, bias: bool, origins: tuple[str | None, str | None]) -> dict[str, Gemm]:
    """The implicit GEMMs of a convolution: forward, grad-input and grad-weight.

    Forward: M = images x output pixels, N = output channels of a group, K = input channels of a group x kernel; all three do the
    same number of multiplications. `origins` are those of the output and input channels. A transposed convolution is the
    input gradient of a plain one.
    """
    out_channels, in_channels = conv.output[1] // conv.groups, conv.input[1] // conv.groups
    kernel = math.prod(conv.weight[2:])
    pixels_in, pixels_out = conv.input[0] * math.prod(conv.input[2:]), conv.output[0] * math.prod(conv.output[2:])
    steps = pixels_in if conv.transposed else pixels_out
    out_name, in_name = origins if conv.groups == 1 else (None, None)
    in_kernel = f"({in_name}*{kernel})" if in_name and kernel > 1 else in_name
    out_kernel = f"({out_name}*{kernel})" if out_name and kernel > 1 else out_name
    unstrided = pixels_in == pixels_out
    narrow = (steps, out_channels, in_channels * kernel, out_name, in_kernel)
    wide = (steps, out_channels * kernel, in_channels, out_kernel, in_name)
    forward = narrow if not conv.transposed or unstrided else wide
    gradient = (
        (steps, in_channels, out_channels * kernel, in_name, out_kernel)
        if conv.transposed or unstrided
        else (steps, in_channels * kernel, out_channels, in_kernel, out_name)
    )
    weight = (
        (out_channels, in_channels * kernel, steps, out_name, in_kernel)
        if not conv.transposed
        else (in_channels, out_channels * kernel, steps, in_name, out_kernel)
    )
    return {
        "forward": _implicit(conv, "NT", forward[:3], (("n", forward[3]), ("k", forward[4])), bias),
        "grad-input": _implicit(conv, "NN", gradient[:3], (("n", gradient[3]), ("k", gradient[4])), False),
        "grad-weight": _implicit(conv, "TN", weight[:3], (("m", weight[3]), ("n", weight[4])), False),
    }


def _implicit(conv: Conv, layout: str, sizes: Dims, origins: Sequence[tuple[str, str | None]], bias: bool) -> Gemm:
    m, n, k = (int(size) for size in sizes)
    lda = k if layout[0] == "N" else m
    ldb = n if layout[1] == "N" else k
    known = tuple((name, origin) for name, origin in origins if origin is not None)
    return Gemm(conv.groups, m, n, k, layout, lda, ldb, n, bias, origins=known)
