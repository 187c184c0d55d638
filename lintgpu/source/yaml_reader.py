"""YAML with positions, by ruamel.yaml.

Plain scalars mean what PyYAML makes of them (YAML 1.1), except that a number such as 4e-4 is a float: the training frameworks that
read these files either patch PyYAML so or cast the string.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.nodes import Node as YamlNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.tokens import ScalarToken

from lintgpu.finding import Span
from lintgpu.source.node import Key, Node
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

MAX_VALUES = 1_000_000
"""Values of a document after its aliases are followed; nested aliases grow without bound."""

_STANDARD = "tag:yaml.org,2002:"
_NO_BOOLEANS = ("y", "Y", "n", "N")
_PARSER_FAULTS = (ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError, NotImplementedError)
"""What ruamel.yaml raises, besides its own errors, on some malformed texts."""
_COMMENT_START = re.compile(r"(?:^|(?<=[ \t]))#[^\r\n]*", re.MULTILINE)
_BLOCK_HEADER = re.compile(r"[^\r\n]*")
_PROPERTIES = re.compile(r"(?:[&!]\S*(?:\s+|$)(?:#[^\r\n]*\s+)*)*")
"""Anchor and tag in front of a value, which its span leaves out."""


def documents(positions: Positions) -> tuple[Node, ...]:
    """All documents of the text, at least one: an empty text holds None. Raises UnreadableFile where it is not YAML."""
    loader = _loader()
    try:
        nodes = list(loader.compose_all(positions.text))
    except YAMLError as error:
        raise _unreadable(error, positions) from None
    except _PARSER_FAULTS as error:
        raise UnreadableFile(positions.path, 1, 1, f"not valid YAML: {error}") from None
    documents = tuple(_Builder(positions, loader).node(node, None) for node in nodes if node is not None)
    return documents or (Node(None, positions.span(0, 0)),)


def comments(positions: Positions) -> tuple[Span, ...]:
    """The spans of all comments of a text that parses: from a # behind white space or at a line's start, but in no scalar."""
    starts, ends = _scalar_ranges(positions)
    found: list[tuple[int, int]] = []
    for match in _COMMENT_START.finditer(positions.text):
        before = bisect_right(starts, match.start()) - 1
        inside_scalar = before >= 0 and match.start() < ends[before]
        inside_comment = bool(found) and match.start() < found[-1][1]
        if not inside_scalar and not inside_comment:
            found.append(match.span())
    return tuple(positions.span(start, end) for start, end in found)


def _scalar_ranges(positions: Positions) -> tuple[list[int], list[int]]:
    """Where scalars start and end, in the order of the text. The header line of a block scalar, which may hold a comment, is left out."""
    starts, ends = [], []
    for token in _loader().scan(positions.text):
        if isinstance(token, ScalarToken):
            start, end = token.start_mark.index, token.end_mark.index
            header = _BLOCK_HEADER.match(positions.text, start) if token.style in ("|", ">") else None
            starts.append(header.end() if header else start)
            ends.append(end)
    return starts, ends


def _loader() -> YAML:
    loader = YAML(typ="safe", pure=True)
    loader.version = (1, 1)
    return loader


def _unreadable(error: YAMLError, positions: Positions) -> UnreadableFile:
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, column = positions.line_column(mark.index if mark else 0)
        message = " ".join(part for part in (error.problem, error.context) if part)
        if "'\\t'" in message:
            message = "a tab where YAML allows only spaces"
        return UnreadableFile(positions.path, line, column, f"not valid YAML: {message}")
    if isinstance(error, ReaderError):
        line, column = positions.line_column(error.position)
        return UnreadableFile(positions.path, line, column, f"not valid YAML: {error.reason}")
    return UnreadableFile(positions.path, 1, 1, f"not valid YAML: {error}")


class _Builder:
    """Turns composed YAML nodes into Nodes. A node that an alias names again is built once and shared."""

    def __init__(self, positions: Positions, loader: YAML) -> None:
        self.positions = positions
        self.constructor = loader.constructor
        self.built: dict[int, tuple[Node, int]] = {}
        self.open: set[int] = set()

    def node(self, node: YamlNode, key_span: Span | None) -> Node:
        """The Node of a YAML node under a key. Raises UnreadableFile on what no Python value can hold."""
        return replace(self._shared(node)[0], key_span=key_span)

    def _shared(self, node: YamlNode) -> tuple[Node, int]:
        """The Node of a YAML node and how many values it holds once aliases are followed."""
        if id(node) in self.open:
            raise self._error(node, "an alias inside the value it names")
        if id(node) not in self.built:
            self.open.add(id(node))
            self.built[id(node)] = self._build(node)
            self.open.remove(id(node))
        return self.built[id(node)]

    def _build(self, node: YamlNode) -> tuple[Node, int]:
        if isinstance(node, MappingNode):
            children = self._mapping(node)
            value: Any = {key: child.value for key, child in children.items()}
        elif isinstance(node, SequenceNode):
            children = {index: self.node(item, None) for index, item in enumerate(node.value)}
            value = [child.value for child in children.values()]
        else:
            return Node(self._scalar(node), self._span(node), tag=_application_tag(node)), 1
        size = 1 + sum(self._size(item) for item in _items(node))
        if size > MAX_VALUES:
            raise self._error(node, f"aliases expand to more than {MAX_VALUES} values")
        return Node(value, self._span(node), None, children, _application_tag(node)), size

    def _size(self, node: YamlNode) -> int:
        return self._shared(node)[1]

    def _mapping(self, node: MappingNode) -> dict[Key, Node]:
        merged: dict[Key, Node] = {}
        own: dict[Key, Node] = {}
        for key, value in node.value:
            if key.tag == _STANDARD + "merge":
                merged = self._merge(value) | merged
            else:
                own[self._key(key)] = self.node(value, self._span(key))
        return merged | own

    def _merge(self, node: YamlNode) -> dict[Key, Node]:
        """What << brings: the children of a mapping, or of several where the first one wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        children: dict[Key, Node] = {}
        for source in sources:
            if not isinstance(source, MappingNode):
                raise self._error(source, "<< wants a mapping or a list of mappings")
            children = dict(self._shared(source)[0].children) | children
        return children

    def _key(self, node: YamlNode) -> Key:
        if isinstance(node, MappingNode):
            raise self._error(node, "a mapping cannot be a key (a template placeholder such as {{ name }} wants quotes)")
        return str(self._shared(node)[0].value) if isinstance(node, SequenceNode) else self._scalar(node)

    def _scalar(self, node: YamlNode) -> Any:
        kind = str(node.tag).removeprefix(_STANDARD)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                # YAML 1.1 has y and n as well, but PyYAML does not.
                return node.value if node.value in _NO_BOOLEANS else self.constructor.construct_yaml_bool(node)
            if kind == "int":
                return self.constructor.construct_yaml_int(node)
            if kind == "float":
                return _float(node.value)
        except _PARSER_FAULTS:
            raise self._error(node, f"{node.value!r} is not a {kind}") from None
        return node.value

    def _span(self, node: YamlNode) -> Span:
        start, end = node.start_mark.index, node.end_mark.index
        properties = _PROPERTIES.match(self.positions.text, start, end)
        start = properties.end() if properties else start
        if isinstance(node, MappingNode | SequenceNode) and not node.flow_style:
            # The parser ends a block collection where the next token starts, after blank lines and comments.
            inside = [child.end_mark.index for child in _items(node) if start <= child.start_mark.index <= child.end_mark.index <= end]
            end = max(inside, default=end)
        return self.positions.span(start, max(start, end))

    def _error(self, node: YamlNode, message: str) -> UnreadableFile:
        return UnreadableFile(self.positions.path, *self.positions.line_column(node.start_mark.index), f"not usable YAML: {message}")


def _items(node: YamlNode) -> list[YamlNode]:
    if isinstance(node, MappingNode):
        return [item for pair in node.value for item in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _application_tag(node: YamlNode) -> str:
    tag = str(node.tag or "")
    if tag.startswith(_STANDARD + "python/"):
        return "!!" + tag.removeprefix(_STANDARD)
    return "" if tag.startswith(_STANDARD) else tag


def _float(text: str) -> float:
    plain = text.replace("_", "").lower()
    sign = -1.0 if plain.startswith("-") else 1.0
    plain = plain.lstrip("+-")
    if plain in (".inf", ".nan"):
        return sign * float(plain[1:])
    value = 0.0
    for digits in plain.split(":"):
        value = value * 60 + float(digits)
    return sign * value
