"""What several formats say in the same words."""

from __future__ import annotations

import hashlib
from collections import Counter

from lintgpu.finding import Finding, FindingCost, Severity
from lintgpu.measurement import MeasuredOp, Measurement, StepMeasurement, Verdict, Verification
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


def only_estimated(target: TargetSummary) -> bool:
    """Whether a trace was wanted and only the numbers of the config were judged: what a trace alone shows was not looked for."""
    return target.basis == "estimated" and not target.static


def measured_line(measured: Measurement) -> str:
    """The verdict with the measured figures beside the predicted ones."""
    return f"{measured.verdict.value}: {measured.reason}"


def op_lines(measured: Measurement, most: int = 3) -> list[str]:
    """The costliest measured ops before and after the change, one line each."""

    def cost(op: MeasuredOp) -> float:
        return -(op.us or 0.0) * op.count

    before, after = sorted(measured.before, key=cost)[:most], sorted(measured.after, key=cost)[:most]
    return [f"before  {_op(op)}" for op in before] + [f"after   {_op(op)}" for op in after]


def _op(op: MeasuredOp) -> str:
    if op.us is None:
        return f"{op.what}, not timed"
    often = f" x {op.count}" if op.count > 1 else ""
    rates = [f"{op.tflops:,.0f} TFLOP/s" if op.tflops else "", f"{op.gbps:,.0f} GB/s" if op.gbps else ""]
    rates.append(f"{percent(op.of_ceiling)} of the card's ceiling" if op.of_ceiling else "")
    grid = f" in a grid of {op.grid}" if op.grid else ""
    kernel = f" on {op.kernel}{grid}" if op.kernel else ""
    figures = ", ".join(part for part in [f"{duration(op.us)} (predicted {duration(op.predicted_us)})", *rates] if part)
    return f"{op.what}{often}, {figures}{kernel}"


def check_lines(measured: Measurement | StepMeasurement) -> list[str]:
    """How the numbers compared: one line where all agree, and one for each check that failed."""
    failed = [f"{check.what}: {check.value:.2g} where {check.limit:.2g} is allowed" for check in measured.checks if not check.passed]
    if failed or not measured.checks:
        return failed
    return [f"{plural(len(measured.checks), 'check')} of the numbers passed: {'; '.join(dict.fromkeys(c.what for c in measured.checks))}"]


def verification_line(verification: Verification) -> str:
    """The card, its driver and the versions that measured."""
    versions = [f"driver {verification.driver}"] if verification.driver else []
    versions += [f"{name} {version}" for name, version in verification.versions]
    partial = "" if verification.complete else "; not everything was measured"
    return f"measured in {verification.seconds:.0f} s on {verification.device} ({', '.join(versions)}){partial}"


def verification_lines(report: Report) -> list[str]:
    """One line for each comparison of steps, then the card that measured and what may bend its figures; nothing without one."""
    steps = [
        f"{target.name} on {target.gpu}: {one.name}: {one.text}"
        for target in report.targets
        for one in (target.measured.comparisons if target.measured is not None else ())
    ]
    card = [verification_line(report.verification), *report.verification.notes] if report.verification is not None else []
    return [one_line(line) for line in (*steps, *card)]


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
        parts += target.assumptions[:1] if only_estimated(target) else ()
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
    return " ".join([f"{head}{where}{hidden}.", *_verified(report), *_not_done(report)])


def _verified(report: Report) -> list[str]:
    """A sentence with the verdicts, where a GPU was asked for any."""
    verdicts = Counter(finding.measured.verdict for finding in report.findings if finding.measured is not None)
    said = [f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict if verdicts[verdict]]
    return [f"Measured: {', '.join(said)}."] if said else []


def _not_done(report: Report) -> list[str]:
    """A sentence for each kind of thing that could not be checked."""
    errors = Counter(
        kind for kind, _ in {(error.kind, error.path if error.kind != "internal" else error.message) for error in report.errors}
    )
    unread, unknown, unmeasured, broken = errors.pop("file", 0), errors.pop("gpu", 0), errors.pop("verify", 0), errors.total()
    failed = sum(target.basis == "failed" and not target.static for target in report.targets)
    estimated = sum(only_estimated(target) for target in report.targets)
    unbuilt = sum(target.basis == "failed" and target.static for target in report.targets)
    way_out = "pip install 'lintgpu[hf]', then run without --static"
    said = (
        (unread, f"{plural(unread, 'file')} could not be read."),
        (failed, f"{plural(failed, 'target')} could not be traced."),
        (estimated, f"{plural(estimated, 'target')} not traced, only estimated from the numbers of the config."),
        (unbuilt, f"{plural(unbuilt, 'target')} could not be estimated without torch: {way_out}."),
        (unknown, f"{plural(unknown, 'GPU')} unknown."),
        (unmeasured, "The verification is not whole."),
        (broken, f"{plural(broken, 'check')} failed."),
    )
    return [sentence for count, sentence in said if count]


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
