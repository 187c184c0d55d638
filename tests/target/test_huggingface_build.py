"""The class that is built, where its numbers come from, and true reasons where nothing can be built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lintgpu.settings import Settings  # noqa: E402
from lintgpu.source import read  # noqa: E402
from lintgpu.target.base import Target  # noqa: E402
from lintgpu.target.huggingface import HuggingFace  # noqa: E402
from lintgpu.trace.client import Worker  # noqa: E402
from lintgpu.trace.records import Trace, TraceFailure  # noqa: E402
from lintgpu.workload import Mode, Workload  # noqa: E402

SMALL = Workload(batch=2, sequence=16)
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 515,
    "n_embd": 48,
    "n_head": 4,
    "n_layer": 2,
    "n_inner": None,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 170,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as running:
        yield running


def target(folder: Path, data: dict[str, Any]) -> Target:
    path = folder / "model.json"
    path.write_text(json.dumps(data))
    [found] = HuggingFace().find(read(str(path)), Settings())
    return found


def traced(worker: Worker, folder: Path, data: dict[str, Any], workload: Workload = SMALL, **changes: int) -> Trace:
    trace = worker.trace(target(folder, data), workload, changes)
    assert isinstance(trace, Trace), trace
    return trace


def failed(worker: Worker, folder: Path, data: dict[str, Any]) -> TraceFailure:
    failure = worker.trace(target(folder, data), SMALL)
    assert isinstance(failure, TraceFailure)
    return failure


def dims(trace: Trace) -> dict[str, str]:
    """expression of N of each forward GEMM by the last part of its module."""
    return {
        op.module.rsplit(".", 1)[-1]: dict(op.gemm.origins).get("n", "")
        for op in trace.ops
        if op.gemm is not None and op.phase == "forward" and op.kind == "gemm"
    }


def test_architectures_decide_over_the_natural_class(worker: Worker, tmp_path: Path) -> None:
    small = {"model_type": "bart", "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 64}
    named = traced(worker, tmp_path, {**small, "architectures": ["BartModel"]})
    natural = traced(worker, tmp_path, small)
    assert (named.model_class, natural.model_class) == ("BartModel", "BartForConditionalGeneration")


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("gpt2", "GPT2LMHeadModel"), ("bert", "BertForMaskedLM"), ("t5", "T5ForConditionalGeneration"), ("vit", "ViTForImageClassification")],
)
def test_the_natural_class_of_a_type(worker: Worker, tmp_path: Path, model_type: str, expected: str) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_layers": 1, "n_layer": 1, "num_attention_heads": 4}
    assert traced(worker, tmp_path, {"model_type": model_type, **sizes}).model_class == expected


def test_dims_name_the_keys_they_came_from(worker: Worker, tmp_path: Path) -> None:
    assert dims(traced(worker, tmp_path, LLAMA)) == {
        "q_proj": "({num_attention_heads}*({hidden_size}//{num_attention_heads}))",
        "k_proj": "({num_key_value_heads}*({hidden_size}//{num_attention_heads}))",
        "v_proj": "({num_key_value_heads}*({hidden_size}//{num_attention_heads}))",
        "o_proj": "{hidden_size}",
        "gate_proj": "{intermediate_size}",
        "up_proj": "{intermediate_size}",
        "down_proj": "{hidden_size}",
        "lm_head": "{vocab_size}",
    }


def test_a_null_feed_forward_is_derived(worker: Worker, tmp_path: Path) -> None:
    found = dims(traced(worker, tmp_path, GPT2))
    assert found["c_fc"] == "(4*{n_embd})"
    assert found["c_attn"] == "(3*{n_embd})"


def test_an_alias_keeps_the_key_of_the_file(worker: Worker, tmp_path: Path) -> None:
    data = {key: value for key, value in GPT2.items() if key != "n_embd"} | {"hidden_size": 48}
    assert dims(traced(worker, tmp_path, data))["c_fc"] == "(4*{hidden_size})"


def test_a_default_of_the_library_is_named_with_its_value(worker: Worker, tmp_path: Path) -> None:
    data = {key: value for key, value in GPT2.items() if key != "vocab_size"}
    trace = traced(worker, tmp_path, data)
    assert dims(trace)["lm_head"] == "{default:vocab_size=50257}"
    assert "default:vocab_size=50257" in trace.knobs_seen
    changed = traced(worker, tmp_path, data, SMALL, **{"default:vocab_size=50257": 50304})
    assert 50304 in {op.gemm.n for op in changed.ops if op.gemm}


def test_a_change_builds_another_model(worker: Worker, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, LLAMA, SMALL, intermediate_size=176)
    assert 176 in {op.gemm.n for op in trace.ops if op.gemm}
    assert 170 not in {op.gemm.n for op in trace.ops if op.gemm}


def test_a_change_the_model_refuses_fails_in_its_own_words(worker: Worker, tmp_path: Path) -> None:
    failure = worker.trace(target(tmp_path, LLAMA), SMALL, {"hidden_size": 65})
    assert isinstance(failure, TraceFailure)
    assert "65" in failure.reason or "multiple" in failure.reason


def test_training_computes_the_loss_and_serving_does_not(worker: Worker, tmp_path: Path) -> None:
    train = traced(worker, tmp_path, GPT2)
    infer = traced(worker, tmp_path, GPT2, Workload(mode=Mode.INFER, batch=2, sequence=16, autocast=False))
    assert "labels" in dict(train.inputs)
    assert "labels" not in dict(infer.inputs)
    assert any(op.phase == "grad-weight" for op in train.ops)
    assert {op.phase for op in infer.ops} == {"forward"}


def test_decoding_is_one_token_a_sequence_over_a_cache(worker: Worker, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, LLAMA, Workload(mode=Mode.DECODE, batch=3, sequence=40, autocast=False))
    assert {op.gemm.m for op in trace.ops if op.kind == "gemm" and op.gemm and "proj" in op.module} == {3}
    assert {(op.attention.q_len, op.attention.kv_len) for op in trace.ops if op.attention} == {(1, 41)}


def test_a_quantised_config_is_built_in_the_compute_precision_and_says_so(worker: Worker, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert any("quantisation is left out" in said for said in trace.assumptions)


def test_a_longer_sequence_than_the_model_has_positions_for_is_cut(worker: Worker, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, {**GPT2, "n_positions": 12})
    assert dict(trace.inputs)["input_ids"] == (2, 12)
    assert any("12" in said and "16" in said for said in trace.assumptions)


def test_an_unknown_type_says_what_is_missing(worker: Worker, tmp_path: Path) -> None:
    failure = failed(worker, tmp_path, {"model_type": "no_such_model", "vocab_size": 64})
    assert failure.stage == "config"
    assert transformers.__version__ in failure.reason
    assert "'no_such_model'" in failure.reason


def test_remote_code_is_named_and_not_run(worker: Worker, tmp_path: Path) -> None:
    data = {
        "model_type": "mine",
        "architectures": ["MineForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_mine.MineConfig", "AutoModel": "modeling_mine.MineForCausalLM"},
    }
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('it ran')\n")
    failure = failed(worker, tmp_path, data)
    assert "remote code" in failure.reason
    assert "modeling_mine.MineForCausalLM" in failure.reason
    assert "[tool.lintgpu.targets]" in failure.hint


def test_a_config_of_a_newer_release_says_so(worker: Worker, tmp_path: Path) -> None:
    failure = failed(worker, tmp_path, {"model_type": "future", "transformers_version": "99.1.0"})
    assert "written by transformers 99.1.0" in failure.reason


def test_architectures_and_type_that_disagree_are_refused(worker: Worker, tmp_path: Path) -> None:
    failure = failed(worker, tmp_path, {**GPT2, "architectures": ["LlamaForCausalLM"]})
    assert "LlamaForCausalLM" in failure.reason
    assert "'gpt2'" in failure.reason
