"""SARIF 2.1.0 for code scanning services (https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PureWindowsPath
from typing import Any
from urllib.parse import quote

from lintgpu.finding import Finding, Related, Span
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.json_ import cost_data, measured_data, target_data, verification_data
from lintgpu.report.shared import fingerprint, measured_line, only_estimated
from lintgpu.report.text import json_text
from lintgpu.rule import Rule, all_rules

NAME = "sarif"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
BASE = "SRCROOT"
"""Relative URIs are relative to the folder lintgpu ran in, which the consumer knows better than the file."""
FINGERPRINT = "lintgpuFinding/v1"

_WINDOWS_ABSOLUTE = re.compile(r"[A-Za-z]:[\\/]|\\\\")


def render(report: Report) -> str:
    """A log with one run."""
    return json_text({"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(report)]})


def _run(report: Report) -> dict[str, Any]:
    rules = _rules(report.findings)
    index = {rule["id"]: position for position, rule in enumerate(rules)}
    seen: Counter[str] = Counter()
    return {
        "tool": {"driver": {"name": "lintgpu", "version": report.version or "0", "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {BASE: {"description": {"text": "The folder lintgpu was run in."}}},
        "invocations": [_invocation(report)],
        "results": [_result(finding, index[finding.code], seen) for finding in report.findings],
        "properties": _run_properties(report),
    }


def _run_properties(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {"targets": [target_data(target) for target in report.targets], "suppressed": report.suppressed}
    return found | ({"verification": verification_data(report.verification)} if report.verification is not None else {})


def _rules(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Every rule's metadata, and the bare code of findings that no rule of this installation owns."""
    known = [_rule(rule) for rule in all_rules()]
    foreign = {finding.code: finding.name for finding in findings} if findings else {}
    for rule in known:
        foreign.pop(rule["id"], None)
    return known + [{"id": code, "name": name} for code, name in sorted(foreign.items())]


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary or rule.name},
        "fullDescription": {"text": rule.summary or rule.name},
        "help": {"text": rule.docs or rule.summary or rule.name, "markdown": rule.docs or rule.summary or rule.name},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["performance", "gpu"]},
    }


def _result(finding: Finding, rule_index: int, seen: Counter[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": finding.severity.value,
        "message": {"text": _message(finding)},
        "locations": [_location(finding)],
        "partialFingerprints": {FINGERPRINT: fingerprint(finding, _artifact(finding.span.path)["uri"], seen)},
        "properties": _properties(finding),
    }
    if finding.related:
        result["relatedLocations"] = [_related(number, related) for number, related in enumerate(finding.related)]
    if finding.fix and finding.fix.edits:
        result["fixes"] = [_fix(finding)]
    return result


def _message(finding: Finding) -> str:
    return finding.message if finding.measured is None else f"{finding.message} [{measured_line(finding.measured)}]"


def _location(finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": _physical(finding.span)}
    if finding.target:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.target, "kind": "module"}]
    return location


def _related(number: int, related: Related) -> dict[str, Any]:
    return {"id": number, "message": {"text": related.message}, "physicalLocation": _physical(related.span)}


def _physical(span: Span) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": _artifact(span.path)}
    if span.line:
        place["region"] = _region(span)
    return place


def _region(span: Span) -> dict[str, int]:
    if not span.column:
        return {"startLine": span.line}
    return {"startLine": span.line, "startColumn": span.column, "endLine": span.end_line, "endColumn": span.end_column}


def _artifact(path: str) -> dict[str, str]:
    """Where a file is: below the run's folder a relative URI, else an absolute one. Each byte beyond RFC 3986 is percent-encoded."""
    if _WINDOWS_ABSOLUTE.match(path):
        posix = PureWindowsPath(path).as_posix()
        return {"uri": ("file:" if posix.startswith("//") else "file:///") + _quoted(posix, ":")}
    relative = os.path.relpath(path) if os.path.isabs(path) else os.path.normpath(path)
    if relative.split(os.sep)[0] == os.pardir:
        return {"uri": "file://" + _quoted(os.path.abspath(path).replace(os.sep, "/"))}
    return {"uri": _quoted(relative.replace(os.sep, "/")), "uriBaseId": BASE}


def _quoted(path: str, safe: str = "") -> str:
    # A colon in the first part of a relative URI would read as a scheme, so it is only safe behind a drive letter.
    return quote(path.encode("utf-8", "surrogateescape"), safe=f"/{safe}")


def _properties(finding: Finding) -> dict[str, Any]:
    named = {
        "name": finding.name,
        "target": finding.target,
        "knob": finding.knob,
        "value": finding.value,
        "suggestion": finding.suggestion,
        "gpu": finding.gpu,
        "workload": finding.workload,
        "cost": cost_data(finding.cost) if finding.cost else None,
        "details": list(finding.details),
        "measured": measured_data(finding.measured) if finding.measured else None,
    }
    return {key: value for key, value in named.items() if value not in (None, [])}


def _fix(finding: Finding) -> dict[str, Any]:
    assert finding.fix is not None
    by_path: dict[str, list[dict[str, Any]]] = {}
    for edit in finding.fix.edits:
        by_path.setdefault(edit.span.path, []).append({"deletedRegion": _region(edit.span), "insertedContent": {"text": edit.text}})
    changes = [{"artifactLocation": _artifact(path), "replacements": replacements} for path, replacements in by_path.items()]
    properties = {"safe": finding.fix.safe, "confirmed": finding.fix.confirmed}
    return {"description": {"text": finding.fix.description}, "artifactChanges": changes, "properties": properties}


def _invocation(report: Report) -> dict[str, Any]:
    failed = [target for target in report.targets if target.basis == "failed"]
    notifications = [_error(error) for error in report.errors] + [_untraced(target, "error") for target in failed]
    estimated = [_untraced(target, "warning") for target in report.targets if only_estimated(target)]
    return {"executionSuccessful": not notifications, "toolExecutionNotifications": notifications + estimated}


def _error(error: FileError) -> dict[str, Any]:
    notification: dict[str, Any] = {"descriptor": {"id": error.kind}, "level": "error", "message": {"text": error.message}}
    if error.kind not in ("gpu", "verify"):
        span = Span(error.path, error.line, error.column, error.line, error.column + 1)
        notification["locations"] = [{"physicalLocation": _physical(span)}]
    return notification


def _untraced(target: TargetSummary, level: str) -> dict[str, Any]:
    reason = target.assumptions[0] if target.assumptions else "could not be traced"
    return {
        "descriptor": {"id": "trace"},
        "level": level,
        "message": {"text": f"{target.name}: {reason}"},
        "locations": [{"physicalLocation": {"artifactLocation": _artifact(target.path)}}],
    }
