"""The CPU's side of a step: microseconds of Python and dispatch for each op, launched kernel or view alike.

The defaults lie in the middle of the hosts that were measured (torch 2.11): 12 us an op of a training step of plain modules under autocast,
12 to 20 us of GPT-2, Llama, BERT, ViT, T5 and Whisper of transformers, whose Python does more between two ops; 6 to 8.5 in inference; 20
to 35 a kernel of compiled training code. Hosts differ that much, so `spread` is wide.
"""

from __future__ import annotations

from dataclasses import dataclass

from lintgpu.trace.records import FORWARD, Parameters, Trace
from lintgpu.workload import Mode, Workload


@dataclass(frozen=True)
class HostProfile:
    """Microseconds of CPU time."""

    autocast_op_us: float = 13.0
    """One forward op of an eager training step under autocast."""
    train_op_us: float = 10.5
    """The same without autocast."""
    backward_op_us: float = 9.5
    """One backward op, which autograd dispatches without Python."""
    infer_op_us: float = 6.3
    """One op of an eager forward pass without gradients."""
    library_factor: float = 1.6
    """How much more an op takes in models of transformers, all told."""
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


def eager_times(trace: Trace, workload: Workload, host: HostProfile) -> HostTimes:
    """Each op is dispatched by itself."""
    if workload.mode is not Mode.TRAIN:
        each = host.infer_op_us
    else:
        each = host.autocast_op_us if workload.autocast and workload.dtype in ("bf16", "fp16") else host.train_op_us
    factor = host.library_factor if any(name == "transformers" for name, _ in trace.versions) else 1.0
    forward = sum(op.count for op in trace.ops if op.phase == FORWARD)
    backward = sum(op.count for op in trace.ops if op.phase != FORWARD)
    return HostTimes(forward * each * factor, backward * host.backward_op_us * factor, optimizer_us(trace.parameters, workload, host))


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
