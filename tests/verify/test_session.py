"""A whole verification on the CPU's clock: the GPU's code paths without its figures. Only what holds on any clock is asserted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lintgpu import engine
from lintgpu.finding import Change, Finding, Severity
from lintgpu.measurement import Check, Verdict
from lintgpu.report import find as find_format
from lintgpu.report.base import Report
from lintgpu.report.read import BadDocument, read_document
from lintgpu.rule import find_rule
from lintgpu.verify import jobs, session
from lintgpu.verify.jobs import Subject
from lintgpu.verify.records import Device

from .conftest import claim, needs_models

pytestmark = needs_models
Planted = Callable[..., Finding]


def measured(request: engine.Request, findings: list[Finding], seconds: float, progress: Any = lambda target, stage: None) -> Report:
    """Without the comparisons that compile: a compiler takes its time, and is not what is tested here."""
    options = session.Options("cpu", time.monotonic() + seconds, progress, job_seconds=0.1, questions=frozenset({"batch x2"}))
    return engine.verify_findings(request, findings, lambda report, subjects: session.verify(report, subjects, options))


@pytest.fixture(scope="module")
def verified(request_: engine.Request, planted: Planted) -> Report:
    """A right and a wrong suggestion, measured."""
    right = planted("vocab_size", 1008, claim(1e9, 0.5))
    wrong = planted("vocab_size", 8008, claim(10.0, 0.5), code="LG102", message="8008 is faster")
    return measured(request_, [right, wrong], 120)


def of(report: Report, suggestion: int) -> Finding:
    return next(finding for finding in report.findings if finding.suggestion == suggestion)


def test_a_planted_wrong_suggestion_is_refuted(verified: Report) -> None:
    finding = of(verified, 8008)
    assert finding.measured is not None
    assert finding.measured.verdict is Verdict.REFUTED
    assert finding.severity is Severity.NOTE
    assert finding.message.endswith("the prediction was: 8008 is faster")
    assert finding.cost == claim(10.0, 0.5), "the prediction stays beside"


def test_every_flagged_gemm_is_timed_before_and_after(verified: Report) -> None:
    found = of(verified, 1008).measured
    assert found is not None
    assert {op.what.split(":")[0] for op in found.before} == {"lm_head forward", "lm_head grad-input", "lm_head grad-weight"}
    assert [op.what.split(":")[0] for op in found.before] == [op.what.split(":")[0] for op in found.after]
    assert all("1001" in op.what for op in found.before)
    assert all("1008" in op.what for op in found.after)
    assert all(op.us is not None and op.us > 0 and op.predicted_us > 0 for op in (*found.before, *found.after))
    assert found.ratio is not None
    assert found.ratio.low <= found.ratio.median <= found.ratio.high


def test_whole_steps_are_timed_with_their_prediction(verified: Report) -> None:
    found = of(verified, 1008).measured
    assert found is not None
    assert [step.label for step in found.steps] == ["as it is", "with the change"]
    assert all(step.predicted_ms for step in found.steps)
    assert found.step_share is not None


def test_the_numbers_agree_and_padded_rows_never_win(verified: Report) -> None:
    found = of(verified, 1008).measured
    assert found is not None
    names = {check.what for check in found.checks}
    assert {
        "padded model: outputs on the real rows",
        "padded model: gradients of the real rows",
        "padded vocabulary: masked rows in the top 5",
        "padded vocabulary: probabilities of the real rows",
        "lm_head forward: the same numbers",
    } <= names
    assert all(check.passed for check in found.checks)
    assert any("mask the logits of the 7 padded rows" in note for note in found.notes)
    assert not [finding for finding in verified.findings if finding.code == "LG003"]


def test_the_target_gets_its_doubling_test(verified: Report) -> None:
    steps = verified.targets[0].measured
    assert steps is not None
    assert steps.comparisons[0].name == "batch x2"
    assert "twice the batch takes" in steps.comparisons[0].text
    assert verified.verification is not None
    assert verified.verification.device == "cpu"
    assert dict(verified.verification.versions)["torch"]


def test_what_the_budget_leaves_out_is_said(request_: engine.Request, planted: Planted) -> None:
    report = measured(request_, [planted("vocab_size", 1008, claim(1.0, 0.1))], 0.01)
    found = report.findings[0].measured
    assert found is not None
    assert found.verdict is Verdict.UNMEASURED
    assert session.OUT_OF_BUDGET in found.reason
    assert report.findings[0].severity is Severity.ERROR, "the static result stands"
    assert report.verification is not None
    assert not report.verification.complete


def test_an_interrupt_leaves_what_was_measured(request_: engine.Request, planted: Planted) -> None:
    def interrupt(target: str, stage: str) -> None:
        if stage == "measuring LG102":
            raise KeyboardInterrupt

    first = planted("vocab_size", 1008, claim(1e6, 0.1))
    second = planted("vocab_size", 1016, claim(1.0, 0.1), code="LG102")
    report = measured(request_, [first, second], 60, interrupt)
    assert of(report, 1008).measured is not None
    assert of(report, 1016) == second, "what was not reached stays as it was predicted"
    assert [(error.kind, error.message) for error in report.errors] == [("verify", "interrupted: what was measured until then is shown")]


def test_a_value_that_the_model_refuses_is_not_measured(request_: engine.Request, planted: Planted) -> None:
    report = measured(request_, [planted("n_embd", 65, claim(1.0, 0.1))], 0.01)
    found = report.findings[0].measured
    assert found is not None
    assert found.verdict is Verdict.UNMEASURED
    assert "refuses" in found.reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"value": 999}, "vocab_size = 999"), ({"workload": "train, batch 9 x 9"}, "batch 9 x 9"), ({"gpu": "A100"}, "on A100")],
)
def test_a_finding_of_other_times_is_an_error(request_: engine.Request, planted: Planted, changed: dict[str, Any], said: str) -> None:
    finding = replace(planted("vocab_size", 1008, claim(1.0, 0.1)), **changed)
    report = measured(request_, [finding], 0.01)
    assert report.findings == (finding,)
    (error,) = report.errors
    assert (error.kind, error.line) == ("verify", 1)
    assert said in error.message
    assert error.message.endswith("check again")


# Another card


@pytest.mark.parametrize(
    ("name", "here"), [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA H100 80GB HBM3", False), ("Some New Card", False)]
)
def test_only_the_card_that_was_judged_for_measures(subject: Subject, name: str, here: bool) -> None:
    assert session._is_here(subject, Device(name)) is here


def test_findings_for_another_card_are_left_alone_in_one_line(subject: Subject) -> None:
    (line,) = session._elsewhere([subject, subject], Device("NVIDIA A100-SXM4-80GB"))
    assert line.startswith("this is a NVIDIA A100-SXM4-80GB, not the H200-SXM-141GB")
    assert line.endswith("the predictions stand")


@pytest.fixture(scope="module")
def subject(request_: engine.Request) -> Subject:
    found: list[Subject] = []

    def keep(report: Report, subjects: Any) -> Report:
        found.extend(subjects)
        return report

    engine.check(request_, keep)
    return found[0]


# What is asked


def test_a_finding_without_a_change_is_not_measured(subject: Subject, planted: Planted) -> None:
    assert jobs.for_finding(subject, planted("vocab_size", 1008, claim(1.0, 0.1), change=None)) == "there is no change to measure"


@pytest.mark.parametrize(
    ("change", "numbers"),
    [(Change(compile="default"), "compiled"), (Change(attention="sdpa"), "attention"), (Change(dtype="tf32"), None)],
)
def test_changes_without_ops_of_their_own_are_measured_in_steps(
    subject: Subject, planted: Planted, change: Change, numbers: str | None
) -> None:
    asked = jobs.for_finding(subject, planted("vocab_size", 1008, claim(1.0, 0.1), change=change))
    assert not isinstance(asked, str)
    assert asked.layers is None
    assert asked.steps is not None
    assert len(asked.steps.variants) == 2
    assert (asked.numbers.kind if asked.numbers else None) == numbers


def test_another_width_is_compared_at_equal_work(subject: Subject, planted: Planted) -> None:
    asked = jobs.for_finding(subject, planted("vocab_size", 2002, claim(1.0, 0.1), change=Change((("vocab_size", 2002),), same_work=True)))
    assert not isinstance(asked, str)
    assert asked.steps is None
    assert asked.work[1] == pytest.approx(2 * asked.work[0])


def test_every_target_is_asked_about_its_waits(subject: Subject) -> None:
    assert [question.name for question in jobs.questions(subject)] == [
        "batch x2",
        "attention",
        "precision",
        "torch.compile",
        "reduce-overhead",
    ]


# The way through a file


def test_findings_come_back_from_json_as_they_were(verified: Report, request_: engine.Request, config: str) -> None:
    document = read_document(find_format("json").render(verified), "findings.json")
    assert [replace(one, measured=None, fingerprint_parts=()) for one in verified.findings] == list(document.findings)
    assert document.paths == (config,)
    assert document.gpus == ("H200-SXM-141GB",)
    assert document.workload == {"batch": 2, "sequence": 32}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "f.json:1:2: not valid JSON"),
        ("[]", "f.json: this is not the output"),
        ('{"schema_version": 99, "findings": []}', "f.json: this is not the output"),
        ('{"schema_version": 1, "findings": [{"code": "LG101"}], "targets": []}', "f.json: findings[0]: 'name' is missing"),
        ('{"schema_version": 1, "findings": [], "targets": [{}]}', "f.json: targets: 'basis' is missing"),
        ('{"schema_version": 1, "findings": [3], "targets": []}', "f.json: findings[0]: "),
    ],
)
def test_a_bad_file_is_one_line(text: str, said: str) -> None:
    with pytest.raises(BadDocument) as error:
        read_document(text, "f.json")
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


# Numbers that differ


def test_a_failed_check_is_an_error_with_both_values(planted: Planted, subject: Subject) -> None:
    rule = find_rule("LG003")
    assert rule is not None
    finding = planted("vocab_size", 1008, claim(1.0, 0.1))
    (found,) = rule.check_numbers(subject.context.target, finding, Check("outputs", 0.5, 1e-4, "relative error", (1.25, -3.0)))
    assert (found.code, found.severity, found.span) == ("LG003", Severity.ERROR, finding.span)
    assert "1.25 as it is, -3 after the change" in found.message
    assert not list(rule.check_numbers(subject.context.target, None, Check("outputs", 1e-6, 1e-4)))
    assert list(rule.check_numbers(subject.context.target, None, Check("outputs", float("nan"), 1e-4))), "NaN never passes"


def test_the_json_of_a_verification_is_whole(verified: Report) -> None:
    data = json.loads(find_format("json").render(verified))
    assert data["verification"]["device"] == "cpu"
    assert {finding["measured"]["verdict"] for finding in data["findings"]} <= {verdict.value for verdict in Verdict}
