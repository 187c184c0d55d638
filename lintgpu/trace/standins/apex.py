"""apex: fused norms and dense layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lintgpu.trace import kernels
from lintgpu.trace.kernels import stands_in

SUBMODULES = ("normalization", "fused_layer_norm", "contrib", "layer_norm", "fused_dense")
"""The parts of dotted names below the package."""


class FusedLayerNorm(nn.LayerNorm):  # type: ignore[misc]
    """apex.normalization.FusedLayerNorm: one kernel, as torch's own."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **options: Any) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> Any:
        """As LayerNorm."""
        stands_in("apex")
        return super().forward(input)


class FusedRMSNorm(kernels.FusedRMSNorm):
    """apex.normalization.FusedRMSNorm."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **options: Any) -> None:
        super().__init__(normalized_shape, elementwise_affine)

    def forward(self, x: torch.Tensor) -> Any:
        """x[..., normalized_shape] -> the same shape."""
        stands_in("apex")
        return super().forward(x)


MixedFusedLayerNorm = FastLayerNorm = FusedLayerNorm
MixedFusedRMSNorm = FusedRMSNorm


class FusedDense(nn.Linear):  # type: ignore[misc]
    """apex.fused_dense.FusedDense: a linear layer."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class FusedDenseGeluDense(nn.Module):  # type: ignore[misc]
    """apex.fused_dense.FusedDenseGeluDense: two linear layers with GELU between them."""

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)

    def forward(self, input: torch.Tensor) -> Any:
        """input[..., in_features] -> [..., out_features]."""
        stands_in("apex")
        return self.second(F.gelu(self.first(input)))
