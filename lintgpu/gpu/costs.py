"""What the cost model answers. Plain frozen data; times in microseconds of one occurrence unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass

MATH = "math"
MEMORY = "memory"
PYTHON = "python"


@dataclass(frozen=True)
class OpCost:
    """GPU time of one op once, with its 80 % band."""

    us: float
    low: float
    high: float
    bound: str
    """math, memory or latency (a kernel too small to fill the GPU)."""
    kernel: str = ""
    """Kernel family (lintgpu.gpu.kernels), an attention kernel (flash, efficient, math) or the kind of a memory-bound op."""
    tile: tuple[int, int] = (0, 0)
    waves: float = 0.0
    """Tiles over the tiles that fit the GPU at once; 2.1 has a tail wave that is 10 % full."""
    alignment: int = 0
    """Alignment class in bytes: the largest power of two, up to 128, dividing every leading dimension."""
    basis: str = "specification"
    """measured, calibrated, sibling or specification."""


@dataclass(frozen=True)
class StepCost:
    """One step: the GPU time line beside the CPU's launches."""

    ops: tuple[OpCost, ...]
    """Parallel to Trace.ops, one occurrence each."""
    gpu_us: float
    gpu_low: float
    gpu_high: float
    cpu_us: float
    step_us: float
    step_low: float
    step_high: float
    math_us: float
    memory_us: float
    bound: str
    """math, memory or python: the wait that binds the step."""
    optimizer_us: float
    gpu: str
    basis: str
    doubled_batch_ratio: float = 0.0
    """Predicted time of a step at twice the batch over this one; below 1.1 the step is launch-bound."""
