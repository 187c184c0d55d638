"""Which fixes of a report may be written, and the new texts of the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lintgpu.finding import Edit, Finding
from lintgpu.report.base import Report
from lintgpu.source import SourceFile, edit


@dataclass(frozen=True)
class Plan:
    """What `--fix` would do."""

    texts: dict[str, str]
    """New text of each file that changes, by path."""
    fixed: tuple[Finding, ...]
    unsafe: int
    """Fixes left out because they touch trained weights or the width of the model (--unsafe-fixes writes them)."""
    unconfirmed: int
    """Fixes left out because no second trace confirmed the gain."""


def plan(report: Report, unsafe_fixes: bool) -> Plan:
    """Choose the fixes to write: confirmed by a second trace, and safe or asked for.

    Findings of several GPUs may want different values at one place: the first one wins. Raises EditError where an edit does not fit.
    """
    chosen: dict[tuple[str, int, int], Edit] = {}
    fixed: list[Finding] = []
    unsafe = unconfirmed = 0
    for finding in report.findings:
        if finding.fix is None:
            continue
        if not finding.fix.confirmed:
            unconfirmed += 1
        elif not finding.fix.safe and not unsafe_fixes:
            unsafe += 1
        elif _free(finding.fix.edits, chosen):
            chosen |= {_place(one): one for one in finding.fix.edits}
            fixed.append(finding)
    texts = edit.apply({path: file.text for path, file in report.files.items()}, list(chosen.values()))
    return Plan(texts, tuple(fixed), unsafe, unconfirmed)


def diff(files: dict[str, SourceFile], texts: dict[str, str]) -> str:
    """The unified diff of a plan."""
    return "".join(edit.diff(files[path].text, text, path) for path, text in sorted(texts.items()))


def _free(edits: Sequence[Edit], chosen: dict[tuple[str, int, int], Edit]) -> bool:
    return all(_place(one) not in chosen for one in edits)


def _place(one: Edit) -> tuple[str, int, int]:
    return one.span.path, one.span.line, one.span.column
