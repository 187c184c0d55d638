"""Read from a model's error message which shape it wanted instead.

A complaint is the error's message, with the line of code that raised it on a second line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from lintgpu.trace.input_specs import Shape, Sizes, Spec, by_document

Specs = Mapping[str, Spec]
_ROWS = 256


def reshaped(message: str, specs: Specs, sizes: Sizes) -> Iterator[dict[str, Spec]]:
    """`specs` with one shape changed as the message suggests, likeliest first."""
    for pattern, shapes in _PATTERNS:
        match = re.search(pattern, message)
        if match is None:
            continue
        numbers = tuple(int(group) for group in match.groups() if group is not None and re.fullmatch(r"-?\d+", group))
        floating = {name: spec for name, spec in specs.items() if spec.floating}
        # The input that has a dim which the message speaks of is the likeliest to be meant.
        for name, spec in sorted(floating.items(), key=lambda item: item[1].shape[-1] not in numbers):
            for shape in shapes(spec.shape, numbers, match.group(1)):
                yield {**specs, name: replace(spec, shape=shape)}
    stated = re.search(r"of shape `?(\([a-z_]+,[^)]*\))", message)
    for name, spec in specs.items() if stated else ():
        for wanted in by_document(stated.group(1), sizes) if stated and not spec.integer else ():
            yield {**specs, name: wanted}


def _last_dim(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    """A matrix of `numbers[1]` columns met a weight of `numbers[2]` rows."""
    _, had, wanted = numbers[:3]
    if shape[-1] == had:
        yield (*shape[:-1], wanted)
    if len(shape) > 2:
        yield (shape[0], _ROWS, wanted)
        if shape[1] == had:
            yield (shape[0], wanted, *shape[2:])
    yield (shape[0] * _ROWS, wanted)


def _normalized(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    """A norm over `numbers[0]` values met rows of `numbers[1]`."""
    wanted, had = numbers[:2]
    if shape[-1] == had:
        yield (*shape[:-1], wanted)
    if len(shape) > 2 and shape[1] == had:
        yield (shape[0], wanted, *shape[2:])
    yield (shape[0], _ROWS, wanted)


def _flattened(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    """A view of rows whose values are the product of the other dims."""
    dims = [int(dim) for dim in re.findall(r"-?\d+", text)]
    row = math.prod(dim for dim in dims if dim > 0)
    if len(dims) > 1 and dims[0] <= 0:
        yield (shape[0] * _ROWS, row)
        yield (shape[0], _ROWS, row)


def _rank(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    """As many dims more or fewer as the unpacking wanted."""
    wanted = numbers[0]
    if wanted == len(shape) + 1:
        yield (shape[0], 1, *shape[1:])
    elif wanted < len(shape):
        yield (*shape[: wanted - 1], math.prod(shape[wanted - 1 :]))


def _broadcast(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    """Something made of the model's own sizes met a dim of the input."""
    wanted, at = numbers[:2]
    if -len(shape) < at < 0:
        yield (*shape[:at], wanted, *shape[len(shape) + at + 1 :])


def _image(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    if len(shape) >= 4:
        yield (*shape[:-2], *numbers[:2])


def _larger(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    if len(shape) >= 4:
        yield (*shape[:-2], 4 * shape[-2], 4 * shape[-1])


def _instead(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    had, wanted = numbers[:2]
    if had in shape[1:]:
        yield (shape[0], *(wanted if dim == had else dim for dim in shape[1:]))


def _multiple(shape: Shape, numbers: tuple[int, ...], text: str) -> Iterator[Shape]:
    had, of = numbers[:2]
    if shape[-1] == had:
        yield (*shape[:-1], -(-had // of) * of)


_PATTERNS: tuple[tuple[str, Callable[[Shape, tuple[int, ...], str], Iterator[Shape]]], ...] = (
    (r"same reduction dim, but got \[(\d+), (\d+)\] X \[(\d+), \d+\]", _last_dim),
    (r"shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)", _last_dim),
    (r"normalized_shape=\[(\d+)\].*got input of size \S*?\[(?:\d+, )*(\d+)\]", _normalized),
    (r"shape '\[([^\]]*)\]' is invalid for input of size \d+", _flattened),
    (r"values to unpack \(expected (\d+)", _rank),
    (r"broadcast a dimension of length (\d+) at (-\d+)", _broadcast),
    (r"doesn't match model \((\d+)\*(\d+)\)", _image),
    (r"[Ii]mage size (\S+) is too small", _larger),
    (r"length \((\d+)\) doesn't match model configuration \((\d+)\)", _instead),
    (r"length (\d+) is not a multiple of (\d+)", _multiple),
)
