"""Plain PyTorch models and their training scripts: what is read without running them, and what a trusted build gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lintgpu.settings import Settings
from lintgpu.source import read
from lintgpu.target.base import Target
from lintgpu.target.nanogpt import PlainPython
from lintgpu.trace.records import Trace
from lintgpu.workload import Workload

MODEL = """
import math
from dataclasses import dataclass
import not_installed_anywhere
import torch
from torch import nn

@dataclass
class TinyConfig:
    block_size: int = 64
    vocab_size: int = 515
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Tiny(nn.Module):
    def __init__(self, config: TinyConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @classmethod
    def from_pretrained(cls, name):
        args = {"tiny-big": dict(n_layer=5, n_head=8, n_embd=96)}[name]
        args["vocab_size"] = 777
        return cls(TinyConfig(**args))
"""
TRAIN = """
import os, pickle
from model import TinyConfig, Tiny

init_from = "scratch"
dataset = "letters"
batch_size = 12
block_size = 32
n_embd = 56 # wider
dtype = "bfloat16" if torch.cuda.is_available() else "float16"
compile = True
exec(open("configurator.py").read())
meta_path = os.path.join("data", dataset, "meta.pkl")
meta_vocab_size = None
if os.path.exists(meta_path):
    meta_vocab_size = pickle.load(open(meta_path, "rb"))["vocab_size"]
args = dict(n_embd=n_embd, block_size=block_size, vocab_size=None)
args["vocab_size"] = meta_vocab_size if meta_vocab_size is not None else 520
model = Tiny(TinyConfig(**args))
if compile:
    model = torch.compile(model)
while True:
    loss = model(x, y)[1]
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "configurator.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "config").mkdir()
    return tmp_path


def found(path: Path, trust: bool = False) -> list[Target]:
    return list(PlainPython().find(read(str(path)), Settings(root=str(path.parent), trust=trust)))


def values(target: Target) -> dict[str, tuple[int, str, int]]:
    return {knob.name: (knob.value, Path(knob.span.path).name, knob.span.line) for knob in target.knobs}


def test_a_models_file_alone_is_judged_by_its_defaults(folder: Path) -> None:
    (folder / "train.py").unlink()
    [target] = found(folder / "model.py")
    assert values(target) == {
        "block_size": (64, "model.py", 10),
        "vocab_size": (515, "model.py", 11),
        "n_layer": (2, "model.py", 12),
        "n_head": (4, "model.py", 13),
        "n_embd": (48, "model.py", 14),
    }
    assert target.runs_project_code
    assert target.compile is None
    assert target.spec["attribute"] == "Tiny"


def test_a_training_script_overrides_the_defaults(folder: Path) -> None:
    [target] = found(folder / "train.py")
    assert values(target)["n_embd"] == (56, "train.py", 9)
    assert values(target)["block_size"] == (32, "train.py", 8)
    assert values(target)["vocab_size"] == (520, "train.py", 18)
    assert values(target)["n_layer"] == (2, "model.py", 12)


def test_a_models_file_is_judged_as_the_script_beside_it_builds_it(folder: Path) -> None:
    assert values(found(folder / "model.py")[0]) == values(found(folder / "train.py")[0])


def test_the_script_states_the_workload(folder: Path) -> None:
    [target] = found(folder / "train.py")
    assert {hint.field: hint.value for hint in target.hints} == {
        "max_sequence": 32,
        "batch": 12,
        "sequence": 32,
        "dtype": "bf16",
        "compile": "default",
    }


@pytest.mark.parametrize(
    ("change", "state", "key", "line"),
    [
        (("compile = True", "compile = False"), "off", "compile", 11),
        (("compile = True", "compile = True"), "on", "compile", 11),
        (("compile = True", "x = True"), "on", "", 21),
        (("compile = True\n", "x = True\n", "torch.compile(model)", "model"), "absent", "", 19),
    ],
)
def test_what_a_script_says_about_compiling(folder: Path, change: tuple[str, ...], state: str, key: str, line: int) -> None:
    text = TRAIN
    for before, after in zip(change[::2], change[1::2], strict=True):
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    use = found(folder / "train.py")[0].compile
    assert use is not None
    assert (use.state, use.key, use.span.line, use.entry) == (state, key, line, "a training loop")


@pytest.mark.parametrize(
    ("line", "dtype"),
    [("", "fp32"), ("torch.set_float32_matmul_precision('high')", "tf32"), ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32")],
)
def test_a_script_without_any_half_precision_trains_in_fp32(folder: Path, line: str, dtype: str) -> None:
    text = "\n".join(part for part in TRAIN.splitlines() if not part.startswith("dtype"))
    (folder / "train.py").write_text(text + f"\n{line}\n")
    hints = {hint.field: hint.value for hint in found(folder / "train.py")[0].hints}
    assert hints["dtype"] == dtype


def test_the_dtype_of_autocast_is_read(folder: Path) -> None:
    text = "\n".join(part for part in TRAIN.splitlines() if not part.startswith("dtype"))
    cast = "    with torch.autocast(device_type='cuda', dtype=torch.float16):\n        loss = model(x, y)[1]"
    (folder / "train.py").write_text(text.replace("    loss = model(x, y)[1]", cast))
    hints = {hint.field: hint.value for hint in found(folder / "train.py")[0].hints}
    assert hints["dtype"] == "fp16"


def test_a_script_with_classes_and_flags_is_read_too(folder: Path) -> None:
    (folder / "train.py").write_text("""
import argparse
from model import TinyConfig, Tiny

parser = argparse.ArgumentParser()
parser.add_argument("--n-embd", type=int, default=72)
parser.add_argument("--batch-size", "-b", type=int, default=5)

class Trainer:
    def setup(self, args):
        self.args = dict(n_embd=args.n_embd)
        self.args["vocab_size"] = 600 if args.vocab is None else 600
        self.model = Tiny(TinyConfig(**self.args))

    def run(self):
        for x, y in self.data:
            self.model(x, y)[1].backward()
            self.optimizer.step()
""")
    [target] = found(folder / "train.py")
    assert values(target)["n_embd"] == (72, "train.py", 6)
    assert values(target)["vocab_size"] == (600, "train.py", 12)
    assert {hint.field: hint.value for hint in target.hints}["batch"] == 5
    assert target.compile is not None
    assert (target.compile.state, target.compile.span.line) == ("absent", 13)


def test_a_file_of_overrides_wins_over_the_script(folder: Path) -> None:
    path = folder / "config" / "wide.py"
    path.write_text('"""Wider."""\nimport time\nn_embd = 64\nbatch_size = 3\nout_dir = "a" + str(time.time())\n')
    [target] = found(path)
    assert values(target)["n_embd"] == (64, "wide.py", 3)
    assert values(target)["block_size"] == (32, "train.py", 8)
    assert {hint.field: hint.value for hint in target.hints}["batch"] == 3


def test_a_file_of_assignments_elsewhere_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("n_embd = 64\nn_layer = 2\n")
    assert found(tmp_path / "settings.py", trust=True) == []


def test_a_vocabulary_that_comes_from_data_is_no_knob(folder: Path) -> None:
    (folder / "data" / "letters").mkdir(parents=True)
    (folder / "data" / "letters" / "meta.pkl").write_bytes(b"not to be read")
    [target] = found(folder / "train.py")
    assert "vocab_size" not in values(target)
    assert any("meta.pkl" in note for note in target.notes)


def test_published_weights_bring_their_own_sizes(folder: Path) -> None:
    path = folder / "config" / "eval.py"
    path.write_text('init_from = "tiny-big"\n')
    [target] = found(path)
    assert target.trained_vocabulary
    assert "vocab_size" not in values(target)
    assert target.spec["config"]["values"] | {"block_size": 32} == {
        "n_layer": 5,
        "n_head": 8,
        "n_embd": 96,
        "vocab_size": 777,
        "block_size": 32,
    }


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "class A:\n    n_embd: int = 64\n",
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, a, b): ...\n    def forward(self, x): ...\n",
        "# nn.Module\n",
        "",
    ],
)
def test_other_python_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text)
    assert found(tmp_path / "m.py", trust=True) == []


def test_a_module_without_transformer_numbers_needs_trust_to_be_a_target(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, wide=96): ...\n    def forward(self, x): ...\n"
    (tmp_path / "m.py").write_text(text)
    assert found(tmp_path / "m.py") == []
    assert len(found(tmp_path / "m.py", trust=True)) == 1


def test_without_trust_the_numbers_are_estimated(folder: Path) -> None:
    [target] = found(folder / "train.py")
    trace = PlainPython().estimate(target, Workload(batch=12, sequence=32), {})
    assert trace is not None
    assert trace.basis == "estimated"
    head = next(op.gemm for op in trace.ops if op.module == "lm_head" and op.phase == "forward" and op.gemm)
    assert (head.m, head.n, head.k) == (384, 520, 56)
    assert dict(head.origins)["n"] == "{train.py:18:74}"
    [knob] = [knob for knob in target.knobs if knob.id == "train.py:18:74"]
    changed = PlainPython().estimate(target, Workload(batch=12, sequence=32), {knob.id: 528})
    assert changed is not None
    assert 528 in {op.gemm.n for op in changed.ops if op.gemm}


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    pytest.importorskip("torch")
    from lintgpu.trace.client import Worker

    # Each spec names its own root; what the worker may read is settled by the folder all of them are in.
    with Worker(trust=True, project_root="/") as running:
        yield running


def test_a_trusted_script_is_built_without_running_its_statements(folder: Path, worker: Any) -> None:
    [target] = found(folder / "train.py", trust=True)
    trace = worker.trace(target, Workload(batch=2, sequence=32))
    assert isinstance(trace, Trace), trace
    assert trace.model_class == "Tiny"
    assert dict(trace.inputs) == {"idx": (2, 32), "targets": (2, 32)}
    head = next(op.gemm for op in trace.ops if op.module == "lm_head" and op.phase == "forward" and op.gemm)
    assert dict(head.origins)["n"] == "{train.py:18:74}"
    assert dict(head.origins)["k"] == "{train.py:9:10}"
    changed = worker.trace(target, Workload(batch=2, sequence=32), {"train.py:9:10": 64})
    assert isinstance(changed, Trace), changed
    assert 64 in {op.gemm.k for op in changed.ops if op.gemm}


def test_a_literal_of_the_models_own_code_is_a_knob(folder: Path, worker: Any) -> None:
    (folder / "model.py").write_text(MODEL.replace("4 * config.n_embd", "200"))
    [target] = found(folder / "train.py", trust=True)
    trace = worker.trace(target, Workload(batch=2, sequence=32))
    assert isinstance(trace, Trace), trace
    knobs = [PlainPython().resolve(target, knob_id) for knob_id in trace.knobs_seen]
    assert {(knob.name, knob.value, knob.span.line) for knob in knobs if knob} >= {("out_features", 200, 19), ("in_features", 200, 20)}


def test_a_model_that_takes_only_short_sequences_is_traced_with_one(folder: Path, worker: Any) -> None:
    check = "        assert idx.shape[1] <= 64, 'too long'\n        x = self.wte(idx)"
    (folder / "model.py").write_text(MODEL.replace("        x = self.wte(idx)", check))
    [target] = found(folder / "train.py", trust=True)
    trace = worker.trace(replace(target, hints=()), Workload(batch=2, sequence=1024))
    assert isinstance(trace, Trace), trace
    assert dict(trace.inputs)["idx"] == (2, 64)
    assert any("no sequence of 1024" in said for said in trace.assumptions)
