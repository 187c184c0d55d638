"""Whole steps of a model, timed against each other, and the wait that dominates them. Worker side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lintgpu.gpu.costs import MATH, MEMORY, PYTHON
from lintgpu.measurement import Interval, TimedStep
from lintgpu.verify import intervals
from lintgpu.verify.models import DoesNotFit, Models, Step, free, reason_of, synchronize
from lintgpu.verify.records import StepsJob, StepsResult, Variant
from lintgpu.verify.rounds import Alternation, KernelTime, alternate, kernel_times

TIGHT = 0.03
"""Width of the confidence interval of a ratio, as a share of it, that is narrow enough."""
# Parts of the names of kernels that multiply matrices (cuBLAS, cuDNN, CUTLASS, Triton's templates, flash attention, ROCm's Tensile).
_MATH_KERNELS = (
    "gemm", "nvjet", "cutlass", "xmma", "cudnn", "conv", "flash", "fmha", "attention", "_mma", "_mm_", "gemv", "splitk", "cijk_",
)  # fmt: skip
_BUSY = 0.9
"""A GPU that is idle for more than the rest of the step waits for Python."""


def measure(job: StepsJob, models: Models, deadline: float, progress: Callable[[str], None]) -> StepsResult:
    """Time the variants of `job` in turn until the ratios are tight or the clock reaches `deadline` (time.monotonic()).

    Where they do not fit the memory the depth is halved for all of them. Raises DoesNotFit where one layer is too much.
    """
    models.start(job.model, job.variants)
    while True:
        try:
            return _measure(job, models, deadline, progress)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
        # Outside the handler, where the traceback no longer holds the tensors.
        if not models.cut():
            raise DoesNotFit(f"the model does not fit the GPU's memory: {reason}")


def _measure(job: StepsJob, models: Models, deadline: float, progress: Callable[[str], None]) -> StepsResult:
    steps: list[Step] = []
    kept: list[Variant] = []
    notes: list[str] = []
    for variant in job.variants:
        step = _ready(variant, models, progress)
        if isinstance(step, str):
            notes.append(f"{variant.label}: {step}")
            if not kept:
                return StepsResult((), models.cuts(), tuple(notes))
            continue
        steps.append(step)
        kept.append(variant)
    progress("timing steps")
    timed = alternate(steps, models.device.type, deadline - time.monotonic(), TIGHT)
    results = [_timed(variant, timed, i) for i, variant in enumerate(kept)]
    if job.profile and models.device.type == "cuda":
        progress("profiling")
        results = [_with_wait(result, step) for result, step in zip(results, steps, strict=True)]
    del steps
    free(models.device)
    return StepsResult(tuple(results), models.cuts(), tuple(notes))


def _ready(variant: Variant, models: Models, progress: Callable[[str], None]) -> Step | str:
    """A step that was built and run a few times, or why it cannot be. Running out of memory goes through."""
    try:
        progress(f"building {variant.label}")
        step = Step(models.built(variant), variant.workload, models.device)
        progress(f"warming up {variant.label}")
        for _ in range(3 if variant.workload.compiled else 2):
            step()
        synchronize(models.device)
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # Compilers and models raise anything.
        return reason_of(error)
    return step


def _timed(variant: Variant, timed: Alternation, i: int) -> TimedStep:
    milliseconds = [seconds * 1e3 for seconds in timed.seconds[i]]
    predicted = None if variant.predicted_us is None else variant.predicted_us / 1e3
    ratio = Interval(1.0, 1.0, 1.0) if i == 0 else intervals.ratio(timed.seconds[0], timed.seconds[i])
    return TimedStep(variant.label, intervals.median(milliseconds), ratio, predicted)


def _with_wait(result: TimedStep, step: Step) -> TimedStep:
    kernels = kernel_times(step, repeat=3)
    if not kernels:
        return replace(result, note="the profiler saw no kernels, so the wait that dominates is not known")
    busy, bound = wait_of(kernels, result.ms.median)
    return replace(result, gpu_ms=busy, bound=bound)


def wait_of(kernels: Sequence[KernelTime], step_ms: float) -> tuple[float, str]:
    """(milliseconds that the GPU is busy, the wait that dominates) of a step of `step_ms` that ran `kernels`."""
    busy = sum(kernel.us for kernel in kernels) / 1e3
    math = sum(kernel.us for kernel in kernels if is_math(kernel.name)) / 1e3
    if busy < _BUSY * step_ms:
        return busy, PYTHON
    return busy, MATH if math >= busy - math else MEMORY


def is_math(kernel: str) -> bool:
    """Whether a kernel of that name multiplies matrices."""
    name = kernel.lower()
    return any(part in name for part in _MATH_KERNELS)
