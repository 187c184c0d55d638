"""scaled_dot_product_attention as one op, as a GPU runs it, instead of the matmuls it decomposes into on meta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lintgpu.trace.records import Attention
from lintgpu.trace.shadow import unmoded

Note = Callable[[Attention, str, list[torch.Tensor], list[torch.Tensor]], None]
"""(attention, phase, inputs, outputs): called once the op has run."""

Origins = Callable[[Attention], tuple[tuple[str, str], ...]]
"""Where the sizes of an attention came from, asked while its module runs."""


def describe(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool
) -> Attention:
    """The record of an attention over [..., heads, length, head_dim] operands (a missing head dim counts as one head)."""
    heads = query.shape[-3] if query.dim() > 2 else 1
    batch = 1
    for size in query.shape[:-3]:
        batch *= size
    kind = ""
    if mask is not None:
        kind = "bool" if mask.dtype == torch.bool else "grad" if mask.requires_grad else "additive"
    return Attention(
        batch=int(batch),
        heads=int(heads),
        kv_heads=int(key.shape[-3]) if key.dim() > 2 else 1,
        q_len=int(query.shape[-2]),
        kv_len=int(key.shape[-2]),
        head_dim=int(query.shape[-1]),
        value_dim=int(value.shape[-1]),
        causal=bool(causal),
        mask=kind,
        dropout=float(dropout),
        aligned=all(_is_aligned(operand) for operand in (query, key, value)),
    )


def _is_aligned(operand: torch.Tensor) -> bool:
    """Flash attention wants unit last strides and rows at multiples of 16 bytes."""
    if operand.shape[-1] > 1 and operand.stride(-1) != 1:
        return False
    strides = [stride for size, stride in zip(operand.shape[:-1], operand.stride()[:-1], strict=True) if size > 1]
    return all(stride * operand.itemsize % 16 == 0 for stride in (*strides, operand.storage_offset()))


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, attention: Attention, note: Note) -> Any:
        ctx.save_for_backward(query, key, value, mask)
        ctx.attention, ctx.note = attention, note
        # Flash attention hands out [batch, length, heads, dim] memory seen as [batch, heads, length, dim].
        shape = (*query.shape[:-1], value.shape[-1])
        with unmoded():
            if query.dim() >= 3:
                output = query.new_empty((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-3, -2)
            else:
                output = query.new_empty(shape)
        note(attention, "forward", [tensor for tensor in (query, key, value, mask) if tensor is not None], [output])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, mask = ctx.saved_tensors
        with unmoded():
            outputs = [torch.empty_like(tensor) for tensor in (query, key, value)]
            grad_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        written = outputs if grad_mask is None else [*outputs, grad_mask]
        ctx.note(ctx.attention, "backward", [grads[0], query, key, value, grads[0]], written)
        return (*outputs, grad_mask, None, None)


class AttentionOverride:
    """Replaces aten::scaled_dot_product_attention for meta tensors while it is open, whoever calls it."""

    def __init__(self, note: Note, origins: Origins) -> None:
        """`note` is told of every attention."""
        self._note = note
        self._origins = origins
        self._library: Any = None

    def __enter__(self) -> AttentionOverride:
        """Install it."""
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("scaled_dot_product_attention", self.attend, "AutogradMeta")
        self._library.impl("dropout", _dropout, "AutogradMeta")
        return self

    def __exit__(self, *error: object) -> None:
        """Take it back."""
        self._library._destroy()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """The signature of torch.nn.functional.scaled_dot_product_attention."""
        for operand in (key, value):
            if operand.dtype != query.dtype:
                raise RuntimeError(
                    f"Expected query, key, and value to have the same dtype, but got query.dtype: {query.dtype} key.dtype: {key.dtype} "
                    f"and value.dtype: {value.dtype} instead."
                )
        attention = describe(query, key, value, attn_mask, dropout_p, is_causal)
        attention = replace(attention, origins=self._origins(attention))
        return _Attend.apply(query, key, value, attn_mask, attention, self._note)


def _dropout(input_: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """What aten::dropout does for CUDA tensors: one fused kernel."""
    if not train or p == 0 or input_.numel() == 0:
        return input_
    return torch.native_dropout(input_, p, train)[0]
