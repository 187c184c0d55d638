"""JSON with positions: values by Python's json, places by tree-sitter and only once somebody asks for them.

What JSONC editors take beyond the standard (comments, trailing commas) is masked by blanks first, so that positions stay, and
Python's json says what is wrong with the rest, if anything is. For the grammar, which is narrower than json (no NaN, no 1e+5),
strings and numbers are masked as well: it only has to find where values start and end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lintgpu.finding import Span
from lintgpu.source.node import Key, Node
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

if TYPE_CHECKING:
    import tree_sitter

_STRING = r'"(?:\\.|[^"\\\r\n])*"'
_STRINGS_AND_COMMENTS = re.compile(rf"{_STRING}|(?P<comment>//[^\r\n]*|/\*.*?\*/)", re.DOTALL)
_TRAILING_COMMAS = re.compile(rf"{_STRING}|(?P<comma>,)(?=\s*[\]}}])", re.DOTALL)
_BLANKS = " \t\n\r"
_SCALARS = re.compile(rf"(?P<string>{_STRING})|[^\s,:\[\]{{}}\"]+", re.DOTALL)


def documents(positions: Positions) -> tuple[Node, ...]:
    """The one document of the text. Raises UnreadableFile where it is not JSON."""
    strict = positions.text
    try:
        value = json.loads(strict)
    except ValueError:
        strict = _without_extensions(strict)
        value = _loads(strict, positions)
    start, end = len(strict) - len(strict.lstrip(_BLANKS)), len(strict.rstrip(_BLANKS))
    return (Node(value, positions.span(start, end), None, _children(value, _Document(strict, positions))),)


def _without_extensions(text: str) -> str:
    """`text` with comments and trailing commas as blanks."""
    return _TRAILING_COMMAS.sub(lambda match: " " if match["comma"] else match[0], _STRINGS_AND_COMMENTS.sub(_blank, text))


def _loads(strict: str, positions: Positions) -> Any:
    try:
        return json.loads(strict)
    except json.JSONDecodeError as error:
        rest = positions.text[error.pos :].split(maxsplit=1)
        found = repr(rest[0][:20]) if rest else "the end of the file"
        line, column = positions.line_column(error.pos)
        message = error.msg[0].lower() + error.msg[1:]
        raise UnreadableFile(positions.path, line, column, f"not valid JSON: {message}, found {found}") from None
    except ValueError as error:
        raise UnreadableFile(positions.path, 1, 1, f"not valid JSON: {error}") from None


def comments(positions: Positions) -> tuple[Span, ...]:
    """The spans of all comments of a JSONC file."""
    return tuple(positions.span(*match.span()) for match in _STRINGS_AND_COMMENTS.finditer(positions.text) if match["comment"])


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\r\n]", " ", match[0]) if match["comment"] else match[0]


def _placeholder(match: re.Match[str]) -> str:
    """ASCII of the same length, so that the grammar's bytes are our characters."""
    return '"' + "s" * (len(match[0]) - 2) + '"' if match["string"] else "1" * len(match[0])


class _Document:
    """The syntax tree of a text, parsed when it is first wanted."""

    def __init__(self, strict: str, positions: Positions) -> None:
        self._strict = strict
        self.positions = positions

    @cached_property
    def syntax(self) -> tree_sitter.Node:
        """The node of the one value."""
        import tree_sitter_json
        from tree_sitter import Language, Parser

        shape = _SCALARS.sub(_placeholder, self._strict).encode("ascii")
        return Parser(Language(tree_sitter_json.language())).parse(shape).root_node.named_children[0]

    def text(self, node: tree_sitter.Node) -> str:
        """What a node of the tree reads in the file."""
        return self.positions.text[node.start_byte : node.end_byte]


def _children(value: Any, document: _Document, syntax: tree_sitter.Node | None = None) -> Mapping[Key, Node]:
    return _Children(value, document, syntax) if isinstance(value, dict | list) and value else {}


class _Children(Mapping[Key, Node]):
    """The children of an object or array, made when one of them is first asked for: of a large file few ever are."""

    def __init__(self, value: Any, document: _Document, syntax: tree_sitter.Node | None) -> None:
        self._value = value
        self._document = document
        self._syntax = syntax

    def __getitem__(self, key: Key) -> Node:
        return self._nodes[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._value)

    def __repr__(self) -> str:
        return f"<children of {type(self._value).__name__}>"

    @cached_property
    def _nodes(self) -> dict[Key, Node]:
        syntax = self._syntax or self._document.syntax
        if isinstance(self._value, list):
            return {
                index: self._node(item, node, None)
                for index, (item, node) in enumerate(zip(self._value, syntax.named_children, strict=True))
            }
        pairs = (pair.named_children for pair in syntax.named_children)
        # Of a key written twice the last value counts, as in the plain value.
        last = {json.loads(self._document.text(key)): (key, node) for key, node in pairs}
        return {name: self._node(self._value[name], node, key) for name, (key, node) in last.items()}

    def _node(self, value: Any, syntax: tree_sitter.Node, key: tree_sitter.Node | None) -> Node:
        span = self._document.positions.span
        key_span = span(key.start_byte, key.end_byte) if key else None
        return Node(value, span(syntax.start_byte, syntax.end_byte), key_span, _children(value, self._document, syntax))
