"""The ops of one step as plain frozen data. Imported by the parent and the worker; imports neither torch nor numpy.

dtypes are the short names bf16, fp16, fp32, fp64, fp8, int8, int4, int32, int64, bool, ... . All sizes are in elements
unless a name says bytes. An op that occurs in many identical layers is one record with a `count`, and its
module path has `*` in the place of the layer numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FORWARD = "forward"
GRAD_INPUT = "grad-input"
GRAD_WEIGHT = "grad-weight"
BACKWARD = "backward"
"""Backward ops that are neither of the two GEMM gradients (memory ops, attention)."""


@dataclass(frozen=True)
class Site:
    """A place in source code: absolute path, line and column from 1 (0 where unknown), end exclusive."""

    path: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    function: str = ""


@dataclass(frozen=True)
class Gemm:
    """C[M,N] = A[M,K] @ B[K,N], `batch` times.

    `layout` has a letter for A and one for B: N = row-major, T = a transposed view, X = neither (copied first).
    The leading dimension of an operand is the stride between its rows (N) or columns (T), in elements.
    """

    batch: int
    m: int
    n: int
    k: int
    layout: str
    lda: int
    ldb: int
    ldc: int
    bias: bool = False
    offset_bytes: int = 0
    """Smallest alignment-relevant storage offset of the operands, in bytes (0 = aligned)."""
    groups: str = ""
    """For a grouped GEMM the ragged dim: M, N or K (else empty); `m`, `n`, `k` are then totals over `batch` groups
    in that dim, split evenly."""
    weight_dtype: str = ""
    """Storage type of a quantised weight (int4, int8, fp8, nf4), empty where it is the op's dtype."""
    origins: tuple[tuple[str, str], ...] = ()
    """(dim, expression) for the dims batch, m, n, k, lda, ldb, ldc whose origin is known. The expression is Python arithmetic
    with each knob id in braces, such as "4*{n_embd}"; see lintgpu.trace.origin."""

    @property
    def flops(self) -> int:
        """2 x batch x M x N x K; a grouped GEMM's ragged dim already counts all groups."""
        return 2 * (1 if self.groups else self.batch) * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """scaled_dot_product_attention over q[B, heads, q_len, head_dim], k/v[B, kv_heads, kv_len, ...]."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    causal: bool
    mask: str = ""
    """'' without a mask, 'bool' or 'additive'; 'grad' for an additive mask that needs a gradient."""
    dropout: float = 0.0
    aligned: bool = True
    """Whether the last strides are 1 and row strides keep 16-byte alignment, as flash attention wants."""
    origins: tuple[tuple[str, str], ...] = ()

    @property
    def flops(self) -> int:
        """Of the forward pass without saving for causality: 2 x (QK^T + PV)."""
        return 2 * self.batch * self.heads * self.q_len * self.kv_len * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Conv:
    """A convolution; `Op.gemm` holds the implicit GEMM beside it (batch = groups)."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    transposed: bool
    channels_last: bool


@dataclass(frozen=True)
class Op:
    """One kind of op of a step, `count` times.

    kind is gemm, conv, attention, pointwise, reduction, norm, softmax, copy, embedding, loss, scatter, sort, random, opaque or
    view (no kernel, only CPU time).
    """

    kind: str
    name: str
    phase: str
    dtype: str
    bytes_read: int = 0
    bytes_written: int = 0
    count: int = 1
    module: str = ""
    module_class: str = ""
    call_site: Site | None = None
    constructor_site: Site | None = None
    gemm: Gemm | None = None
    attention: Attention | None = None
    conv: Conv | None = None
    shape: tuple[int, ...] = ()
    """Shape of the (first) output."""
    in_layer: bool = True
    assumed: bool = False
    """The shape rests on an oracle's answer about data or weights."""


@dataclass(frozen=True)
class Parameters:
    """What the optimizer and the gradients touch."""

    tensors: int
    elements: int
    trainable_tensors: int
    trainable_elements: int
    dtype: str


@dataclass(frozen=True)
class Trace:
    """The ops of one step of a target under a workload."""

    ops: tuple[Op, ...]
    parameters: Parameters
    basis: str
    """traced (built and run on meta) or estimated (from the config's numbers alone)."""
    model_class: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the trace assumed, one sentence each (oracle answers, even expert split, loss left out, ...)."""
    inexact_divisions: tuple[str, ...] = ()
    """Expressions a // b over knobs that left a remainder while the model was built."""
    knobs_seen: tuple[str, ...] = ()
    """Knob ids that reached any tensor shape."""
    compile_calls: tuple[str, ...] = ()
    """Modules that called torch.compile themselves while building."""
    files: tuple[str, ...] = ()
    """What the trace was made from besides the target's own files: sources of the model's classes, modules of the project and files
    it opened, and the folders of installed libraries, whose versions count."""
    variables: tuple[str, ...] = ()
    """Variables of the environment that the project's code asked for."""
    seconds: float = 0.0


@dataclass(frozen=True)
class TraceFailure:
    """Why a target could not be traced: a true reason and a way out."""

    stage: str
    """environment (no torch, no library), trust, config, build, inputs, forward, backward, limit (time, memory) or crash."""
    reason: str
    hint: str = ""
    path: str = ""
    line: int = 0
    error_type: str = ""


def op_from_json(data: dict[str, Any]) -> Op:
    """The inverse of dataclasses.asdict for an Op. Raises KeyError or TypeError on a malformed record."""
    values = dict(data)
    for key, kind in (("call_site", Site), ("constructor_site", Site)):
        if values.get(key):
            values[key] = kind(**values[key])
    if values.get("gemm"):
        values["gemm"] = Gemm(**(values["gemm"] | {"origins": _pairs(values["gemm"].get("origins", ()))}))
    if values.get("attention"):
        values["attention"] = Attention(**(values["attention"] | {"origins": _pairs(values["attention"].get("origins", ()))}))
    if values.get("conv"):
        conv: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["conv"].items()}
        values["conv"] = Conv(**conv)
    values["shape"] = tuple(values.get("shape", ()))
    return Op(**values)


def _pairs(items: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(a), str(b)) for a, b in items)


def trace_from_json(data: dict[str, Any]) -> Trace:
    """The inverse of dataclasses.asdict for a Trace. Raises KeyError or TypeError on a malformed record."""
    values = dict(data)
    values["ops"] = tuple(op_from_json(op) for op in data["ops"])
    values["parameters"] = Parameters(**data["parameters"])
    values["inputs"] = tuple((str(name), tuple(shape)) for name, shape in data.get("inputs", ()))
    values["versions"] = _pairs(data.get("versions", ()))
    for key in ("assumptions", "inexact_divisions", "knobs_seen", "compile_calls", "files", "variables"):
        values[key] = tuple(data.get(key, ()))
    return Trace(**values)
