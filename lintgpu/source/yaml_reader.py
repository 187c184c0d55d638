"""YAML with positions: PyYAML's events (by libyaml where its wheel has it), values at once and places only where somebody asks for them.

Plain scalars mean what PyYAML makes of them (YAML 1.1), except that a number such as 4e-4 is a float: the training frameworks that
read these files either patch PyYAML so or cast the string.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import yaml

from lintgpu.finding import Span
from lintgpu.source.node import Key, Node
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

MAX_VALUES = 1_000_000
"""Values of a document after its aliases are followed; nested aliases grow without bound."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_READS_BYTES = _Loader is not yaml.SafeLoader
"""libyaml counts bytes where it refuses a character, and characters everywhere else."""
_STANDARD = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+")
_COMMENT_START = re.compile(r"(?:^|(?<=[ \t]))#[^\r\n]*", re.MULTILINE)
_BLOCK_HEADER = re.compile(r"[^\r\n]*")
_PROPERTIES = re.compile(r"(?:[&!]\S*(?:\s+|$)(?:#[^\r\n]*\s+)*)*")
"""Anchor and tag in front of a value, which its span leaves out."""


def documents(positions: Positions) -> tuple[Node, ...]:
    """All documents of the text, at least one: an empty text holds None. Raises UnreadableFile where it is not YAML."""
    builder = _Builder(positions)
    try:
        parts = list(_compose(positions))
    except yaml.YAMLError as error:
        raise _unreadable(error, positions) from None
    return tuple(builder.node(part, None) for part in parts) or (Node(None, positions.span(0, 0)),)


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
    for token in yaml.scan(positions.text, Loader=_Loader):
        if isinstance(token, yaml.ScalarToken):
            start, end = token.start_mark.index, token.end_mark.index
            header = _BLOCK_HEADER.match(positions.text, start) if token.style in ("|", ">") else None
            starts.append(header.end() if header else start)
            ends.append(end)
    return starts, ends


def _unreadable(error: Any, positions: Positions) -> UnreadableFile:
    if isinstance(error, yaml.reader.ReaderError):
        offset = positions.from_byte(error.position) if _READS_BYTES else error.position
        return _refused(positions, offset, f"not valid YAML: {error.reason}")
    mark = error.problem_mark or error.context_mark
    offset = mark.index if mark else 0
    character = positions.text[offset : offset + 1]
    message = " ".join(part for part in (error.problem, error.context) if part)
    if "cannot start any token" in message:
        message = "a tab where YAML allows only spaces" if character == "\t" else f"the character {character!r} cannot start a value"
    return _refused(positions, offset, f"not valid YAML: {message}")


def _refused(positions: Positions, offset: int, message: str) -> UnreadableFile:
    return UnreadableFile(positions.path, *positions.line_column(offset), message)


@dataclass(eq=False)
class _Part:
    """A value as it stands in the text, aliases followed: the same object for all of them."""

    tag: str
    start: int
    end: int
    text: str = ""
    """Of a scalar."""
    items: list[_Part] = field(default_factory=list)
    """Of a sequence; of a mapping keys and values in turn."""
    is_mapping: bool = False
    is_sequence: bool = False
    is_flow: bool = False


def _compose(positions: Positions) -> Iterator[_Part]:
    """The root of each document. Raises yaml.YAMLError, and UnreadableFile for an alias of nothing."""
    loader = _Loader(positions.text)
    anchors: dict[str, _Part] = {}
    open_parts: list[_Part] = []
    try:
        while loader.check_event():
            event = loader.get_event()
            part = None
            if isinstance(event, yaml.DocumentStartEvent):
                anchors.clear()
            elif isinstance(event, yaml.CollectionEndEvent):
                part = open_parts.pop()
                part.end = event.end_mark.index
            elif isinstance(event, yaml.AliasEvent):
                part = anchors.get(event.anchor)
                if part is None:
                    raise _refused(positions, event.start_mark.index, f"not valid YAML: found undefined alias {event.anchor!r}")
            elif isinstance(event, yaml.NodeEvent):
                part = _part(event, loader)
                if event.anchor is not None:
                    anchors[event.anchor] = part
                if not isinstance(event, yaml.ScalarEvent):
                    open_parts.append(part)
                    continue
            if part is None:
                continue
            if not open_parts:
                yield part
            else:
                open_parts[-1].items.append(part)
    finally:
        loader.dispose()


def _part(event: Any, loader: Any) -> _Part:
    """A scalar, or a collection that has just begun."""
    start, end = event.start_mark.index, event.end_mark.index
    tag = None if event.tag == "!" else event.tag
    if isinstance(event, yaml.ScalarEvent):
        tag = tag or loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag == _STANDARD + "str" and event.implicit[0] and _FLOAT.fullmatch(event.value):
            tag = _STANDARD + "float"
        return _Part(tag, start, end, event.value)
    is_mapping = isinstance(event, yaml.MappingStartEvent)
    tag = tag or _STANDARD + ("map" if is_mapping else "seq")
    return _Part(tag, start, end, is_mapping=is_mapping, is_sequence=not is_mapping, is_flow=bool(event.flow_style))


_Entries = dict[Key, tuple[_Part | None, _Part]]
"""The values of a mapping by key, or of a sequence by index, with the part that the key is."""


@dataclass
class _Built:
    """What is known of a part: its value, how many values that is once aliases are followed, and its entries."""

    value: Any
    size: int
    entries: _Entries


class _Builder:
    """Turns parts into Nodes. What an alias names again is built once and shared."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self._scalars = yaml.SafeLoader("")
        self._built: dict[int, _Built] = {}
        self._open: set[int] = set()

    def node(self, part: _Part, key: _Part | None) -> Node:
        """The Node of a part under a key. Raises UnreadableFile on what no Python value can hold."""
        built = self._of(part)
        children: Mapping[Key, Node] = _Children(self, built.entries) if built.entries else {}
        return Node(built.value, self._span(part), self._span(key) if key else None, children, _application_tag(part.tag))

    def _of(self, part: _Part) -> _Built:
        built = self._built.get(id(part))
        if built is None:
            if id(part) in self._open:
                raise self._error(part, "an alias inside the value it names")
            self._open.add(id(part))
            built = self._built[id(part)] = self._build(part)
            self._open.remove(id(part))
        return built

    def _build(self, part: _Part) -> _Built:
        if not part.is_mapping and not part.is_sequence:
            return _Built(self._scalar(part), 1, {})
        entries: _Entries = self._mapping(part) if part.is_mapping else {index: (None, item) for index, item in enumerate(part.items)}
        size = 1 + sum(self._of(item).size for item in part.items)
        if size > MAX_VALUES:
            raise self._error(part, f"aliases expand to more than {MAX_VALUES} values")
        values = {key: self._of(item).value for key, (_, item) in entries.items()}
        return _Built(values if part.is_mapping else list(values.values()), size, entries)

    def _mapping(self, part: _Part) -> _Entries:
        merged: _Entries = {}
        own: _Entries = {}
        items = iter(part.items)
        for key, value in zip(items, items, strict=True):
            if key.tag == _STANDARD + "merge":
                merged = self._merge(value) | merged
            else:
                own[self._key(key)] = (key, value)
        return merged | own

    def _merge(self, part: _Part) -> _Entries:
        """What << brings: the entries of a mapping, or of several where the first one wins."""
        entries: _Entries = {}
        for source in part.items if part.is_sequence else [part]:
            if not source.is_mapping:
                raise self._error(source, "<< wants a mapping or a list of mappings")
            entries = self._of(source).entries | entries
        return entries

    def _key(self, part: _Part) -> Key:
        if part.is_mapping:
            raise self._error(part, "a mapping cannot be a key (a template placeholder such as {{ name }} wants quotes)")
        value: Any = self._of(part).value
        return str(value) if part.is_sequence else value

    def _scalar(self, part: _Part) -> Any:
        kind = part.tag.removeprefix(_STANDARD)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return self._scalars.bool_values[part.text.lower()]
            if kind == "int":
                return self._scalars.construct_yaml_int(yaml.ScalarNode(part.tag, part.text))
            if kind == "float":
                return _float(part.text)
        except (ValueError, IndexError, KeyError):
            raise self._error(part, f"{part.text!r} is not a {kind}") from None
        return part.text

    def _span(self, part: _Part) -> Span:
        start, end = part.start, part.end
        properties = _PROPERTIES.match(self.positions.text, start, end)
        start = properties.end() if properties else start
        if part.items and not part.is_flow:
            end = self._end_of_block(part, start)
        return self.positions.span(start, max(start, end))

    def _end_of_block(self, part: _Part, start: int) -> int:
        """The parser ends a block collection where the next token starts, after blank lines and comments."""
        while part.items and not part.is_flow:
            inside = [item for item in part.items if start <= item.start <= item.end <= part.end]
            if not inside:
                break
            part = max(inside, key=lambda item: item.end)
        return part.end

    def _error(self, part: _Part, message: str) -> UnreadableFile:
        return _refused(self.positions, part.start, f"not usable YAML: {message}")


class _Children(Mapping[Key, Node]):
    """The children of a mapping or sequence, made when one of them is first asked for."""

    def __init__(self, builder: _Builder, entries: _Entries) -> None:
        self._builder = builder
        self._entries = entries

    def __getitem__(self, key: Key) -> Node:
        return self._nodes[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<children {', '.join(map(repr, self._entries))}>"

    @cached_property
    def _nodes(self) -> dict[Key, Node]:
        return {name: self._builder.node(part, key) for name, (key, part) in self._entries.items()}


def _application_tag(tag: str) -> str:
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
