"""One JSON document with everything a run found; docs/json-output.md describes it, schema.json beside this file fixes it."""

from __future__ import annotations

from typing import Any

from lintgpu.finding import Change, Finding, FindingCost, Span
from lintgpu.measurement import Check, Interval, MeasuredOp, Measurement, StepMeasurement, TimedStep, Verification
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.text import json_text

NAME = "json"
SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new fields may come without."""


def render(report: Report) -> str:
    """The document, indented, in ASCII."""
    return json_text(document(report))


def document(report: Report) -> dict[str, Any]:
    """The document as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "version": report.version,
        "findings": [finding_data(finding) for finding in report.findings],
        "targets": [target_data(target) for target in report.targets],
        "errors": [_error(error) for error in report.errors],
        "suppressed": report.suppressed,
        "checked": report.checked,
        "verification": verification_data(report.verification) if report.verification else None,
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    """One finding as plain data."""
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.value,
        "message": finding.message,
        **_span(finding.span),
        "target": finding.target,
        "knob": finding.knob,
        "value": finding.value,
        "suggestion": finding.suggestion,
        "gpu": finding.gpu,
        "workload": finding.workload,
        "cost": cost_data(finding.cost) if finding.cost else None,
        "related": [{**_span(related.span), "message": related.message} for related in finding.related],
        "fix": _fix(finding),
        "details": list(finding.details),
        "change": _change(finding.change) if finding.change else None,
        "measured": measured_data(finding.measured) if finding.measured else None,
    }


def cost_data(cost: FindingCost) -> dict[str, Any]:
    """A finding's cost as plain data: times in microseconds, shares 0..1 of a step."""
    return {
        "gpu_us": cost.gpu_us,
        "gpu_share": cost.gpu_share,
        "saving_gpu_us": cost.saving_gpu_us,
        "saving_gpu_share": cost.saving_gpu_share,
        "saving_step_share": cost.saving_step_share,
        "low": cost.low,
        "high": cost.high,
        "basis": cost.basis.value,
    }


def target_data(target: TargetSummary) -> dict[str, Any]:
    """One target as plain data."""
    return {
        "name": target.name,
        "path": target.path,
        "family": target.family,
        "model_class": target.model_class or None,
        "gpu": target.gpu,
        "workload": target.workload,
        "workload_values": [{"name": item.name, "value": item.value, "source": item.source} for item in target.workload_values],
        "basis": target.basis,
        "step_us": target.step_us,
        "gpu_us": target.gpu_us,
        "bound": target.bound or None,
        "cost_basis": target.cost_basis or None,
        "trace_seconds": target.trace_seconds,
        "assumptions": list(target.assumptions),
        "measured": steps_data(target.measured) if target.measured else None,
    }


def measured_data(measured: Measurement) -> dict[str, Any]:
    """What was measured about a finding as plain data."""
    return {
        "verdict": measured.verdict.value,
        "reason": measured.reason,
        "saving_gpu_us": _interval(measured.saving_us),
        "ratio": _interval(measured.ratio),
        "saving_step_share": _interval(measured.step_share),
        "before": [_op(op) for op in measured.before],
        "after": [_op(op) for op in measured.after],
        "steps": [_step(step) for step in measured.steps],
        "checks": [_check(check) for check in measured.checks],
        "notes": list(measured.notes),
    }


def steps_data(measured: StepMeasurement) -> dict[str, Any]:
    """What was measured about a target's step as plain data."""
    comparisons = [{"name": one.name, "text": one.text, "steps": [_step(step) for step in one.steps]} for one in measured.comparisons]
    return {"comparisons": comparisons, "checks": [_check(check) for check in measured.checks], "notes": list(measured.notes)}


def verification_data(verification: Verification) -> dict[str, Any]:
    """The card that measured as plain data."""
    return {
        "device": verification.device,
        "driver": verification.driver or None,
        "versions": dict(verification.versions),
        "seconds": verification.seconds,
        "complete": verification.complete,
        "notes": list(verification.notes),
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return {"median": interval.median, "low": interval.low, "high": interval.high} if interval is not None else None


def _op(op: MeasuredOp) -> dict[str, Any]:
    return {
        "what": op.what,
        "count": op.count,
        "predicted_us": op.predicted_us,
        "us": op.us,
        "kernel": op.kernel or None,
        "grid": op.grid or None,
        "tflops": op.tflops,
        "gbps": op.gbps,
        "of_ceiling": op.of_ceiling,
    }


def _step(step: TimedStep) -> dict[str, Any]:
    return {
        "label": step.label,
        "ms": _interval(step.ms),
        "ratio": _interval(step.ratio),
        "predicted_ms": step.predicted_ms,
        "gpu_ms": step.gpu_ms,
        "bound": step.bound or None,
        "note": step.note or None,
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "what": check.what,
        "value": check.value,
        "limit": check.limit,
        "passed": check.passed,
        "detail": check.detail or None,
        "pair": list(check.pair) if check.pair else None,
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "knobs": dict(change.knobs),
        "compile": change.compile or None,
        "attention": change.attention or None,
        "dtype": change.dtype or None,
        "channels_last": change.channels_last,
        "same_work": change.same_work,
    }


def _error(error: FileError) -> dict[str, Any]:
    return {"path": error.path, "line": error.line, "column": error.column, "message": error.message, "kind": error.kind}


def _fix(finding: Finding) -> dict[str, Any] | None:
    if finding.fix is None:
        return None
    edits = [{**_span(edit.span), "text": edit.text} for edit in finding.fix.edits]
    return {"description": finding.fix.description, "safe": finding.fix.safe, "confirmed": finding.fix.confirmed, "edits": edits}


def _span(span: Span) -> dict[str, Any]:
    return {"path": span.path, "line": span.line, "column": span.column, "end_line": span.end_line, "end_column": span.end_column}
