"""Whole steps against what was measured on one H200: GPT-2 124M of plain modules, bf16 autocast, fused AdamW (ms a training step)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lintgpu.cli import main

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "gpt2" / "config.json"
MEASURED = {("50257", 16): 71.1, ("50304", 16): 45.9}
WITHIN_POINTS = 0.06


def step(tmp_path: Path, vocabulary: str, batch: int, *options: str) -> dict[str, Any]:
    path = tmp_path / "config.json"
    path.write_text(EXAMPLE.read_text().replace("50257", vocabulary))
    arguments = ["check", "--static", "-f", "json", str(path), "--gpu", "H200", "--batch", str(batch), "--seq", "1024", *options]
    (target,) = json.loads(CliRunner().invoke(main, arguments).stdout)["targets"]
    assert isinstance(target, dict)
    return target


@pytest.mark.parametrize(("case", "ms"), MEASURED.items())
def test_a_step_takes_what_was_measured(tmp_path: Path, case: tuple[str, int], ms: float) -> None:
    assert step(tmp_path, *case)["step_us"] / 1000 == pytest.approx(ms, rel=0.15)


def test_what_the_padded_vocabulary_buys(tmp_path: Path) -> None:
    predicted = 1 - step(tmp_path, "50304", 16)["step_us"] / step(tmp_path, "50257", 16)["step_us"]
    measured = 1 - MEASURED["50304", 16] / MEASURED["50257", 16]
    assert abs(predicted - measured) <= WITHIN_POINTS


def test_a_large_batch_waits_for_math_and_one_short_sequence_for_python(tmp_path: Path) -> None:
    assert step(tmp_path, "50304", 16)["bound"] == "math"
    assert step(tmp_path, "50304", 1, "--seq", "16", "--mode", "infer")["bound"] == "python"


def test_tf32_takes_a_fraction_of_fp32(tmp_path: Path) -> None:
    fp32, tf32 = (step(tmp_path, "50304", 4, "--dtype", dtype)["step_us"] for dtype in ("fp32", "tf32"))
    assert 2 < fp32 / tf32 < 4  # measured 82.5 and 30.2 ms


def test_what_compiling_and_padding_buy_together(tmp_path: Path) -> None:
    """Inductor pads by itself: compiled, the odd vocabulary costs little (measured 42.8 and 41.2 ms)."""
    odd, even = (step(tmp_path, vocabulary, 16, "--compile")["step_us"] / 1000 for vocabulary in ("50257", "50304"))
    assert even == pytest.approx(41.2, rel=0.15)
    assert 0 < 1 - even / odd < 0.06
