"""The what-if on a hand-made trace: one linear layer of width d, forward only, d = heads x head_dim."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.finding import Span
from lintgpu.gpu.profiles import find
from lintgpu.gpu.step import cost_step
from lintgpu.target.base import Knob
from lintgpu.trace.records import Gemm, Op, Parameters, Trace, TraceFailure
from lintgpu.whatif import Outcome, Rejected, WhatIf, floor_divisions, saving, substitute
from lintgpu.workload import Workload

SPAN = Span("config.json", 1, 1, 1, 2)
H200 = find("H200")
PARAMETERS = Parameters(1, 0, 1, 0, "bf16")


def layer(width: int, vocabulary: int, tokens: int = 8192, inexact: tuple[str, ...] = (), module: str = "head") -> Trace:
    origins = (("n", "{vocab}"), ("k", "{d}"), ("lda", "{d}"), ("ldb", "{d}"), ("ldc", "{vocab}"), ("batch", "({d}//{heads})"))
    gemm = Gemm(1, tokens, vocabulary, width, "NT", width, width, vocabulary, origins=origins)
    op = Op("gemm", "mm", "forward", "bf16", gemm=gemm, module=module, bytes_read=100, bytes_written=100)
    return Trace((op,), PARAMETERS, "traced", "Net", inexact_divisions=inexact)


def knobs(width: int = 768, vocabulary: int = 50257, heads: int = 12) -> dict[str, Knob]:
    values = {"d": width, "vocab": vocabulary, "heads": heads}
    return {name: Knob(name, name, value, SPAN) for name, value in values.items()}


def cost(trace: Trace) -> object:
    return cost_step(trace, H200, Workload())


def what_if(base: Trace, retrace: object) -> WhatIf:
    return WhatIf(base, cost(base), knobs(), retrace, cost)  # type: ignore[arg-type]


def test_substitution_moves_every_dim_that_the_knob_sets() -> None:
    changed = substitute(layer(768, 50257), {"d": 768, "vocab": 50257, "heads": 12}, {"vocab": 50304}).ops[0].gemm
    assert changed is not None
    assert (changed.n, changed.ldc, changed.k, changed.lda) == (50304, 50304, 768, 768)


def test_substitution_leaves_a_dim_whose_origin_does_not_explain_it() -> None:
    base = layer(768, 50257)
    changed = substitute(base, {"d": 768, "vocab": 50000, "heads": 12}, {"vocab": 50304})
    assert changed == base


@given(st.integers(min_value=1, max_value=1 << 20))
def test_substituting_the_value_it_has_changes_nothing(vocabulary: int) -> None:
    base = layer(768, vocabulary)
    assert substitute(base, {"d": 768, "vocab": vocabulary, "heads": 12}, {"vocab": vocabulary}).ops[0].gemm == base.ops[0].gemm


def test_the_saving_of_a_padded_vocabulary_is_the_layers() -> None:
    base = layer(768, 50257)
    run = what_if(base, lambda changes: layer(768, changes["vocab"]))
    outcome = run.confirmed({"vocab": 50304})
    assert isinstance(outcome, Outcome)
    gain = saving(Outcome({}, base, run.base_step), outcome)
    assert 0.5 < gain.gpu_share < 0.95
    assert gain.low <= gain.gpu_share <= gain.high
    assert gain.gpu_us == pytest.approx(run.base_step.gpu_us - outcome.step.gpu_us)


def test_ops_that_do_not_change_bring_no_error() -> None:
    base = layer(768, 50304)
    same = Outcome({}, base, what_if(base, None).base_step)
    gain = saving(same, same)
    assert (gain.gpu_us, gain.low, gain.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (TraceFailure("build", "hidden_size must be divisible by num_heads"), "hidden_size must be divisible by num_heads"),
        (layer(770, 50257, inexact=("({d}//{heads})",)), "({d}//{heads}) would leave a remainder"),
        (layer(770, 50257, module="other"), "the model gets other layers"),
    ],
)
def test_a_change_that_the_model_does_not_allow_is_rejected_with_the_reason(result: Trace | TraceFailure, reason: str) -> None:
    outcome = what_if(layer(768, 50257), lambda changes: result).confirmed({"d": 770})
    assert isinstance(outcome, Rejected)
    assert outcome.reason == reason


def test_a_changed_model_is_traced_once() -> None:
    traced: list[dict[str, int]] = []

    def retrace(changes: dict[str, int]) -> Trace:
        traced.append(changes)
        return layer(768, 50304)

    run = what_if(layer(768, 50257), retrace)
    assert run.confirmed({"vocab": 50304}) is run.confirmed({"vocab": 50304})
    assert len(traced) == 1


def test_the_width_must_stay_a_multiple_of_the_heads() -> None:
    assert what_if(layer(768, 50257), None).divisors("d") == (12,)
    assert what_if(layer(768, 50257), None).divisors("vocab") == ()


@pytest.mark.parametrize(
    ("expression", "divisions"),
    [
        ("{a}", []),
        ("({a}//{b})", [("{a}", "{b}")]),
        ("(3*({text.hidden}//{heads}))", [("{text.hidden}", "{heads}")]),
        ("(({a}*{b})//({c}*2))", [("{a} * {b}", "{c} * 2")]),
        ("({/p/x.py:3:9}//{b})", [("{/p/x.py:3:9}", "{b}")]),
    ],
)
def test_floor_divisions(expression: str, divisions: list[tuple[str, str]]) -> None:
    assert floor_divisions(expression) == divisions


def test_a_memory_op_is_no_part_of_the_substitution() -> None:
    base = layer(768, 50257)
    memory = Op("pointwise", "add", "forward", "bf16", bytes_read=10, bytes_written=10)
    both = replace(base, ops=(*base.ops, memory))
    assert substitute(both, {"vocab": 50257, "d": 768, "heads": 12}, {"vocab": 50304}).ops[1] is memory
