"""transformer_engine.pytorch: layers whose GEMMs run in fp8 under fp8_autocast, with the norm in front fused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lintgpu.trace.kernels import FusedRMSNorm, attend, fp8_linear, stands_in

SUBMODULES = ("pytorch", "common", "recipe", "attention", "fp8", "module")
"""The parts of dotted names below the package."""


_fp8: ContextVar[bool] = ContextVar("_fp8", default=False)


@contextmanager
def fp8_autocast(enabled: bool = True, *args: Any, **options: Any) -> Iterator[None]:
    """GEMMs of the layers below run in fp8 while it is open."""
    before = _fp8.set(enabled)
    try:
        yield
    finally:
        _fp8.reset(before)


autocast = fp8_autocast


@contextmanager
def fp8_model_init(*args: Any, **options: Any) -> Iterator[None]:
    """Keeps weights in fp8; they are recorded as cast in every step."""
    yield


class DelayedScaling:
    """A recipe: how scales are chosen changes no shape."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


Float8CurrentScaling = MXFP8BlockScaling = Float8BlockScaling = DelayedScaling


class Format:
    """The fp8 formats of a recipe."""

    E4M3, E5M2, HYBRID = "e4m3", "e5m2", "hybrid"


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    stands_in("transformer_engine")
    return fp8_linear(x, weight, bias) if _fp8.get() else F.linear(x, weight, bias)


def _norm(kind: str, size: int, eps: float) -> nn.Module:
    return FusedRMSNorm(size) if kind == "RMSNorm" else nn.LayerNorm(size, eps)


class Linear(nn.Linear):  # type: ignore[misc]
    """A linear layer."""

    def __init__(self, in_features: int, out_features: int, *args: Any, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias)

    def forward(self, inp: torch.Tensor, *args: Any, **options: Any) -> Any:
        """inp[..., in_features] -> [..., out_features]."""
        return _multiply(inp, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):  # type: ignore[misc]
    """torch's own."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(normalized_shape, eps)


class RMSNorm(FusedRMSNorm):
    """One kernel."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(normalized_shape)


class LayerNormLinear(nn.Module):  # type: ignore[misc]
    """A norm and a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *args: Any,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.norm = _norm(normalization, in_features, eps)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.returns_norm = return_layernorm_output

    def forward(self, inp: torch.Tensor, *args: Any, **options: Any) -> Any:
        """inp[..., in_features] -> [..., out_features]."""
        normed = self.norm(inp)
        output = _multiply(normed, self.weight, self.bias)
        return (output, normed) if self.returns_norm else output


class LayerNormMLP(nn.Module):  # type: ignore[misc]
    """A norm and two linear layers with an activation between them, gated where its name says so."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *args: Any,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        **options: Any,
    ) -> None:
        super().__init__()
        self.gated = activation.endswith("glu")
        self.norm = _norm(normalization, hidden_size, eps)
        self.fc1_weight = nn.Parameter(torch.empty(ffn_hidden_size * (2 if self.gated else 1), hidden_size))
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size))
        self.fc1_bias = nn.Parameter(torch.empty(self.fc1_weight.shape[0])) if bias else None
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size)) if bias else None

    def forward(self, inp: torch.Tensor, *args: Any, **options: Any) -> Any:
        """inp[..., hidden_size] -> the same shape."""
        inner = _multiply(self.norm(inp), self.fc1_weight, self.fc1_bias)
        inner = F.glu(inner, -1) if self.gated else F.gelu(inner)
        return _multiply(inner, self.fc2_weight, self.fc2_bias)


class DotProductAttention(nn.Module):  # type: ignore[misc]
    """Fused attention; operands are [length, batch, heads, head_dim] unless qkv_format says bshd."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        *args: Any,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        **options: Any,
    ) -> None:
        super().__init__()
        self.dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type

    def forward(self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor, *args: Any, **options: Any) -> Any:
        """The heads come back flattened: [length, batch, heads x head_dim], or batch first."""
        stands_in("transformer_engine")
        causal = "causal" in options.get("attn_mask_type", self.attn_mask_type)
        batch_first = options.get("qkv_format", self.qkv_format) == "bshd"
        q, k, v = (layer if batch_first else layer.transpose(0, 1) for layer in (query_layer, key_layer, value_layer))
        output = attend(q, k, v, dropout=self.dropout if self.training else 0.0, causal=causal).flatten(2)
        return output if batch_first else output.transpose(0, 1)
