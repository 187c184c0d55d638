"""A whole step: the GPU's time line beside the CPU's launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lintgpu.gpu.cost import LATENCY, cost_ops
from lintgpu.gpu.costs import MATH, MEMORY, PYTHON, OpCost, StepCost
from lintgpu.gpu.fusion import fuse, padded, padding_us
from lintgpu.gpu.host import DEFAULT_HOST, HostProfile, HostTimes, compiled_times, eager_times
from lintgpu.gpu.memory import transfer_us
from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import FORWARD, Op, Parameters, Trace
from lintgpu.workload import Mode, Workload

# (bytes a parameter, share of the bandwidth): AdamW reads weight, gradient and two moments and writes three of them, all fp32;
# foreach does it in a dozen passes. Measured on an H200 inside GPT-2 and Llama steps.
_OPTIMIZERS = {"adamw-fused": (28.0, 0.60), "adamw-foreach": (93.0, 0.88), "sgd": (12.0, 0.80)}
_COMMON_ERROR = 0.6
"""Share of the ops' bands that all ops of a step have in common (clocks, the machine); the rest averages out."""


@dataclass(frozen=True)
class GpuTimes:
    """GPU time of the parts of a step, in microseconds."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step's."""
        return self.forward + self.backward + self.optimizer

    def scaled(self, factor: float) -> GpuTimes:
        """A GPU `factor` times slower."""
        return GpuTimes(self.forward * factor, self.backward * factor, self.optimizer * factor)


OpCoster = Callable[[Sequence[Op], Profile, Workload], tuple[OpCost, ...]]


def cost_step(
    trace: Trace, profile: Profile, workload: Workload, host: HostProfile = DEFAULT_HOST, op_coster: OpCoster = cost_ops
) -> StepCost:
    """What one step of `trace` takes on `profile`, in microseconds; `op_coster` may answer from memory (KnownCosts)."""
    costs, kernels = _costs(trace.ops, profile, workload, op_coster)
    optimizer = optimizer_us(trace.parameters, profile, workload)
    gpu = _gpu_times(trace.ops, [cost.us for cost in costs], optimizer)
    doubled = _gpu_times(trace.ops, [_doubled(op, cost) for op, cost in zip(trace.ops, costs, strict=True)], optimizer)
    cpu = _host_times(trace, kernels, workload, host)
    low, high = _band(trace.ops, costs, gpu.total)
    math_us = sum(op.count * cost.us for op, cost in zip(trace.ops, costs, strict=True) if cost.bound == MATH)
    step = overlapped(gpu, cpu)
    return StepCost(
        ops=tuple(costs),
        gpu_us=gpu.total,
        gpu_low=gpu.total * low,
        gpu_high=gpu.total * high,
        cpu_us=cpu.total,
        step_us=step,
        step_low=overlapped(gpu.scaled(low), cpu.scaled(1 / host.spread)),
        step_high=overlapped(gpu.scaled(high), cpu.scaled(host.spread)),
        math_us=math_us,
        memory_us=gpu.total - math_us,
        bound=PYTHON if cpu.total > gpu.total else (MATH if math_us >= gpu.total - math_us else MEMORY),
        optimizer_us=optimizer,
        gpu=profile.name,
        basis=profile.basis,
        doubled_batch_ratio=overlapped(doubled, cpu) / step if step else 0.0,
    )


def overlapped(gpu: GpuTimes, cpu: HostTimes) -> float:
    """Time of a step that starts with an idle GPU: the GPU runs behind the launches of each part, the optimizer's come last."""
    forward = max(gpu.forward, cpu.forward)
    backward = max(forward + gpu.backward, cpu.forward + cpu.backward)
    return max(backward, cpu.total) + gpu.optimizer


def optimizer_us(parameters: Parameters, profile: Profile, workload: Workload) -> float:
    """GPU time of the optimizer step; 0 outside training."""
    if workload.mode is not Mode.TRAIN or workload.optimizer == "none":
        return 0.0
    each, share = _OPTIMIZERS.get(workload.optimizer, _OPTIMIZERS["adamw-fused"])
    return 5.0 + transfer_us(parameters.trainable_elements * each, share, profile)


def _costs(ops: Sequence[Op], profile: Profile, workload: Workload, op_coster: OpCoster) -> tuple[list[OpCost], list[float]]:
    """The ops' costs and the kernels that each launches."""
    costs = list(op_coster(ops, profile, workload))
    if not workload.compiled:
        return costs, [0.0 if op.kind == "view" else 1.0 for op in ops]
    return fuse(ops, _with_padding(ops, costs, profile, workload, op_coster), profile)


def _with_padding(ops: Sequence[Op], costs: list[OpCost], profile: Profile, workload: Workload, op_coster: OpCoster) -> list[OpCost]:
    """Inductor pads a misaligned GEMM where the padded one and its copies take less."""
    candidates = [(i, wider) for i, op in enumerate(ops) if (wider := padded(op)) is not None]
    result = list(costs)
    for (i, _), cost in zip(candidates, op_coster([wider for _, wider in candidates], profile, workload), strict=True):
        gemm = ops[i].gemm
        assert gemm is not None
        copies = padding_us(gemm, ops[i].dtype, profile)
        if cost.us + copies < costs[i].us:
            result[i] = replace(cost, us=cost.us + copies, low=cost.low + copies, high=cost.high + copies)
    return result


def _gpu_times(ops: Sequence[Op], us: Sequence[float], optimizer: float) -> GpuTimes:
    forward = sum(op.count * each for op, each in zip(ops, us, strict=True) if op.phase == FORWARD)
    backward = sum(op.count * each for op, each in zip(ops, us, strict=True) if op.phase != FORWARD)
    return GpuTimes(forward, backward, optimizer)


def _host_times(trace: Trace, kernels: Sequence[float], workload: Workload, host: HostProfile) -> HostTimes:
    if not workload.compiled:
        return eager_times(trace, workload, host)
    forward = sum(op.count * each for op, each in zip(trace.ops, kernels, strict=True) if op.phase == FORWARD)
    backward = sum(op.count * each for op, each in zip(trace.ops, kernels, strict=True) if op.phase != FORWARD)
    return compiled_times(forward, backward, trace.parameters, workload, host)


def _doubled(op: Op, cost: OpCost) -> float:
    """Time of the op at twice the batch: kernels that do not fill the GPU take no longer, weights are read once all the same."""
    if op.gemm is not None and cost.waves > 0:
        if cost.bound == MEMORY:
            gemm = op.gemm
            moving = gemm.m * (gemm.k + gemm.n)
            return cost.us * (2 * moving + gemm.k * gemm.n) / (moving + gemm.k * gemm.n)
        return cost.us * math.ceil(2 * cost.waves) / math.ceil(cost.waves)
    if cost.bound == LATENCY:
        return cost.us * 1.1
    return 2 * cost.us - min(cost.us, 2.0)


def _band(ops: Sequence[Op], costs: Sequence[OpCost], total: float) -> tuple[float, float]:
    """80 % band of the GPU time as factors."""
    if total <= 0:
        return 1.0, 1.0
    below = sum(op.count * (cost.us - cost.low) for op, cost in zip(ops, costs, strict=True))
    above = sum(op.count * (cost.high - cost.us) for op, cost in zip(ops, costs, strict=True))
    return 1 - _COMMON_ERROR * below / total, 1 + _COMMON_ERROR * above / total
