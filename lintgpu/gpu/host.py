"""The CPU's side of a step: microseconds of Python and dispatch for each op it launches."""

from __future__ import annotations

from dataclasses import dataclass

from lintgpu.trace.records import FORWARD, Op, Parameters
from lintgpu.workload import Mode, Workload


@dataclass(frozen=True)
class HostProfile:
    """Microseconds of CPU time; a band of `spread` times either way."""

    forward_us: float = 11.0
    """One launched op of the forward pass, Python included."""
    backward_us: float = 8.0
    """One launched op of the backward pass (C++ autograd)."""
    view_us: float = 1.5
    """An op that launches nothing."""
    fused_optimizer_us: float = 250.0
    foreach_optimizer_us: float = 1500.0
    compiled_us: float = 4.5
    """One kernel launched by compiled code."""
    compiled_step_us: float = 300.0
    """Guards and calls around a compiled step."""
    graph_us: float = 120.0
    """Replay of a CUDA graph."""
    optimizer_tensor_us: float = 0.6
    """Each parameter tensor of an optimizer step."""
    spread: float = 1.5


DEFAULT_HOST = HostProfile()


def cpu_us(ops: tuple[Op, ...], parameters: Parameters, workload: Workload, host: HostProfile) -> float:
    """CPU time of one eager step."""
    launched = sum(op.count * (host.forward_us if op.phase == FORWARD else host.backward_us) for op in ops if op.kind != "view")
    views = sum(op.count * host.view_us for op in ops if op.kind == "view")
    return launched + views + optimizer_cpu_us(parameters, workload, host)


def optimizer_cpu_us(parameters: Parameters, workload: Workload, host: HostProfile) -> float:
    """CPU time of the optimizer step; 0 outside training."""
    if workload.mode is not Mode.TRAIN or workload.optimizer == "none":
        return 0.0
    base = host.fused_optimizer_us if workload.optimizer == "adamw-fused" else host.foreach_optimizer_us
    return base + parameters.trainable_tensors * host.optimizer_tensor_us
