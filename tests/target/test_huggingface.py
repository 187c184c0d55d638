"""Which JSON files are model configs, and what is read from them without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.settings import Settings
from lintgpu.source import read
from lintgpu.target.base import Target
from lintgpu.target.huggingface import HuggingFace, architectures_of, describes_a_model, integers, knob_id
from lintgpu.target.roles import role_of

GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_inner": None}


def targets(folder: Path, data: Any, name: str = "model.json") -> list[Target]:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data, indent=2))
    return list(HuggingFace().find(read(str(path)), Settings()))


@pytest.mark.parametrize(
    "data",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["BertModel"], "hidden_size": 64},
        {"model_type": "bert", "vocab_size": 30522},
        {"model_type": "vit", "image_size": 224},
        {"model_type": "clip", "text_config": {}},
    ],
)
def test_configs_are_known_by_their_content(tmp_path: Path, data: dict[str, Any]) -> None:
    assert len(targets(tmp_path, data, "any-name.json")) == 1


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        "null",
        {"vocab_size": 30522, "hidden_size": 768},
        {"model_type": "linear", "alpha": 0.1},
        {"architectures": ["x64", "arm64"]},
        {"architectures": "x86_64"},
        {"model_type": 7, "vocab_size": 30522},
        {"text": 'says "model_type" in a string'},
        {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024},
    ],
)
def test_other_json_is_left_alone(tmp_path: Path, data: Any) -> None:
    assert targets(tmp_path, data) == []


def test_each_integer_is_a_knob_at_its_own_place(tmp_path: Path) -> None:
    [target] = targets(tmp_path, GPT2)
    knobs = {knob.id: knob for knob in target.knobs}
    assert {name: (knob.value, knob.role) for name, knob in knobs.items()} == {
        "vocab_size": (50257, "vocabulary"),
        "n_embd": (768, "hidden"),
        "n_head": (12, "heads"),
    }
    span = knobs["vocab_size"].span
    assert (span.line, span.column, span.end_column) == (6, 17, 22)


def test_nested_parts_have_their_own_knobs(tmp_path: Path) -> None:
    data = {"model_type": "clip", "text_config": {"hidden_size": 512}, "vision_config": {"hidden_size": 768, "depths": [2, 18]}}
    [target] = targets(tmp_path, data)
    assert [knob.id for knob in target.knobs] == [
        "text_config.hidden_size",
        "vision_config.hidden_size",
        "vision_config.depths.0",
        "vision_config.depths.1",
    ]
    assert target.knobs[3].name == "depths"


def test_numbers_that_size_nothing_are_no_knobs(tmp_path: Path) -> None:
    data = {
        "model_type": "bart",
        "vocab_size": 50265,
        "pad_token_id": 1,
        "eos_token_ids": [1, 2],
        "decoder_start_token_id": 2,
        "image_token_index": 32000,
        "id2label": {"0": "a"},
        "label2id": {"a": 0},
        "task_specific_params": {"summarization": {"max_length": 142}},
        "quantization_config": {"bits": 4, "group_size": 128},
        "suppress_tokens": [1, 2, 7],
        "rope_scaling": {"factor": 8},
        "num_beams": 4,
        "use_cache": True,
    }
    [target] = targets(tmp_path, data)
    assert [knob.id for knob in target.knobs] == ["vocab_size"]


def test_half_precision_and_positions_are_hints_and_fp32_is_none(tmp_path: Path) -> None:
    [half] = targets(tmp_path, {**GPT2, "torch_dtype": "bfloat16", "n_positions": 512})
    assert [(hint.field, hint.value) for hint in half.hints] == [("dtype", "bf16"), ("max_sequence", 512)]
    [single] = targets(tmp_path, {**GPT2, "torch_dtype": "float32"})
    assert single.hints == ()


@pytest.mark.parametrize("published", [{"transformers_version": "4.40.0"}, {"_name_or_path": "gpt2"}])
def test_a_published_config_has_a_trained_vocabulary(tmp_path: Path, published: dict[str, str]) -> None:
    assert targets(tmp_path, {**GPT2, **published})[0].trained_vocabulary


@pytest.mark.parametrize("beside", ["tokenizer.json", "model.safetensors", "pytorch_model-00001-of-00002.bin", "merges.txt"])
def test_a_tokenizer_or_weights_beside_it_mean_a_trained_vocabulary(tmp_path: Path, beside: str) -> None:
    assert not targets(tmp_path, GPT2)[0].trained_vocabulary
    (tmp_path / beside).write_text("")
    assert targets(tmp_path, GPT2)[0].trained_vocabulary


def test_a_config_json_is_called_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert targets(tmp_path / "my-model", GPT2, "config.json")[0].name == "my-model"
    assert targets(tmp_path, GPT2, "gpt2-small.json")[0].name == "gpt2-small"


def test_a_default_of_the_library_sits_on_the_key_that_names_the_model(tmp_path: Path) -> None:
    [target] = targets(tmp_path, {"model_type": "gpt2", "n_embd": 768})
    knob = HuggingFace().resolve(target, "default:text_config.vocab_size=50257")
    assert knob is not None
    assert (knob.value, knob.role, knob.span) == (50257, "vocabulary", target.span)
    assert "not in the file" in knob.name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from(["model_type", "architectures"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(json_values)
def test_any_json_gets_an_answer(data: Any) -> None:
    assert describes_a_model(data) in (True, False)
    for path, value in integers(data):
        at = data
        for part in path:
            at = at[part]
        assert at == value
        assert type(value) is int
        assert knob_id(path)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("vocab_size", "vocabulary"),
        ("padded_vocab_size", "vocabulary"),
        ("text_config.hidden_size", "hidden"),
        ("n_embd", "hidden"),
        ("d_model", "hidden"),
        ("encoder_ffn_dim", "feed-forward"),
        ("moe_intermediate_size", "feed-forward"),
        ("n_inner", "feed-forward"),
        ("--n-head", "heads"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "kv-heads"),
        ("n_kv_heads", "kv-heads"),
        ("qk_rope_head_dim", "head-dim"),
        ("d_kv", "head-dim"),
        ("num_hidden_layers", "layers"),
        ("block_size", "positions"),
        ("n_routed_experts", "experts"),
        ("num_experts_per_tok", ""),
        ("patch_size", ""),
        ("batch_size", ""),
    ],
)
def test_roles_follow_the_usual_names(name: str, role: str) -> None:
    assert role_of(name) == role


def test_architectures_given_as_one_string_are_one_class(tmp_path: Path) -> None:
    assert len(targets(tmp_path, {"architectures": "GPT2LMHeadModel", "vocab_size": 50257})) == 1
    assert architectures_of({"architectures": "GPT2LMHeadModel"}) == ["GPT2LMHeadModel"]
    assert architectures_of({"architectures": ["A", 3, None]}) == ["A"]
    assert architectures_of({"architectures": 7}) == []
