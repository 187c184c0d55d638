"""The workload a model is judged under: batch, sequence, precision, mode, compiled or not, parallel degrees."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
