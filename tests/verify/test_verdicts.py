"""What measured figures say about a prediction."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.finding import Confidence, Edit, Finding, FindingCost, Fix, Severity, Span
from lintgpu.measurement import Interval, Measurement, Verdict
from lintgpu.verify import intervals, verdicts

COST = FindingCost(
    gpu_us=15_000.0,
    gpu_share=0.3,
    saving_gpu_us=10_000.0,
    saving_gpu_share=0.2,
    saving_step_share=0.2,
    low=0.15,
    high=0.25,
    basis=Confidence.CALIBRATED,
)
SPAN = Span("config.json", 1, 2, 1, 7)
FINDING = Finding(
    "LG101",
    "misaligned-dimension",
    Severity.ERROR,
    "50264 saves 10 ms",
    SPAN,
    cost=COST,
    fix=Fix((Edit(SPAN, "50264"),), "set it", safe=True),
)


def around(value: float, width: float = 0.02) -> Interval:
    return Interval(value, value - abs(value) * width, value + abs(value) * width)


@pytest.mark.parametrize(
    ("saving", "verdict"),
    [
        (around(10_000), Verdict.CONFIRMED),
        (around(14_000), Verdict.CONFIRMED),
        (around(7_600), Verdict.CONFIRMED),  # inside the band, whose low end is 7,500
        (around(4_000), Verdict.SMALLER),
        (around(1_500), Verdict.REFUTED),  # real, and no reason to change anything
        (Interval(3_000, -500, 6_000), Verdict.REFUTED),  # not told from nothing
        (around(-2_000), Verdict.REFUTED),
    ],
)
def test_verdicts_on_layers(saving: Interval, verdict: Verdict) -> None:
    assert verdicts.of_layers(COST, saving, None) is verdict


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(around(0.2), Verdict.CONFIRMED), (around(0.08), Verdict.SMALLER), (Interval(-0.02, -0.04, -0.01), Verdict.REFUTED)],
)
def test_a_step_that_gains_less_speaks_against_faster_layers(share: Interval, verdict: Verdict) -> None:
    assert verdicts.of_layers(COST, around(10_000), share) is verdict


def test_a_step_share_below_its_own_noise_says_nothing() -> None:
    hidden = replace(COST, saving_step_share=0.005)
    assert verdicts.of_layers(hidden, around(10_000), Interval(0.0, -0.01, 0.01)) is Verdict.CONFIRMED


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(around(0.3), Verdict.CONFIRMED), (around(0.1), Verdict.SMALLER), (around(0.02), Verdict.REFUTED), (around(-0.1), Verdict.REFUTED)],
)
def test_verdicts_on_steps_alone(share: Interval, verdict: Verdict) -> None:
    assert verdicts.of_step(COST, share) is verdict


def test_a_claim_without_gpu_share_has_no_band_to_go_by() -> None:
    launches = replace(COST, saving_gpu_share=0.0, low=0.0, high=0.0)
    assert verdicts.least_of(launches, 0.5) == pytest.approx(verdicts.ENOUGH * 0.5)
    assert verdicts.of_step(launches, around(0.19)) is Verdict.CONFIRMED


@given(st.floats(1.0, 1e6), st.floats(0.1, 1.0), st.floats(-1e6, 1e6), st.floats(0, 1e5))
def test_more_is_never_judged_worse(claim: float, band: float, saving: float, more: float) -> None:
    order = [Verdict.REFUTED, Verdict.SMALLER, Verdict.CONFIRMED]
    one, other = (verdicts.judge(claim, claim * band, Interval(value, value, value)) for value in (saving, saving + more))
    assert order.index(one) <= order.index(other)


def test_saved_share_of_a_ratio() -> None:
    assert verdicts.saved(Interval(2.0, 1.0, 4.0)) == Interval(0.5, 0.0, 0.75)


def test_equal_work_takes_a_wider_layer_for_what_it_does() -> None:
    assert verdicts.at_equal_work(Interval(1.0, 0.9, 1.1), before=100.0, after=150.0) == Interval(
        1.5, pytest.approx(1.35), pytest.approx(1.65)
    )
    assert verdicts.at_equal_work(Interval(1.2, 1.1, 1.3), 1.0, 1.0) == Interval(1.2, 1.1, 1.3)


# What becomes of the finding


def measured(verdict: Verdict, share: Interval | None = None) -> Measurement:
    return Measurement(verdict, "the flagged ops take 4.00 ms less a step, predicted 10.0 ms less", step_share=share)


def test_a_confirmed_finding_stays_as_it_is() -> None:
    found = verdicts.annotated(FINDING, measured(Verdict.CONFIRMED), "NVIDIA H200")
    assert replace(found, measured=None) == FINDING


def test_a_refuted_finding_becomes_a_note_with_its_prediction_beside() -> None:
    found = verdicts.annotated(FINDING, measured(Verdict.REFUTED), "NVIDIA H200")
    assert found.severity is Severity.NOTE
    assert found.message.startswith("refuted by timing on NVIDIA H200: the flagged ops take 4.00 ms less")
    assert found.message.endswith("the prediction was: 50264 saves 10 ms")
    assert found.cost == COST
    assert found.fix is None, "--fix must not write what was refuted"


@pytest.mark.parametrize(
    ("share", "severity"), [(0.3, Severity.ERROR), (0.03, Severity.WARNING), (0.003, Severity.NOTE), (None, Severity.ERROR)]
)
def test_a_smaller_saving_is_as_severe_as_was_measured(share: float | None, severity: Severity) -> None:
    interval = None if share is None else around(share)
    assert verdicts.annotated(FINDING, measured(Verdict.SMALLER, interval), "x").severity is severity
    warning = replace(FINDING, severity=Severity.WARNING)
    assert verdicts.annotated(warning, measured(Verdict.SMALLER, around(0.3)), "x").severity is Severity.WARNING, "never raised"


# Intervals


def test_the_interval_of_few_values_is_their_range() -> None:
    assert intervals.median([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0)


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        intervals.median([])


@given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=60))
def test_an_interval_holds_its_median(values: list[float]) -> None:
    found = intervals.median(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_a_drift_that_both_sides_share_cancels() -> None:
    before = [10.0 * (1 + i / 10) for i in range(20)]
    assert intervals.ratio(before, [value / 2 for value in before]) == Interval(2.0, 2.0, 2.0)
