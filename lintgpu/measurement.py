"""What a GPU said about predictions: figures that were measured, beside findings and steps. Plain frozen data.

Times are in the unit that a name ends in, shares are 0..1 of a step. A ratio is time before over time after: 1.5 means that the change
makes it 1.5 times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """What a measurement says about a prediction."""

    CONFIRMED = "confirmed"
    SMALLER = "smaller than predicted"
    REFUTED = "refuted"
    UNMEASURED = "not measured"


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Of the interval, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Check:
    """Two numbers that must agree: `value` may be at most `limit` (a relative error, a share, a count)."""

    what: str
    value: float
    limit: float
    detail: str = ""
    pair: tuple[float, float] | None = None
    """The two numbers where they differ most: as it is, and after the change."""

    @property
    def passed(self) -> bool:
        """False for a NaN too."""
        return self.value <= self.limit


@dataclass(frozen=True)
class MeasuredOp:
    """One op of a step, `count` times: predicted and measured microseconds of one occurrence."""

    what: str
    """Module, phase, shape, layout and dtype."""
    count: int
    predicted_us: float
    us: float | None
    kernel: str = ""
    grid: str = ""
    """Of the longest kernel; empty where the profiler does not tell."""
    tflops: float | None = None
    gbps: float | None = None
    """Each tensor counted once."""
    of_ceiling: float | None = None
    """Share of the card's peak rate or bandwidth, whichever is nearer."""


@dataclass(frozen=True)
class TimedStep:
    """One variant's step."""

    label: str
    ms: Interval
    ratio: Interval
    """Time of the first variant over this one's."""
    predicted_ms: float | None = None
    gpu_ms: float | None = None
    """GPU busy in a step, from the profiler."""
    bound: str = ""
    """math, memory or python, from the profiler; empty where it was not asked."""
    note: str = ""


@dataclass(frozen=True)
class Measurement:
    """What was measured about one finding. The prediction stays in the finding's cost."""

    verdict: Verdict
    reason: str
    """The verdict in one line, for people."""
    saving_us: Interval | None = None
    """GPU time that the change saves in the flagged ops of one step."""
    ratio: Interval | None = None
    """Of the flagged ops."""
    step_share: Interval | None = None
    """Share of the whole step's time that the change saves."""
    before: tuple[MeasuredOp, ...] = ()
    after: tuple[MeasuredOp, ...] = ()
    steps: tuple[TimedStep, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Steps timed in turn; the first is what the others are compared with."""

    name: str
    steps: tuple[TimedStep, ...]
    text: str
    """The outcome in one line, for people."""


@dataclass(frozen=True)
class StepMeasurement:
    """What was measured about a target's step."""

    comparisons: tuple[Comparison, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The card that measured and how far it came."""

    device: str
    driver: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    complete: bool = True
    """False where the run was interrupted or something could not be measured in its budget."""
    notes: tuple[str, ...] = ()
    """What may bend the figures, one line each."""
