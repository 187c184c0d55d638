"""The workload a model is judged under: batch, sequence, precision, mode, compiled or not, parallel degrees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any


class Mode(str, Enum):
    """One training step, one forward pass over whole sequences, or one token a sequence from a KV cache."""

    TRAIN = "train"
    INFER = "infer"
    DECODE = "decode"


class Source(str, Enum):
    """Where a workload value comes from."""

    GIVEN = "given"
    """On the command line or in [tool.lintgpu]."""
    READ = "read"
    """From the linted files."""
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Workload:
    """One step's shape. `sequence` is the context length in decode mode."""

    mode: Mode = Mode.TRAIN
    batch: int = 8
    sequence: int = 1024
    dtype: str = "bf16"
    """bf16, fp16, tf32 or fp32. tf32 means fp32 tensors whose GEMMs may run in TF32."""
    autocast: bool = True
    """bf16 / fp16 by autocast over fp32 weights (usual in training) rather than weights of that dtype."""
    compile: str = "none"
    """none, default (torch.compile) or reduce-overhead (torch.compile with CUDA graphs)."""
    optimizer: str = "adamw-fused"
    """adamw-fused, adamw-foreach, sgd or none; only used in train mode."""
    tensor_parallel: int = 1
    expert_parallel: int = 1
    sources: tuple[tuple[str, str], ...] = ()
    """(field, Source value) for each field that is not at its default by assumption."""

    def source_of(self, field: str) -> Source:
        """Where `field` comes from; ASSUMED unless said otherwise."""
        return Source(dict(self.sources).get(field, Source.ASSUMED.value))

    def with_value(self, source: Source, **values: Any) -> Workload:
        """A copy with the given fields set, each marked as coming from `source`."""
        sources = dict(self.sources) | dict.fromkeys(values, source.value)
        return replace(self, **values, sources=tuple(sorted(sources.items())))

    @property
    def compiled(self) -> bool:
        """Whether the step runs under torch.compile."""
        return self.compile != "none"


@dataclass(frozen=True)
class Stated:
    """A workload value that a linted file states."""

    field: str
    value: Any


DEFAULT_SEQUENCE = 1024
DEFAULTS_BY_MODE: dict[Mode, dict[str, Any]] = {
    Mode.TRAIN: {"batch": 8, "autocast": True},
    Mode.INFER: {"batch": 8, "autocast": False},
    Mode.DECODE: {"batch": 8, "autocast": False},
}


def resolve(stated: Iterable[Stated], given: Mapping[str, Any]) -> Workload:
    """The workload of a target: what was given wins over what its files state, and defaults fill the rest.

    `stated` may hold `max_sequence`, the longest sequence the model takes: it caps the default sequence, nothing else.
    """
    read = {item.field: item.value for item in stated}
    longest = read.pop("max_sequence", None)
    mode = Mode(given.get("mode", read.get("mode", Mode.TRAIN)))
    workload = Workload(mode=mode, sequence=min(DEFAULT_SEQUENCE, longest or DEFAULT_SEQUENCE))
    workload = replace(workload, **DEFAULTS_BY_MODE[mode])
    names = {field.name for field in fields(Workload)} - {"sources"}
    workload = workload.with_value(Source.READ, **{name: value for name, value in read.items() if name in names})
    workload = workload.with_value(Source.GIVEN, **{name: value for name, value in given.items() if name in names})
    return workload if workload.dtype in ("bf16", "fp16") else replace(workload, autocast=False)


def values(workload: Workload) -> list[tuple[str, str, Source]]:
    """(name, value, where it comes from) of each field that bears on this mode, for people."""
    shown = ["mode", "batch", "sequence", "dtype", "compile"]
    if workload.mode is Mode.TRAIN:
        shown += ["autocast", "optimizer"]
    shown += [name for name in ("tensor_parallel", "expert_parallel") if getattr(workload, name) > 1]
    return [(name, _text(getattr(workload, name)), workload.source_of(name)) for name in shown]


def describe(workload: Workload) -> str:
    """One line, such as "train, batch 16 x 1024, bf16 autocast, eager"."""
    context = "context " if workload.mode is Mode.DECODE else ""
    dtype = f"{workload.dtype} autocast" if workload.autocast else workload.dtype
    compiled = {"none": "eager", "default": "compiled", "reduce-overhead": "compiled with CUDA graphs"}[workload.compile]
    parts = [workload.mode.value, f"batch {workload.batch} x {context}{workload.sequence}", dtype, compiled]
    parts += [f"TP {workload.tensor_parallel}"] if workload.tensor_parallel > 1 else []
    parts += [f"EP {workload.expert_parallel}"] if workload.expert_parallel > 1 else []
    return ", ".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, Enum) else value)
