"""Models that the project's owner names: declared without running code, built with every literal and key as a knob."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lintgpu import settings
from lintgpu.settings import SettingsError
from lintgpu.target.base import Knob, Target
from lintgpu.target.python_module import PythonModule
from lintgpu.trace.records import Trace, TraceFailure
from lintgpu.workload import Mode, Workload

MODULE = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    vocab: int = 130
    width: int = 48

class Net(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.up = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(3 * config.width, 99)
        self.head = nn.Linear(99, config.vocab)

    def forward(self, tokens, labels=None):
        logits = self.head(self.mix(torch.relu(self.up(self.embed(tokens)))))
        if labels is None:
            return logits
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

def factory(width=40, depth=2):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def images():
    return nn.Conv2d(3, 24, 16, stride=16)

def example(batch):
    return torch.zeros(batch, 40)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def worker(root: Path) -> Iterator[Any]:
    pytest.importorskip("torch")
    from lintgpu.trace.client import Worker

    with Worker(trust=True, project_root=str(root)) as running:
        yield running


@pytest.fixture
def project(root: Path) -> Path:
    tmp_path = root
    (tmp_path / "src" / "shop").mkdir(parents=True, exist_ok=True)
    (tmp_path / "src" / "shop" / "__init__.py").write_text("")
    (tmp_path / "src" / "shop" / "nets.py").write_text(MODULE)
    return tmp_path


def declare(project: Path, toml: str) -> Target:
    path = project / "pyproject.toml"
    path.write_text(toml)
    [target] = PythonModule().declared(settings.load(str(path)))
    return target


def test_a_declared_target_runs_nothing_and_sits_on_its_model(project: Path) -> None:
    (project / "src" / "shop" / "nets.py").write_text("raise SystemExit('it ran')\nclass Net: ...\n")
    target = declare(project, '[tool.lintgpu.targets.net]\nmodel = "shop.nets:Net"\n')
    assert (target.name, target.runs_project_code) == ("net", True)
    assert (target.span.line, target.span.column) == (2, 9)
    assert any(file.endswith("nets.py") for file in target.files)


def test_values_in_the_table_are_knobs_at_their_place(project: Path) -> None:
    target = declare(project, '[tool.lintgpu.targets.net]\nmodel = "shop.nets:factory"\nkwargs = { width = 500, depth = 2 }\n')
    assert [(knob.id, knob.value, knob.role, knob.span.line, knob.span.column) for knob in target.knobs] == [
        ("kwargs.width", 500, "hidden", 3, 20),
        ("kwargs.depth", 2, "layers", 3, 33),
    ]


@pytest.mark.parametrize(("name", "text"), [("c.yaml", "model:\n  width: 56 # wide\n"), ("c.json", '{"model":\n {"width": 56}}')])
def test_a_config_file_gives_knobs_in_that_file(project: Path, name: str, text: str) -> None:
    (project / name).write_text(text)
    target = declare(project, f'[tool.lintgpu.targets.net]\nmodel = "shop.nets:Net"\nconfig = "{name}"\n')
    [knob] = target.knobs
    assert (knob.id, knob.value, knob.span.line) == ("model.width", 56, 2)
    assert knob.span.path.endswith(name)


@pytest.mark.parametrize(
    ("toml", "message", "line"),
    [
        ('[tool.lintgpu.targets.net]\nmodle = "a:b"\n', "unknown key 'modle'", 1),
        ("[tool.lintgpu.targets.net]\n", "needs model", 1),
        ('[tool.lintgpu.targets.net]\nmodel = "shop.nets"\n', "needs model", 1),
        ('[tool.lintgpu.targets.net]\nmodel = "a:b"\nconfig = "missing.yaml"\n', "no such file", 3),
        ('[tool.lintgpu.targets.net]\nmodel = "a:b"\nconfig = 7\n', "config must be", 3),
    ],
)
def test_a_wrong_table_is_one_clear_error(project: Path, toml: str, message: str, line: int) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        declare(project, toml)
    assert caught.value.line == line


def traced(worker: Any, target: Target, workload: Workload | None = None, **changes: int) -> Any:
    trace = worker.trace(target, workload or Workload(batch=2, sequence=16), changes)
    assert isinstance(trace, Trace), trace
    return trace


def knobs(target: Target, trace: Any) -> dict[str, Knob]:
    found = [PythonModule().resolve(target, knob_id) for knob_id in trace.knobs_seen]
    return {knob.name: knob for knob in found if knob is not None}


def test_dataclass_defaults_and_literals_are_the_knobs_of_a_source_model(project: Path, worker: Any) -> None:
    target = declare(project, '[tool.lintgpu.targets.net]\nmodel = "shop.nets:Net"\nconfig = "shop.nets:Config"\n')
    trace = traced(worker, target)
    found = knobs(target, trace)
    assert {name: (knob.value, knob.role, knob.span.line, knob.span.column) for name, knob in found.items()} == {
        "vocab": (130, "vocabulary", 8, 18),
        "width": (48, "hidden", 9, 18),
        "out_features": (99, "", 16, 48),
        "in_features": (99, "", 17, 31),
    }
    up = next(op.gemm for op in trace.ops if op.module == "up" and op.phase == "forward" and op.gemm)
    assert dict(up.origins)["n"] == "(3*{src/shop/nets.py:9:18})"
    assert "labels" in dict(trace.inputs)


def test_a_literal_can_be_changed_for_a_rebuild(project: Path, worker: Any) -> None:
    target = declare(project, '[tool.lintgpu.targets.net]\nmodel = "shop.nets:Net"\nconfig = "shop.nets:Config"\n')
    trace = traced(worker, target, **{"src/shop/nets.py:8:18": 136})
    assert 136 in {op.gemm.n for op in trace.ops if op.gemm}


def test_inline_config_values_reach_the_annotated_dataclass(project: Path, worker: Any) -> None:
    target = declare(project, '[tool.lintgpu.targets.net]\nmodel = "shop.nets:Net"\nconfig = { width = 56, other = 1 }\n')
    assert 56 in {op.gemm.k for op in traced(worker, target).ops if op.gemm}


def test_example_inputs_may_be_a_function_or_a_table(project: Path, worker: Any) -> None:
    by_function = declare(project, '[tool.lintgpu.targets.f]\nmodel = "shop.nets:factory"\nexample_inputs = "shop.nets:example"\n')
    assert {op.gemm.m for op in traced(worker, by_function, Workload(batch=7)).ops if op.gemm and op.phase == "forward"} == {7}
    table = 'example_inputs = { input = { shape = ["batch", 5, 40] } }'
    by_table = declare(project, f'[tool.lintgpu.targets.f]\nmodel = "shop.nets:factory"\n{table}\n')
    assert {op.gemm.m for op in traced(worker, by_table, Workload(batch=3)).ops if op.gemm and op.phase == "forward"} == {15}


def test_without_an_example_the_first_layer_says_what_it_takes(project: Path, worker: Any) -> None:
    target = declare(project, '[tool.lintgpu.targets.i]\nmodel = "shop.nets:images"\n')
    assert dict(traced(worker, target).inputs)["input"] == (2, 3, 224, 224)


def test_what_cannot_be_built_says_why(project: Path, worker: Any) -> None:
    def reason(model: str, workload: Workload) -> tuple[str, str]:
        failure = worker.trace(declare(project, f'[tool.lintgpu.targets.f]\nmodel = "{model}"\n'), workload)
        assert isinstance(failure, TraceFailure), failure
        return failure.stage, failure.reason

    assert "KV cache" in reason("shop.nets:factory", Workload(mode=Mode.DECODE, autocast=False))[1]
    assert "has no gone" in reason("shop.nets:gone", Workload())[1]
    assert reason("shop.absent:Net", Workload()) == ("environment", "No module named 'shop.absent'")
