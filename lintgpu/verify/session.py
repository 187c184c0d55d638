"""One verification: start the measuring process, ask it what the findings need while the budget lasts, and annotate the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lintgpu import workload as workloads
from lintgpu.finding import Finding
from lintgpu.gpu.profiles import Profile, UnknownGpu, find
from lintgpu.measurement import Check, Comparison, Interval, MeasuredOp, Measurement, StepMeasurement, TimedStep, Verdict, Verification
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.text import duration, percent
from lintgpu.rule import all_rules
from lintgpu.verify import jobs, verdicts
from lintgpu.verify.client import GRACE_SECONDS, NoVerification, Verifier
from lintgpu.verify.jobs import Asked, Question, Subject
from lintgpu.verify.records import Device, Failure, Job, LayersResult, NumbersResult, Result, StepsResult, TimedItem, knob_name

_JOB_SECONDS = 6.0
_JOBS_A_FINDING = 3
_LEAST_SECONDS = 3.0
"""Nothing is begun with less of the budget left."""
_LEAST_COMPILE_SECONDS = 10.0
LAUNCH_BOUND = 1.1
"""A step that takes less than this much longer at twice the batch waits for Python."""
OUT_OF_BUDGET = "the budget was used up before its turn (--verify-budget)"


@dataclass(frozen=True)
class Options:
    """What the user asked for. `deadline` is one of time.monotonic(); `device` a GPU's number, or cpu for a dry run."""

    device: str
    deadline: float
    progress: Callable[[str, str], None] = lambda target, stage: None
    job_seconds: float = _JOB_SECONDS
    """Of timing, at most, for one job; where many findings share the budget it is less."""
    questions: frozenset[str] | None = None
    """Which comparisons of a target's own steps to make; None is all."""


@dataclass
class _Found:
    """What has been measured so far."""

    findings: dict[Finding, Measurement] = field(default_factory=dict)
    steps: dict[int, StepMeasurement] = field(default_factory=dict)
    """By the place of the subject in the list."""
    failed: list[tuple[Subject, Finding | None, Check]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    device: Device | None = None
    complete: bool = True


def verify(report: Report, subjects: Sequence[Subject], options: Options) -> Report:
    """`report` with what was measured about its findings and targets. Never raises for a GPU that cannot measure: that is an error in it.

    An interrupt ends the measuring; what was measured until then is reported.
    """
    started = time.monotonic()
    found = _Found()
    try:
        for (python, root), group in _by_environment(subjects).items():
            if not _measure_group(found, python, root, group, options):
                break
    except KeyboardInterrupt:
        found.complete = False
        found.errors.append("interrupted: what was measured until then is shown")
    return _annotated(report, subjects, found, options, time.monotonic() - started)


def _by_environment(subjects: Sequence[Subject]) -> dict[tuple[str, str | None], list[tuple[int, Subject]]]:
    groups: dict[tuple[str, str | None], list[tuple[int, Subject]]] = {}
    for i, subject in enumerate(subjects):
        groups.setdefault((subject.python, subject.project_root), []).append((i, subject))
    return groups


def _measure_group(found: _Found, python: str, root: str | None, group: list[tuple[int, Subject]], options: Options) -> bool:
    """Measure the subjects that one process can build; False where there is nothing to measure with."""
    try:
        with Verifier(options.device, python, root, lambda stage: options.progress("", stage)) as verifier:
            found.device = verifier.device
            found.notes += [note for note in verifier.device.notes if note not in found.notes]
            here = [(i, subject) for i, subject in group if _is_here(subject, verifier.device)]
            found.errors += _elsewhere([subject for _, subject in group if not _is_here(subject, verifier.device)], verifier.device)
            _Session(found, verifier, options).measure(here)
    except NoVerification as error:
        found.errors.append(f"{error}; nothing was measured, the predictions stand")
        found.complete = False
        return False
    return True


def _is_here(subject: Subject, device: Device) -> bool:
    """Whether the finding was made for the card that measures; a dry run stands for any."""
    if device.kind == "cpu":
        return True
    wanted = subject.context.profile.name
    try:
        return find(device.name).name == find(wanted).name
    except UnknownGpu:
        return device.name == wanted


def _elsewhere(subjects: Sequence[Subject], device: Device) -> list[str]:
    names = dict.fromkeys(subject.context.profile.name for subject in subjects)
    return [
        f"this is a {device.name}, not the {name} that --gpu names: its findings were not measured, the predictions stand" for name in names
    ]


class _Session:
    """The jobs of one measuring process, in the order of their worth: every finding first, then the targets' own steps."""

    def __init__(self, found: _Found, verifier: Verifier, options: Options) -> None:
        self._found, self._verifier, self._options = found, verifier, options
        self._seconds = options.job_seconds

    def measure(self, subjects: Sequence[tuple[int, Subject]]) -> None:
        """Fill `found`. Raises KeyboardInterrupt, with what was measured until then in place."""
        pairs = [(subject, finding) for _, subject in subjects for finding in subject.findings]
        try:
            for done, (subject, finding) in enumerate(pairs):
                self._seconds = min(self._options.job_seconds, self._left() / (_JOBS_A_FINDING * (len(pairs) - done)))
                self._finding(subject, finding)
            self._seconds = self._options.job_seconds
            for i, subject in subjects:
                self._steps(i, subject)
        finally:
            if self._verifier.slowed and self._verifier.slowed not in self._found.notes:
                self._found.notes.append(self._verifier.slowed)

    # Findings

    def _finding(self, subject: Subject, finding: Finding) -> None:
        self._options.progress(subject.context.target.name, f"measuring {finding.code}")
        asked = jobs.for_finding(subject, finding)
        measured = Measurement(Verdict.UNMEASURED, asked) if isinstance(asked, str) else self._measured(subject, finding, asked)
        self._found.findings[finding] = measured

    def _measured(self, subject: Subject, finding: Finding, asked: Asked) -> Measurement:
        layers = self._run(asked.layers)
        compiles = asked.steps is not None and any(variant.workload.compiled for variant in asked.steps.variants)
        steps = self._run(asked.steps, compiles)
        numbers = self._run(asked.numbers, compiles)
        measured = measurement(finding, subject.context.profile, asked, layers, steps, numbers)
        self._found.failed += [(subject, finding, check) for check in measured.checks if not check.passed]
        return measured

    # Steps

    def _steps(self, i: int, subject: Subject) -> None:
        comparisons: list[Comparison] = []
        checks: list[Check] = []
        notes: list[str] = []
        try:
            for question in self._questions(subject, notes):
                self._options.progress(subject.context.target.name, f"timing steps: {question.name}")
                result = self._run(question.job, question.compiles)
                if isinstance(result, StepsResult) and len(result.steps) > 1:
                    comparisons.append(compared(subject, question, result))
                notes += [f"{question.name}: {text}" for text in _notes_of(result)]
                numbers = self._run(question.numbers, question.compiles)
                checks += numbers.checks if isinstance(numbers, NumbersResult) else ()
        finally:
            self._found.failed += [(subject, None, check) for check in checks if not check.passed]
            self._found.steps[i] = StepMeasurement(tuple(comparisons), tuple(checks), tuple(dict.fromkeys(notes)))

    def _questions(self, subject: Subject, notes: list[str]) -> Iterator[Question]:
        """The questions there is still time for; the first one that is left out is said."""
        wanted = self._options.questions
        for question in jobs.questions(subject):
            if wanted is not None and question.name not in wanted:
                continue
            if self._left() < (_LEAST_COMPILE_SECONDS if question.compiles else _LEAST_SECONDS):
                self._found.complete = False
                notes.append(f"{question.name} and what follows it: {OUT_OF_BUDGET}")
                return
            yield question

    # Jobs

    def _left(self) -> float:
        return self._options.deadline - time.monotonic()

    def _run(self, job: Job | None, compiles: bool = False) -> Result | None:
        """The result of `job`, which may take what is left of the budget to build and compile. None without a job."""
        if job is None:
            return None
        left = self._left()
        if left < (_LEAST_COMPILE_SECONDS if compiles else _LEAST_SECONDS):
            self._found.complete = False
            return Failure(OUT_OF_BUDGET)
        seconds = min(self._seconds, left)
        result = self._verifier.run(job, seconds, grace=min(GRACE_SECONDS, left - seconds))
        if isinstance(result, Failure) and self._left() < 0.5:
            self._found.complete = False
            return Failure(f"it did not end in the {left:.0f} s that were left of the budget (--verify-budget)")
        return result


# From results to measurements


def measurement(
    finding: Finding, profile: Profile, asked: Asked, layers: Result | None, steps: Result | None, numbers: Result | None
) -> Measurement:
    """What the results of a finding's jobs say about it. The finding has a cost wherever it has a change."""
    notes = [*asked.notes, *(f"ops: {text}" for text in _notes_of(layers)), *(f"step: {text}" for text in _notes_of(steps))]
    notes += [f"numbers: {text}" for text in _notes_of(numbers)]
    timed = layers if isinstance(layers, LayersResult) and layers.rounds else None
    ratio = verdicts.at_equal_work(timed.ratio, *asked.work) if timed is not None else None
    saving = verdicts.times(verdicts.saved(ratio), timed.before_us) if ratio is not None and timed is not None else None
    timed_steps = steps.steps if isinstance(steps, StepsResult) and len(steps.steps) > 1 else ()
    whole = isinstance(steps, StepsResult) and not steps.layers
    share = verdicts.saved(timed_steps[1].ratio) if timed_steps else None
    verdict, reason = _verdict(finding, saving, share if whole else None, notes)
    checks = (timed.numbers if timed is not None else ()) + (numbers.checks if isinstance(numbers, NumbersResult) else ())
    return Measurement(
        verdict=verdict,
        reason=reason,
        saving_us=saving,
        ratio=ratio,
        step_share=share,
        before=tuple(measured_op(one, profile) for one in timed.before) if timed is not None else (),
        after=tuple(measured_op(one, profile) for one in timed.after) if timed is not None else (),
        steps=timed_steps,
        checks=checks,
        notes=tuple(notes),
    )


def _verdict(finding: Finding, saving: Interval | None, share: Interval | None, notes: Sequence[str]) -> tuple[Verdict, str]:
    cost = finding.cost
    if cost is None:
        return Verdict.UNMEASURED, "the finding predicts no figure"
    texts = [verdicts.layers_text(cost, saving)] if saving is not None else []
    texts += [verdicts.step_text(cost, share)] if share is not None else []
    if saving is not None:
        return verdicts.of_layers(cost, saving, share), "; ".join(texts)
    if share is not None:
        return verdicts.of_step(cost, share), "; ".join(texts)
    return Verdict.UNMEASURED, notes[-1] if notes else "nothing could be timed"


def _notes_of(result: Result | None) -> list[str]:
    """What a result says about itself in words."""
    if isinstance(result, Failure):
        return [result.reason]
    if isinstance(result, StepsResult):
        why = "so that it fits the memory: shares do not compare with the prediction"
        return [*result.notes, *(f"{knob_name(knob)} = {now} instead of {was}, {why}" for knob, was, now in result.layers)]
    if isinstance(result, NumbersResult):
        return [*result.advice, *([result.note] if result.note else [])]
    return [result.note] if isinstance(result, LayersResult) and result.note else []


def measured_op(timed: TimedItem, profile: Profile) -> MeasuredOp:
    """A timed op in words and figures, beside what the card can do at most."""
    op = timed.item.op
    what = f"{op.module or op.name} {op.phase}"
    gemm, attention = op.gemm, op.attention
    if op.conv is not None:
        what += f": {'x'.join(map(str, op.conv.input))} * {'x'.join(map(str, op.conv.weight))}"
    elif gemm is not None:
        batch = f"{gemm.batch} x " if gemm.batch > 1 else ""
        what += f": {batch}M {gemm.m} N {gemm.n} K {gemm.k} {gemm.layout}"
    elif attention is not None:
        what += f": {attention.batch} x {attention.heads} heads, {attention.q_len} x {attention.kv_len} x {attention.head_dim}"
    kernel = timed.kernels[0] if timed.kernels else ""
    peak, bandwidth = profile.peak(op.dtype) / 1e12, profile.bandwidth_gbps
    shares = [rate / most for rate, most in ((timed.tflops, peak), (timed.gbps, bandwidth)) if rate is not None and most]
    return MeasuredOp(
        f"{what} {op.dtype}", op.count, timed.item.us, timed.us, kernel, timed.grid, timed.tflops, timed.gbps, max(shares, default=None)
    )


def compared(subject: Subject, question: Question, result: StepsResult) -> Comparison:
    """Steps with their outcome in one line."""
    steps = result.steps
    if question.name == "batch x2":
        text = _doubling_text(subject, steps)
    else:
        text = "; ".join(_step_text(step, first=step is steps[0]) for step in steps)
    return Comparison(question.name, steps, text)


def _step_text(step: TimedStep, first: bool) -> str:
    predicted = f", predicted {duration(step.predicted_ms * 1e3)}" if step.predicted_ms is not None else ""
    ratio = "" if first else f" ({step.ratio.median:.2f}x{predicted})"
    return f"{step.label} {duration(step.ms.median * 1e3)}{ratio or (f' ({predicted[2:]})' if predicted else '')}"


def _doubling_text(subject: Subject, steps: Sequence[TimedStep]) -> str:
    base, twice = steps[0], steps[1]
    factor = 1 / twice.ratio.median if twice.ratio.median else 0.0
    said = "launch-bound" if factor < LAUNCH_BOUND else "the GPU is the wait" if factor > 1.5 else "partly launch-bound"
    text = (
        f"{_step_text(base, first=True)}; twice the batch takes {factor:.2f}x the time "
        f"(predicted {subject.context.step.doubled_batch_ratio:.2f}x): {said}"
    )
    if base.bound:
        busy = f", GPU busy {percent(min(1.0, base.gpu_ms / base.ms.median))}" if base.gpu_ms is not None and base.ms.median else ""
        predicted = subject.context.step.bound
        agree = "as predicted" if base.bound == predicted else f"but {predicted} was predicted"
        text += f"; bound by {base.bound}, {agree}{busy}"
    return text


# Into the report


def _annotated(report: Report, subjects: Sequence[Subject], found: _Found, options: Options, seconds: float) -> Report:
    device = found.device
    name = device.name if device is not None else ""
    measured = {finding for subject in subjects for finding in subject.findings}
    findings = tuple(
        verdicts.annotated(finding, found.findings[finding], name) if finding in found.findings else finding for finding in report.findings
    )
    failed = tuple(dict.fromkeys(one for subject, finding, check in found.failed for one in _number_findings(subject, finding, check)))
    verification = None
    if device is not None:
        versions = device.versions
        notes = tuple(found.notes) if measured else ("no finding to verify", *found.notes)
        verification = Verification(device.name, device.driver, versions, seconds, found.complete, notes)
    place = f"GPU {options.device}" if options.device.isdecimal() else options.device
    return replace(
        report,
        findings=(*findings, *failed),
        targets=tuple(_with_steps(target, subjects, found) for target in report.targets),
        errors=(*report.errors, *(FileError(place, 0, 0, text, "verify") for text in dict.fromkeys(found.errors))),
        verification=verification,
    )


def _with_steps(target: TargetSummary, subjects: Sequence[Subject], found: _Found) -> TargetSummary:
    for i, subject in enumerate(subjects):
        context = subject.context
        same = (context.target.name, context.target.span.path, context.profile.name) == (target.name, target.path, target.gpu)
        if i in found.steps and same and workloads.describe(context.workload) == target.workload:
            return replace(target, measured=found.steps[i])
    return target


def _number_findings(subject: Subject, finding: Finding | None, check: Check) -> Iterator[Finding]:
    context = subject.context
    for rule in all_rules():
        for one in rule.check_numbers(context.target, finding, check):
            yield replace(one, gpu=context.profile.name, workload=workloads.describe(context.workload))
