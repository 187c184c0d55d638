"""Measure whole steps on this machine's GPU: python3 benchmarks/measure_steps.py OUT.jsonl [SECONDS]

One JSON line a case: milliseconds of a step, of its CPU issue and of its GPU kernels, and the kernels by name.
"""

from __future__ import annotations

import collections
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from plain_gpt import PlainGpt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = tuple[dict[str, Any], Callable[[], Callable[[], object]]]


def train(model: Any, inputs: dict[str, Any], dtype: str, mode: str = "none") -> Callable[[], object]:
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=DEVICE == "cuda")
    run = torch.compile(model, mode=None if mode == "default" else mode) if mode != "none" else model
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"

    def step() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            out = run(**inputs)
        loss = out if torch.is_tensor(out) else out.loss if getattr(out, "loss", None) is not None else out[0].float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def infer(model: Any, inputs: dict[str, Any], mode: str = "none") -> Callable[[], object]:
    model = model.to(DEVICE).to(torch.bfloat16).eval()
    run = torch.compile(model, mode=None if mode == "default" else mode) if mode != "none" else model

    def step() -> None:
        with torch.no_grad():
            run(**inputs)

    return step


def tokens(batch: int, length: int, vocabulary: int, labels: bool = True) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
    return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}


def plain(batch: int, length: int, vocabulary: int, dtype: str, compile_mode: str, inner: int = 3072, inference: bool = False) -> Case:
    def build() -> Callable[[], object]:
        model = PlainGpt(vocabulary, 768, 12, 12, inner, 1024)
        ids = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
        if inference:
            return infer(model, {"ids": ids}, compile_mode)
        return train(model, {"ids": ids, "labels": ids}, dtype, compile_mode)

    facts = {
        "model": "plain",
        "B": batch,
        "T": length,
        "V": vocabulary,
        "ff": inner,
        "dtype": dtype,
        "compile": compile_mode,
        "infer": inference,
    }
    return facts, build


def hf(name: str, batch: int, length: int, dtype: str = "bf16", compile_mode: str = "none", **options: Any) -> Case:
    def build() -> Callable[[], object]:
        import transformers

        config = getattr(transformers, f"{name.split('/')[0]}Config")(**options)
        model = getattr(transformers, name.split("/")[1])(config)
        inputs = tokens(batch, length, getattr(config, "vocab_size", 1000))
        if "ViT" in name:
            inputs = {
                "pixel_values": torch.randn(batch, 3, 224, 224, device=DEVICE),
                "labels": torch.zeros(batch, dtype=torch.int64, device=DEVICE),
            }
        if "Whisper" in name:
            inputs = {"input_features": torch.randn(batch, 80, 3000, device=DEVICE), "labels": inputs["input_ids"]}
        return train(model, inputs, dtype, compile_mode)

    facts = {"model": name, "B": batch, "T": length, "dtype": dtype, "compile": compile_mode, "infer": False, "options": options}
    return facts, build


def cases() -> Iterator[Case]:
    llama = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    tiny = {
        "vocab_size": 10000,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    yield plain(8, 1024, 50304, "bf16", "none")
    yield plain(8, 1024, 50257, "bf16", "none")
    yield plain(2, 512, 50304, "bf16", "none")
    yield plain(4, 1024, 50304, "tf32", "none")
    yield hf("GPT2/GPT2LMHeadModel", 8, 1024)
    yield hf("Llama/LlamaForCausalLM", 4, 1024, **llama)
    yield hf("Llama/LlamaForCausalLM", 2, 128, **tiny)
    yield hf("Bert/BertForMaskedLM", 16, 512)
    yield hf("ViT/ViTForImageClassification", 64, 0)
    yield hf("T5/T5ForConditionalGeneration", 16, 512, d_model=512, vocab_size=32128, decoder_start_token_id=0)
    yield plain(1, 16, 50304, "bf16", "none", inference=True)
    yield plain(8, 512, 50304, "bf16", "none", inference=True)
    yield plain(8, 1024, 50304, "bf16", "default")
    yield hf("Llama/LlamaForCausalLM", 4, 1024, compile_mode="default", **llama)
    yield plain(2, 128, 50304, "bf16", "reduce-overhead", inference=True)
    yield hf("GPT2/GPT2LMHeadModel", 8, 1024, attn_implementation="eager")
    yield hf("Llama/LlamaForCausalLM", 4, 1024, **(llama | {"intermediate_size": 2730}))
    yield hf("Bert/BertForMaskedLM", 16, 512, compile_mode="default")


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(step: Callable[[], object], repeats: int = 10) -> dict[str, Any]:
    for _ in range(4):
        step()
    synchronize()
    whole, issue = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        issue.append((time.perf_counter() - start) * 1e3)
        synchronize()
        whole.append((time.perf_counter() - start) * 1e3)
    found: dict[str, Any] = {
        "ms": statistics.median(whole),
        "ms_min": min(whole),
        "ms_max": max(whole),
        "issue_ms": statistics.median(issue),
    }
    if DEVICE == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            synchronize()
        kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for event in profiler.profiler.kineto_results.events():
            if "CUDA" in str(event.device_type()):
                entry = kernels[event.name()[:150]]
                entry[0] += 1
                entry[1] += event.duration_ns() / 1e3
        found |= {"gpu_ms": sum(us for _, us in kernels.values()) / 1e3, "launches": sum(int(n) for n, _ in kernels.values())}
        found["kernels"] = sorted(([name, int(n), round(us, 1)] for name, (n, us) in kernels.items()), key=lambda row: -row[2])[:70]
    return found


def main(path: str, seconds: float = 120.0) -> None:
    started = time.monotonic()
    with open(path, "w") as file:
        for facts, build in cases():
            left = seconds - (time.monotonic() - started)
            if left < (45 if facts["compile"] != "none" else 8):
                continue
            try:
                result = facts | measure(build())
            except Exception as error:  # a case that fails must not lose the rest
                result = facts | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            result["seconds"] = time.monotonic() - started
            file.write(json.dumps(result) + "\n")
            file.flush()
            print({k: v for k, v in result.items() if k != "kernels"}, file=sys.stderr, flush=True)
            torch.compiler.reset()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(float, sys.argv[2:3]))
