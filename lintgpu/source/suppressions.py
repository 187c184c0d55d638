"""Comments that hide findings: `# lintgpu: ignore[LG101] reason` and `# lintgpu: ignore-file[LG2] reason`.

A comment behind code speaks of its own line; one on a line of its own speaks of the next line that is not a comment.
Without codes it hides everything; a code may be a prefix. Comments are found by the parsers, so text in strings never counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from lintgpu.finding import Span
from lintgpu.source.file import SourceFile

_DIRECTIVE = re.compile(
    r"""
    \blintgpu:\s*ignore(?P<file>-file)?
    (?:\s*\[(?P<codes>[^\]]*)\])?
    (?![\w\[-])             # neither another word nor an unclosed list of codes
    [\s:,-]*(?P<reason>.*?)
    \s*(?:\*/)?$            # the end of a JSONC block comment is not part of the reason
    """,
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class Suppression:
    """One ignore comment."""

    span: Span
    """Of the comment."""
    line: int
    """The line it speaks of; 0 for the whole file."""
    codes: tuple[str, ...]
    """Codes or prefixes in upper case; empty for all."""
    reason: str

    def hides(self, line: int, code: str) -> bool:
        """Whether it hides a finding of `code` whose span starts on `line`."""
        return self.line in (0, line) and (not self.codes or any(code.upper().startswith(prefix) for prefix in self.codes))


@lru_cache(maxsize=256)
def suppressions(file: SourceFile) -> tuple[Suppression, ...]:
    """All ignore comments of a file in its order; none where it does not parse."""
    if "lintgpu:" not in file.text:
        return ()
    comments = [(span, _DIRECTIVE.search(file.slice(span))) for span in file.comments]
    own_lines = {span.line: span.end_line for span, _ in comments if not file.positions.line(span.line)[: span.column - 1].strip()}
    return tuple(
        Suppression(span, 0 if match["file"] else _line_meant(span, own_lines), _codes(match["codes"]), match["reason"])
        for span, match in comments
        if match
    )


def suppressed(file: SourceFile, line: int, code: str) -> bool:
    """Whether a comment hides a finding of `code` whose span starts on `line`."""
    return any(suppression.hides(line, code) for suppression in suppressions(file))


def unused(suppression: Suppression, findings: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """The codes of a comment that hide none of the (line, code) of its file's findings, hidden ones included; "" for no codes at all."""
    here = [code.upper() for line, code in findings if suppression.line in (0, line)]
    return tuple(prefix for prefix in suppression.codes or ("",) if not any(code.startswith(prefix) for code in here))


def _line_meant(span: Span, own_lines: dict[int, int]) -> int:
    """The comment's line, or the first line below it that is no comment where it stands on lines of its own."""
    line = span.line
    while line in own_lines:
        line = own_lines[line] + 1
    return line


def _codes(text: str | None) -> tuple[str, ...]:
    return tuple(code.upper() for code in re.split(r"[\s,]+", text or "") if code)
