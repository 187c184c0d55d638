"""What several formats say in the same words."""

from __future__ import annotations

import hashlib
from collections import Counter

from lintgpu.finding import Finding, FindingCost, Severity
from lintgpu.report.base import FileError, Report, TargetSummary
from lintgpu.report.text import BASIS, duration, one_line, percent, plural, printable


def place(path: str, line: int, column: int) -> str:
    """ "path:line:column", without what is not known."""
    return printable(path) + (f":{line}" if line else "") + (f":{column}" if line and column else "")


def errors_of_their_own(report: Report) -> list[FileError]:
    """The errors that no finding already tells."""
    told = {(finding.span.path, finding.span.line, finding.message) for finding in report.findings}
    return [error for error in report.errors if (error.path, error.line, error.message) not in told]


def cost_line(cost: FindingCost) -> str:
    """What the flagged ops cost and what the fix saves, with band and basis."""
    spent = f"{duration(cost.gpu_us)} of GPU time a step ({percent(cost.gpu_share)})"
    if cost.saving_gpu_share <= 0:
        return f"{spent}; {BASIS[cost.basis.value]}"
    saved = (
        f"{duration(cost.saving_gpu_us)}, {percent(cost.saving_gpu_share)} of the GPU time [{percent(cost.low)} to {percent(cost.high)}]"
    )
    return f"{spent}; the fix saves {saved} and {percent(cost.saving_step_share)} of the step ({BASIS[cost.basis.value]})"


def fingerprint(finding: Finding, path: str, seen: Counter[str]) -> str:
    """What stays when lines move: rule, file, target, knob and what the rule adds. Equal ones are numbered in order, which `seen` counts.

    `path` is the file as the format names it.
    """
    own = finding.fingerprint_parts or (finding.knob or "", finding.message)
    parts = (finding.code, path, finding.target or "", finding.gpu or "", *own)
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    seen[digest] += 1
    return f"{digest}:{seen[digest]}"


def not_judged(target: TargetSummary) -> str:
    """Why nothing can be said of a target."""
    reason = target.assumptions[0] if target.assumptions else "could not be traced"
    return one_line(f"{target.name}: {reason}")


def judged_on(finding: Finding) -> str:
    """The GPU and the workload of a finding; empty where it has neither."""
    return one_line("; ".join(part for part in (finding.gpu, finding.workload) if part))


def target_line(target: TargetSummary) -> str:
    """One line: the target, what it was judged under, and which of that was assumed."""
    name = target.name if target.name == target.path else f"{target.name} ({target.path})"
    sources = "; ".join(f"{source}: {', '.join(names)}" for source, names in workload_sources(target).items())
    parts = [f"{name} on {target.gpu or 'no GPU'}", target.workload, sources]
    if target.basis == "failed":
        parts.insert(0, "NOT CHECKED")
    elif target.step_us is not None:
        parts.append(f"step {duration(target.step_us)}, bound by {target.bound or 'nothing known'}, {target.basis}")
    return one_line("; ".join(part for part in parts if part))


def workload_sources(target: TargetSummary) -> dict[str, list[str]]:
    """Names and values of the workload by where they come from, in the order given, read, assumed."""
    found: dict[str, list[str]] = {}
    for source in ("given", "read", "assumed"):
        names = [f"{value.name} {value.value}" for value in target.workload_values if value.source == source]
        if names:
            found[source] = names
    return found


def summary_line(report: Report) -> str:
    """ "Found 1 error and 2 warnings in 3 files, 1 hidden by a comment." and what could not be checked."""
    counts = Counter(finding.severity for finding in report.findings)
    found = [plural(counts[severity], severity.value) for severity in (Severity.ERROR, Severity.WARNING, Severity.NOTE) if counts[severity]]
    head = f"Found {_and(found)}" if found else "No findings"
    where = f" in {plural(report.checked, 'file')}" if report.checked else ""
    hidden = f", {report.suppressed} hidden by comments" if report.suppressed else ""
    return " ".join([f"{head}{where}{hidden}.", *_not_done(report)])


def _not_done(report: Report) -> list[str]:
    """A sentence for each kind of thing that could not be checked."""
    errors = Counter(
        kind for kind, _ in {(error.kind, error.path if error.kind != "internal" else error.message) for error in report.errors}
    )
    unread, unknown, broken = errors.pop("file", 0), errors.pop("gpu", 0), errors.total()
    failed = sum(target.basis == "failed" and not target.static for target in report.targets)
    unbuilt = sum(target.basis == "failed" and target.static for target in report.targets)
    way_out = "pip install 'lintgpu[hf]', then run without --static"
    said = (
        (unread, f"{plural(unread, 'file')} could not be read."),
        (failed, f"{plural(failed, 'target')} could not be traced."),
        (unbuilt, f"{plural(unbuilt, 'target')} could not be estimated without torch: {way_out}."),
        (unknown, f"{plural(unknown, 'GPU')} unknown."),
        (broken, f"{plural(broken, 'check')} failed."),
    )
    return [sentence for count, sentence in said if count]


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
