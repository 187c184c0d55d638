"""What measured figures say about a prediction. Pure functions over plain data."""

from __future__ import annotations

from dataclasses import replace

from lintgpu.finding import Finding, FindingCost, Severity
from lintgpu.measurement import Interval, Measurement, Verdict
from lintgpu.report.text import duration, percent

ENOUGH = 0.8
"""A measured saving of this share of the predicted one confirms it, however narrow the band was."""
NOTHING = 0.2
"""A measured saving below this share of the predicted one refutes it, however real it is."""
_LEAST_STEP_SHARE = 0.02
"""Predicted savings of a step below this are too small for the step's own noise to speak against."""


def saved(ratio: Interval) -> Interval:
    """Share of the time before that a change saves, from the ratio of times."""
    return Interval(*(1 - 1 / value if value else 0.0 for value in (ratio.median, ratio.low, ratio.high)))


def at_equal_work(ratio: Interval, before: float, after: float) -> Interval:
    """`ratio` for one unit of work where the change takes `before` units to `after`."""
    factor = after / before if before else 1.0
    return Interval(ratio.median * factor, ratio.low * factor, ratio.high * factor)


def times(interval: Interval, factor: float) -> Interval:
    """An interval in another unit; `factor` is positive."""
    return Interval(interval.median * factor, interval.low * factor, interval.high * factor)


def judge(claim: float, least: float, found: Interval) -> Verdict:
    """A saving that was predicted as `claim`, with `least` as the low end of its band, against the measured one in the same unit."""
    if found.low <= 0 or found.median < NOTHING * claim:
        return Verdict.REFUTED
    return Verdict.CONFIRMED if found.median >= min(least, ENOUGH * claim) else Verdict.SMALLER


def least_of(cost: FindingCost, claim: float) -> float:
    """The low end of the band of `claim`: the cost's own band, which is one of GPU shares, as a share of the claim."""
    return claim * cost.low / cost.saving_gpu_share if cost.saving_gpu_share > 0 else ENOUGH * claim


def of_layers(cost: FindingCost, saving_us: Interval, step_share: Interval | None) -> Verdict:
    """The verdict on ops that were timed alone, and on the step where that was timed too (its share is the measured one)."""
    verdict = judge(cost.saving_gpu_us, least_of(cost, cost.saving_gpu_us), saving_us)
    if step_share is None or cost.saving_step_share < _LEAST_STEP_SHARE or verdict is Verdict.REFUTED:
        return verdict
    if step_share.high <= 0:
        return Verdict.REFUTED
    return Verdict.SMALLER if step_share.high < cost.saving_step_share / 2 else verdict


def of_step(cost: FindingCost, step_share: Interval) -> Verdict:
    """The verdict on a change that has no ops of its own to time: compilation, precision, layout."""
    return judge(cost.saving_step_share, least_of(cost, cost.saving_step_share), step_share)


def layers_text(cost: FindingCost, saving_us: Interval) -> str:
    """Measured and predicted saving of the flagged ops in one clause."""
    return (
        f"the flagged ops take {_signed(saving_us.median)} a step [{_signed(saving_us.low)} to {_signed(saving_us.high)}], "
        f"predicted {_signed(cost.saving_gpu_us)}"
    )


def step_text(cost: FindingCost, step_share: Interval) -> str:
    """Measured and predicted saving of the step in one clause."""
    return (
        f"the step takes {_less(step_share.median)} [{percent(step_share.low)} to {percent(step_share.high)}], "
        f"predicted {percent(cost.saving_step_share)}"
    )


def _signed(us: float) -> str:
    return f"{duration(abs(us))} {'less' if us >= 0 else 'more'}"


def _less(share: float) -> str:
    return f"{percent(abs(share))} {'less' if share >= 0 else 'more'} time"


def annotated(finding: Finding, measured: Measurement, device: str) -> Finding:
    """`finding` with its measurement. A refuted one becomes a note that keeps its prediction, a smaller one as severe as was measured."""
    finding = replace(finding, measured=measured)
    if measured.verdict is Verdict.REFUTED:
        message = f"refuted by timing on {device}: {measured.reason}; the prediction was: {finding.message}"
        return replace(finding, severity=Severity.NOTE, message=message, fix=None)
    if measured.verdict is Verdict.SMALLER and measured.step_share is not None:
        severity = Severity.of_share(measured.step_share.median)
        return replace(finding, severity=min(severity, finding.severity, key=lambda one: one.rank))
    return finding
