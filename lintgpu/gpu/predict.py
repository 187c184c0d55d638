"""`lintgpu predict`: the cost of bare GEMM shapes, from a CSV file or one shape on the command line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lintgpu.gpu.cost import gemm_costs
from lintgpu.gpu.costs import OpCost
from lintgpu.gpu.gemms import DTYPES, columns
from lintgpu.gpu.profiles import Profile

OPS = ("mm", "addmm", "bmm", "baddbmm", "scaled_mm", "int_mm")
LAYOUTS = ("NT", "NN", "TN", "TT")
DEFAULTS = {"dtype": "bf16", "op": "mm", "layout": "NT", "B": "1"}
SIZES = ("B", "M", "N", "K")
INPUT_COLUMNS = ("dtype", "op", "layout", *SIZES)
OUTPUT_COLUMNS = (*INPUT_COLUMNS, "us", "us_low", "us_high", "bound", "kernel", "tile", "waves", "alignment", "basis")
_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float8": "fp8", "float64": "fp64"}


class ShapeError(ValueError):
    """A shape that cannot be costed; says which row and column, or which part of a shape."""


@dataclass(frozen=True)
class Shape:
    """C[M,N] = A[M,K] @ B[K,N], `batch` times."""

    dtype: str
    op: str
    layout: str
    batch: int
    m: int
    n: int
    k: int


def parse_shape(text: str) -> Shape:
    """MxNxK or BxMxNxK as bf16 NT, with optional dtype and layout behind commas: "8x512x512x64,fp16,NN".

    Raises ShapeError.
    """
    sizes, *words = text.split(",")
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+)", sizes.strip())
    if match is None:
        raise ShapeError(f"{sizes.strip()!r} is not MxNxK or BxMxNxK")
    batch, m, n, k = match.groups()
    row = {"M": m, "N": n, "K": k, "B": batch or "1", "op": "bmm" if batch else "mm"}
    for word in (word.strip() for word in words):
        row["layout" if word.upper() in LAYOUTS else "dtype"] = word
    return _shape(row, "")


def read_shapes(text: str, path: str) -> list[Shape]:
    """The shapes of a CSV file with the columns M, N, K and optionally dtype, op, layout, B.

    Raises ShapeError naming the row (the header is row 1) and the column.
    """
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    names = {name.strip(): name for name in reader.fieldnames or () if name}
    missing = [name for name in ("M", "N", "K") if name not in names]
    if missing:
        raise ShapeError(f"{path}:1: no column {', '.join(missing)}; the columns are {', '.join(INPUT_COLUMNS)}")
    return [
        _shape({name: (row[key] or "").strip() for name, key in names.items() if name in INPUT_COLUMNS}, f"{path}:{reader.line_num}: ")
        for row in reader
        if any((value or "").strip() for value in row.values() if isinstance(value, str))
    ]


def predict(shapes: Sequence[Shape], profile: Profile) -> list[OpCost]:
    """The cost of each shape on `profile`; leading dimensions are those of packed tensors."""
    if not shapes:
        return []
    return gemm_costs(
        columns(
            dtypes=[shape.dtype for shape in shapes],
            batch=[shape.batch for shape in shapes],
            m=[shape.m for shape in shapes],
            n=[shape.n for shape in shapes],
            k=[shape.k for shape in shapes],
            layout=[shape.layout for shape in shapes],
            bias=[shape.op in ("addmm", "baddbmm") for shape in shapes],
        ),
        profile,
    )


def to_csv(shapes: Iterable[Shape], costs: Iterable[OpCost]) -> str:
    """One row a shape with the columns OUTPUT_COLUMNS; times in microseconds, alignment in bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(OUTPUT_COLUMNS)
    for shape, cost in zip(shapes, costs, strict=True):
        sizes = (shape.dtype, shape.op, shape.layout, shape.batch, shape.m, shape.n, shape.k)
        times = (f"{cost.us:.3f}", f"{cost.low:.3f}", f"{cost.high:.3f}")
        writer.writerow(
            (*sizes, *times, cost.bound, cost.kernel, f"{cost.tile[0]}x{cost.tile[1]}", f"{cost.waves:.2f}", cost.alignment, cost.basis)
        )
    return text.getvalue()


def _shape(row: Mapping[str, str], place: str) -> Shape:
    values = DEFAULTS | {name: value for name, value in row.items() if value}
    dtype = _ALIASES.get(values["dtype"].lower(), values["dtype"].lower())
    for name, value, known in (("dtype", dtype, DTYPES), ("op", values["op"], OPS), ("layout", values["layout"].upper(), LAYOUTS)):
        if value not in known:
            raise ShapeError(f"{place}{name}: {values[name]!r} is none of {', '.join(known)}")
    sizes = {name: _size(values.get(name, ""), name, place) for name in SIZES}
    return Shape(dtype, values["op"], values["layout"].upper(), sizes["B"], sizes["M"], sizes["N"], sizes["K"])


def _size(text: str, name: str, place: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < 1:
        raise ShapeError(f"{place}{name}: {text!r} is not a whole number from 1")
    return int(text)
