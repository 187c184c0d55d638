"""Kernel times of GEMMs on the GPU of this machine.

Kernels are timed by CUPTI through torch's profiler. Operands rotate through buffers larger than the L2 cache, the members of a group
are launched round-robin so that they see the same clocks, and a session keeps the GPU busy for seconds, as training does. On a machine
without a GPU the same code runs on the CPU's clock, which is of use to tests alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp8": 1, "int8": 1}


class NoGpu(RuntimeError):
    """There is no CUDA GPU that torch can use."""


@dataclass(frozen=True)
class Shape:
    """One GEMM to time: op is mm, addmm (with bias), bmm, scaled_mm (fp8) or int_mm (int8)."""

    dtype: str
    op: str
    layout: str
    batch: int
    m: int
    n: int
    k: int
    lda: int = 0
    """Leading dimensions of operands that are views of wider tensors; 0 where rows (or columns, of a T) lie next to each other."""
    ldb: int = 0
    ldc: int = 0


@dataclass(frozen=True)
class Timing:
    """Microseconds over the rounds, and the kernels of one launch in order, joined by ';'."""

    shape: Shape
    us: float
    us_min: float
    us_max: float
    kernels: str


class Bench:
    """Buffers and a profiler for timing GEMMs. `device` is cuda, or cpu to exercise the code without a GPU.

    Raises NoGpu where `device` is cuda and torch has none.
    """

    def __init__(self, device: str = "cuda", pool_bytes: int = 12 << 30) -> None:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise NoGpu("torch sees no CUDA GPU on this machine")
        self.torch: Any = torch
        self.device = device
        self.pool_bytes = pool_bytes
        self._pools: dict[tuple[str, str], Any] = {}
        self._position: dict[tuple[str, str], int] = {}
        self._marker = torch.zeros(1, device=device)

    def fits(self, shape: Shape) -> bool:
        """Whether the operands of `shape` fit the buffers."""
        a = shape.m * shape.k if shape.lda == 0 else shape.lda * (shape.m if shape.layout[0] != "T" else shape.k)
        b = shape.k * shape.n if shape.ldb == 0 else shape.ldb * (shape.k if shape.layout[1] != "T" else shape.n)
        c = shape.m * (shape.ldc or shape.n)
        largest = max(a, b, 2 * c if shape.dtype in ("fp8", "int8") else c)
        return shape.batch * largest * BYTES[shape.dtype] <= self._pool_size(shape.dtype)

    def time(self, groups: Sequence[Sequence[Shape]], rounds: Callable[[Shape], int]) -> list[list[Timing | None]]:
        """Time each group round-robin, all in one profiler session; None for a shape that the library refuses."""
        launches: list[tuple[int, int]] = []
        samples = self.time_calls(list(self._calls(groups, rounds, launches)))
        results: dict[tuple[int, int], list[tuple[float, str]]] = {}
        for place, sample in zip(launches, samples, strict=True):
            if sample is not None:
                results.setdefault(place, []).append(sample)
        return [[_timing(shape, results.get((g, i), [])) for i, shape in enumerate(group)] for g, group in enumerate(groups)]

    def time_calls(self, calls: Sequence[Callable[[], object]]) -> list[tuple[float, str] | None]:
        """(microseconds of GPU kernels, their names) of each call, run in order; None for one that raised."""
        return self._profiled(calls) if self.device == "cuda" else self._clocked(calls)

    def _calls(
        self, groups: Sequence[Sequence[Shape]], rounds: Callable[[Shape], int], launches: list[tuple[int, int]]
    ) -> Iterator[Callable[[], object]]:
        for g, group in enumerate(groups):
            wanted = [rounds(shape) for shape in group]
            for turn in range(max(wanted, default=0)):
                for i, shape in enumerate(group):
                    if turn < wanted[i]:
                        launches.append((g, i))
                        yield lambda shape=shape: self.launch(shape)  # type: ignore[misc]

    def _clocked(self, calls: Sequence[Callable[[], object]]) -> list[tuple[float, str] | None]:
        samples: list[tuple[float, str] | None] = []
        for call in calls:
            start = time.perf_counter()
            done = self._guarded(call)
            samples.append(((time.perf_counter() - start) * 1e6, "cpu") if done else None)
        return samples

    def _profiled(self, calls: Sequence[Callable[[], object]]) -> list[tuple[float, str] | None]:
        """A one-element arc tangent, used by nothing else here, separates the launches: a GEMM may be one kernel or several."""
        torch = self.torch
        torch.cuda.synchronize()
        ran: list[bool] = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for call in calls:
                ran.append(self._guarded(call))
                self._marker.atan_()
            torch.cuda.synchronize()
        launches = _between_markers(profiler.profiler.kineto_results.events())
        if len(launches) != len(calls):
            raise RuntimeError(f"the profiler recorded {len(launches)} of {len(calls)} launches")
        return [sample if ok and sample[0] > 0 else None for ok, sample in zip(ran, launches, strict=True)]

    def _guarded(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except (RuntimeError, ValueError):
            return False
        return True

    def launch(self, shape: Shape) -> None:
        """Run the GEMM once on the next region of the buffers. Raises what the library raises for a shape that it does not take."""
        torch = self.torch
        b, m, n, k = shape.batch, shape.m, shape.n, shape.k
        batched = shape.op == "bmm"
        a = self._operand("a", shape.dtype, b, m, k, shape.layout[0] == "T", batched, shape.lda)
        w = self._operand("b", shape.dtype, b, k, n, shape.layout[1] == "T", batched, shape.ldb)
        output = {"fp8": "bf16", "int8": "int32"}.get(shape.dtype, shape.dtype)
        c = self._operand("c", output, b, m, n, False, batched, shape.ldc)
        torch.backends.cuda.matmul.allow_tf32 = shape.dtype == "tf32"
        if shape.op == "addmm":
            torch.addmm(self._operand("b", shape.dtype, 1, 1, n, False, False)[0], a, w, out=c)
        elif shape.op == "scaled_mm":
            one = self._scale()
            torch._scaled_mm(a, w, one, one, out_dtype=torch.bfloat16, out=c)
        elif shape.op == "int_mm":
            torch._int_mm(a, w, out=c)
        elif batched:
            torch.bmm(a, w, out=c)
        else:
            torch.mm(a, w, out=c)

    def _operand(
        self, role: str, dtype: str, batch: int, rows: int, columns: int, transposed: bool, batched: bool, leading: int = 0
    ) -> Any:
        """The next region of the role's buffer, 256-byte aligned, as [rows, columns] or [batch, rows, columns]."""
        dtype = "fp32" if dtype == "tf32" else dtype
        pool = self._pool(role, dtype)
        leading = leading or (rows if transposed else columns)
        matrix = leading * (columns if transposed else rows)
        size = batch * matrix
        start = self._position[role, dtype]
        if start + size > pool.numel():
            start = 0
        self._position[role, dtype] = start + -(-size // 256) * 256
        strides = (1, leading) if transposed else (leading, 1)
        if batched:
            return pool.as_strided((batch, rows, columns), (matrix, *strides), start)
        return pool.as_strided((rows, columns), strides, start)

    def _scale(self) -> Any:
        if ("scale", "") not in self._pools:
            self._pools["scale", ""] = self.torch.ones((), device=self.device)
        return self._pools["scale", ""]

    def _pool_size(self, dtype: str) -> int:
        """Bytes of a buffer: the usual dtype gets the most."""
        return self.pool_bytes if dtype == "bf16" else self.pool_bytes // 2

    def _pool(self, role: str, dtype: str) -> Any:
        if (role, dtype) not in self._pools:
            self._pools[role, dtype] = self._random(dtype, self._pool_size(dtype) // BYTES.get(dtype, 4))
            self._position[role, dtype] = 0
        return self._pools[role, dtype]

    def _random(self, dtype: str, count: int) -> Any:
        """Random values: the power a multiplier draws, and so the clock, depends on the data."""
        torch = self.torch
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int32": torch.int32}
        kind = kinds.get(dtype, torch.float32)
        pool = torch.empty(count, dtype=kind, device=self.device)
        chunk = min(count, 1 << 27)
        values = torch.randn(chunk, device=self.device)
        values = (values * 32).round() if dtype in ("int8", "int32") else values
        for start in range(0, count, chunk):
            part = pool[start : start + chunk]
            part.copy_(values[: part.numel()])
        return pool


def _between_markers(events: Sequence[Any]) -> list[tuple[float, str]]:
    """(summed microseconds, kernel names) of what the GPU ran before each marker."""
    on_gpu = sorted((e.start_ns(), e.duration_ns(), e.name()) for e in events if "CUDA" in str(e.device_type()))
    launches: list[tuple[float, str]] = []
    total = 0.0
    names: list[str] = []
    for _, duration, name in on_gpu:
        if "atan_kernel" in name:
            launches.append((total, ";".join(names)))
            total, names = 0.0, []
        else:
            total += duration / 1e3
            names.append(name)
    return launches


def _timing(shape: Shape, samples: Sequence[tuple[float, str]]) -> Timing | None:
    if not samples:
        return None
    times = [us for us, _ in samples]
    return Timing(shape, statistics.median(times), min(times), max(times), samples[-1][1])
