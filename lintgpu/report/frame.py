"""The lines of code a finding sits on, with the span underlined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lintgpu.finding import Span
from lintgpu.report.text import printable, width
from lintgpu.source.positions import Positions

TAB = "    "
CONTEXT = 1
"""Lines shown above and below the span."""
ELLIPSIS = "…"


@dataclass(frozen=True)
class _Window:
    """The part of the columns that is shown: [first, last)."""

    first: int
    last: int


def frame(positions: Positions, span: Span, label: str, columns: int, mark: Callable[[str], str]) -> list[str]:
    """The code around a span, carets under it and `label` behind them; `mark` colours carets and label.

    Lines longer than `columns` are cut around the span, all at the same columns. Empty where the span is outside the text.
    """
    last_line = positions.line_count - (1 if not positions.line(positions.line_count) else 0)
    if not 1 <= span.line <= max(last_line, 1):
        return []
    shown = range(max(1, span.line - CONTEXT), min(max(last_line, 1), span.line + CONTEXT) + 1)
    gutter = len(str(shown[-1]))
    cells = _cells(positions.line(span.line))
    before = sum(width(cell) for cell in cells[: span.column - 1])
    end = span.end_column - 1 if span.end_line == span.line else len(cells)
    carets = max(1, sum(width(cell) for cell in cells[span.column - 1 : end]))
    window = _window(sum(map(width, cells)), before, carets, max(20, columns - gutter - 3))
    lines = [f"{'':{gutter}} |"]
    for number in shown:
        lines.append(f"{number:>{gutter}} | {_cut(_cells(positions.line(number)), window)}".rstrip())
        if number == span.line:
            shown_carets = min(carets, window.last - before) if window.last > before else 1
            offset = before - window.first + (len(ELLIPSIS) if window.first else 0)
            lines.append(f"{'':{gutter}} | {'':{offset}}{mark(('^' * shown_carets + ' ' + label).rstrip())}")
    lines.append(f"{'':{gutter}} |")
    return lines


def _cells(line: str) -> list[str]:
    """What each character is shown as."""
    return [TAB if character == "\t" else printable(character) for character in line]


def _window(total: int, start: int, length: int, room: int) -> _Window:
    """All columns where they fit, else those around the span: a third of the spare room on its left."""
    if total <= room:
        return _Window(0, max(total, room))
    spare = max(0, room - length)
    first = max(0, min(start - spare // 3, total - room))
    return _Window(first, first + room)


def _cut(cells: list[str], window: _Window) -> str:
    """The cells inside the window, with an ellipsis at each end where something is left out."""
    kept: list[str] = []
    column = 0
    for cell in cells:
        end = column + width(cell)
        if column >= window.first and end <= window.last:
            kept.append(cell)
        elif column < window.first < end:
            # Half of a wide character or of a tab: keep the columns right.
            kept.append(" " * (end - window.first))
        column = end
    tail = ELLIPSIS if column > window.last else ""
    head = ELLIPSIS if window.first and column > window.first else ""
    return f"{head}{''.join(kept)}{tail}"
