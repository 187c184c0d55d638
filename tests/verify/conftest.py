"""A small model with a finding whose change can be measured on the CPU's clock: a dry run of the real code paths."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lintgpu import engine
from lintgpu.cache import Cache
from lintgpu.finding import Change, Confidence, Finding, FindingCost, Severity
from lintgpu.report.base import Report

needs_models = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="builds models: needs lintgpu[hf]",
)
CONFIG = {"model_type": "gpt2", "vocab_size": 1001, "n_layer": 1, "n_embd": 64, "n_head": 2}
WORKLOAD = {"batch": 2, "sequence": 32}


def claim(us: float, share: float) -> FindingCost:
    return FindingCost(2 * us, 2 * share, us, share, share, share * 0.7, share * 1.3, Confidence.CALIBRATED)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("dry") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="session")
def request_(config: str, tmp_path_factory: pytest.TempPathFactory) -> engine.Request:
    kept = Cache(tmp_path_factory.mktemp("traces"))
    return engine.Request((config,), {"gpus": ("H200",), "gpus_given": True}, WORKLOAD, kept)


@pytest.fixture(scope="session")
def report(request_: engine.Request) -> Report:
    """What check says of the config: nothing worth a finding, on a GPU."""
    return engine.check(request_)


@pytest.fixture(scope="session")
def planted(config: str, report: Report) -> Callable[..., Finding]:
    """A finding that somebody claims: the knob's new value, and the saving."""
    from lintgpu.source import read

    target = report.targets[0]

    def make(knob: str, suggestion: int, cost: FindingCost, **changes: Any) -> Finding:
        node = read(config).root.get(knob)
        assert node is not None
        found = Finding(
            code="LG101",
            name="misaligned-dimension",
            severity=Severity.ERROR,
            message=f"{knob} = {suggestion} is faster",
            span=node.span,
            target=target.name,
            knob=knob,
            value=CONFIG[knob],
            suggestion=suggestion,
            gpu=target.gpu,
            workload=target.workload,
            cost=cost,
            change=Change(knobs=((knob, suggestion),)),
        )
        return replace(found, **changes)

    return make
