"""What the recorder notes while a model runs, and how it folds into the ops of a Trace.

Notes are a tree: an Event is one op, a Replay stands for all events of a memoised block run again elsewhere. Folding
walks each block once, whatever its number of runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lintgpu.trace.records import Attention, Conv, Gemm, Op, Site

Path = tuple[str, ...]
"""A module path split at its dots."""

STAR = "*"


@dataclass(frozen=True)
class Place:
    """Where an op belongs: the running module, its constructor and the calling line of user code."""

    module: str = ""
    module_class: str = ""
    call_site: Site | None = None
    constructor_site: Site | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One op as it ran."""

    kind: str
    name: str
    phase: str
    dtype: str
    bytes_read: int
    bytes_written: int
    place: Place
    shape: tuple[int, ...] = ()
    gemm: Gemm | None = None
    attention: Attention | None = None
    conv: Conv | None = None
    assumed: bool = False


@dataclass
class Block:
    """The events of one memoised run, seen from the module at `path`."""

    path: Path
    items: list[Event | Replay] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """All events of `block`, run by the module at `path` instead."""

    block: Block
    path: Path


def split(path: str) -> Path:
    """'model.layers.3' -> ('model', 'layers', '3')."""
    return tuple(path.split(".")) if path else ()


def fold(items: Iterable[Event | Replay]) -> tuple[Op, ...]:
    """The ops of a trace: equal ops of sibling layers become one with a count, in order of first occurrence."""
    folded: dict[tuple[object, ...], tuple[Event, list[str], list[int]]] = {}
    for event, path, count in _expand(items, 0, (), 1):
        key = (
            event.kind, event.name, event.phase, event.dtype, event.bytes_read, event.bytes_written, event.shape, event.gemm,
            event.attention, event.conv, event.assumed, event.place.module_class, event.place.call_site, event.place.constructor_site,
            _starred(path),
        )  # fmt: skip
        known = folded.get(key)
        if known is None:
            folded[key] = (event, list(path), [count])
            continue
        known[2][0] += count
        _merge(known[1], path)
    return tuple(_op(event, ".".join(path), count[0]) for event, path, count in folded.values())


def expand(items: Iterable[Event | Replay]) -> Iterator[tuple[Event, Path, int]]:
    """Every event with its path ('*' where replays of it differ) and how often it ran."""
    return _expand(items, 0, (), 1)


def _expand(items: Iterable[Event | Replay], depth: int, prefix: Path, count: int) -> Iterator[tuple[Event, Path, int]]:
    """`prefix` replaces the first `depth` parts of each path."""
    replays: dict[tuple[object, ...], tuple[Block, list[str], list[int]]] = {}
    order: list[Event | tuple[object, ...]] = []
    for item in items:
        if isinstance(item, Event):
            order.append(item)
            continue
        at = list(prefix + item.path[depth:])
        # Alike blocks of two containers keep their two paths.
        key = (id(item.block), _starred(at))
        known = replays.get(key)
        if known is None:
            replays[key] = (item.block, at, [count])
            order.append(key)
        else:
            _merge(known[1], tuple(at))
            known[2][0] += count
    for entry in order:
        if isinstance(entry, Event):
            # The engine's sums of gradients belong to no module, wherever they are replayed.
            path = split(entry.place.module)
            yield entry, prefix + path[depth:] if path else (), count
        else:
            block, at, times = replays[entry]
            yield from _expand(block.items, len(block.path), tuple(at), times[0])


def _starred(path: Iterable[str]) -> Path:
    return tuple(STAR if _is_number(part) else part for part in path)


def _merge(path: list[str], other: Path) -> None:
    """Star the numbers in which two paths differ."""
    for i, (mine, theirs) in enumerate(zip(path, other, strict=False)):
        if mine != theirs:
            path[i] = STAR


_NUMBER = re.compile(r"\d+|\*")


def _is_number(part: str) -> bool:
    return _NUMBER.fullmatch(part) is not None


def _op(event: Event, module: str, count: int) -> Op:
    return Op(
        kind=event.kind,
        name=event.name,
        phase=event.phase,
        dtype=event.dtype,
        bytes_read=event.bytes_read,
        bytes_written=event.bytes_written,
        count=count,
        module=module,
        module_class=event.place.module_class,
        call_site=event.place.call_site,
        constructor_site=event.place.constructor_site,
        gemm=event.gemm,
        attention=event.attention,
        conv=event.conv,
        shape=event.shape,
        in_layer=any(_is_number(part) for part in module.split(".")),
        assumed=event.assumed,
    )
