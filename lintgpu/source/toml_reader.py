"""TOML with positions: values and errors by tomllib, spans by tree-sitter."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tree_sitter_toml
from tree_sitter import Language, Parser

from lintgpu.finding import Span
from lintgpu.source.node import Key, Node
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import tree_sitter

_POSITION = re.compile(r" \((?:at line (\d+), column (\d+)|at end of document)\)$")


@dataclass
class _Place:
    """Where a value is written, and the places below it."""

    span: Span
    key_span: Span | None = None
    children: dict[Key, _Place] = field(default_factory=dict)


def documents(positions: Positions) -> tuple[Node, ...]:
    """The one document of the text. Raises UnreadableFile where it is not TOML."""
    try:
        value = tomllib.loads(positions.text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(str(error), positions) from None
    except ValueError as error:
        raise UnreadableFile(positions.path, 1, 1, f"not valid TOML: {error}") from None
    root = _Place(positions.span(0, len(positions.text)))
    for item in _parse(positions).named_children:
        _add_item(root, item, positions)
    return (_node(value, root, root.span),)


def comments(positions: Positions) -> tuple[Span, ...]:
    """The spans of all comments."""
    return tuple(_span(node, positions) for node in _descendants(_parse(positions)) if node.type == "comment")


def _unreadable(message: str, positions: Positions) -> UnreadableFile:
    match = _POSITION.search(message)
    if match and match[1]:
        line, column = int(match[1]), int(match[2])
    else:
        line, column = positions.line_column(len(positions.text))
    text = _POSITION.sub(" at the end of the file" if match and not match[1] else "", message)
    return UnreadableFile(positions.path, line, column, f"not valid TOML: {text[0].lower() + text[1:]}")


def _parse(positions: Positions) -> tree_sitter.Node:
    return Parser(Language(tree_sitter_toml.language())).parse(positions.text.encode("utf-8")).root_node


def _descendants(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    yield node
    for child in node.children:
        yield from _descendants(child)


def _span(node: tree_sitter.Node, positions: Positions) -> Span:
    return positions.span(positions.from_byte(node.start_byte), positions.from_byte(node.end_byte))


def _add_item(root: _Place, item: tree_sitter.Node, positions: Positions) -> None:
    """Add a top-level pair or a table with its pairs."""
    if item.type == "pair":
        _add_pair(root, item, positions)
    elif item.type in ("table", "table_array_element"):
        header, *pairs = [child for child in item.named_children if child.type != "comment"]
        *above, last = _keys(header, positions)
        parent = root
        for key, span in above:
            parent = _latest(parent.children.setdefault(key, _Place(_span(item, positions), span)))
        key, span = last
        table = parent.children.setdefault(key, _Place(_span(item, positions), span))
        if item.type == "table_array_element":
            table = table.children.setdefault(len(table.children), _Place(_span(item, positions)))
        for pair in pairs:
            if pair.type == "pair":
                _add_pair(table, pair, positions)


def _latest(place: _Place) -> _Place:
    """The table a header speaks of: of an array of tables, the last element so far."""
    is_array = bool(place.children) and all(isinstance(key, int) for key in place.children)
    return place.children[len(place.children) - 1] if is_array else place


def _add_pair(table: _Place, pair: tree_sitter.Node, positions: Positions) -> None:
    key_node, value = [child for child in pair.named_children if child.type != "comment"]
    *above, (key, span) = _keys(key_node, positions)
    for name, place in above:
        table = table.children.setdefault(name, _Place(_span(pair, positions), place))
    table.children[key] = _value(value, span, positions)


def _value(node: tree_sitter.Node, key_span: Span | None, positions: Positions) -> _Place:
    place = _Place(_span(node, positions), key_span)
    if node.type == "array":
        items = [child for child in node.named_children if child.type != "comment"]
        place.children = {index: _value(item, None, positions) for index, item in enumerate(items)}
    elif node.type == "inline_table":
        for pair in node.named_children:
            if pair.type == "pair":
                _add_pair(place, pair, positions)
    return place


def _keys(node: tree_sitter.Node, positions: Positions) -> list[tuple[str, Span]]:
    """The parts of a bare, quoted or dotted key."""
    if node.type == "dotted_key":
        return [key for child in node.named_children for key in _keys(child, positions)]
    span = _span(node, positions)
    start, end = positions.offsets(span)
    text = positions.text[start:end]
    return [(next(iter(tomllib.loads(f"{text} = 0"))) if node.type == "quoted_key" else text, span)]


def _node(value: Any, place: _Place | None, around: Span) -> Node:
    """The Node of a value; where the grammar found no place for it, the span around it serves."""
    span = place.span if place else around
    places = place.children if place else {}
    children: dict[Key, Node] = {}
    if isinstance(value, dict):
        children = {key: _node(item, places.get(key), span) for key, item in value.items()}
        value = {key: child.value for key, child in children.items()}
    elif isinstance(value, list):
        children = {index: _node(item, places.get(index), span) for index, item in enumerate(value)}
        value = [child.value for child in children.values()]
    elif not isinstance(value, str | int | float | bool):
        # Dates and times: as they read in TOML.
        value = str(value)
    return Node(value, span, place.key_span if place else None, children)
