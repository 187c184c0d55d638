"""The CPU's side of a step: microseconds of Python and dispatch for each op, launched kernel or view alike.

The defaults lie in the middle of three hosts that were measured on GPT-2, Llama, BERT, ViT and T5 steps (torch 2.11): 12 to 19 us an op in
training under autocast, 6 to 8.5 in inference, 20 to 35 a kernel of compiled training code. Hosts differ that much, so `spread` is wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lintgpu.trace.records import FORWARD, Op, Parameters
from lintgpu.workload import Mode, Workload


@dataclass(frozen=True)
class HostProfile:
    """Microseconds of CPU time."""

    autocast_op_us: float = 14.5
    """One op, forward or backward, of an eager training step under autocast."""
    train_op_us: float = 11.5
    """The same without autocast."""
    infer_op_us: float = 6.3
    """One op of an eager forward pass without gradients."""
    compiled_train_kernel_us: float = 26.0
    compiled_infer_kernel_us: float = 14.0
    compiled_step_us: float = 300.0
    """Guards and wrappers around a compiled step."""
    graph_us: float = 120.0
    """Replay of a CUDA graph."""
    fused_optimizer_us: float = 400.0
    foreach_optimizer_us: float = 1600.0
    optimizer_tensor_us: float = 2.0
    """Each parameter tensor of an optimizer step and of zeroing its gradient."""
    spread: float = 1.5
    """The 80 % band: this many times faster or slower."""


DEFAULT_HOST = HostProfile()


@dataclass(frozen=True)
class HostTimes:
    """CPU time of the parts of a step, in microseconds."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step's."""
        return self.forward + self.backward + self.optimizer

    def scaled(self, factor: float) -> HostTimes:
        """A host `factor` times slower."""
        return HostTimes(self.forward * factor, self.backward * factor, self.optimizer * factor)


def eager_times(ops: Sequence[Op], parameters: Parameters, workload: Workload, host: HostProfile) -> HostTimes:
    """Each op is dispatched by itself."""
    if workload.mode is not Mode.TRAIN:
        each = host.infer_op_us
    else:
        each = host.autocast_op_us if workload.autocast and workload.dtype in ("bf16", "fp16") else host.train_op_us
    forward = sum(op.count for op in ops if op.phase == FORWARD)
    backward = sum(op.count for op in ops if op.phase != FORWARD)
    return HostTimes(forward * each, backward * each, optimizer_us(parameters, workload, host))


def compiled_times(
    forward_kernels: float, backward_kernels: float, parameters: Parameters, workload: Workload, host: HostProfile
) -> HostTimes:
    """torch.compile launches the kernels that fusion leaves; with reduce-overhead a CUDA graph replays them at once."""
    optimizer = optimizer_us(parameters, workload, host)
    if workload.compile == "reduce-overhead":
        return HostTimes(host.graph_us, host.graph_us if backward_kernels else 0.0, optimizer)
    each = host.compiled_train_kernel_us if workload.mode is Mode.TRAIN else host.compiled_infer_kernel_us
    return HostTimes(host.compiled_step_us + forward_kernels * each, backward_kernels * each, optimizer)


def optimizer_us(parameters: Parameters, workload: Workload, host: HostProfile) -> float:
    """CPU time of the optimizer step; 0 outside training."""
    if workload.mode is not Mode.TRAIN or workload.optimizer == "none":
        return 0.0
    base = host.fused_optimizer_us if workload.optimizer == "adamw-fused" else host.foreach_optimizer_us
    return base + parameters.trainable_tensors * host.optimizer_tensor_us
