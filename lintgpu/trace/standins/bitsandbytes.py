"""bitsandbytes: linear layers with weights of 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lintgpu.trace.kernels import stands_in
from lintgpu.trace.quantised import FourBit, LlmInt8

SUBMODULES = ("nn", "modules")
"""The parts of dotted names below the package."""


class Linear4bit(FourBit):
    """A frozen weight of 4 bits, written out in the compute type before each GEMM."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: Any = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(input_features, output_features, bias, quant_type, compute_dtype)

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., input_features] -> [..., output_features]."""
        stands_in("bitsandbytes")
        return super().forward(x)


class LinearNF4(Linear4bit):
    """Linear4bit of type nf4."""

    def __init__(self, input_features: int, output_features: int, bias: bool = True, compute_dtype: Any = None, **options: Any) -> None:
        super().__init__(input_features, output_features, bias, compute_dtype, quant_type="nf4")


class LinearFP4(Linear4bit):
    """Linear4bit of type fp4."""


class Linear8bitLt(LlmInt8):
    """int8 weights and activations."""

    def __init__(self, input_features: int, output_features: int, bias: bool = True, *args: Any, **options: Any) -> None:
        super().__init__(input_features, output_features, bias)

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., input_features] -> [..., output_features]."""
        stands_in("bitsandbytes")
        return super().forward(x)


class StableEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding with a norm behind it."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, input: torch.Tensor) -> Any:
        """Token ids -> [..., embedding_dim]."""
        stands_in("bitsandbytes")
        return self.norm(super().forward(input))


class Embedding(nn.Embedding):  # type: ignore[misc]
    """torch's own."""
