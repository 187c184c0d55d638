"""timm's hub configs and train.py arguments: which files are taken, what they say of the workload, and what is built of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lintgpu.settings import Settings
from lintgpu.source import read
from lintgpu.target.base import Target
from lintgpu.target.timm import Timm
from lintgpu.trace.records import Trace, TraceFailure
from lintgpu.workload import Mode, Workload

HUB = {"architecture": "vit_tiny_patch16_224", "num_classes": 1001, "num_features": 192, "pretrained_cfg": {"input_size": [3, 224, 224]}}
ARGUMENTS = """
model: resnet18
batch_size: 256
num_classes: 1001
opt: lamb
sched: cosine
warmup_epochs: 5
amp: true
amp_dtype: bfloat16
torchcompile: null
"""
SMALL = Workload(batch=2, autocast=False)
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


def targets(folder: Path, data: Any, name: str) -> list[Target]:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data, indent=2))
    return list(Timm().find(read(str(path)), Settings()))


def hints(target: Target) -> dict[str, Any]:
    return {hint.field: hint.value for hint in target.hints}


def test_a_hub_config_is_a_target_on_its_architecture(tmp_path: Path) -> None:
    [target] = targets(tmp_path, HUB, "config.json")
    assert (target.name, target.span.line, target.span.column) == ("vit_tiny_patch16_224", 2, 19)
    assert [(knob.id, knob.value) for knob in target.knobs] == [("num_classes", 1001)]


def test_arguments_of_train_py_state_the_workload(tmp_path: Path) -> None:
    [target] = targets(tmp_path, ARGUMENTS, "args.yaml")
    assert hints(target) == {"batch": 256, "dtype": "bf16"}
    assert target.compile is not None
    assert target.compile.state == "absent"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("amp: true", {"dtype": "fp16"}),
        ("amp: false", {"dtype": "tf32"}),
        ("torchcompile: inductor", {"compile": "default"}),
        ("batch_size: none", {}),
    ],
)
def test_each_argument_is_read_as_train_py_means_it(tmp_path: Path, line: str, expected: dict[str, Any]) -> None:
    [target] = targets(tmp_path, f"model: resnet18\nopt: sgd\nsched: cosine\nmixup: 0.2\n{line}\n", "args.yaml")
    assert hints(target) == expected


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", {"architecture": "x86_64", "system": "linux"}),
        ("config.json", {"architecture": "resnet50", "model_type": "timm_wrapper", "num_features": 2048}),
        ("config.json", {"architecture": ["resnet50"], "num_features": 2048}),
        ("config.json", []),
        ("run.yaml", "model: gpt2\nbatch_size: 8\nlr: 0.1\nepochs: 3\n"),
        ("run.yaml", "model:\n  name: resnet50\nopt: sgd\nsched: cosine\nmixup: 0.1\n"),
        ("run.yaml", "- model\n"),
    ],
)
def test_other_files_are_left_alone(tmp_path: Path, name: str, data: Any) -> None:
    assert targets(tmp_path, data, name) == []


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    pytest.importorskip("torch")
    from lintgpu.trace.client import Worker

    with Worker() as running:
        yield running


def traced(worker: Any, folder: Path, data: Any, name: str = "config.json", workload: Workload = SMALL, **changes: int) -> Trace:
    [target] = targets(folder, data, name)
    trace = worker.trace(target, workload, changes)
    assert isinstance(trace, Trace), trace
    return trace


def failed(worker: Any, folder: Path, data: Any, workload: Workload = SMALL) -> TraceFailure:
    [target] = targets(folder, data, "config.json")
    failure = worker.trace(target, workload)
    assert isinstance(failure, TraceFailure)
    return failure


def gemm(trace: Trace, module: str) -> dict[str, Any]:
    [op] = [op for op in trace.ops if op.module == module and op.phase == "forward" and op.kind == "gemm"]
    assert op.gemm is not None
    return {"m": op.gemm.m, "n": op.gemm.n, "k": op.gemm.k, "count": op.count, **{f"{d}_from": e for d, e in op.gemm.origins}}


@needs_timm
def test_a_hub_config_is_built_at_its_own_image_size_with_the_knobs_of_the_file(worker: Any, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, HUB)
    assert trace.inputs == (("0", (2, 3, 224, 224)),)
    head = gemm(trace, "head")
    assert (head["n"], head["n_from"], head["k"]) == (1001, "{num_classes}", 192)
    assert gemm(traced(worker, tmp_path, HUB, num_classes=1008), "head")["n"] == 1008


@needs_timm
def test_the_sizes_behind_a_name_are_knobs_on_it(worker: Any, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, HUB)
    assert gemm(trace, "blocks.*.attn.proj")["n_from"] == "{default:embed_dim=192}"
    [target] = targets(tmp_path, HUB, "config.json")
    knob = Timm().resolve(target, "default:embed_dim=192")
    assert knob is not None
    assert (knob.value, knob.role, knob.span) == (192, "hidden", target.span)
    wider = traced(worker, tmp_path, HUB, **{"default:embed_dim=192": 384})
    assert gemm(wider, "blocks.*.attn.proj")["n"] == 384


@needs_timm
def test_model_args_are_handed_on(worker: Any, tmp_path: Path) -> None:
    data = {**HUB, "model_args": {"img_size": 64, "depth": 3, "embed_dim": 96}, "pretrained_cfg": {"input_size": [3, 64, 64]}}
    proj = gemm(traced(worker, tmp_path, data), "blocks.*.attn.proj")
    assert (proj["m"], proj["n"], proj["count"], proj["n_from"]) == (2 * 17, 96, 3, "{model_args.embed_dim}")


@needs_timm
def test_channels_last_reaches_the_convolutions(worker: Any, tmp_path: Path) -> None:
    layouts = {}
    for flag in ("true", "false"):
        trace = traced(worker, tmp_path, f"{ARGUMENTS}channels_last: {flag}\nimg_size: 64\n", "args.yaml")
        layouts[flag] = {op.conv.channels_last for op in trace.ops if op.conv is not None and op.phase == "forward"}
        assert trace.inputs == (("0", (2, 3, 64, 64)),)
    assert layouts == {"true": {True}, "false": {False}}


@needs_timm
def test_training_ends_in_cross_entropy_over_the_classes(worker: Any, tmp_path: Path) -> None:
    trace = traced(worker, tmp_path, HUB)
    assert "loss" in {op.kind for op in trace.ops}
    assert not any("loss was left out" in text for text in trace.assumptions)


@needs_timm
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"architecture": "resnet_of_nobody"}, "has no model 'resnet_of_nobody'"), ({"model_args": {"depth": "deep"}}, "")],
)
def test_a_config_that_cannot_be_built_says_why(worker: Any, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    failure = failed(worker, tmp_path, {**HUB, **change})
    assert failure.stage in ("config", "build")
    assert reason in failure.reason


@needs_timm
def test_a_model_of_someone_elses_hub_repository_is_not_fetched(worker: Any, tmp_path: Path) -> None:
    [target] = targets(tmp_path, "model: hf_hub:someone/resnet18\nopt: sgd\nsched: cosine\nmixup: 0.2\n", "args.yaml")
    failure = worker.trace(target, SMALL)
    assert failure.stage == "config"
    assert "never asks" in failure.reason


@needs_timm
def test_there_is_no_decode_step(worker: Any, tmp_path: Path) -> None:
    assert "no decode step" in failed(worker, tmp_path, HUB, Workload(mode=Mode.DECODE, batch=2)).reason
