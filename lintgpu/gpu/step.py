"""A whole step: the GPU's time line beside the CPU's launches."""

from __future__ import annotations

from dataclasses import dataclass

from lintgpu.gpu.cost import cost_ops
from lintgpu.gpu.costs import MATH, MEMORY, PYTHON, OpCost, StepCost
from lintgpu.gpu.host import DEFAULT_HOST, HostProfile, cpu_us, optimizer_cpu_us
from lintgpu.gpu.memory import STREAMING
from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import Op, Parameters, Trace
from lintgpu.workload import Mode, Workload

_FUSED_KINDS = frozenset({"pointwise", "norm", "softmax", "loss", "reduction", "copy", "random"})
# What is left of the memory traffic and launches of fusible ops once the compiler has merged them.
_FUSED_BYTES = 0.4
_FUSED_LAUNCHES = 0.3
# Bytes an optimizer moves for each parameter: AdamW reads weight, gradient and two moments and writes three of them, in fp32.
_OPTIMIZER_BYTES = {"adamw-fused": 28.0, "adamw-foreach": 64.0, "sgd": 12.0}


def cost_step(trace: Trace, profile: Profile, workload: Workload, host: HostProfile = DEFAULT_HOST) -> StepCost:
    """What one step of `trace` takes on `profile`, in microseconds."""
    costs = cost_ops(trace.ops, profile, workload)
    optimizer = optimizer_us(trace.parameters, profile, workload)
    scale = [_FUSED_BYTES if workload.compiled and op.kind in _FUSED_KINDS else 1.0 for op in trace.ops]
    totals = [(op, cost, op.count * factor) for op, cost, factor in zip(trace.ops, costs, scale, strict=True)]
    gpu = sum(cost.us * times for _, cost, times in totals) + optimizer
    math = sum(cost.us * times for _, cost, times in totals if cost.bound == MATH)
    low, high = _band(totals, optimizer, gpu)
    cpu = _cpu_us(trace, workload, host)
    step = _overlapped(gpu, cpu)
    return StepCost(
        ops=costs,
        gpu_us=gpu,
        gpu_low=low,
        gpu_high=high,
        cpu_us=cpu,
        step_us=step,
        step_low=_overlapped(low, cpu / host.spread),
        step_high=_overlapped(high, cpu * host.spread),
        math_us=math,
        memory_us=gpu - math,
        bound=PYTHON if cpu > gpu else (MATH if math >= gpu - math else MEMORY),
        optimizer_us=optimizer,
        gpu=profile.name,
        basis=profile.basis,
        doubled_batch_ratio=_overlapped(2 * (gpu - optimizer) + optimizer, cpu) / step if step else 0.0,
    )


def optimizer_us(parameters: Parameters, profile: Profile, workload: Workload) -> float:
    """GPU time of the optimizer step; 0 outside training."""
    if workload.mode is not Mode.TRAIN or workload.optimizer == "none":
        return 0.0
    moved = parameters.trainable_elements * _OPTIMIZER_BYTES.get(workload.optimizer, 28.0)
    return 5.0 + moved / (profile.bandwidth_gbps * 1e9 * STREAMING) * 1e6


def _band(totals: list[tuple[Op, OpCost, float]], optimizer: float, gpu: float) -> tuple[float, float]:
    """80 % band of the sum: half of the ops' errors is common to all (clocks), half independent."""
    common_low = sum((cost.us - cost.low) * times for _, cost, times in totals)
    common_high = sum((cost.high - cost.us) * times for _, cost, times in totals)
    return gpu - 0.6 * common_low - 0.1 * optimizer, gpu + 0.6 * common_high + 0.1 * optimizer


def _cpu_us(trace: Trace, workload: Workload, host: HostProfile) -> float:
    if workload.compile == "reduce-overhead":
        return host.graph_us + optimizer_cpu_us(trace.parameters, workload, host)
    if workload.compiled:
        launches = sum(op.count * (_FUSED_LAUNCHES if op.kind in _FUSED_KINDS else 1.0) for op in trace.ops if op.kind != "view")
        return host.compiled_step_us + launches * host.compiled_us + optimizer_cpu_us(trace.parameters, workload, host)
    return cpu_us(trace.ops, trace.parameters, workload, host)


def _overlapped(gpu: float, cpu: float) -> float:
    """The step's time: launches run ahead of the GPU, so the longer line counts, and a little of the shorter where they meet."""
    longer, shorter = max(gpu, cpu), min(gpu, cpu)
    return longer + 0.05 * shorter * (shorter / longer) ** 4 if longer else 0.0


@dataclass(frozen=True)
class Saving:
    """What a change saves, shares of the step before it."""

    gpu_us: float
    gpu_share: float
    step_share: float
    low: float
    """80 % band of gpu_share."""
    high: float


def saving(before: StepCost, after: StepCost) -> Saving:
    """What going from `before` to `after` saves. Errors common to both steps cancel."""
    saved = before.gpu_us - after.gpu_us
    spread = 0.25 * abs(saved) + 0.005 * before.gpu_us
    return Saving(
        gpu_us=saved,
        gpu_share=saved / before.gpu_us if before.gpu_us else 0.0,
        step_share=(before.step_us - after.step_us) / before.step_us if before.step_us else 0.0,
        low=(saved - spread) / before.gpu_us if before.gpu_us else 0.0,
        high=(saved + spread) / before.gpu_us if before.gpu_us else 0.0,
    )
