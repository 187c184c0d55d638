"""Measure memory-bound ops, attention and the optimizer on this machine's GPU: python3 benchmarks/measure_ops.py OUT.csv"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from lintgpu.verify.timing import Bench

aten = torch.ops.aten
Case = tuple[str, str, str, Callable[[], object]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
ROWS = ((2048, 768), (16384, 768), (16384, 4096), (8192, 3072), (512, 1024), (32768, 1024), (4096, 11008))
HEADS = (
    # batch, heads, kv heads, queries, keys, head dim
    (8, 12, 12, 1024, 1024, 64),
    (16, 12, 12, 1024, 1024, 64),
    (2, 32, 32, 2048, 2048, 128),
    (2, 32, 8, 2048, 2048, 128),
    (1, 32, 32, 8192, 8192, 128),
    (64, 12, 12, 197, 197, 64),
    (8, 16, 16, 577, 577, 64),
    (16, 12, 12, 512, 512, 64),
    (8, 12, 12, 448, 1500, 64),
    (8, 12, 12, 1500, 1500, 64),
    (4, 16, 16, 1024, 1024, 80),
    (4, 16, 16, 1024, 1024, 96),
    (4, 8, 8, 1024, 1024, 256),
    (8, 4, 4, 128, 128, 64),
    (32, 32, 8, 1, 2048, 128),
    (1, 32, 8, 1, 4096, 128),
    (8, 12, 12, 1023, 1023, 64),
    (2, 8, 8, 4096, 4096, 40),
    (2, 64, 1, 1024, 1024, 64),
)


def rand(*shape: int, dtype: str = "bf16") -> Any:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(DTYPES[dtype])


def row_cases(rows: int, width: int, dtype: str) -> Iterator[Case]:
    x, g, w, b = rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype), rand(width, dtype=dtype), rand(width, dtype=dtype)
    size = f"{rows}x{width}"
    _, mean, rstd = aten.native_layer_norm(x, [width], w, b, 1e-5)
    soft = torch.softmax(x, -1)
    mask = torch.rand(rows, width, device=DEVICE) > 0.1
    wide = torch.cat([x, g], 1)
    yield "add", size, dtype, lambda: x + g
    yield "bias_add", size, dtype, lambda: x + w
    yield "layer_norm", size, dtype, lambda: aten.native_layer_norm(x, [width], w, b, 1e-5)
    yield "layer_norm_backward", size, dtype, lambda: aten.native_layer_norm_backward(g, x, [width], mean, rstd, w, b, [True, True, True])
    yield "gelu_backward", size, dtype, lambda: aten.gelu_backward(g, x)
    yield "gelu_tanh", size, dtype, lambda: F.gelu(x, approximate="tanh")
    yield "tanh", size, dtype, lambda: torch.tanh(x)
    yield "pow3", size, dtype, lambda: torch.pow(x, 3.0)
    yield "silu_backward", size, dtype, lambda: aten.silu_backward(g, x)
    yield "mean_last", size, dtype, lambda: x.mean(-1, keepdim=True)
    yield "sum_first", size, dtype, lambda: x.sum(0)
    yield "sum_all", size, dtype, lambda: x.sum()
    yield "softmax_backward", size, dtype, lambda: aten._softmax_backward_data(g, soft, -1, x.dtype)
    yield "masked_fill", size, dtype, lambda: x.masked_fill(mask, 0.0)
    yield "where", size, dtype, lambda: torch.where(mask, x, g)
    yield "native_dropout", size, dtype, lambda: aten.native_dropout(x, 0.1, True)
    yield "cat_last", size, dtype, lambda: torch.cat([x, g], 1)
    yield "split_contiguous", size, dtype, lambda: wide[:, :width].contiguous()
    yield "transpose_contiguous", size, dtype, lambda: x.view(rows // 64, 64, width).transpose(0, 1).contiguous()
    yield "clone", size, dtype, lambda: x.clone()
    yield "to_other", size, dtype, lambda: x.to(torch.bfloat16 if dtype == "fp32" else torch.float32)
    yield "zeros", size, dtype, lambda: torch.zeros_like(x)
    yield "add_inplace", size, dtype, lambda: x.add_(g, alpha=1e-6)
    yield "rsqrt_col", size, dtype, lambda: torch.rsqrt(x[:, :1].float().abs() + 1)
    yield "mul_col", size, dtype, lambda: x * x[:, :1]
    yield "neg_half_cat", size, dtype, lambda: torch.cat([-x[:, width // 2 :], x[:, : width // 2]], 1)


def loss_cases(rows: int, vocabulary: int) -> Iterator[Case]:
    size = f"{rows}x{vocabulary}"
    logits = rand(rows, vocabulary)
    wide = logits.float()
    target = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    log = torch.log_softmax(wide, -1)
    _, total = aten.nll_loss_forward(log, target, None, 1, -100)
    one = torch.ones((), device=DEVICE)
    yield "logits_to_f32", size, "bf16", lambda: logits.float()
    yield "log_softmax", size, "fp32", lambda: torch.log_softmax(wide, -1)
    yield "log_softmax_from_bf16", size, "bf16", lambda: torch.log_softmax(logits, -1, dtype=torch.float32)
    yield "log_softmax_backward", size, "fp32", lambda: aten._log_softmax_backward_data(log, log, -1, torch.float32)
    yield "nll_forward", size, "fp32", lambda: aten.nll_loss_forward(log, target, None, 1, -100)
    yield "nll_backward", size, "fp32", lambda: aten.nll_loss_backward(one, log, target, None, 1, -100, total)
    yield "f32_to_bf16", size, "fp32", lambda: wide.to(torch.bfloat16)
    table, grad = rand(vocabulary, 768, dtype="fp32"), rand(rows, 768, dtype="fp32")
    yield "embedding", size, "fp32", lambda: F.embedding(target, table)
    yield "embedding_backward", size, "fp32", lambda: aten.embedding_dense_backward(grad, target, vocabulary, -1, False)


def attention_cases() -> Iterator[Case]:
    for batch, heads, kv, queries, keys, dim in HEADS:
        for dtype in ("bf16", "fp32"):
            for mask in ("", "causal", "additive"):
                if dtype == "fp32" and (batch * heads * queries * keys > 3e8 or kv != heads):
                    continue
                yield from _attention(batch, heads, kv, queries, keys, dim, dtype, mask)


def _attention(batch: int, heads: int, kv: int, queries: int, keys: int, dim: int, dtype: str, mask: str) -> Iterator[Case]:
    q = rand(batch, queries, heads, dim, dtype=dtype).transpose(1, 2).requires_grad_()
    k = rand(batch, keys, kv, dim, dtype=dtype).transpose(1, 2).requires_grad_()
    v = rand(batch, keys, kv, dim, dtype=dtype).transpose(1, 2).requires_grad_()
    bias = rand(batch, 1, queries, keys, dtype=dtype) if mask == "additive" else None
    size = f"{batch}x{heads}x{kv}x{queries}x{keys}x{dim}"

    def forward() -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=mask == "causal", enable_gqa=kv != heads)

    yield f"sdpa_{mask or 'none'}", size, dtype, forward
    if queries > 1:
        out = forward()
        grad = torch.randn_like(out)
        yield f"sdpa_backward_{mask or 'none'}", size, dtype, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def optimizer_cases() -> Iterator[Case]:
    for hidden, layers in ((768, 12), (256, 6), (2048, 8)):
        shapes = [(50304, hidden), (1024, hidden)] + [
            (4 * hidden, hidden),
            (hidden, 4 * hidden),
            (3 * hidden, hidden),
            (hidden, hidden),
            *[(hidden,)] * 8,
        ] * layers
        weights = [torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes]
        for w in weights:
            w.grad = torch.randn_like(w)
        count = sum(w.numel() for w in weights)
        for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
            yield f"adamw_{name}", f"{len(weights)}x{count}", "fp32", torch.optim.AdamW(weights, **options).step


def conv_cases() -> Iterator[Case]:
    for n, c, size, out, kernel, stride in (
        (64, 3, 224, 768, 16, 16),
        (32, 64, 56, 64, 3, 1),
        (32, 256, 14, 256, 3, 1),
        (32, 3, 224, 64, 7, 2),
        (8, 320, 64, 320, 3, 1),
    ):
        for last in (False, True):
            layout = torch.channels_last if last else torch.contiguous_format
            x = rand(n, c, size, size).to(memory_format=layout).requires_grad_(c > 3)
            w = rand(out, c, kernel, kernel).to(memory_format=layout).requires_grad_()
            name = "conv2d_cl" if last else "conv2d"
            shape = f"{n}x{c}x{size}x{size}x{out}x{kernel}x{stride}"
            y = F.conv2d(x, w, stride=stride, padding=kernel // 2 if stride < kernel else 0)
            g = torch.randn_like(y)
            wanted = (x, w) if c > 3 else (w,)
            yield name, shape, "bf16", lambda x=x, w=w, s=stride, k=kernel: F.conv2d(x, w, stride=s, padding=k // 2 if s < k else 0)
            yield f"{name}_backward", shape, "bf16", lambda y=y, g=g, wanted=wanted: torch.autograd.grad(y, wanted, g, retain_graph=True)


def cases() -> Iterator[Case]:
    yield from attention_cases()
    for dtype in ("bf16", "fp32"):
        for rows, width in ROWS:
            yield from row_cases(rows, width, dtype)
    for rows, vocabulary in ((8192, 50257), (8192, 50304), (4096, 128256), (1024, 32000)):
        yield from loss_cases(rows, vocabulary)
    yield from optimizer_cases()
    yield from conv_cases()


def main(path: str, seconds: float = 60.0) -> None:
    bench = Bench(DEVICE, 1 << 20)
    started = time.monotonic()
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("op", "shape", "dtype", "gpu_us", "cpu_us", "kernels", "names"))
        for name, shape, dtype, call in cases():
            if time.monotonic() - started > seconds:
                break
            try:
                for _ in range(2):
                    call()
                start = time.perf_counter()
                for _ in range(3):
                    call()
                cpu = (time.perf_counter() - start) / 3 * 1e6
                samples = [s for s in bench.time_calls([call] * 5) if s]
            except RuntimeError as error:
                print(name, shape, dtype, str(error).splitlines()[0], file=sys.stderr)
                continue
            if samples:
                names = samples[-1][1]
                writer.writerow(
                    (
                        name,
                        shape,
                        dtype,
                        f"{statistics.median(us for us, _ in samples):.2f}",
                        f"{cpu:.1f}",
                        names.count(";") + 1,
                        names[:400],
                    )
                )
                file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(float, sys.argv[2:3]))
