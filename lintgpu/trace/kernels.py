"""What stands in for kernels that cannot run here: their shapes are right, and the recorder is told of them.

A stand-in is written in torch as far as its GEMMs and attention go; the rest is a call of `kernel`, of which only the bytes are known.
Outside a trace the functions here compute nothing and give empty tensors of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lintgpu.trace.recorder import Recorder
from lintgpu.trace.records import BACKWARD, FORWARD
from lintgpu.trace.shadow import unmoded

Tensors = Sequence[torch.Tensor]

_library = torch.library.Library("lintgpu", "DEF")
_library.define("quantised_mm(Tensor a, Tensor b, str weight_dtype, Tensor? bias) -> Tensor")


@torch.library.impl(_library, "quantised_mm", "Meta")  # type: ignore[untyped-decorator]
def _quantised_mm(a: torch.Tensor, b: torch.Tensor, weight_dtype: str, bias: torch.Tensor | None) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def recorder() -> Recorder | None:
    """The recorder of the trace that is running, None outside one."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


def say(text: str) -> None:
    """An assumption of the trace that is running."""
    active = recorder()
    if active is not None:
        active.assumptions.setdefault(text)


def stands_in(package: str) -> None:
    """Say that a stand-in took the place of an absent package."""
    say(f"{package} is not installed: what the model calls of it was recorded by its known shapes")


def kernel(name: str, inputs: Tensors, make: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], kind: str = "opaque") -> Any:
    """One kernel that reads `inputs` and writes what `make` gives; differentiable, with one kernel for all gradients.

    `kind` is one of those of lintgpu.trace.records.Op.
    """
    return _Kernel.apply(name, kind, recorder(), make, *inputs)


class FusedRMSNorm(nn.Module):  # type: ignore[misc]
    """A root-mean-square norm as one kernel, with a weight where `affine`."""

    def __init__(self, size: Any, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if affine else None

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., size] -> the same shape."""
        inputs = (x,) if self.weight is None else (x, self.weight)
        return kernel("rms_norm", inputs, lambda: torch.empty_like(x), kind="norm")


class _Kernel(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, name: str, kind: str, active: Recorder | None, make: Callable[[], Any], *inputs: torch.Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.name, ctx.kind, ctx.recorder = name, kind, active
        with unmoded():
            made = make()
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        if active is not None:
            active.note_kernel(name, FORWARD, list(inputs), outputs, kind)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        with unmoded():
            made = [torch.empty_like(tensor) if needed else None for tensor, needed in zip(inputs, wanted, strict=True)]
        if ctx.recorder is not None:
            read = [*(gradient for gradient in gradients if gradient is not None), *inputs]
            written = [tensor for tensor in made if tensor is not None]
            ctx.recorder.note_kernel(f"{ctx.name}_backward", BACKWARD, read, written, ctx.kind)
        return (None, None, None, None, *made)


def launched(name: str, tensors: Tensors) -> None:
    """A kernel that somebody's code launches on tensors it made: it may write any of them."""
    active = recorder()
    if active is None or not tensors:
        return
    backward = torch._C._current_autograd_node() is not None
    active.note_kernel(name, BACKWARD if backward else FORWARD, list(tensors), [])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Any:
    """Attention over [batch, length, heads, head_dim] operands, as the packages of fused attention lay them out; so is the output."""
    q, k, v = (operand.transpose(1, 2) for operand in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=k.shape[1] != q.shape[1]).transpose(1, 2)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_dtype: str, unpacks: bool = False) -> Any:
    """x[..., K] times a frozen weight[N, K] that is stored as `weight_dtype`.

    `unpacks` says that a kernel of its own writes the weight in x's type first, in every pass that uses it.
    """
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    rows = x.reshape(-1, x.shape[-1])
    output = _Multiply.apply(rows, weight, bias, weight_dtype, unpacks, recorder())
    return output.view(*x.shape[:-1], weight.shape[0])


class _Multiply(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any, bias: Any, weight_dtype: str, unpacks: bool, active: Recorder | None) -> Any:
        ctx.save_for_backward(weight)
        ctx.options = weight_dtype, unpacks, active
        if unpacks:
            _unpack(active, FORWARD, weight, rows.dtype, weight_dtype)
        return torch.ops.lintgpu.quantised_mm(rows, weight.t(), weight_dtype, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        weight_dtype, unpacks, active = ctx.options
        (gradient,) = gradients
        if unpacks:
            _unpack(active, BACKWARD, weight, gradient.dtype, weight_dtype)
        rows = torch.ops.lintgpu.quantised_mm(gradient, weight, weight_dtype, None) if ctx.needs_input_grad[0] else None
        return rows, None, gradient.sum(0) if ctx.needs_input_grad[2] else None, None, None, None


def _unpack(active: Recorder | None, phase: str, weight: torch.Tensor, dtype: torch.dtype, weight_dtype: str) -> None:
    if active is not None:
        with unmoded():
            plain = torch.empty_like(weight, dtype=dtype)
            # Two values of four bits lie in a byte.
            stored = weight[: (weight.shape[0] + 1) // 2] if weight_dtype in ("nf4", "fp4", "int4") else weight
        active.note_kernel(f"dequantize_{weight_dtype}", phase, [stored], [plain])


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """x[..., K] times weight[N, K] with both cast to fp8 first, and both gradients likewise."""
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    output = _Fp8.apply(x.reshape(-1, x.shape[-1]), weight)
    return (output if bias is None else output + bias).view(*x.shape[:-1], weight.shape[0])


class _Fp8(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        rows8, weight8 = rows.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        ctx.save_for_backward(rows8, weight8)
        ctx.dtypes = rows.dtype, weight.dtype
        return _scaled(rows8, weight8.t(), rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows8, weight8 = ctx.saved_tensors
        rows_dtype, weight_dtype = ctx.dtypes
        gradient = gradients[0].to(torch.float8_e5m2)
        # fp8 GEMMs read both operands along K: what lies across is copied.
        across = gradient.t().contiguous()
        rows = _scaled(gradient, weight8.t().contiguous().t(), rows_dtype) if ctx.needs_input_grad[0] else None
        weight = _scaled(across, rows8.t().contiguous().t(), weight_dtype) if ctx.needs_input_grad[1] else None
        return rows, weight


def _scaled(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Any:
    one = torch.ones((), dtype=torch.float32)
    return torch._scaled_mm(a, b, one, one, out_dtype=dtype)
