"""`lintgpu check` with real traces: on plain torch models, so that a run costs seconds; the rules' cases trace Hugging Face models."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")

from lintgpu.cli import main

MODEL = '''\
"""A small GPT."""

from dataclasses import dataclass

import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 256
    vocab_size: int = 50257  # of the GPT-2 tokenizer
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 256


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(B, T, C))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss
'''
VOCABULARY_LINE = 1 + MODEL.splitlines().index("    vocab_size: int = 50257  # of the GPT-2 tokenizer")
PROJECT = """\
[tool.lintgpu.targets.net]
model = "pkg.net:Net"
kwargs = { width = 256, vocab = 50257 }
example_inputs = { tokens = { shape = [8, 256], dtype = "int64" } }
"""
NET = """\
import torch.nn as nn

from pkg.sizes import HIDDEN


class Net(nn.Module):
    def __init__(self, width, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.up = nn.Linear(width, HIDDEN)
        self.down = nn.Linear(HIDDEN, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(self.up(x).relu()))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["check", "--gpu", "H200", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def report(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(check("-f", "json", *arguments).stdout)
    return found


def of(code: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in found["findings"] if finding["code"] == code]


def test_a_trusted_model_is_traced_and_its_literal_fixed_in_place(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    found = report("model.py", "--trust", "--batch", "16")
    (target,) = found["targets"]
    assert (target["basis"], target["model_class"]) == ("traced", "GPT")
    (finding,) = of("LG101", found)
    assert (finding["path"], finding["line"], finding["knob"], finding["value"]) == ("model.py", VOCABULARY_LINE, "vocab_size", 50257)
    assert any("constructed" in related["message"] and related["path"] == "model.py" for related in finding["related"])
    diff = check("model.py", "--trust", "--batch", "16", "--diff").stdout
    assert f"+    vocab_size: int = {finding['suggestion']}  # of the GPT-2 tokenizer\n" in diff
    assert (folder / "model.py").read_text() == MODEL
    fixed = check("model.py", "--trust", "--batch", "16", "--fix")
    assert "fixed 1 finding" in fixed.stderr
    assert (folder / "model.py").read_text() == MODEL.replace("50257", str(finding["suggestion"]))
    assert of("LG101", report("model.py", "--trust", "--batch", "16")) == []


def test_code_of_the_project_does_not_run_without_the_owners_say_so(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL + f"\nopen({str(folder / 'ran')!r}, 'w')\n")
    (target,) = report("model.py")["targets"]
    assert target["basis"] == "estimated"
    assert any("--trust" in note for note in target["assumptions"])
    assert not (folder / "ran").exists()


def test_a_named_target_is_found_at_its_number_in_the_settings_and_can_be_hidden_there(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "sizes.py").write_text("HIDDEN = 1024\n")
    (folder / "pkg" / "net.py").write_text(NET)
    (folder / "pyproject.toml").write_text(PROJECT)
    (finding,) = of("LG101", report("."))
    assert (finding["path"], finding["line"], finding["value"]) == ("pyproject.toml", 3, 50257)
    # A module that the build imports is part of what a kept result depends on.
    (folder / "pkg" / "sizes.py").write_text("HIDDEN = 8191\n")
    places = {(finding["path"], finding["line"], finding["value"]) for finding in of("LG101", report("."))}
    assert places == {("pyproject.toml", 3, 50257), ("pkg/sizes.py", 1, 8191)}
    (folder / "pkg" / "sizes.py").write_text("HIDDEN = 8191  # lintgpu: ignore[LG101] of the paper\n")
    (folder / "pyproject.toml").write_text(PROJECT.replace("kwargs", "# lintgpu: ignore[LG101] of the tokenizer\nkwargs"))
    found = report(".")
    assert of("LG101", found) == []
    assert found["suppressed"] == 2


def test_a_model_that_fails_is_reported_with_its_own_words_and_the_others_are_judged(folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "sizes.py").write_text("HIDDEN = 1024\n")
    (folder / "pkg" / "net.py").write_text(NET)
    (folder / "pkg" / "bad.py").write_text("def make():\n    raise ValueError('the width must be even')\n")
    (folder / "pyproject.toml").write_text(PROJECT + '\n[tool.lintgpu.targets.bad]\nmodel = "pkg.bad:make"\n')
    result = report(".")
    (failed,) = of("LG001", result)
    assert "the width must be even" in failed["message"]
    assert failed["message"].endswith("or exclude the file in [tool.lintgpu] where it is no model of yours")
    assert (failed["path"], failed["target"], failed["severity"]) == ("pyproject.toml", "bad", "warning")
    assert [finding["target"] for finding in of("LG101", result)] == ["net"]


def test_without_torch_the_numbers_are_judged_and_the_way_to_trace_is_named(folder: Path) -> None:
    bare = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}\n'
    )
    found = report("config.json", "--python", str(bare / "bin" / "python"), "--batch", "16")
    (target,) = found["targets"]
    assert target["basis"] == "estimated"
    assert any("torch is not installed" in note and "lintgpu[" in note for note in target["assumptions"])
    (finding,) = of("LG101", found)
    assert (finding["line"], finding["value"]) == (1, 50257)
    assert of("LG001", found) == []


def test_shapes_are_as_many_as_the_layers_that_differ(folder: Path) -> None:
    tables = []
    for layers in (3, 60):
        (folder / "model.py").write_text(MODEL.replace("n_layer: int = 2", f"n_layer: int = {layers}"))
        result = CliRunner().invoke(main, ["shapes", "-f", "csv", "--trust", "model.py"])
        assert result.exit_code == 0, result.output
        tables.append(result.stdout.splitlines())
    assert len(tables[0]) == len(tables[1])
    assert tables[0] != tables[1]


def test_comments_that_hide_nothing_are_told(folder: Path) -> None:
    text = MODEL.replace("# of the GPT-2 tokenizer", "# lintgpu: ignore[LG101, LG102, LG9]").replace("= 4\n", "= 4  # lintgpu: ignore\n")
    (folder / "model.py").write_text(text)
    found = report("model.py", "--trust")
    assert of("LG101", found) == []
    assert [(finding["line"], finding["severity"], finding["message"]) for finding in of("LG004", found)] == [
        (
            VOCABULARY_LINE,
            "note",
            f"this comment hides no finding of LG102 on line {VOCABULARY_LINE} and names LG9, which no rule is called; "
            "remove it, or the codes",
        ),
        (VOCABULARY_LINE + 2, "note", f"this comment hides no finding on line {VOCABULARY_LINE + 2}; remove it, or the codes"),
    ]
    assert of("LG004", report("model.py", "--trust")) == of("LG004", found)
    # What was not looked for may be what a comment hides.
    assert [finding["line"] for finding in of("LG004", report("model.py", "--trust", "--ignore", "LG102"))] == [VOCABULARY_LINE]
    assert of("LG004", report("model.py", "--trust", "--ignore", "LG004")) == []
    (folder / "model.py").write_text(text.replace("LG9]", "LG9, LG004]").replace("= 4  # lintgpu: ignore\n", "= 4\n"))
    assert of("LG004", report("model.py", "--trust")) == []


def test_a_kept_result_is_the_same_report(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    time.sleep(0.05)  # What was written in the very moment that a run began is not kept.
    first = report("model.py", "--trust")
    assert report("model.py", "--trust") == first
    assert report("model.py", "--trust", "--no-cache")["findings"] == first["findings"]
    for changed in (("--batch", "3"), ("--dtype", "fp32"), ("--mode", "infer"), ("--compile",), ("--gpu", "A100")):
        assert report("model.py", "--trust", *changed)["targets"] != first["targets"], changed
