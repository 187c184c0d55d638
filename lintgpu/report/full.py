"""The output for people: each finding with its code, its cost, its fix, and what it was judged under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lintgpu.finding import Finding, Fix, Severity
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.frame import frame
from lintgpu.report.shared import (
    check_lines,
    cost_line,
    errors_of_their_own,
    judged_on,
    measured_line,
    op_lines,
    place,
    summary_line,
    verification_line,
    workload_sources,
)
from lintgpu.report.text import BASIS, duration, one_line

NAME = "full"
DEFAULT_COLUMNS = 120

_COLORS = {Severity.ERROR.value: "31;1", Severity.WARNING.value: "33;1", Severity.NOTE.value: "36;1", "quiet": "34", "strong": "1"}


@dataclass(frozen=True)
class _Style:
    color: bool

    def __call__(self, text: str, kind: str) -> str:
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if self.color and text else text


def render(report: Report) -> str:
    """Findings and errors with a blank line after each, then the targets, then a summary line."""
    style = _Style(report.color)
    blocks = [list(_finding(report, finding, style)) for finding in report.findings]
    blocks += [[_error(error, style)] for error in errors_of_their_own(report)]
    blocks += [list(_target(target, style)) for target in report.targets]
    if report.verification is not None:
        blocks.append([one_line(line) for line in (verification_line(report.verification), *report.verification.notes)])
    blocks.append([style(summary_line(report), "strong")])
    return "\n".join("".join(f"{line}\n" for line in block) for block in blocks)


def _finding(report: Report, finding: Finding, style: _Style) -> Iterator[str]:
    severity = finding.severity.value
    yield f"{style(f'{severity}[{finding.code}]', severity)} {style(finding.name, 'strong')}: {one_line(finding.message)}"
    span = finding.span
    yield f"{style('-->', 'quiet')} {place(span.path, span.line, span.column)}"
    file = report.files.get(span.path)
    if file is not None:
        label = "" if finding.suggestion is None else f"suggested: {one_line(str(finding.suggestion))}"
        yield from frame(file.positions, span, label, report.width or DEFAULT_COLUMNS, lambda text: style(text, severity))
    for name, text in _notes(finding):
        label = f"{name}:" if name else ""
        yield f"{style(f'{label:>7}', 'quiet')} {one_line(text)}"


def _notes(finding: Finding) -> Iterator[tuple[str, str]]:
    if finding.cost:
        yield "cost", cost_line(finding.cost)
    yield from (("", detail) for detail in finding.details)
    if finding.measured:
        measured = finding.measured
        yield "timed", measured_line(measured)
        yield from (("", line) for line in (*op_lines(measured), *check_lines(measured), *measured.notes))
    if finding.fix:
        yield "fix", _fix(finding.fix)
    for related in finding.related:
        yield "see", f"{place(related.span.path, related.span.line, related.span.column)}: {related.message}"
    if judged_on(finding):
        yield "on", judged_on(finding)


def _fix(fix: Fix) -> str:
    confirmed = "confirmed by a second trace" if fix.confirmed else "not confirmed by a trace"
    return f"{fix.description} ({confirmed}{'' if fix.safe else '; needs --unsafe-fixes'})"


def _error(error: FileError, style: _Style) -> str:
    return f"{style('error', 'error')}: {place(error.path, error.line, error.column)}: {one_line(error.message)}"


def _target(target: TargetSummary, style: _Style) -> Iterator[str]:
    name = target.name if target.name == target.path else f"{target.name} ({target.path})"
    built = f": {target.model_class}" if target.model_class else ""
    how = f"traced in {target.trace_seconds:.1f} s" if target.basis == "traced" else target.basis
    yield f"{style(one_line(name), 'strong')}{one_line(built)}, {how}"
    for label, text in _target_notes(target):
        yield f"{style(f'{label:>10}', 'quiet')}  {one_line(text)}"


def _target_notes(target: TargetSummary) -> Iterator[tuple[str, str]]:
    if target.gpu:
        yield "GPU", target.gpu
    if target.workload:
        yield "workload", target.workload
    for source, names in workload_sources(target).items():
        yield source, ", ".join(names)
    if target.step_us is not None:
        gpu = f"; GPU time {duration(target.gpu_us)}" if target.gpu_us is not None else ""
        basis = f" ({BASIS.get(target.cost_basis, target.cost_basis)})" if target.cost_basis else ""
        bound = f", bound by {target.bound}" if target.bound else ""
        yield "step", f"{duration(target.step_us)}{bound}{gpu}{basis}"
    yield from (("note", text) for text in target.assumptions)
    if target.measured is not None:
        yield from (("measured", f"{one.name}: {one.text}") for one in target.measured.comparisons)
        yield from (("", text) for text in (*check_lines(target.measured), *target.measured.notes))
