"""Whole steps timed in turn (A B A B ...), and the kernels that a step runs. Worker side."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lintgpu.verify import intervals

LEAST_ROUNDS, MOST_ROUNDS = 6, 60
_SAMPLE_SECONDS = 0.12
"""A sample runs a step as often as this takes, so that the wait at its end counts little."""


@dataclass(frozen=True)
class Alternation:
    """Seconds of one step, of each alternative, round by round."""

    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class KernelTime:
    """Microseconds that a kernel took in one step, and its grid where the profiler tells."""

    name: str
    us: float
    grid: str = ""


def alternate(steps: Sequence[Callable[[], object]], device: str, seconds: float, tight: float) -> Alternation:
    """Time each of `steps` once a round until every ratio to the first is known to `tight` of itself or `seconds` are over.

    A sample is several calls that end in one wait for the GPU, as in a training loop. At least three rounds are run.
    """
    started = time.monotonic()
    repeats = [max(1, min(20, round(_SAMPLE_SECONDS / max(1e-6, _sample(step, device, 1))))) for step in steps]
    samples: list[list[float]] = [[] for _ in steps]
    for done in range(1, MOST_ROUNDS + 1):
        for times, step, repeat in zip(samples, steps, repeats, strict=True):
            times.append(_sample(step, device, repeat))
        if done >= LEAST_ROUNDS and all(intervals.ratio(samples[0], other).width <= tight for other in samples[1:]):
            break
        if done >= 3 and time.monotonic() - started > seconds:
            break
    return Alternation(tuple(tuple(times) for times in samples))


def _sample(step: Callable[[], object], device: str, repeat: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    _wait(device)
    return (time.perf_counter() - start) / repeat


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def kernel_times(step: Callable[[], object], repeat: int = 1) -> list[KernelTime]:
    """The kernels of one call of `step` in the order they ran, the mean of `repeat` calls; copies and fills count too.

    Empty where the profiler cannot see the GPU.
    """
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeat):
            step()
        torch.cuda.synchronize()
    events = sorted(_exported(profiler), key=lambda event: float(event["ts"]))
    return [KernelTime(str(event["name"]), float(event.get("dur", 0)) / repeat, _grid(event)) for event in events]


def _exported(profiler: Any) -> list[dict[str, Any]]:
    """What ran on the GPU, from the profiler's trace file, the one place that has the grids."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, RuntimeError):
        return []
    finally:
        os.unlink(path)
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def _grid(event: dict[str, Any]) -> str:
    grid = event.get("args", {}).get("grid")
    return "x".join(str(size) for size in grid) if grid else ""
