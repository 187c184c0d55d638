"""Linear layers whose weights are stored in fewer bits: recorded with the type of their weight, which no plain GEMM would show."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lintgpu.trace.kernels import linear


class Quantised(nn.Module):  # type: ignore[misc]
    """A frozen weight of `weight_dtype` (nf4, fp4, int4, int8, fp8) that one kernel multiplies with activations of another type.

    The weight is kept as one byte an element, whatever its packing, so that its shape stays [out_features, in_features].
    """

    unpacks = False

    def __init__(self, in_features: int, out_features: int, bias: bool, weight_dtype: str, compute_dtype: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weight_dtype, self.compute_dtype = in_features, out_features, weight_dtype, compute_dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., in_features] -> [..., out_features], in x's type."""
        inner = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(inner.dtype)
        return linear(inner, self.weight, bias, self.weight_dtype, self.unpacks).to(x.dtype)


class FourBit(Quantised):
    """As bitsandbytes does 4 bits: a kernel writes the weight in the compute type, then a GEMM reads it."""

    unpacks = True


class LlmInt8(nn.Module):  # type: ignore[misc]
    """As bitsandbytes does 8 bits: the activations are cast to int8, the GEMM runs in int8 and its sums are scaled back."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., in_features] -> [..., out_features], in x's type."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        output = _Int8.apply(rows, self.weight)
        output = output if self.bias is None else output + self.bias.to(dtype)
        return output.view(*x.shape[:-1], self.out_features)


class _Int8(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return torch._int_mm(rows.to(torch.int8), weight.t()).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        return (torch.mm(gradient, weight.to(gradient.dtype)) if ctx.needs_input_grad[0] else None), None
