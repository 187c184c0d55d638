"""JSON with positions, by tree-sitter.

What JSONC editors take beyond the standard (comments, trailing commas) is masked by blanks first, so that positions stay, and
Python's json says what is wrong with the rest, if anything is. For the grammar, which is narrower than json (no NaN, no 1e+5),
strings and numbers are masked as well: it only has to find where values start and end.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import tree_sitter_json
from tree_sitter import Language, Parser

from lintgpu.finding import Span
from lintgpu.source.node import Node
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

if TYPE_CHECKING:
    import tree_sitter

_STRING = r'"(?:\\.|[^"\\\r\n])*"'
_STRINGS_AND_COMMENTS = re.compile(rf"{_STRING}|(?P<comment>//[^\r\n]*|/\*.*?\*/)", re.DOTALL)
_TRAILING_COMMAS = re.compile(rf"{_STRING}|(?P<comma>,)(?=\s*[\]}}])", re.DOTALL)
_SCALARS = re.compile(rf"(?P<string>{_STRING})|[^\s,:\[\]{{}}\"]+", re.DOTALL)


def documents(positions: Positions) -> tuple[Node, ...]:
    """The one document of the text. Raises UnreadableFile where it is not JSON."""
    strict = _TRAILING_COMMAS.sub(lambda match: " " if match["comma"] else match[0], _STRINGS_AND_COMMENTS.sub(_blank, positions.text))
    try:
        json.loads(strict)
    except json.JSONDecodeError as error:
        rest = positions.text[error.pos :].split(maxsplit=1)
        found = repr(rest[0][:20]) if rest else "the end of the file"
        line, column = positions.line_column(error.pos)
        message = error.msg[0].lower() + error.msg[1:]
        raise UnreadableFile(positions.path, line, column, f"not valid JSON: {message}, found {found}") from None
    except ValueError as error:
        raise UnreadableFile(positions.path, 1, 1, f"not valid JSON: {error}") from None
    shape = _SCALARS.sub(_placeholder, strict).encode("ascii")
    document = Parser(Language(tree_sitter_json.language())).parse(shape).root_node
    return (_node(document.named_children[0], positions, None),)


def comments(positions: Positions) -> tuple[Span, ...]:
    """The spans of all comments of a JSONC file."""
    return tuple(positions.span(*match.span()) for match in _STRINGS_AND_COMMENTS.finditer(positions.text) if match["comment"])


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\r\n]", " ", match[0]) if match["comment"] else match[0]


def _placeholder(match: re.Match[str]) -> str:
    """ASCII of the same length, so that the grammar's bytes are our characters."""
    return '"' + "s" * (len(match[0]) - 2) + '"' if match["string"] else "1" * len(match[0])


def _node(node: tree_sitter.Node, positions: Positions, key_span: Span | None) -> Node:
    span = positions.span(node.start_byte, node.end_byte)
    if node.type == "object":
        children: dict[Any, Node] = {}
        for pair in node.named_children:
            key, value = pair.named_children
            place = positions.span(key.start_byte, key.end_byte)
            children[_scalar(key, positions)] = _node(value, positions, place)
        return Node({name: child.value for name, child in children.items()}, span, key_span, children)
    if node.type == "array":
        items = [_node(item, positions, None) for item in node.named_children]
        return Node([item.value for item in items], span, key_span, dict(enumerate(items)))
    return Node(_scalar(node, positions), span, key_span)


def _scalar(node: tree_sitter.Node, positions: Positions) -> Any:
    return json.loads(positions.text[node.start_byte : node.end_byte])
