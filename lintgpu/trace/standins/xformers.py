"""xformers: memory_efficient_attention over [batch, length, heads, head_dim] and the masks that it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lintgpu.trace.kernels import attend, say, stands_in

SUBMODULES = ("ops", "fmha", "attn_bias", "swiglu_op")
"""The parts of dotted names below the package."""


class AttentionBias:
    """A mask that is known by its kind."""

    causal = False


class LowerTriangularMask(AttentionBias):
    """Causal."""

    causal = True


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Causal, with the last query seeing the last key."""


class BlockDiagonalMask(AttentionBias):
    """Sequences end to end in one row."""

    def __init__(self, sequences: int = 1) -> None:
        self.sequences = sequences

    @classmethod
    def from_seqlens(cls, q_seqlen: Any, kv_seqlen: Any = None, **options: Any) -> BlockDiagonalMask:
        """One block a sequence."""
        return cls(max(1, len(q_seqlen)))

    def make_causal(self) -> BlockDiagonalMask:
        """The same blocks, causal."""
        return BlockDiagonalCausalMask(self.sequences)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Sequences end to end in one row, each causal."""

    causal = True


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **options: Any,
) -> Any:
    """query[B, Lq, H, D] or [B, Lq, D], or with groups of heads [B, Lq, G, H, D] -> a tensor like query."""
    stands_in("xformers")
    shape = query.shape
    if query.dim() == 3:
        query, key, value = (operand.unsqueeze(2) for operand in (query, key, value))
    elif query.dim() == 5:
        query, key, value = (operand.flatten(2, 3) for operand in (query, key, value))
    mask = attn_bias if isinstance(attn_bias, torch.Tensor) else None
    if isinstance(attn_bias, BlockDiagonalMask) and attn_bias.sequences > 1 and query.shape[0] == 1:
        say("sequences of different lengths were taken to be equally long")
        query, key, value = (_even(operand, attn_bias.sequences) for operand in (query, key, value))
    output = attend(query, key, value, mask, p, bool(getattr(attn_bias, "causal", False)))
    return output.reshape(*shape[:-1], value.shape[-1])


class SwiGLU(nn.Module):  # type: ignore[misc]
    """xformers.ops.SwiGLU: w3(silu(w1(x)) * w2(x)), the first two weights packed."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias)

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., in_features] -> [..., out_features]."""
        stands_in("xformers")
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


def unbind(x: torch.Tensor, dim: int) -> Any:
    """torch.unbind."""
    return x.unbind(dim)


def _even(operand: torch.Tensor, sequences: int) -> torch.Tensor:
    length = operand.shape[1] // sequences
    return operand[:, : sequences * length].reshape(sequences, length, *operand.shape[2:])
