"""causal_conv1d: short depthwise convolutions along time, one kernel each."""

from __future__ import annotations

from typing import Any

import torch

from lintgpu.trace.kernels import kernel, stands_in

SUBMODULES = ("causal_conv1d_interface",)
"""The parts of dotted names below the package."""


def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **options: Any) -> Any:
    """x[B, D, L], weight[D, width] -> [B, D, L]."""
    stands_in("causal_conv1d")
    inputs = (x, weight) if bias is None else (x, weight, bias)
    output = kernel("causal_conv1d_fn", inputs, lambda: torch.empty_like(x))
    if options.get("return_final_states"):
        return output, x.new_empty((x.shape[0], x.shape[1], weight.shape[-1] - 1))
    return output


def causal_conv1d_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any, **options: Any
) -> Any:
    """One step: x[B, D] or [B, D, L] with the state [B, D, width]."""
    stands_in("causal_conv1d")
    inputs = (x, conv_state, weight) if bias is None else (x, conv_state, weight, bias)
    return kernel("causal_conv1d_update", inputs, lambda: torch.empty_like(x))
