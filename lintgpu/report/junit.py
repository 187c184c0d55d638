"""JUnit's XML, which CI servers show as tests: a suite a file, a case a finding, and one for every model that was judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from lintgpu.finding import Finding, Severity
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.shared import cost_line, errors_of_their_own, judged_on, measured_line, not_judged, place, target_line
from lintgpu.report.text import one_line, printable

NAME = "junit"
FAILURE, ERROR, OUTPUT = "failure", "error", "system-out"


@dataclass(frozen=True)
class _Case:
    path: str
    name: str
    line: int
    outcome: str
    """failure: a finding of warning or error; error: something that was not checked; system-out: neither."""
    kind: str
    message: str
    text: str


def render(report: Report) -> str:
    """The document. Notes are cases that pass, with their text as output."""
    cases = [*_findings(report), *_errors(report), *_targets(report)]
    root = ElementTree.Element("testsuites", {"name": "lintgpu", **_counts(cases)})
    for path in dict.fromkeys(case.path for case in cases):
        mine = [case for case in cases if case.path == path]
        suite = ElementTree.SubElement(root, "testsuite", {"name": path, **_counts(mine), "skipped": "0"})
        for case in mine:
            _add(suite, case)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _counts(cases: list[_Case]) -> dict[str, str]:
    outcomes = [case.outcome for case in cases]
    return {"tests": str(len(cases)), "failures": str(outcomes.count(FAILURE)), "errors": str(outcomes.count(ERROR))}


def _add(suite: ElementTree.Element, case: _Case) -> None:
    attributes = {"name": case.name, "classname": case.path, "file": case.path}
    if case.line:
        attributes["line"] = str(case.line)
    element = ElementTree.SubElement(suite, "testcase", attributes)
    outcome = ElementTree.SubElement(element, case.outcome)
    outcome.text = case.text
    if case.outcome != OUTPUT:
        outcome.attrib |= {"message": case.message, "type": case.kind}


def _findings(report: Report) -> Iterator[_Case]:
    for finding in report.findings:
        span = finding.span
        outcome = OUTPUT if finding.severity is Severity.NOTE else FAILURE
        where = f" at {place('', span.line, span.column)[1:]}" if span.line else ""
        name = f"{finding.code} {finding.name}{where}" + (f" on {finding.gpu}" if finding.gpu else "")
        yield _Case(
            printable(span.path), one_line(name), span.line, outcome, finding.severity.value, one_line(finding.message), _text(finding)
        )


def _text(finding: Finding) -> str:
    fix = f"fix: {finding.fix.description}" if finding.fix else ""
    lines = [
        f"{place(finding.span.path, finding.span.line, finding.span.column)}: {finding.message}",
        cost_line(finding.cost) if finding.cost else "",
        *finding.details,
        measured_line(finding.measured) if finding.measured is not None else "",
        fix,
        judged_on(finding),
    ]
    return "\n".join(one_line(line) for line in lines if line)


def _errors(report: Report) -> Iterator[_Case]:
    for error in errors_of_their_own(report):
        message = one_line(error.message)
        yield _Case(printable(error.path) or "lintgpu", _kind(error), error.line, ERROR, error.kind, message, message)


def _kind(error: FileError) -> str:
    return {"file": "can be read", "gpu": "is a GPU", "fix": "can be fixed", "verify": "can be measured"}.get(error.kind, "can be checked")


def _targets(report: Report) -> Iterator[_Case]:
    for target in report.targets:
        failed = target.basis == "failed"
        message = not_judged(target) if failed else ""
        name = one_line(f"{target.name} on {target.gpu or 'no GPU'}")
        yield _Case(printable(target.path), name, 0, ERROR if failed else OUTPUT, "target", message, _target_text(target))


def _target_text(target: TargetSummary) -> str:
    return "\n".join([target_line(target), *(one_line(note) for note in target.assumptions)])
