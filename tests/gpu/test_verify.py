"""The verifier on a real GPU. Run with: pytest -m gpu tests/gpu (needs a CUDA GPU and lintgpu[hf]; takes two minutes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]


def _why_not() -> str:
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        return f"needs lintgpu[hf]: {error}"
    return "" if torch.cuda.is_available() else f"no GPU: torch {torch.__version__} sees none on this machine"


WHY_NOT = _why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a GPU")]


@pytest.fixture(scope="module")
def gpu() -> str:
    """What --gpu calls this machine's card."""
    import torch

    from lintgpu.gpu.profiles import find

    return find(torch.cuda.get_device_name(0)).name


def lintgpu(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOP), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "lintgpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=300)


def config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 4, **values}))


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, gpu: str) -> tuple[Path, dict[str, Any]]:
    """The odd vocabulary of GPT-2, checked and verified."""
    folder = tmp_path_factory.mktemp("vocabulary")
    config(folder, vocab_size=50257)
    options = ("--batch", "8", "--seq", "1024", "--gpu", gpu, "--verify", "--verify-budget", "25s", "-f", "json")
    done = lintgpu(folder, "check", "config.json", *options)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return folder, json.loads(done.stdout)


def test_the_vocabulary_of_gpt2_is_confirmed(checked: tuple[Path, dict[str, Any]]) -> None:
    (finding,) = checked[1]["findings"]
    assert finding["measured"]["verdict"] == "confirmed", finding["measured"]
    assert finding["measured"]["ratio"]["low"] > 2
    assert abs(finding["measured"]["saving_step_share"]["median"] - finding["cost"]["saving_step_share"]) < 0.1
    assert all(check["passed"] for check in finding["measured"]["checks"])
    assert all(op["kernel"] and op["tflops"] for op in finding["measured"]["before"] + finding["measured"]["after"])
    assert any("mask the logits" in note for note in finding["measured"]["notes"])


def test_the_card_and_its_versions_are_on_record(checked: tuple[Path, dict[str, Any]]) -> None:
    card = checked[1]["verification"]
    assert card["driver"]
    assert {"torch", "cuda"} <= set(card["versions"])


def test_the_doubling_test_says_which_wait_dominates(checked: tuple[Path, dict[str, Any]]) -> None:
    (target,) = checked[1]["targets"]
    doubling = target["measured"]["comparisons"][0]
    assert doubling["name"] == "batch x2"
    assert doubling["steps"][0]["bound"] in ("math", "memory", "python")
    assert doubling["steps"][0]["gpu_ms"] > 0


def test_a_planted_wrong_suggestion_is_refuted(checked: tuple[Path, dict[str, Any]]) -> None:
    folder, document = checked
    (finding,) = document["findings"]
    planted = finding | {"suggestion": 50259, "change": finding["change"] | {"knobs": {"vocab_size": 50259}}, "measured": None}
    (folder / "planted.json").write_text(json.dumps(document | {"findings": [planted]}))
    done = lintgpu(folder, "verify", "planted.json", "--verify-budget", "25s", "-f", "json")
    (found,) = json.loads(done.stdout)["findings"]
    assert found["measured"]["verdict"] == "refuted", found["measured"]
    assert found["severity"] == "note"
    assert found["cost"] == finding["cost"]


def test_an_odd_token_count_is_nothing_to_verify(tmp_path: Path, gpu: str) -> None:
    config(tmp_path, vocab_size=50304, n_positions=4096)
    options = ("--batch", "1", "--seq", "4095", "--gpu", gpu, "--verify", "--verify-budget", "12s", "-f", "json")
    found = json.loads(lintgpu(tmp_path, "check", "config.json", *options).stdout)
    assert found["findings"] == []
    assert "no finding to verify" in found["verification"]["notes"]


def test_findings_for_another_card_are_not_measured(tmp_path: Path, gpu: str) -> None:
    config(tmp_path, vocab_size=50257)
    other = "A100-SXM4-80GB" if "A100" not in gpu else "H100-SXM5-80GB"
    done = lintgpu(tmp_path, "check", "config.json", "--batch", "8", "--gpu", other, "--verify", "-f", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 2
    assert [error["kind"] for error in found["errors"]] == ["verify"]
    assert other in found["errors"][0]["message"]
    assert all(finding["measured"] is None for finding in found["findings"])


def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path, gpu: str) -> None:
    config(tmp_path, vocab_size=50304)
    done = lintgpu(tmp_path, "check", "config.json", "--gpu", gpu, "--verify", "--device", "99", "-f", "concise")
    assert done.returncode == 2
    assert [line for line in done.stdout.splitlines() if "there is no GPU 99" in line]
