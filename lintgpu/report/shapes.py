"""The shapes of a step: every GEMM and attention with its cost, the largest memory ops, and what binds the step."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lintgpu.report.text import BASIS, duration, json_text, one_line, width
from lintgpu.workload import describe

if TYPE_CHECKING:
    from lintgpu.engine import Costed
    from lintgpu.gpu.costs import OpCost, StepCost
    from lintgpu.trace.records import Op

SCHEMA_VERSION = 1
MEMORY_ROWS = 10
"""How many ops that are neither GEMM nor attention the table names; the rest is one row."""
LEAST_MODULE_COLUMNS = 16

COLUMNS = (
    "target", "gpu", "workload", "module", "phase", "kind", "op",
    "batch", "m", "n", "k", "layout", "lda", "ldb", "ldc",
    "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal",
    "dtype", "count", "us", "low_us", "high_us", "gpu_share", "step_share",
    "bound", "kernel", "alignment", "tile", "waves", "basis", "bytes_read", "bytes_written",
)  # fmt: skip
"""Of the csv form, and the keys of an op in the json form."""


@dataclass(frozen=True)
class _Row:
    """One kind of op with its cost; `us` is of one occurrence, shares of all its occurrences in a step."""

    op: Op
    cost: OpCost
    gpu_share: float
    step_share: float

    @property
    def total_us(self) -> float:
        return self.cost.us * self.op.count


def render_shapes(costed: Sequence[Costed], output_format: str = "table", columns: int = 0, order: str = "share") -> str:
    """The shapes of each target on each GPU as a table, one json document or one csv file.

    `columns` is the terminal's width, 0 where there is none; `order` is share (costliest first) or model (as they run).
    """
    if output_format == "json":
        return json_text({"schema_version": SCHEMA_VERSION, "targets": [_document(one, order) for one in costed]})
    if output_format == "csv":
        return _csv(costed, order)
    return "\n".join("".join(f"{line}\n" for line in _table(one, columns, order)) for one in costed)


def _rows(costed: Costed, order: str) -> list[_Row]:
    trace, step = costed.traced.trace, costed.step
    assert trace is not None
    rows = [
        _Row(op, cost, _share(cost.us * op.count, step.gpu_us), _share(cost.us * op.count, step.step_us))
        for op, cost in zip(trace.ops, step.ops, strict=True)
    ]
    return sorted(rows, key=lambda row: -row.total_us) if order == "share" else rows


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# json and csv


def _document(costed: Costed, order: str) -> dict[str, Any]:
    traced, step = costed.traced, costed.step
    assert traced.trace is not None
    return {
        "target": traced.target.name,
        "path": traced.target.span.path,
        "model_class": traced.trace.model_class,
        "basis": traced.trace.basis,
        "gpu": costed.profile.name,
        "workload": describe(traced.workload),
        "step": {
            "step_us": step.step_us,
            "step_low_us": step.step_low,
            "step_high_us": step.step_high,
            "gpu_us": step.gpu_us,
            "cpu_us": step.cpu_us,
            "math_us": step.math_us,
            "memory_us": step.memory_us,
            "optimizer_us": step.optimizer_us,
            "bound": step.bound,
            "doubled_batch_ratio": step.doubled_batch_ratio,
            "basis": step.basis,
        },
        "assumptions": list(traced.trace.assumptions),
        "ops": [{key: value for key, value in _record(costed, row).items() if key not in _OF_TARGET} for row in _rows(costed, order)],
    }


_OF_TARGET = COLUMNS[:3]


def _csv(costed: Sequence[Costed], order: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for one in costed:
        for row in _rows(one, order):
            writer.writerow({key: _csv_cell(value) for key, value in _record(one, row).items()})
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str):
        # A cell that starts with one of these is a formula to a spreadsheet.
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else one_line(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def _record(costed: Costed, row: _Row) -> dict[str, Any]:
    """One op as flat data; what does not apply to its kind is left out."""
    op, cost = row.op, row.cost
    record: dict[str, Any] = {
        "target": costed.traced.target.name,
        "gpu": costed.profile.name,
        "workload": describe(costed.traced.workload),
        "module": op.module,
        "phase": op.phase,
        "kind": op.kind,
        "op": op.name,
    }
    if op.gemm:
        gemm = op.gemm
        record |= {"batch": gemm.batch, "m": gemm.m, "n": gemm.n, "k": gemm.k, "layout": gemm.layout}
        record |= {"lda": gemm.lda, "ldb": gemm.ldb, "ldc": gemm.ldc}
    if op.attention:
        attention = op.attention
        record |= {"batch": attention.batch, "heads": attention.heads, "kv_heads": attention.kv_heads, "q_len": attention.q_len}
        record |= {"kv_len": attention.kv_len, "head_dim": attention.head_dim, "causal": attention.causal}
    record |= {"dtype": op.dtype, "count": op.count, "us": cost.us, "low_us": cost.low, "high_us": cost.high}
    record |= {"gpu_share": row.gpu_share, "step_share": row.step_share, "bound": cost.bound, "kernel": cost.kernel}
    if op.gemm:
        record |= {"alignment": cost.alignment, "tile": f"{cost.tile[0]}x{cost.tile[1]}" if any(cost.tile) else "", "waves": cost.waves}
    return record | {"basis": cost.basis, "bytes_read": op.bytes_read, "bytes_written": op.bytes_written}


# table


def _table(costed: Costed, columns: int, order: str) -> Iterator[str]:
    traced = costed.traced
    assert traced.trace is not None
    rows = _rows(costed, order)
    gemms = [row for row in rows if row.op.gemm]
    attention = [row for row in rows if row.op.attention]
    others = [row for row in rows if not row.op.gemm and not row.op.attention and row.total_us > 0]
    named = sorted(others, key=lambda row: -row.total_us)[:MEMORY_ROWS]
    model = f" {traced.trace.model_class}" if traced.trace.model_class else ""
    yield one_line(f"{traced.target.name}:{model}, {traced.trace.basis}, on {costed.profile.name}: {describe(traced.workload)}")
    if gemms:
        yield ""
        yield from _aligned(_GEMM_HEAD, [_gemm_cells(row) for row in gemms], columns)
    if attention:
        yield ""
        yield from _aligned(_ATTENTION_HEAD, [_attention_cells(row) for row in attention], columns)
    if named:
        rest = [row for row in others if row not in named]
        yield ""
        yield from _aligned(
            _MEMORY_HEAD, [*map(_memory_cells, [row for row in others if row in named]), *_rest_cells(rest, costed.step)], columns
        )
    yield ""
    yield from _totals(costed.step, rows)


_GEMM_HEAD = (
    "GEMM", "phase", ">M", ">N", ">K", ">batch", "layout", "dtype", ">count", ">us each", ">% step", "bound", "kernel", ">align", ">waves",
)  # fmt: skip
_ATTENTION_HEAD = (
    "attention", "phase", ">batch", ">heads", ">kv", ">queries", ">keys", ">dim", "mask", "dtype", ">count", ">us each", ">% step",
    "bound", "kernel",
)  # fmt: skip
_MEMORY_HEAD = ("memory op", "phase", "op", "kind", ">MB each", "dtype", ">count", ">us each", ">% step")


def _gemm_cells(row: _Row) -> tuple[str, ...]:
    gemm, cost = row.op.gemm, row.cost
    assert gemm is not None
    batch = f"{gemm.groups}/{gemm.batch}" if gemm.groups else str(gemm.batch)
    shape = (str(gemm.m), str(gemm.n), str(gemm.k), batch, gemm.layout)
    alignment = f"{cost.alignment} B" if cost.alignment else ""
    waves = f"{cost.waves:.2f}" if cost.waves else ""
    return (_module(row.op), row.op.phase, *shape, row.op.dtype, *_figures(row), cost.bound, cost.kernel, alignment, waves)


def _attention_cells(row: _Row) -> tuple[str, ...]:
    attention, cost = row.op.attention, row.cost
    assert attention is not None
    sizes = (attention.batch, attention.heads, attention.kv_heads, attention.q_len, attention.kv_len, attention.head_dim)
    mask = " ".join(word for word in ("causal" if attention.causal else "", attention.mask) if word) or "none"
    return (_module(row.op), row.op.phase, *map(str, sizes), mask, row.op.dtype, *_figures(row), cost.bound, cost.kernel)


def _memory_cells(row: _Row) -> tuple[str, ...]:
    moved = (row.op.bytes_read + row.op.bytes_written) / 1e6
    return (_module(row.op), row.op.phase, row.op.name, row.op.kind, f"{moved:,.1f}", row.op.dtype, *_figures(row))


def _rest_cells(rest: list[_Row], step: StepCost) -> Iterator[tuple[str, ...]]:
    if rest:
        total = sum(row.total_us for row in rest)
        count = sum(row.op.count for row in rest)
        yield (f"{len(rest)} more", "", "", "", "", "", str(count), "", _percent(_share(total, step.step_us)))


def _module(op: Op) -> str:
    return one_line(op.module or op.name)


def _figures(row: _Row) -> tuple[str, str, str]:
    return str(row.op.count), f"{row.cost.us:,.1f}", _percent(row.step_share)


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


def _aligned(head: Sequence[str], rows: Sequence[tuple[str, ...]], columns: int) -> Iterator[str]:
    """Rows under their heads; a head with > stands for figures, set to the right.

    On a narrow terminal the least telling columns go, then the first one is cut.
    """
    table = list(zip(head, *rows, strict=True))
    for name in _LEAST_TELLING if columns else ():
        if _total_width(table) > columns - _width(table[0]) + LEAST_MODULE_COLUMNS:
            table = [column for column in table if column[0] != name]
    widths = [_width(column) for column in table]
    if columns:
        widths[0] = min(widths[0], max(LEAST_MODULE_COLUMNS, columns - (_total_width(table) - widths[0])))
    rights = [column[0].startswith(">") for column in table]
    for cells in zip(*table, strict=True):
        first = _shortened(cells[0], widths[0])
        names = (first, *(cell.removeprefix(">") if cell in head else cell for cell in cells[1:]))
        yield "  ".join(_pad(cell, size, right) for cell, size, right in zip(names, widths, rights, strict=True)).rstrip()


_LEAST_TELLING = ("kernel", "kind", "dtype", "mask", ">batch", "layout", ">kv", ">waves", "bound")


def _width(column: Sequence[str]) -> int:
    return max(width(cell) for cell in (column[0].removeprefix(">"), *column[1:]))


def _total_width(table: Sequence[Sequence[str]]) -> int:
    return sum(map(_width, table)) + 2 * (len(table) - 1)


def _pad(cell: str, size: int, right: bool) -> str:
    space = " " * (size - width(cell))
    return space + cell if right else cell + space


def _shortened(text: str, columns: int) -> str:
    """The end of a module path says more than its start."""
    while width(text) > columns:
        text = "…" + text.lstrip("…")[1:]
    return text


def _totals(step: StepCost, rows: list[_Row]) -> Iterator[str]:
    band = f"[{duration(step.step_low)} to {duration(step.step_high)}]"
    yield f"step {duration(step.step_us)} {band}, bound by {step.bound} ({BASIS.get(step.basis, step.basis)})"
    parts = f"math {duration(step.math_us)}, memory {duration(step.memory_us)}"
    optimizer = f", of it optimizer {duration(step.optimizer_us)}" if step.optimizer_us else ""
    yield f"GPU {duration(step.gpu_us)}: {parts}{optimizer}; Python and launches {duration(step.cpu_us)}"
    fused = sum(row.total_us for row in rows) + step.optimizer_us - step.gpu_us
    if step.gpu_us and fused > 0.001 * step.gpu_us:
        yield f"the compiler's fusion takes {duration(fused)} off the memory ops above, which are listed as the model runs them"
    if step.doubled_batch_ratio:
        yield f"twice the batch would take {step.doubled_batch_ratio:.2f} x the time"
