"""The step of a transformer from its numbers alone, against hand counts and against the traced models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.settings import Settings
from lintgpu.source import read
from lintgpu.target.base import Target
from lintgpu.target.estimate import Shape, estimate, shape_of
from lintgpu.target.huggingface import HuggingFace
from lintgpu.trace.origin import TracedInt, evaluate
from lintgpu.trace.records import Trace
from lintgpu.workload import Mode, Workload

TRAIN = Workload(batch=4, sequence=128)
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12}


def target(folder: Path, data: Mapping[str, Any]) -> Target:
    path = folder / "model.json"
    path.write_text(json.dumps(data))
    [found] = HuggingFace().find(read(str(path)), Settings())
    return found


def flops(trace: Trace) -> int:
    return sum(op.gemm.flops * op.count for op in trace.ops if op.gemm is not None and op.kind == "gemm")


shapes = st.builds(
    lambda heads, width, groups, **rest: Shape(hidden=heads * width, heads=heads, kv_heads=max(1, heads // groups), head_dim=width, **rest),
    heads=st.integers(1, 16),
    width=st.integers(1, 128),
    groups=st.integers(1, 4),
    layers=st.integers(1, 8),
    feed_forward=st.integers(1, 4096),
    vocabulary=st.integers(1, 60000),
    gated=st.booleans(),
    tied=st.booleans(),
)


@given(shapes)
def test_each_weight_costs_six_flops_a_token_and_is_counted_once(shape: Shape) -> None:
    trace = estimate(shape, TRAIN)
    kv = shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * shape.heads * shape.head_dim + 2 * kv)
    layer = attention + shape.hidden * shape.feed_forward * (3 if shape.gated else 2)
    weights = shape.layers * layer + shape.hidden * shape.vocabulary
    assert flops(trace) == 6 * weights * 4 * 128
    norms = (2 * shape.layers + 1) * shape.hidden
    embedding = 0 if shape.tied else shape.hidden * shape.vocabulary
    assert trace.parameters.elements == weights + norms + embedding


@given(shapes)
def test_the_three_gemms_of_a_weight_have_their_layouts_and_leading_dims(shape: Shape) -> None:
    for op in estimate(shape, TRAIN).ops:
        if op.gemm is None:
            continue
        gemm = op.gemm
        assert gemm.layout == {"forward": "NT", "grad-input": "NN", "grad-weight": "TN"}[op.phase]
        assert gemm.lda == (gemm.m if gemm.layout[0] == "T" else gemm.k)
        assert gemm.ldb == (gemm.k if gemm.layout[1] == "T" else gemm.n)
        assert gemm.ldc == gemm.n


@given(st.integers(1, 512), st.integers(1, 60000))
def test_origins_evaluate_to_the_dims(width: int, vocabulary: int) -> None:
    hidden = TracedInt(8 * width, "{hidden}")
    shape = Shape(hidden, 2, 8, 8, hidden // 8, 4 * hidden, TracedInt(vocabulary, "{vocab}"))
    values = {"hidden": 8 * width, "vocab": vocabulary}
    trace = estimate(shape, TRAIN)
    assert set(trace.knobs_seen) == {"hidden", "vocab"}
    for op in trace.ops:
        for dim, source in op.gemm.origins if op.gemm else ():
            assert evaluate(source, values) == getattr(op.gemm, dim)


def test_serving_has_no_backward_and_decoding_one_token_a_sequence() -> None:
    shape = Shape(64, 2, 4, 2, 16, 256, 1000)
    infer = estimate(shape, Workload(mode=Mode.INFER, batch=4, sequence=128, autocast=False))
    assert {op.phase for op in infer.ops} == {"forward"}
    decode = estimate(shape, Workload(mode=Mode.DECODE, batch=4, sequence=128, autocast=False))
    assert {op.gemm.m for op in decode.ops if op.gemm} == {4}
    assert {(op.attention.q_len, op.attention.kv_len) for op in decode.ops if op.attention} == {(1, 128)}


def test_experts_share_the_tokens_evenly() -> None:
    shape = Shape(64, 2, 4, 4, 16, 256, 1000, gated=True, experts=8, experts_per_token=2, expert_feed_forward=96)
    grouped = [op.gemm for op in estimate(shape, TRAIN).ops if op.gemm and op.gemm.groups and op.phase == "forward"]
    assert [(gemm.batch, gemm.m, gemm.n, gemm.k) for gemm in grouped] == [(8, 1024, 192, 64), (8, 1024, 64, 96)]


def test_a_change_of_a_knob_changes_what_follows_from_it(tmp_path: Path) -> None:
    found = target(tmp_path, GPT2)
    trace = HuggingFace().estimate(found, TRAIN, {"n_embd": 1536})
    assert trace is not None
    assert 6144 in {op.gemm.n for op in trace.ops if op.gemm}


@pytest.mark.parametrize("data", [{"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}])
def test_what_is_no_transformer_over_tokens_is_not_estimated(tmp_path: Path, data: dict[str, Any]) -> None:
    assert HuggingFace().estimate(target(tmp_path, data), TRAIN, {}) is None


def test_a_model_without_a_head_has_no_gemm_of_its_vocabulary() -> None:
    numbers = {"hidden": 64, "layers": 2, "heads": 4, "vocabulary": 999}
    shape = shape_of(numbers, {"architectures": ["BertModel"], "type_vocab_size": 2})
    assert shape is not None
    assert not any(op.gemm and 999 in (op.gemm.m, op.gemm.n, op.gemm.k) for op in estimate(shape, TRAIN).ops)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "type_vocab_size": 2,
}


@pytest.fixture(scope="module")
def worker() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from lintgpu.trace.client import Worker

    with Worker() as running:
        yield running


@pytest.mark.parametrize("data", [GPT2, LLAMA, BERT], ids=["gpt2", "llama", "bert"])
def test_the_estimate_is_within_two_percent_of_the_trace(worker: Any, tmp_path: Path, data: dict[str, Any]) -> None:
    found = target(tmp_path, data)
    traced = worker.trace(found, TRAIN)
    estimated = HuggingFace().estimate(found, TRAIN, {})
    assert isinstance(traced, Trace), traced
    assert estimated is not None
    assert flops(estimated) == pytest.approx(flops(traced), rel=0.02)
    assert estimated.parameters.elements == pytest.approx(traced.parameters.elements, rel=0.02)
