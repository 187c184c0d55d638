"""The GPT of plain modules whose whole steps were measured."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention by SDPA, or written out as its products and a softmax."""

    def __init__(self, width: int, heads: int, inner: int, context: int, handwritten: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.handwritten = handwritten
        if handwritten:
            self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).tril(), persistent=False)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        if not self.handwritten:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[: q.shape[2], : q.shape[2]], float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, x: Any) -> Any:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, dim=2))
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class PlainGpt(nn.Module):
    """Tied embeddings, learned positions; the loss where labels are given."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, inner: int, context: int, handwritten: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner, context, handwritten) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Any, labels: Any = None) -> Any:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return logits if labels is None else F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
