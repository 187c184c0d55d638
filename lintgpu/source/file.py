"""A linted file: its text, its language, and what its reader makes of it."""

from __future__ import annotations

import ast
import codecs
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from types import ModuleType

from lintgpu.finding import Span
from lintgpu.source.node import Node
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

PYTHON, YAML, JSON, TOML = "python", "yaml", "json", "toml"
LANGUAGES = {
    ".py": PYTHON,
    ".pyi": PYTHON,
    ".yaml": YAML,
    ".yml": YAML,
    ".json": JSON,
    ".jsonc": JSON,
    ".toml": TOML,
}
MAX_BYTES = 8 * 2**20
"""Model configs and sources are far smaller; data files that happen to end in .json are not."""

_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


@dataclass(frozen=True)
class SourceFile:
    """The text of one file (without a byte order mark, line endings as they are) and its lazily parsed form."""

    path: str
    """What spans and messages call it."""
    text: str = field(repr=False)
    language: str
    encoding: str = "utf-8"
    bom: bool = False

    @cached_property
    def positions(self) -> Positions:
        """Offsets of the text as lines and columns and back."""
        return Positions(self.path, self.text)

    @property
    def root(self) -> Node:
        """The (first) document of a JSON, YAML or TOML file. Raises UnreadableFile where it does not parse."""
        return self.documents[0]

    @cached_property
    def documents(self) -> tuple[Node, ...]:
        """All documents of a data file, at least one. Raises UnreadableFile where they do not parse."""
        if self.language == PYTHON:
            raise TypeError(f"{self.path} is Python: use tree")
        reader = _reader(self.language)
        try:
            documents: tuple[Node, ...] = reader.documents(self.positions)
        except RecursionError:
            raise UnreadableFile(self.path, 1, 1, "values are nested too deeply to read") from None
        return documents

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of a Python file. Raises UnreadableFile where it does not parse."""
        if self.language != PYTHON:
            raise TypeError(f"{self.path} is {self.language}: use root")
        tree: ast.Module = _reader(PYTHON).tree(self.positions)
        return tree

    @cached_property
    def comments(self) -> tuple[Span, ...]:
        """The comments of the file, marker included; none where it does not parse."""
        try:
            self.check()
        except UnreadableFile:
            return ()
        comments: tuple[Span, ...] = _reader(self.language).comments(self.positions)
        return comments

    def check(self) -> None:
        """Parse the file. Raises UnreadableFile where it does not parse."""
        _ = self.tree if self.language == PYTHON else self.documents

    def span(self, node: ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias | ast.excepthandler) -> Span:
        """The span of a node of `tree`, with columns in characters."""
        start = self.positions.from_line_byte(node.lineno, node.col_offset)
        if node.end_lineno is None or node.end_col_offset is None:
            return self.positions.span(start, start)
        return self.positions.span(start, self.positions.from_line_byte(node.end_lineno, node.end_col_offset))

    def slice(self, span: Span) -> str:
        """The text at a span of this file. Raises ValueError where it is outside the text."""
        start, end = self.positions.offsets(span)
        return self.text[start:end]

    def encode(self, text: str) -> bytes:
        """`text` as the bytes to write in place of this file: same encoding and byte order mark."""
        data = text.encode(self.encoding)
        return codecs.BOM_UTF8 + data if self.bom else data


def read(path: str, display_path: str | None = None) -> SourceFile:
    """Read a file; spans and messages show `display_path` (else `path`). Parsing waits until it is asked for.

    Raises UnreadableFile where the file is missing, a directory, too large, not text, or of no known language.
    """
    shown = display_path or path
    data = _bytes(path, shown)
    return decode(data, shown)


def decode(data: bytes, path: str) -> SourceFile:
    """A SourceFile from the bytes of a file called `path`. Raises UnreadableFile where they are not text of a known language."""
    language = LANGUAGES.get(PurePath(path).suffix.lower())
    bom = data.startswith(codecs.BOM_UTF8)
    body = data[len(codecs.BOM_UTF8) :] if bom else data
    encoding = _declared_encoding(body, path) if language == PYTHON and not bom else "utf-8"
    text = _decode(body, encoding, path)
    language = language or _sniff(text)
    if language is None:
        raise UnreadableFile(path, 0, 0, "not a Python, YAML, JSON or TOML file", "language")
    return SourceFile(path, text, language, encoding, bom)


def _bytes(path: str, shown: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableFile(shown, 0, 0, "no such file", "missing") from None
    except IsADirectoryError:
        raise UnreadableFile(shown, 0, 0, "is a directory", "directory") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableFile(shown, 0, 0, f"cannot be read: {reason}", "permission") from None
    if len(data) > MAX_BYTES:
        raise UnreadableFile(shown, 0, 0, f"larger than {MAX_BYTES // 2**20} MiB, which is no config or source of a model", "size")
    return data


def _decode(data: bytes, encoding: str, path: str) -> str:
    for name, mark in (("UTF-16", codecs.BOM_UTF16_LE), ("UTF-16", codecs.BOM_UTF16_BE)):
        if data.startswith(mark):
            raise UnreadableFile(path, 1, 1, f"is {name}, not UTF-8", "encoding")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line, column = Positions(path, data[: error.start].decode(encoding)).line_column(error.start)
        raise UnreadableFile(path, line, column, f"not {encoding.upper()}: byte 0x{data[error.start]:02x}", "encoding") from None
    if "\0" in text:
        line, column = Positions(path, text).line_column(text.index("\0"))
        raise UnreadableFile(path, line, column, "holds a null character, so it is not text", "encoding")
    return text


def _declared_encoding(data: bytes, path: str) -> str:
    """The encoding a Python file declares in its first two lines (PEP 263); UTF-8 without."""
    for number, line in enumerate(data.split(b"\n", 2)[:2], start=1):
        match = _CODING.match(line)
        if match:
            name = match[1].decode("ascii")
            try:
                return codecs.lookup(name).name
            except LookupError:
                raise UnreadableFile(path, number, 1, f"declares the unknown encoding {name}", "encoding") from None
        if line.strip() and not line.lstrip().startswith(b"#"):
            break
    return "utf-8"


def _sniff(text: str) -> str | None:
    """The language of a file whose name does not say it."""
    start = text.lstrip()[:200]
    if start.startswith(("{", "[")):
        return JSON
    return PYTHON if re.match(r"#!.*\bpython", start) else None


def _reader(language: str) -> ModuleType:
    """The reader of a language, imported only now: the parsers behind them take tens of milliseconds to import."""
    if language == JSON:
        from lintgpu.source import json_reader

        return json_reader
    if language == YAML:
        from lintgpu.source import yaml_reader

        return yaml_reader
    if language == TOML:
        from lintgpu.source import toml_reader

        return toml_reader
    from lintgpu.source import python_reader

    return python_reader
