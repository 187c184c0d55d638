"""mamba_ssm: selective scans as one kernel, and the Mamba blocks around them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lintgpu.trace.kernels import FusedRMSNorm, kernel, stands_in
from lintgpu.trace.standins.causal_conv1d import causal_conv1d_fn

SUBMODULES = (
    "ops",
    "modules",
    "selective_scan_interface",
    "triton",
    "mamba_simple",
    "mamba2",
    "layer_norm",
    "layernorm",
    "layernorm_gated",
    "selective_state_update",
    "ssd_combined",
)
"""The parts of dotted names below the package."""


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """u, delta and z[batch, dim, length], A[dim, state] -> [batch, dim, length]."""
    stands_in("mamba_ssm")
    inputs = [tensor for tensor in (u, delta, A, B, C, D, z, delta_bias) if tensor is not None]
    output = kernel("selective_scan_fn", inputs, lambda: torch.empty_like(u))
    return (output, u.new_empty((u.shape[0], u.shape[1], A.shape[1]))) if return_last_state else output


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    """The inside of a Mamba block: xz[batch, 2*dim, length] -> [batch, length, model]."""
    x, z = xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, conv1d_weight.flatten(1), conv1d_bias, activation="silu")
    rank, state = delta_proj_weight.shape[1], A.shape[1]
    dt, b, c = F.linear(x.transpose(1, 2), x_proj_weight).split([rank, state, state], dim=-1)
    delta = F.linear(dt, delta_proj_weight).transpose(1, 2)
    y = selective_scan_fn(x, delta, A, b.transpose(1, 2), c.transpose(1, 2), D, z, delta_bias, True)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def selective_state_update(state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, *args: Any, **options: Any) -> Any:
    """One step of a scan: x[batch, dim] or [batch, heads, head_dim] with its state."""
    stands_in("mamba_ssm")
    return kernel("selective_state_update", (state, x, dt), lambda: torch.empty_like(x))


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """x[batch, length, heads, head_dim], dt[batch, length, heads], B and C[batch, length, groups, state] -> a tensor like x."""
    stands_in("mamba_ssm")
    inputs = [tensor for tensor in (x, dt, A, B, C, D, z, dt_bias) if tensor is not None]
    return kernel("mamba_chunk_scan_combined", inputs, lambda: torch.empty_like(x))


class RMSNorm(FusedRMSNorm):
    """A norm, with the gate of Mamba-2 where one is given."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> Any:
        """x and z[..., hidden_size]."""
        stands_in("mamba_ssm")
        return super().forward(x if z is None else x * F.silu(z))


RMSNormGated = RMSNorm


def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    **options: Any,
) -> Any:
    """Residual addition and norm in one kernel; with `prenorm` the sum comes back too."""
    stands_in("mamba_ssm")
    inputs = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    if not prenorm:
        return kernel("rms_norm_fn", inputs, lambda: torch.empty_like(x))
    sums = torch.float32 if residual_in_fp32 else x.dtype
    return kernel("rms_norm_fn", inputs, lambda: (torch.empty_like(x), torch.empty_like(x, dtype=sums)))


layer_norm_fn = rms_norm_fn


class Mamba(nn.Module):  # type: ignore[misc]
    """The first Mamba block."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: Any = "auto",
        *args: Any,
        conv_bias: bool = True,
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.d_model, self.d_state, self.d_inner = d_model, d_state, int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1, bias=conv_bias)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        self.A_log = nn.Parameter(torch.empty(self.d_inner, d_state, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.d_inner, dtype=torch.float32))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    def forward(self, hidden_states: torch.Tensor, inference_params: Any = None) -> Any:
        """hidden_states[batch, length, d_model] -> the same shape."""
        xz = self.in_proj(hidden_states).transpose(1, 2)
        weights = self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.out_proj.weight, self.out_proj.bias
        return mamba_inner_fn(xz, *weights, -torch.exp(self.A_log), None, None, self.D, self.dt_proj.bias)


class Mamba2(nn.Module):  # type: ignore[misc]
    """The block of Mamba-2."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: Any = None,
        expand: int = 2,
        headdim: int = 64,
        *args: Any,
        ngroups: int = 1,
        rmsnorm: bool = True,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        **options: Any,
    ) -> None:
        super().__init__()
        self.d_inner, self.d_state, self.headdim, self.ngroups, self.chunk_size = expand * d_model, d_state, headdim, ngroups, chunk_size
        self.nheads = self.d_inner // headdim
        conv_dim = self.d_inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + conv_dim + self.nheads, bias=bias)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, d_conv, groups=conv_dim, padding=d_conv - 1, bias=conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        self.A_log = nn.Parameter(torch.empty(self.nheads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.nheads))
        self.norm = RMSNorm(self.d_inner) if rmsnorm else None
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    def forward(self, u: torch.Tensor, *args: Any, **options: Any) -> Any:
        """u[batch, length, d_model] -> the same shape."""
        states = self.ngroups * self.d_state
        z, xbc, dt = self.in_proj(u).split([self.d_inner, self.d_inner + 2 * states, self.nheads], dim=-1)
        xbc = causal_conv1d_fn(xbc.transpose(1, 2), self.conv1d.weight.flatten(1), self.conv1d.bias, activation="silu").transpose(1, 2)
        x, b, c = xbc.split([self.d_inner, states, states], dim=-1)
        heads = x.unflatten(-1, (self.nheads, self.headdim))
        b, c = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (b, c))
        y = mamba_chunk_scan_combined(heads, dt, -torch.exp(self.A_log), b, c, self.chunk_size, self.D, None, self.dt_bias).flatten(2)
        return self.out_proj(self.norm(y, z) if self.norm is not None else y * F.silu(z))
