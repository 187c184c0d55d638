"""Numbers that carry the knobs they came from."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.trace.origin import TracedFloat, TracedInt, TracingInt, collect_inexact, evaluate, expression, knobs

BINARY = ["+", "-", "*", "//", "/", "%", "<<", "&", "|", "^"]
UNARY = ["-{}", "abs({})", "round({})", "math.ceil({})", "math.floor({})", "TracingInt({})"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Arithmetic over two knobs a, b and constants, of ints alone where the operators want ints."""
    text = draw(st.sampled_from(["a", "b"]))
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            other = draw(st.sampled_from(["a", "b", "2", "3", "64", "0.5", "4.0"]))
            operator = draw(st.sampled_from(BINARY))
            # A plain float on the left answers by itself: Python does not ask the int on its right.
            left, right = (text, other) if "." in other or draw(st.booleans()) else (other, text)
            if operator == "<<":
                # Shifts by knobs reach numbers that no memory holds.
                left, right = text, str(draw(st.integers(0, 9)))
            text = f"({left} {operator} {right})"
        else:
            text = draw(st.sampled_from(UNARY)).format(text)
    return f"TracingInt({text})"


def run(program: str, a: int, b: int) -> Any:
    return eval(program, {"a": a, "b": b, "math": math, "TracingInt": TracingInt})


@given(programs(), st.integers(1, 4096), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 64))
def test_an_expression_gives_the_value_for_other_knobs_too(program: str, a: int, b: int, other_a: int, other_b: int) -> None:
    try:
        traced = run(program, TracedInt(a, "{cfg.a}"), TracedInt(b, "{cfg.b}"))
        plain, other = run(program, a, b), run(program, other_a, other_b)
    except (ZeroDivisionError, TypeError, ValueError, OverflowError):
        return
    assert traced == plain
    if plain.bit_length() > 200 or other.bit_length() > 200:
        return
    text = expression(traced)
    if text is None:
        # Only an expression too long to read may be dropped.
        assert len(program) > 40
        return
    assert set(knobs(text)) <= {"cfg.a", "cfg.b"}
    assert evaluate(text, {"cfg.a": a, "cfg.b": b}) == plain
    assert evaluate(text, {"cfg.a": other_a, "cfg.b": other_b}) == other


@pytest.mark.parametrize("text", ["(2<<{a})", "({a}**{a})", "(({a}<<3)**{a})"])
def test_a_number_that_no_memory_holds_is_refused(text: str) -> None:
    with pytest.raises(OverflowError):
        evaluate(text, {"a": 1 << 40})


def test_expressions_are_readable() -> None:
    hidden, heads = TracedInt(768, "{hidden_size}"), TracedInt(12, "{num_attention_heads}")
    assert expression(4 * hidden) == "(4*{hidden_size})"
    assert expression(hidden // heads) == "({hidden_size}//{num_attention_heads})"
    assert expression(max(hidden, 12)) == "{hidden_size}"
    assert expression(TracingInt(hidden * 8 / 3)) == "int((({hidden_size}*8)/3))"
    assert expression(TracingInt(hidden * 4.0)) == "int(({hidden_size}*4.0))"
    assert knobs("({a.b}*({c}+{a.b}))") == ("a.b", "c")


def test_traced_numbers_behave_as_plain_ones() -> None:
    hidden = TracedInt(768, "{n}")
    assert hidden == 768
    assert hash(hidden) == hash(768)
    assert {768: "found"}[hidden] == "found"
    assert f"{hidden} {hidden!r}" == "768 768"
    assert json.dumps({"n": hidden * 2}) == '{"n": 1536}'
    assert isinstance(hidden / 2, TracedFloat)
    assert isinstance(3, TracingInt)
    assert issubclass(bool, TracingInt)


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_keep_the_expression(remake: Any) -> None:
    assert expression(remake(TracedInt(5, "{n}") * 2)) == "({n}*2)"
    assert expression(remake(TracedFloat(5.0, "{x}"))) == "{x}"


def test_only_divisions_of_knobs_by_knobs_count_as_inexact() -> None:
    hidden, heads = TracedInt(100, "{hidden}"), TracedInt(12, "{heads}")
    with collect_inexact() as inexact:
        assert hidden // heads == 8
        assert hidden // TracedInt(10, "{even}") == 10
        assert (hidden + 7) // 8 * 8 == 104
    assert inexact == ["({hidden}//{heads})"]


@pytest.mark.parametrize("text", ["__import__('os')", "{a}.real", "a", "[1]", "{a} if 1 else 2", "{a}("])
def test_only_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match="origin expression"):
        evaluate(text, {"a": 1})
