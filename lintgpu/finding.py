"""What a rule reports: findings, spans, costs and fixes. Plain frozen data that serialises to JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lintgpu.measurement import Measurement


class Severity(str, Enum):
    """How much of a step a finding costs: error >= 5 %, warning >= 1 %, note below that."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for a note, 1 for a warning, 2 for an error."""
        return ("note", "warning", "error").index(self.value)

    @classmethod
    def of_share(cls, share: float) -> Severity:
        """The severity of a saving that is `share` (0..1) of a step."""
        if share >= 0.05:
            return cls.ERROR
        return cls.WARNING if share >= 0.01 else cls.NOTE


class Confidence(str, Enum):
    """Where the figures of a finding come from, best first."""

    MEASURED = "measured"
    CALIBRATED = "calibrated"
    SIBLING = "sibling"
    SPECIFICATION = "specification"


@dataclass(frozen=True, order=True)
class Span:
    """A piece of text: lines and columns count from 1, in characters; the end is exclusive."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Edit:
    """Replace the text at `span` by `text`."""

    span: Span
    text: str


@dataclass(frozen=True)
class Fix:
    """Edits that go together. `safe` is False where trained weights or behaviour would change."""

    edits: tuple[Edit, ...]
    description: str
    safe: bool
    confirmed: bool = False
    """True where the fixed model was built and traced again and the gain was seen in its cost."""


@dataclass(frozen=True)
class Related:
    """Another place that belongs to a finding: the constructor, the call, a knob to change with it."""

    span: Span
    message: str


@dataclass(frozen=True)
class FindingCost:
    """What the flagged thing costs and what the fix saves; shares are of one step, 0..1, times in us."""

    gpu_us: float
    """GPU time of the flagged ops in one step."""
    gpu_share: float
    saving_gpu_us: float
    saving_gpu_share: float
    """Saving as a share of the GPU time of a step."""
    saving_step_share: float
    """Saving as a share of the whole step: what is left after the Python wait hides its part."""
    low: float
    high: float
    """80 % band of `saving_gpu_share`."""
    basis: Confidence


@dataclass(frozen=True)
class Change:
    """What a finding advises, in a form that can be carried out and measured. Empty fields stay as they are."""

    knobs: tuple[tuple[str, int], ...] = ()
    """(knob id, value): all that have to change together."""
    compile: str = ""
    """The mode of torch.compile: default or reduce-overhead."""
    attention: str = ""
    """The implementation of attention: sdpa."""
    dtype: str = ""
    """The precision of the GEMMs, as in a workload."""
    channels_last: bool = False
    same_work: bool = False
    """The saving is meant at equal work: the change makes the layers wider or narrower."""


@dataclass(frozen=True)
class Finding:
    """One thing to change, or one check that could not run."""

    code: str
    name: str
    severity: Severity
    message: str
    span: Span
    target: str | None = None
    knob: str | None = None
    value: int | str | None = None
    suggestion: int | str | None = None
    gpu: str | None = None
    workload: str | None = None
    cost: FindingCost | None = None
    related: tuple[Related, ...] = ()
    fix: Fix | None = None
    details: tuple[str, ...] = ()
    """Further lines for the full output: the GEMM, its kernel, the band, the caveats."""
    fingerprint_parts: tuple[str, ...] = field(default=())
    """What identifies the finding over edits of the file (no line numbers)."""
    change: Change | None = None
    """None where there is nothing to measure: advice without one outcome, or a check that could not run."""
    measured: Measurement | None = None
