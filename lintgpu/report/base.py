"""What the renderers are given: the result of one run, complete and frozen. A renderer adds nothing and drops nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lintgpu.finding import Finding
from lintgpu.measurement import StepMeasurement, Verification
from lintgpu.source import SourceFile


@dataclass(frozen=True)
class FileError:
    """A file or a check that could not be handled; line and column count from 1, 0 where unknown."""

    path: str
    line: int
    column: int
    message: str
    kind: str = "file"
    """file (not readable), gpu (not known), fix (not writable), verify (nothing could be measured) or internal (a rule failed)."""


@dataclass(frozen=True)
class WorkloadValue:
    """One value of the workload a target was judged under."""

    name: str
    value: str
    source: str
    """given, read or assumed (see lintgpu.workload.Source)."""


@dataclass(frozen=True)
class TargetSummary:
    """One target under one workload on one GPU: what was judged, and on which assumptions."""

    name: str
    path: str
    family: str
    gpu: str
    basis: str
    """traced, estimated or failed."""
    static: bool = False
    """Whether no trace was asked for."""
    model_class: str = ""
    workload: str = ""
    """One line, such as "train, batch 16 x 1024, bf16, eager"."""
    workload_values: tuple[WorkloadValue, ...] = ()
    step_us: float | None = None
    """Predicted time of one step in microseconds; None where there is no trace."""
    gpu_us: float | None = None
    bound: str = ""
    """math, memory or python: the wait that binds the step."""
    cost_basis: str = ""
    """measured, calibrated, sibling or specification."""
    trace_seconds: float = 0.0
    assumptions: tuple[str, ...] = ()
    measured: StepMeasurement | None = None


@dataclass(frozen=True)
class Report:
    """Everything one run found, in the order to show it."""

    findings: tuple[Finding, ...] = ()
    files: Mapping[str, SourceFile] = field(default_factory=dict)
    """By the path that spans use; a file that is not here is shown without its code."""
    targets: tuple[TargetSummary, ...] = ()
    errors: tuple[FileError, ...] = ()
    suppressed: int = 0
    """Findings that a comment hid."""
    checked: int = 0
    """Files that were looked at."""
    version: str = ""
    """Of lintgpu."""
    verification: Verification | None = None
    """The GPU that measured; None where none was asked to, or none could."""
    color: bool = False
    """Whether ANSI colours may be used; the caller knows the terminal and NO_COLOR."""
    width: int = 0
    """Columns of the terminal, 0 where there is none."""


class Format(Protocol):
    """What a module of this package offers to be an output format."""

    NAME: str

    def render(self, report: Report) -> str:
        """The whole output as text, ending with a newline unless it is empty."""
        ...
