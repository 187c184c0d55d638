"""What the verifier asks of a GPU and what came back. Plain frozen data; imports neither torch nor numpy.

Times are microseconds and shares are 0..1 unless a name says otherwise; ratios are as in lintgpu.measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lintgpu.measurement import Check, Interval, TimedStep
from lintgpu.trace.records import Op, op_from_json
from lintgpu.workload import Mode, Workload


@dataclass(frozen=True)
class Device:
    """The GPU that measured, as its driver reports it."""

    name: str
    kind: str = "cuda"
    """cuda, rocm or cpu (a dry run)."""
    index: int = 0
    sms: int = 0
    memory_gb: float = 0.0
    driver: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    """(torch, cuda, cublas, ...)."""
    notes: tuple[str, ...] = ()
    """What may bend the figures: other processes, a MIG slice, throttled clocks; one line each."""


# What is asked


@dataclass(frozen=True)
class Item:
    """An op to time, and the predicted time of one occurrence."""

    op: Op
    us: float


@dataclass(frozen=True)
class LayersJob:
    """The ops that a change takes away and those that it brings, timed side by side."""

    before: tuple[Item, ...]
    after: tuple[Item, ...]
    tf32: bool = False
    """fp32 GEMMs go through TF32."""


@dataclass(frozen=True)
class Variant:
    """A model and a workload to run as a step."""

    label: str
    workload: Workload
    changes: tuple[tuple[str, int], ...] = ()
    """(knob id, value)."""
    spec: Mapping[str, Any] | None = None
    """Instead of the model's own spec."""
    channels_last: bool = False
    """The model and its images are laid out channels last."""
    predicted_us: float | None = None
    """Of one step."""


@dataclass(frozen=True)
class Model:
    """How to build the model of a target on the GPU, and what it needs there."""

    key: str
    family: str
    spec: Mapping[str, Any]
    layers: tuple[tuple[str, int], ...] = ()
    """Knobs that count layers, with their values: they are lowered where the model does not fit the memory."""
    parameter_elements: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class StepsJob:
    """Whole steps of variants, timed in turn; the first is what the others are compared with."""

    model: Model
    variants: tuple[Variant, ...]
    profile: bool = False
    """Also say which wait dominates, from a short profiler trace of each variant."""


@dataclass(frozen=True)
class NumbersJob:
    """Whether a variant computes what the base computes."""

    model: Model
    kind: str
    """padded, attention or compiled."""
    base: Variant
    variant: Variant
    knobs: tuple[str, ...] = ()
    """Roles of the knobs that change."""


# What came back


@dataclass(frozen=True)
class TimedItem:
    """One op, measured once or more often. `grid` is empty where the profiler does not tell."""

    item: Item
    us: float | None
    """None where it could not be run; `note` says why."""
    kernels: tuple[str, ...] = ()
    grid: str = ""
    note: str = ""

    @property
    def tflops(self) -> float | None:
        """Achieved TFLOP/s; None for what is no GEMM or was not timed."""
        gemm = self.item.op.gemm
        return gemm.flops / self.us / 1e6 if gemm is not None and self.us else None

    @property
    def gbps(self) -> float | None:
        """Achieved GB/s, each tensor counted once."""
        moved = self.item.op.bytes_read + self.item.op.bytes_written
        return moved / self.us / 1e3 if moved and self.us else None


@dataclass(frozen=True)
class LayersResult:
    """The answer to a LayersJob: totals over one step, each op as often as it occurs."""

    before: tuple[TimedItem, ...]
    after: tuple[TimedItem, ...]
    before_us: float
    after_us: float
    ratio: Interval
    rounds: int
    numbers: tuple[Check, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class StepsResult:
    """The answer to a StepsJob."""

    steps: tuple[TimedStep, ...]
    layers: tuple[tuple[str, int, int], ...] = ()
    """(knob id, value in the config, value measured) where the depth was cut to fit the memory."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NumbersResult:
    """The answer to a NumbersJob."""

    kind: str
    checks: tuple[Check, ...]
    advice: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """A job that could not be done, and why, in one line."""

    reason: str


Job = LayersJob | StepsJob | NumbersJob
Result = LayersResult | StepsResult | NumbersResult | Failure


def knob_name(knob_id: str) -> str:
    """What a message calls a knob, whether the file states it or leaves it to the config class."""
    return knob_id.removeprefix("default:").partition("=")[0]


def to_json(value: Any) -> Any:
    """Plain data of a record. The inverse of `from_json`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind_": type(value).__name__, **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(data: Any) -> Any:
    """The record that `to_json` wrote. Raises KeyError or TypeError on anything else."""
    if isinstance(data, list):
        return tuple(from_json(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "kind_" not in data:
        return {key: _plain(item) for key, item in data.items()}
    name, fields = data["kind_"], {key: item for key, item in data.items() if key != "kind_"}
    if name == "Op":
        return op_from_json({key: _plain(item) for key, item in fields.items()})
    if name == "Workload":
        sources = tuple((str(a), str(b)) for a, b in fields["sources"])
        return Workload(**{**fields, "mode": Mode(fields["mode"]), "sources": sources})
    values = {key: _plain(item) if key == "spec" else from_json(item) for key, item in fields.items()}
    return _KINDS[name](**values)


def _plain(data: Any) -> Any:
    """JSON data as it was, lists and all, with the marks of records taken out."""
    if isinstance(data, dict):
        return {key: _plain(item) for key, item in data.items() if key != "kind_"}
    return [_plain(item) for item in data] if isinstance(data, list) else data


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Interval, Device, Item, LayersJob, Variant, Model, StepsJob, NumbersJob, TimedItem, LayersResult, TimedStep, StepsResult, Check,
        NumbersResult, Failure,
    )
}  # fmt: skip
