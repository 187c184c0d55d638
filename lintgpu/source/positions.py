"""Offsets in a text, in characters, bytes or lines and columns, and the way from one to the other."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

from lintgpu.finding import Span

_LINE_END = re.compile(r"\r\n|\r|\n")


class Positions:
    """Lines of a text end at LF, CRLF or CR, as Python, YAML and editors have it. Lines and columns count from 1."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self._starts = [0, *(match.end() for match in _LINE_END.finditer(text))]

    def line_column(self, offset: int) -> tuple[int, int]:
        """Line and column of a character offset; offsets past the end count as the end."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def offset(self, line: int, column: int) -> int:
        """Character offset of a line and column; the column may be that of the line's end. Raises ValueError beyond."""
        if not 1 <= line <= len(self._starts):
            raise ValueError(f"line {line} is outside the {len(self._starts)} lines of {self.path}")
        start = self._starts[line - 1]
        # Behind the last character of the text there is one more place, behind a line's end the next line begins.
        places = self._line_end(line) - start + (line == len(self._starts))
        if not 1 <= column <= places:
            raise ValueError(f"column {column} is outside line {line} of {self.path}")
        return start + column - 1

    def span(self, start: int, end: int) -> Span:
        """The span of the characters from `start` up to `end`."""
        return Span(self.path, *self.line_column(start), *self.line_column(end))

    def offsets(self, span: Span) -> tuple[int, int]:
        """Character offsets of a span. Raises ValueError where it is outside the text."""
        return self.offset(span.line, span.column), self.offset(span.end_line, span.end_column)

    def line(self, number: int) -> str:
        """The text of a line without its end; empty outside the text."""
        if not 1 <= number <= len(self._starts):
            return ""
        return self.text[self._starts[number - 1] : self._line_end(number)].rstrip("\r\n")

    @property
    def line_count(self) -> int:
        """How many lines there are; a text that ends with a line end has an empty last one."""
        return len(self._starts)

    def from_byte(self, byte: int) -> int:
        """Character offset of a byte offset in the UTF-8 form of the text."""
        table = self._characters_by_byte
        return byte if table is None else table[min(byte, len(table) - 1)]

    def from_line_byte(self, line: int, byte: int) -> int:
        """Character offset of a byte offset inside a line, which is how `ast` gives columns."""
        start = self._starts[min(line, len(self._starts)) - 1]
        if self._characters_by_byte is None:
            return start + byte
        return start + len(self.line(line).encode()[:byte].decode(errors="ignore"))

    def _line_end(self, line: int) -> int:
        return self._starts[line] if line < len(self._starts) else len(self.text)

    @cached_property
    def _characters_by_byte(self) -> list[int] | None:
        if self.text.isascii():
            return None
        table = [index for index, character in enumerate(self.text) for _ in character.encode("utf-8", "surrogatepass")]
        return [*table, len(self.text)]
