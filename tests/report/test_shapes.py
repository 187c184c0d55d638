"""The table of shapes: every GEMM with its figures, aligned, and the same as json and csv."""

import csv
import io
import json
from dataclasses import replace

import pytest

from lintgpu.engine import Costed, Traced
from lintgpu.finding import Span
from lintgpu.gpu.costs import OpCost, StepCost
from lintgpu.gpu.profiles import find
from lintgpu.report.shapes import COLUMNS, render_shapes
from lintgpu.report.text import width
from lintgpu.settings import Settings
from lintgpu.target.base import Target
from lintgpu.trace.records import Attention, Gemm, Op, Parameters, Trace
from lintgpu.workload import Workload

QKV = Gemm(1, 16384, 2304, 768, "NN", 768, 2304, 2304)
HEAD = Gemm(1, 16384, 50257, 768, "NT", 768, 768, 50257)
EXPERTS = Gemm(8, 64, 4096, 2048, "TN", 64, 4096, 4096, groups="K")
OPS = (
    Op("embedding", "embedding", "forward", "bf16", 25_165_824, 25_165_824, module="transformer.wte"),
    Op("gemm", "addmm", "forward", "bf16", module="transformer.h.*.attn.c_attn", count=12, gemm=QKV),
    Op(
        "attention",
        "sdpa",
        "forward",
        "bf16",
        module="transformer.h.*.attn",
        count=12,
        attention=Attention(16, 12, 12, 1024, 1024, 64, 64, True),
    ),
    Op("view", "view", "forward", "bf16", module="transformer.h.*.attn", count=48),
    Op("gemm", "mm", "forward", "bf16", module="lm_head", gemm=HEAD),
    Op("gemm", "grouped_mm", "grad-weight", "bf16", module="moe.=experts", gemm=EXPERTS),
    Op("loss", "nll_loss", "forward", "fp32", 3_293_642_752, 65536, module="loss"),
)
COSTS = (
    OpCost(14.2, 12.0, 16.0, "memory", "memory"),
    OpCost(84.0, 80.0, 90.0, "math", "nvjet", (128, 256), 8.73, 128, "calibrated"),
    OpCost(210.5, 190.0, 240.0, "math", "flash"),
    OpCost(0.0, 0.0, 0.0, "latency", ""),
    OpCost(9568.0, 9000.0, 10000.0, "math", "cutlass-align1", (128, 128), 380.45, 2, "calibrated"),
    OpCost(31.0, 20.0, 45.0, "memory", "nvjet", (128, 128), 0.97, 128, "calibrated"),
    OpCost(820.0, 700.0, 900.0, "memory", "memory"),
)
STEP = StepCost(
    ops=COSTS,
    gpu_us=15_000.0,
    gpu_low=14_000.0,
    gpu_high=16_500.0,
    cpu_us=9_000.0,
    step_us=15_010.0,
    step_low=14_010.0,
    step_high=16_510.0,
    math_us=13_100.0,
    memory_us=1_900.0,
    bound="math",
    optimizer_us=500.0,
    gpu="H200-SXM-141GB",
    basis="calibrated",
    doubled_batch_ratio=1.97,
)


@pytest.fixture
def costed():
    target = Target("gpt2", "huggingface", Span("configs/gpt2.json", 1, 1, 1, 2), {})
    trace = Trace(OPS, Parameters(148, 124_439_808, 148, 124_439_808, "fp32"), "traced", "GPT2LMHeadModel")
    return Costed(Traced(target, Settings(), Workload(batch=16), trace, None), find("H200"), STEP)


@pytest.mark.parametrize(
    ("name", "form", "columns", "order"),
    [
        ("wide", "table", 0, "share"),
        ("narrow", "table", 80, "share"),
        ("model-order", "table", 0, "model"),
        ("ops", "json", 0, "share"),
        ("ops", "csv", 0, "model"),
    ],
)
def test_golden(costed, golden, name, form, columns, order):
    golden(f"shapes-{name}.{form}.txt", render_shapes([costed], form, columns, order))


def test_rows_come_by_share_or_as_the_model_runs(costed):
    def modules(order):
        return [op["module"] for op in json.loads(render_shapes([costed], "json", order=order))["targets"][0]["ops"]]

    assert modules("model") == [op.module for op in OPS]
    assert modules("share") == [
        "lm_head",
        "transformer.h.*.attn",
        "transformer.h.*.attn.c_attn",
        "loss",
        "moe.=experts",
        "transformer.wte",
        "transformer.h.*.attn",
    ]


def test_csv_and_json_hold_the_same(costed):
    rows = list(csv.DictReader(io.StringIO(render_shapes([costed, costed], "csv"))))
    ops = json.loads(render_shapes([costed], "json"))["targets"][0]["ops"]
    assert len(rows) == 2 * len(ops)
    assert tuple(rows[0]) == COLUMNS
    for row, op in zip(rows, ops, strict=False):
        assert {key for key, value in row.items() if value} - set(COLUMNS[:3]) <= set(op)
        assert (row["m"], row["us"]) == (str(op.get("m", "")), f"{op['us']:.6g}")


def test_shares_are_of_all_occurrences(costed):
    op = next(op for op in json.loads(render_shapes([costed], "json"))["targets"][0]["ops"] if op["module"].endswith("c_attn"))
    assert op["gpu_share"] == pytest.approx(84.0 * 12 / 15_000)
    assert op["step_share"] == pytest.approx(84.0 * 12 / 15_010, rel=1e-5)


@pytest.mark.parametrize("columns", [80, 110, 150])
def test_columns_line_up_on_any_terminal(costed, columns):
    lines = render_shapes([costed], "table", columns).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("GEMM"))
    end = lines[head].index("  M") + 3
    assert [line[:end].split()[-1] for line in lines[head + 1 : head + 4]] == ["16384", "16384", "64"]
    assert width(lines[head]) <= columns


def test_module_names_cannot_break_the_table(costed):
    trace = replace(costed.traced.trace, ops=(replace(OPS[1], module="a\nb\x1b[2J漢"), *OPS[1:]))
    text = render_shapes([replace(costed, traced=replace(costed.traced, trace=trace), step=replace(STEP, ops=(COSTS[1], *COSTS[1:])))])
    assert "a b\\x1b[2J漢" in text
    assert "\x1b" not in text


def test_what_the_compiler_fuses_is_said(costed):
    assert "fusion takes" in render_shapes([replace(costed, step=replace(STEP, gpu_us=14_000.0))])
    assert "fusion takes" not in render_shapes([replace(costed, step=replace(STEP, gpu_us=14_900.0))])


def test_no_target_is_no_table():
    assert render_shapes([]) == ""
    assert json.loads(render_shapes([], "json"))["targets"] == []
