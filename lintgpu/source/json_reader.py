"""JSON with positions, by tree-sitter.

What Python's json and JSONC editors take beyond the standard (NaN, Infinity; comments, trailing commas) is masked by characters
of the same length first, so that positions stay, and Python's json then says what is wrong with the rest, if anything is.
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
_COMMENT = r"//[^\r\n]*|/\*.*?\*/"
_LEXEMES = re.compile(rf"{_STRING}|(?P<comment>{_COMMENT})|(?P<constant>(?<![\w.+-])(?:-?Infinity|NaN)(?![\w.+-]))", re.DOTALL)
_TRAILING_COMMAS = re.compile(rf"{_STRING}|(?P<comma>,)(?=\s*[\]}}])", re.DOTALL)


def documents(positions: Positions) -> tuple[Node, ...]:
    """The one document of the text. Raises UnreadableFile where it is not JSON."""
    masked = _TRAILING_COMMAS.sub(lambda match: " " if match["comma"] else match[0], _LEXEMES.sub(_mask, positions.text))
    try:
        json.loads(masked)
    except json.JSONDecodeError as error:
        rest = positions.text[error.pos :].split(maxsplit=1)
        found = repr(rest[0][:20]) if rest else "the end of the file"
        line, column = positions.line_column(error.pos)
        message = error.msg[0].lower() + error.msg[1:]
        raise UnreadableFile(positions.path, line, column, f"not valid JSON: {message}, found {found}") from None
    except ValueError as error:
        raise UnreadableFile(positions.path, 1, 1, f"not valid JSON: {error}") from None
    document = Parser(Language(tree_sitter_json.language())).parse(masked.encode("utf-8")).root_node
    return (_node(document.named_children[0], positions, None),)


def comments(positions: Positions) -> tuple[Span, ...]:
    """The spans of all comments of a JSONC file."""
    return tuple(positions.span(*match.span()) for match in _LEXEMES.finditer(positions.text) if match["comment"])


def _mask(match: re.Match[str]) -> str:
    if match["comment"]:
        return re.sub(r"[^\r\n]", " ", match[0])
    return "1" * len(match[0]) if match["constant"] else match[0]


def _node(node: tree_sitter.Node, positions: Positions, key_span: Span | None) -> Node:
    start, end = positions.from_byte(node.start_byte), positions.from_byte(node.end_byte)
    span = positions.span(start, end)
    if node.type == "object":
        children: dict[Any, Node] = {}
        for pair in node.named_children:
            key, value = pair.named_children
            place = positions.span(positions.from_byte(key.start_byte), positions.from_byte(key.end_byte))
            children[_scalar(key, positions)] = _node(value, positions, place)
        return Node({name: child.value for name, child in children.items()}, span, key_span, children)
    if node.type == "array":
        items = [_node(item, positions, None) for item in node.named_children]
        return Node([item.value for item in items], span, key_span, dict(enumerate(items)))
    return Node(_scalar(node, positions), span, key_span)


def _scalar(node: tree_sitter.Node, positions: Positions) -> Any:
    return json.loads(positions.text[positions.from_byte(node.start_byte) : positions.from_byte(node.end_byte)])
