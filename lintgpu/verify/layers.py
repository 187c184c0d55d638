"""The ops that a change takes away and brings, timed side by side on the GPU. Worker side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lintgpu.measurement import Interval
from lintgpu.trace.records import BACKWARD, FORWARD, GRAD_INPUT, Attention, Conv, Gemm, Op
from lintgpu.verify import intervals
from lintgpu.verify.numbers import gemm_checks
from lintgpu.verify.records import Item, LayersJob, LayersResult, TimedItem
from lintgpu.verify.rounds import kernel_times
from lintgpu.verify.timing import BYTES, Bench, Shape

TIGHT = 0.01
"""Width of the confidence interval of the ratio, as a share of it, that is narrow enough."""
_SESSION_SECONDS = 0.4
_LEAST_ROUNDS, _MOST_ROUNDS = 8, 400
_WARM_UP_SECONDS = 0.3
_POOL_BYTES = 2 << 30
"""Of each operand's buffer: many times the L2 cache of any GPU, so that no operand is found there."""

Call = Callable[[], object]


class Unsupported(ValueError):
    """An op that cannot be run alone."""


def measure(job: LayersJob, device: torch.device, deadline: float, progress: Callable[[str], None]) -> LayersResult:
    """Time every op of `job` round-robin until the ratio of the totals is tight or the clock reaches `deadline` (time.monotonic())."""
    items = (*job.before, *job.after)
    bench = Bench(device.type, _pool_bytes(items, device))
    calls, problems = _calls(bench, items, job.tf32)
    progress("warming up")
    calls, problems = _warm_up(bench, calls, problems)
    if any(problems):
        timed = [TimedItem(item, None, note=problem) for item, problem in zip(items, problems, strict=True)]
        cut = len(job.before)
        reason = next(problem for problem in problems if problem)
        return LayersResult(tuple(timed[:cut]), tuple(timed[cut:]), 0.0, 0.0, Interval(0, 0, 0), 0, note=reason)
    progress("timing layers")
    rounds = _rounds(bench, [call for call in calls if call is not None], items, len(job.before), deadline)
    progress("checking the numbers of layers")
    kernels = _kernels(bench, [call for call in calls if call is not None])
    del bench
    return _result(job, rounds, kernels, gemm_checks(job, device))


def _warm_up(bench: Bench, calls: Sequence[Call | None], problems: Sequence[str]) -> tuple[list[Call | None], list[str]]:
    """Run every call for a while, so that libraries are loaded and clocks are up; a call that raises is a problem."""
    found = list(problems)
    end = time.monotonic() + _WARM_UP_SECONDS
    for turn in range(50):
        for i, call in enumerate(calls):
            if call is None or found[i]:
                continue
            try:
                call()
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, NotImplementedError) as error:
                found[i] = str(error).strip().splitlines()[0][:200]
        if bench.device == "cuda":
            torch.cuda.synchronize()
        if turn and time.monotonic() > end:
            break
    return list(calls), found


def _rounds(bench: Bench, calls: Sequence[Call], items: Sequence[Item], before: int, deadline: float) -> list[list[float]]:
    """Microseconds of each call, a list a round."""
    rounds: list[list[float]] = []
    started = time.monotonic()
    first = _session(bench, calls, 1)[0]
    batch = max(2, min(40, round(_SESSION_SECONDS * 1e6 / max(1.0, sum(first)))))
    while len(rounds) < _MOST_ROUNDS:
        rounds += _session(bench, calls, batch)
        if len(rounds) >= _LEAST_ROUNDS and _ratio(rounds, items, before).width <= TIGHT:
            break
        if time.monotonic() + (time.monotonic() - started) / 2 > deadline:
            break
    return rounds


def _session(bench: Bench, calls: Sequence[Call], rounds: int) -> list[list[float]]:
    samples = bench.time_calls([call for _ in range(rounds) for call in calls])
    times = [sample[0] if sample is not None else math.nan for sample in samples]
    return [times[i : i + len(calls)] for i in range(0, len(times), len(calls))]


def _totals(rounds: Sequence[Sequence[float]], items: Sequence[Item], before: int) -> tuple[list[float], list[float]]:
    """Round by round, the time of one step's worth of the ops before and after."""
    weighted = [[us * item.op.count for us, item in zip(times, items, strict=True)] for times in rounds]
    return [sum(times[:before]) for times in weighted], [sum(times[before:]) for times in weighted]


def _ratio(rounds: Sequence[Sequence[float]], items: Sequence[Item], before: int) -> Interval:
    return intervals.ratio(*_totals(rounds, items, before))


def _result(
    job: LayersJob, rounds: Sequence[Sequence[float]], kernels: Sequence[tuple[tuple[str, ...], str]], checks: Sequence[Any]
) -> LayersResult:
    items = (*job.before, *job.after)
    cut = len(job.before)
    timed = [TimedItem(item, statistics.median(times[i] for times in rounds), *kernels[i]) for i, item in enumerate(items)]
    before, after = _totals(rounds, items, cut)
    return LayersResult(
        before=tuple(timed[:cut]),
        after=tuple(timed[cut:]),
        before_us=statistics.median(before),
        after_us=statistics.median(after),
        ratio=intervals.ratio(before, after),
        rounds=len(rounds),
        numbers=tuple(checks),
    )


def _kernels(bench: Bench, calls: Sequence[Call]) -> list[tuple[tuple[str, ...], str]]:
    """(names, grid of the longest) of the kernels of each call."""
    found: list[tuple[tuple[str, ...], str]] = []
    for call in calls:
        kernels = kernel_times(call) if bench.device == "cuda" else []
        longest = max(kernels, key=lambda kernel: kernel.us, default=None)
        found.append((tuple(dict.fromkeys(kernel.name for kernel in kernels)), longest.grid if longest else ""))
    return found


# The ops


def _pool_bytes(items: Sequence[Item], device: torch.device) -> int:
    """Room for the largest operand; less on a CPU, where this is only an exercise."""
    largest = max((_operand_bytes(item.op) for item in items), default=0)
    return max(_POOL_BYTES if device.type == "cuda" else 1 << 22, largest + (largest >> 1)) * 2


def _operand_bytes(op: Op) -> int:
    gemm = op.gemm
    if gemm is None or op.conv is not None:
        return 0
    a = (gemm.lda or gemm.k) * (gemm.k if gemm.layout[0] == "T" else gemm.m)
    b = (gemm.ldb or gemm.n) * (gemm.n if gemm.layout[1] == "T" else gemm.k)
    c = (gemm.ldc or gemm.n) * gemm.m
    # Outputs of the 8-bit types are wider than their inputs.
    return gemm.batch * max(a, b, c) * max(BYTES.get(op.dtype, 4), 4 if op.dtype in ("int8", "fp8") else 0)


def _calls(bench: Bench, items: Sequence[Item], tf32: bool) -> tuple[list[Call | None], list[str]]:
    calls: list[Call | None] = []
    problems: list[str] = []
    for item in items:
        try:
            calls.append(call_of(bench, item.op, tf32))
            problems.append("")
        except Unsupported as error:
            calls.append(None)
            problems.append(str(error))
    return calls, problems


def call_of(bench: Bench, op: Op, tf32: bool) -> Call:
    """A function that launches `op` once, on other memory each time. Raises Unsupported for what cannot be run alone."""
    if op.conv is not None:
        return _convolution(op.conv, op, bench.device)
    if op.attention is not None:
        return _attention(op.attention, op, bench.device)
    if op.gemm is None:
        raise Unsupported(f"{op.name} cannot be timed alone")
    shape = shape_of(op, op.gemm, tf32)
    return lambda: bench.launch(shape)


def shape_of(op: Op, gemm: Gemm, tf32: bool) -> Shape:
    """What the timer needs to know of a GEMM. Raises Unsupported for quantised weights and ragged groups."""
    if gemm.groups:
        raise Unsupported("a grouped GEMM cannot be timed alone")
    if gemm.weight_dtype and gemm.weight_dtype != op.dtype:
        raise Unsupported(f"a GEMM with {gemm.weight_dtype} weights cannot be timed alone")
    dtype = "tf32" if tf32 and op.dtype == "fp32" else op.dtype
    if dtype not in BYTES:
        raise Unsupported(f"a GEMM in {op.dtype} cannot be timed")
    kind = {"fp8": "scaled_mm", "int8": "int_mm"}.get(dtype) or ("bmm" if gemm.batch > 1 else "addmm" if gemm.bias else "mm")
    # X is copied to a row-major operand before the GEMM; the copy is an op of its own.
    layout = gemm.layout.replace("X", "N")
    return Shape(dtype, kind, layout, gemm.batch, gemm.m, gemm.n, gemm.k, gemm.lda, gemm.ldb, gemm.ldc)


def _convolution(conv: Conv, op: Op, device: str) -> Call:
    dtype = _dtype(op)
    layout = torch.channels_last if conv.channels_last else torch.contiguous_format
    inputs = [
        torch.randn(conv.input, device=device, dtype=dtype).contiguous(memory_format=layout) for _ in range(_copies(conv.input, dtype))
    ]
    weight = torch.randn(conv.weight, device=device, dtype=dtype).contiguous(memory_format=layout)
    spatial = len(conv.stride)
    kernel = conv.weight[2:]
    # The record keeps no padding: what gives the recorded output.
    padding = [_padding(conv, i, kernel[i]) for i in range(spatial)]
    gradient = torch.randn(conv.output, device=device, dtype=dtype).contiguous(memory_format=layout)
    turn = iter(_forever(len(inputs)))
    common = (list(conv.stride), padding, [1] * spatial, conv.transposed, [0] * spatial, conv.groups)
    if op.phase == FORWARD:
        return lambda: torch.ops.aten.convolution(inputs[next(turn)], weight, None, *common)
    mask = [op.phase == GRAD_INPUT, op.phase != GRAD_INPUT, False]
    return lambda: torch.ops.aten.convolution_backward(gradient, inputs[next(turn)], weight, None, *common, mask)


def _padding(conv: Conv, axis: int, kernel: int) -> int:
    size, output, stride = conv.input[2 + axis], conv.output[2 + axis], conv.stride[axis]
    needed = (size - 1) * stride + kernel - output if conv.transposed else (output - 1) * stride + kernel - size
    return max(0, -(-needed // 2))


def _attention(attention: Attention, op: Op, device: str) -> Call:
    dtype = _dtype(op)
    heads = (attention.heads, attention.kv_heads, attention.kv_heads)
    lengths = (attention.q_len, attention.kv_len, attention.kv_len)
    dims = (attention.head_dim, attention.head_dim, attention.value_dim)
    shapes = [(attention.batch, h, length, dim) for h, length, dim in zip(heads, lengths, dims, strict=True)]
    backward = op.phase == BACKWARD
    copies = [
        [torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for shape in shapes]
        for _ in range(_copies(shapes[0], dtype))
    ]
    mask = None
    if attention.mask:
        mask = torch.zeros((attention.batch, 1, attention.q_len, attention.kv_len), device=device, dtype=dtype)
        mask = mask == 0 if attention.mask == "bool" else mask
    grouped = attention.kv_heads != attention.heads
    turn = iter(_forever(len(copies)))

    def forward(operands: Sequence[Any]) -> Any:
        query, key, value = operands
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=attention.dropout, is_causal=attention.causal, enable_gqa=grouped
        )

    if not backward:
        return lambda: forward(copies[next(turn)])
    outputs = [forward(operands) for operands in copies]
    gradient = torch.randn_like(outputs[0])

    def run_backward() -> Any:
        i = next(turn)
        return torch.autograd.grad(outputs[i], copies[i], gradient, retain_graph=True)

    return run_backward


def _dtype(op: Op) -> torch.dtype:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if op.dtype not in dtypes:
        raise Unsupported(f"{op.name} in {op.dtype} cannot be timed")
    return dtypes[op.dtype]


def _copies(shape: Sequence[int], dtype: torch.dtype) -> int:
    """As many as leave the L2 cache behind, but no more than 8."""
    size: int = math.prod(shape) * dtype.itemsize
    return max(1, min(8, (256 << 20) // max(1, size)))


def _forever(count: int) -> Any:
    while True:
        yield from range(count)
