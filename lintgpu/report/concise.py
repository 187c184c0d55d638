"""One line a finding: `path:line:col: severity[CODE] message`, for editors and grep."""

from __future__ import annotations

from collections.abc import Iterator

from lintgpu.report.base import Report
from lintgpu.report.shared import errors_of_their_own, measured_line, place, summary_line, target_line, verification_lines
from lintgpu.report.text import one_line

NAME = "concise"


def render(report: Report) -> str:
    """The findings, then the errors, then what each target was judged under, and a summary."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    for finding in report.findings:
        where = place(finding.span.path, finding.span.line, finding.span.column)
        measured = f" [{one_line(measured_line(finding.measured))}]" if finding.measured is not None else ""
        yield f"{where}: {finding.severity.value}[{finding.code}] {one_line(finding.message)}{measured}"
    for error in errors_of_their_own(report):
        yield f"{place(error.path, error.line, error.column)}: error: {one_line(error.message)}"
    yield from (target_line(target) for target in report.targets)
    yield from verification_lines(report)
    yield summary_line(report)
