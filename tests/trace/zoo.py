"""Small versions of well-known architectures: name -> (build, inputs)."""

from __future__ import annotations

from typing import Any

import torch

BATCH, SEQUENCE = 2, 16


def tokens(length: int = SEQUENCE, **more: Any) -> dict[str, Any]:
    ids = torch.ones(BATCH, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, **more}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_head=3, n_layer=3, vocab_size=101, n_positions=32))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=101, **sizes))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=101, **sizes))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    ids = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 48, "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "num_mel_bins": 8, "max_source_positions": 20}
    return WhisperForConditionalGeneration(WhisperConfig(vocab_size=101, max_target_positions=32, **ids, **layers, **sizes))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=101, d_model=48, d_kv=12, d_ff=72, num_layers=3, num_heads=4))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=101, num_local_experts=4, num_experts_per_tok=2, **sizes))


def decoder_tokens() -> dict[str, Any]:
    return {"decoder_input_ids": torch.ones(BATCH, 8, dtype=torch.long), "labels": torch.ones(BATCH, 8, dtype=torch.long)}


ZOO: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2, lambda: tokens(use_cache=False)),
    "llama": (llama, lambda: tokens(use_cache=False)),
    "bert": (bert, tokens),
    "vit": (vit, lambda: {"pixel_values": torch.zeros(BATCH, 3, 32, 32), "labels": torch.zeros(BATCH, dtype=torch.long)}),
    "whisper": (whisper, lambda: {"input_features": torch.zeros(BATCH, 8, 40), **decoder_tokens(), "use_cache": False}),
    "t5": (t5, lambda: {"input_ids": torch.ones(BATCH, SEQUENCE, dtype=torch.long), **decoder_tokens(), "use_cache": False}),
    "mixtral": (mixtral, lambda: tokens(use_cache=False)),
}
