"""flash_attn: fused attention over [batch, length, heads, head_dim], its packed and variable-length forms, and its small fused layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lintgpu.trace.kernels import FusedRMSNorm, attend, kernel, say, stands_in

SUBMODULES = (
    "flash_attn_interface",
    "bert_padding",
    "layers",
    "rotary",
    "ops",
    "rms_norm",
    "fused_dense",
    "losses",
    "cross_entropy",
    "utils",
)
"""The parts of dotted names below the package."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *args: Any,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """q[B, Lq, H, D], k and v[B, Lk, Hkv, D] -> [B, Lq, H, D]."""
    stands_in("flash_attn")
    output = attend(q, k, v, dropout=dropout_p, causal=causal)
    return (output, _statistics(q), None) if return_attn_probs else output


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Any:
    """qkv[B, L, 3, H, D] -> [B, L, H, D]."""
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, **options)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, **options: Any
) -> Any:
    """q[B, Lq, H, D], kv[B, Lk, 2, Hkv, D] -> [B, Lq, H, D]."""
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *args: Any,
    return_attn_probs: bool = False,
    **options: Any,
) -> Any:
    """q[total, H, D], k and v[total, Hkv, D] of sequences end to end -> [total, H, D]."""
    stands_in("flash_attn")
    say("sequences of different lengths were taken to be equally long")
    batch = max(1, cu_seqlens_q.shape[0] - 1)
    output = attend(_even(q, batch), _even(k, batch), _even(v, batch), dropout=dropout_p, causal=causal).flatten(0, 1)
    output = F.pad(output, (0, 0, 0, 0, 0, q.shape[0] - output.shape[0])) if output.shape[0] < q.shape[0] else output
    return (output, None, None) if return_attn_probs else output


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any = None, *args: Any, **options: Any
) -> Any:
    """qkv[total, 3, H, D] -> [total, H, D]."""
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """q[total, H, D], kv[total, 2, Hkv, D] -> [total, H, D]."""
    return flash_attn_varlen_func(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options)


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **options: Any) -> Any:
    """q[B, Lq, H, D] over a cache [B, L, Hkv, D], taken to be full."""
    stands_in("flash_attn")
    return attend(q, k_cache, v_cache, causal=bool(options.get("causal", False)))


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Rotates x[B, L, H, D]."""
    stands_in("flash_attn")
    return kernel("flash_attn.apply_rotary_emb", (x, cos, sin), lambda: torch.empty_like(x))


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, *args: Any) -> Any:
    """The rows of hidden_states[B, L, ...] that the mask keeps, their indices, cumulative lengths, the longest, and all lengths."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    cumulative = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cumulative, int(lengths.max().item()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of unpad_input: [total, ...] -> [B, L, ...] with zeros where there is nothing."""
    output = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return output.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of x."""
    return x[indices]


class RMSNorm(FusedRMSNorm):
    """flash_attn.ops.rms_norm.RMSNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size)


class FusedDense(nn.Linear):  # type: ignore[misc]
    """flash_attn.ops.fused_dense.FusedDense: a linear layer."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *args: Any, **options: Any) -> None:
        super().__init__(in_features, out_features, bias)


class CrossEntropyLoss(nn.Module):  # type: ignore[misc]
    """flash_attn.losses.cross_entropy.CrossEntropyLoss."""

    def __init__(self, *args: Any, reduction: str = "mean", **options: Any) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, scores: torch.Tensor, target: torch.Tensor, *args: Any) -> Any:
        """scores[rows, classes], target[rows]."""
        stands_in("flash_attn")
        return F.cross_entropy(scores, target, reduction=self.reduction)


def _even(rows: torch.Tensor, batch: int) -> torch.Tensor:
    length = rows.shape[0] // batch
    return rows[: batch * length].unflatten(0, (batch, length))


def _statistics(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
