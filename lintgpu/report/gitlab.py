"""GitLab's code quality report (https://docs.gitlab.com/ci/testing/code_quality/): what a merge request shows beside the changed lines."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from typing import Any

from lintgpu.finding import Finding, Severity
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.shared import cost_line, errors_of_their_own, fingerprint, measured_line, not_judged, only_estimated
from lintgpu.report.text import json_text, one_line

NAME = "gitlab"

_SEVERITIES = {Severity.ERROR: "major", Severity.WARNING: "minor", Severity.NOTE: "info"}


def render(report: Report) -> str:
    """A JSON array with one entry a finding, and one for everything that could not be checked or only estimated."""
    seen: Counter[str] = Counter()
    entries = [_finding(finding, seen) for finding in report.findings]
    entries += [_error(error, seen) for error in errors_of_their_own(report)]
    told = {(finding.code, finding.target) for finding in report.findings}
    entries += [_failed(target, seen) for target in report.targets if target.basis == "failed" and ("LG001", target.name) not in told]
    entries += [_estimated(target, seen) for target in report.targets if only_estimated(target) and ("LG001", target.name) not in told]
    return json_text(entries)


def _finding(finding: Finding, seen: Counter[str]) -> dict[str, Any]:
    parts = [one_line(finding.message), cost_line(finding.cost) if finding.cost else ""]
    parts.append(one_line(measured_line(finding.measured)) if finding.measured is not None else "")
    path = _path(finding.span.path)
    return _entry(
        ". ".join(part for part in parts if part),
        finding.code,
        hashlib.sha256(fingerprint(finding, path, seen).encode()).hexdigest()[:32],
        _SEVERITIES[finding.severity],
        path,
        finding.span.line,
    )


def _error(error: FileError, seen: Counter[str]) -> dict[str, Any]:
    path = _path(error.path)
    return _entry(
        one_line(error.message), f"lintgpu-{error.kind}", _hashed(seen, error.kind, path, error.message), "major", path, error.line
    )


def _failed(target: TargetSummary, seen: Counter[str]) -> dict[str, Any]:
    path = _path(target.path)
    return _entry(not_judged(target), "lintgpu-target", _hashed(seen, "target", path, target.name, target.gpu), "major", path, 0)


def _estimated(target: TargetSummary, seen: Counter[str]) -> dict[str, Any]:
    path = _path(target.path)
    return _entry(not_judged(target), "lintgpu-estimated", _hashed(seen, "estimated", path, target.name, target.gpu), "info", path, 0)


def _entry(description: str, check: str, print_: str, severity: str, path: str, line: int) -> dict[str, Any]:
    """GitLab wants a line; where none is known the first has to do."""
    return {
        "description": description,
        "check_name": check,
        "fingerprint": print_,
        "severity": severity,
        "location": {"path": path, "lines": {"begin": max(line, 1)}},
    }


def _path(path: str) -> str:
    """Relative to the folder of the run, which is the repository's in a pipeline, without a leading ./"""
    shown = os.path.relpath(path) if os.path.isabs(path) else os.path.normpath(path)
    return one_line(shown.replace(os.sep, "/"))


def _hashed(seen: Counter[str], *parts: str) -> str:
    """Equal ones are numbered in order: each entry needs one of its own."""
    text = "\0".join(parts)
    seen[text] += 1
    return hashlib.sha256(f"{text}\0{seen[text]}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
