"""Workflow commands of GitHub Actions, which become annotations on the lines of a pull request."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lintgpu.finding import Finding, Severity
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.shared import (
    cost_line,
    errors_of_their_own,
    judged_on,
    measured_line,
    not_judged,
    only_estimated,
    summary_line,
    target_line,
    verification_lines,
)
from lintgpu.report.text import one_line

NAME = "github"

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render(report: Report) -> str:
    """One command a finding and error; what each target was judged under follows as plain log lines."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from (_finding(finding) for finding in report.findings)
    yield from (_error(error) for error in errors_of_their_own(report))
    told = {(finding.code, finding.target) for finding in report.findings}
    yield from (_estimated(one) for one in report.targets if only_estimated(one) and ("LG001", one.name) not in told)
    yield from (target_line(target) for target in report.targets)
    yield from verification_lines(report)
    yield summary_line(report)


def _finding(finding: Finding) -> str:
    span = finding.span
    properties: dict[str, str | int] = {"file": span.path.replace(os.sep, "/")}
    if span.line:
        properties |= {"line": span.line, "endLine": span.end_line}
        # GitHub drops an annotation whose columns are on different lines.
        properties |= {"col": span.column, "endColumn": span.end_column} if span.column and span.line == span.end_line else {}
    properties["title"] = f"{finding.code} {finding.name}"
    measured = one_line(measured_line(finding.measured)) if finding.measured is not None else ""
    lines = [one_line(finding.message), cost_line(finding.cost) if finding.cost else "", measured, judged_on(finding)]
    return _command(_COMMANDS[finding.severity], properties, "\n".join(line for line in lines if line))


def _error(error: FileError) -> str:
    properties: dict[str, str | int] = {"file": error.path.replace(os.sep, "/")} if error.kind not in ("gpu", "verify") else {}
    properties |= {"line": error.line} if error.line else {}
    properties |= {"col": error.column} if error.line and error.column else {}
    return _command("error", properties | {"title": "lintgpu could not check this"}, one_line(error.message))


def _estimated(target: TargetSummary) -> str:
    return _command("notice", {"file": target.path.replace(os.sep, "/"), "title": "lintgpu could only estimate this"}, not_judged(target))


def _command(name: str, properties: dict[str, str | int], message: str) -> str:
    listed = ",".join(f"{key}={_escape_property(str(value))}" for key, value in properties.items())
    return f"::{name} {listed}::{_escape(message)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
