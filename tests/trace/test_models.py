"""The recorded GEMMs against what the same models run for real on the CPU."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from lintgpu.trace.records import FORWARD, GRAD_INPUT, GRAD_WEIGHT, Op, Trace  # noqa: E402

_spec = importlib.util.spec_from_file_location("trace_zoo", Path(__file__).with_name("zoo.py"))
assert _spec is not None
assert _spec.loader is not None
zoo = importlib.util.module_from_spec(_spec)
sys.modules["trace_zoo"] = zoo
_spec.loader.exec_module(zoo)

NAMES = list(zoo.ZOO)
loss_of = lambda output: output.loss  # noqa: E731


def flops_of(op: Op) -> int:
    if op.attention is not None:
        return op.attention.flops * (1 if op.phase == FORWARD else 2)
    return op.gemm.flops if op.gemm is not None else 0


def run_on_cpu(name: str, modes: Callable[[], Any]) -> Any:
    """One real training step; returns the mode that watched it."""
    build, inputs = zoo.ZOO[name]
    torch.manual_seed(0)
    model = build().train()
    with sdpa_kernel(SDPBackend.MATH), modes() as watching:
        model(**inputs()).loss.backward()
    return watching


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_that_torch_counts(name: str, trace_model: Callable[..., Trace]) -> None:
    build, inputs = zoo.ZOO[name]
    trace = trace_model(build, inputs, loss_of)
    counted = run_on_cpu(name, lambda: FlopCounterMode(display=False)).get_total_flops()
    assert sum(op.count * flops_of(op) for op in trace.ops) == counted + missing_in_counter(trace)


def missing_in_counter(trace: Trace) -> int:
    """FlopCounterMode knows no grouped GEMMs."""
    return sum(op.count * flops_of(op) for op in trace.ops if op.gemm is not None and op.gemm.groups)


class Operands(TorchDispatchMode):
    """The plain GEMMs of a real run: name, shapes and strides of the operands."""

    positions: dict[str, int] = {"mm": 0, "addmm": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in self.positions:
            a, b = args[self.positions[name] : self.positions[name] + 2]
            self.seen[(name, a.shape[0], b.shape[1], a.shape[1], *layout(a), *layout(b))] += 1
        return func(*args, **(kwargs or {}))


def layout(matrix: Any) -> tuple[str, int]:
    rows, columns = matrix.stride()
    return ("N", rows) if columns == 1 else ("T", columns) if rows == 1 else ("X", 0)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_strides_are_those_of_real_tensors(name: str, trace_model: Callable[..., Trace]) -> None:
    build, inputs = zoo.ZOO[name]
    trace = trace_model(build, inputs, loss_of)
    recorded: Counter[tuple[Any, ...]] = Counter()
    for op in trace.ops:
        if op.name in Operands.positions and op.gemm is not None:
            g = op.gemm
            recorded[(op.name, g.m, g.n, g.k, g.layout[0], g.lda, g.layout[1], g.ldb)] += op.count
    assert recorded == run_on_cpu(name, Operands).seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("autocast", [False, True])
def test_memoised_trace_is_the_full_one(name: str, autocast: bool, trace_model: Callable[..., Trace]) -> None:
    build, inputs = zoo.ZOO[name]
    options = {"dtype": "bf16", "autocast": autocast}
    full = trace_model(build, inputs, loss_of, memoise=False, **options)
    memoised = trace_model(build, inputs, loss_of, memoise=True, **options)
    assert memoised.ops == full.ops
    assert memoised.assumptions == full.assumptions


@pytest.mark.parametrize("name", NAMES)
def test_memoisation_runs_a_block_once(name: str, trace_model: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    build, inputs = zoo.ZOO[name]
    with counting_linears() as full:
        trace_model(build, inputs, loss_of, memoise=False)
    with counting_linears() as memoised:
        trace_model(build, inputs, loss_of, memoise=True)
    assert memoised["forward"] < full["forward"]


@contextmanager
def counting_linears() -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    original = torch.nn.LayerNorm.forward, torch.nn.Dropout.forward, torch.nn.Linear.forward

    def counted(forward: Any) -> Any:
        def run(module: Any, *args: Any) -> Any:
            calls["forward"] += 1
            return forward(module, *args)

        return run

    kinds = (torch.nn.LayerNorm, torch.nn.Dropout, torch.nn.Linear)
    for kind, forward in zip(kinds, original, strict=True):
        kind.forward = counted(forward)
    try:
        yield calls
    finally:
        for kind, forward in zip(kinds, original, strict=True):
            kind.forward = forward


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "whisper", "t5"])
def test_every_forward_weight_gemm_has_its_two_gradients(name: str, trace_model: Callable[..., Trace], gemms: Any) -> None:
    build, inputs = zoo.ZOO[name]
    trace = trace_model(build, inputs, loss_of)
    phases = {phase: Counter() for phase in (FORWARD, GRAD_INPUT, GRAD_WEIGHT)}
    for op in gemms(trace):
        phases[op.phase][op.module] += op.count
    for module, count in phases[FORWARD].items():
        if module.endswith(
            ("proj", "query", "key", "value", "dense", "fc1", "fc2", "wi", "wo", "q", "k", "v", "o", "lm_head", "c_fc", "c_attn")
        ):
            assert phases[GRAD_WEIGHT][module] == count, module
            assert phases[GRAD_INPUT][module] in (count, 0), module


def test_gpt2_stores_its_weights_row_major(trace_model: Callable[..., Trace], gemms: Any) -> None:
    trace = trace_model(*zoo.ZOO["gpt2"], loss_of)
    (forward,) = [op for op in gemms(trace, FORWARD) if op.module == "transformer.h.*.mlp.c_fc"]
    assert (forward.count, forward.gemm.layout, forward.gemm.n, forward.gemm.k) == (3, "NN", 192, 48)
    assert (forward.gemm.lda, forward.gemm.ldb, forward.gemm.ldc) == (48, 192, 192)
    assert forward.module_class == "Conv1D"
    assert forward.gemm.bias
    (gradient,) = [op for op in gemms(trace, GRAD_WEIGHT) if op.module == "transformer.h.*.mlp.c_fc"]
    assert (gradient.gemm.m, gradient.gemm.n, gradient.gemm.k) == (48, 192, zoo.BATCH * zoo.SEQUENCE)


def test_attention_is_one_op_with_grouped_heads(trace_model: Callable[..., Trace]) -> None:
    trace = trace_model(*zoo.ZOO["llama"], loss_of)
    forward, backward = [op for op in trace.ops if op.attention is not None]
    assert (forward.phase, backward.phase, forward.count, backward.count) == ("forward", "backward", 3, 3)
    attention = forward.attention
    assert attention is not None
    assert (attention.batch, attention.heads, attention.kv_heads, attention.q_len, attention.kv_len, attention.head_dim) == (
        2,
        6,
        2,
        16,
        16,
        8,
    )
    assert attention.causal
    assert attention.mask == ""
    assert not any("softmax" in op.name for op in trace.ops if op.in_layer)


def test_experts_get_an_even_split_and_it_is_said(trace_model: Callable[..., Trace], gemms: Any) -> None:
    trace = trace_model(*zoo.ZOO["mixtral"], loss_of, dtype="bf16")
    experts = [op for op in gemms(trace, FORWARD) if op.gemm.groups]
    assert {(op.gemm.batch, op.gemm.groups, op.gemm.m) for op in experts} == {(4, "M", zoo.BATCH * zoo.SEQUENCE * 2)}
    assert {(op.gemm.n, op.gemm.k) for op in experts} == {(128, 48), (48, 64)}
    assert any("evenly" in text for text in trace.assumptions)


def test_identical_layers_fold_into_a_count(trace_model: Callable[..., Trace]) -> None:
    trace = trace_model(*zoo.ZOO["bert"], loss_of)
    modules = {op.module for op in trace.ops}
    assert "bert.encoder.layer.*.attention.self.query" in modules
    assert not any(part.isdigit() for module in modules for part in module.split("."))


def test_tied_weights_count_once(trace_model: Callable[..., Trace]) -> None:
    trace = trace_model(*zoo.ZOO["gpt2"], loss_of)
    model = zoo.gpt2()
    assert trace.parameters.elements == sum(math.prod(parameter.shape) for parameter in model.parameters())
    assert trace.parameters.tensors == len(list(model.parameters()))


def test_inference_has_no_backward(trace_model: Callable[..., Trace]) -> None:
    trace = trace_model(*zoo.ZOO["llama"], None, mode="infer", dtype="bf16", autocast=True)
    assert {op.phase for op in trace.ops} == {FORWARD}
    assert {op.dtype for op in trace.ops if op.gemm is not None and op.module_class == "Linear"} == {"bf16"}
    assert trace.parameters.dtype == "bf16"
