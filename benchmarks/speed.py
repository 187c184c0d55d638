"""How long `lintgpu check` takes and how much memory, beside what importing torch and the model's own modules takes in the same run.

Usage: python benchmarks/speed.py [--repeat 3] [--write docs/speed.md]

Every time is the median over the repeats, which take turns (import, cold, warm, import, ...), so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
LLAMA_405B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "num_hidden_layers": 61}
MODELS = {
    "GPT-2 124M": (GPT2, "transformers.models.gpt2.modeling_gpt2"),
    "Llama-3.1-405B": (LLAMA_405B, "transformers.models.llama.modeling_llama"),
    "DeepSeek-V3": (DEEPSEEK_V3, "transformers.models.deepseek_v3.modeling_deepseek_v3"),
}


@dataclass(frozen=True)
class Run:
    """Wall-clock seconds of one process and its children, and the largest resident memory among them so far."""

    seconds: float
    peak_gb: float


def timed(command: list[str], cache: str) -> Run:
    """Run `command` and time it. Raises RuntimeError where it fails (exit code 1 means findings and is none)."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LINTGPU_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - start
    if result.returncode not in (0, 1) or "Traceback" in result.stderr:
        raise RuntimeError(f"{command} ended with {result.returncode}: {result.stderr[-2000:]}")
    return Run(seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20)


def measure(config: dict[str, object], module: str, repeat: int) -> dict[str, float]:
    """Medians of the import alone, a cold check and a warm check, in seconds, and the peak memory in GB."""
    times: dict[str, list[float]] = {"import": [], "cold": [], "warm": []}
    peak = 0.0
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            check = [sys.executable, "-m", "lintgpu", "check", str(path)]
            runs = {
                "import": timed([sys.executable, "-c", f"import torch, {module}"], folder),
                "cold": timed(check, f"{folder}/cache"),
                "warm": timed(check, f"{folder}/cache"),
            }
        for name, run in runs.items():
            times[name].append(run.seconds)
        peak = max(peak, runs["cold"].peak_gb)
    return {name: statistics.median(values) for name, values in times.items()} | {"peak": peak}


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as a markdown page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [
        "# Speed",
        "",
        f"Made by `python benchmarks/speed.py --write docs/speed.md` on {date.today()}, Python {platform.python_version()}, {versions}, "
        f"{os.cpu_count()} CPU cores, medians. The peak is of the largest single process so far in the run.",
        "",
        "| model | import torch and the model's modules | cold check | check over import | warm check | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        more = row["cold"] - row["import"]
        lines.append(
            f"| {name} | {row['import']:.2f} s | {row['cold']:.2f} s | {more:+.2f} s ({row['cold'] / row['import']:.2f} x) "
            f"| {row['warm']:.2f} s | {row['peak']:.2f} GB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every model and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    page = table({name: measure(config, module, arguments.repeat) for name, (config, module) in MODELS.items()})
    if arguments.write:
        arguments.write.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
