"""The warm worker with its real server: the same answers as a cold one, and a cold one wherever anything is amiss."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if os.name != "posix":
    pytest.skip("the warm worker is for POSIX", allow_module_level=True)

from click.testing import CliRunner

from lintgpu.cli import main
from lintgpu.finding import Span
from lintgpu.settings import discover
from lintgpu.target.base import Target
from lintgpu.trace import warm
from lintgpu.trace.client import Limits, Worker
from lintgpu.trace.records import Trace, TraceFailure
from lintgpu.trace.warm import Warmth
from lintgpu.workload import Workload

SPAN = Span("models.py", 1, 1, 1, 1)
SMALL = Workload(batch=2, sequence=16)
MODELS = """
import os, time
from torch import nn

def plain():
    return nn.Linear(24, 40)

def slow():
    time.sleep(1.5)
    return nn.Linear(24, 40)

def dies():
    os._exit(3)

def hangs():
    time.sleep(600)
"""
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 48, "num_hidden_layers": 2},
}


def target(attribute: str, root: Path) -> Target:
    spec = {"root": str(root), "module": "models", "attribute": attribute}
    return Target(attribute, "python", SPAN, spec, runs_project_code=True)


def servers_of(warmth: Warmth) -> set[int]:
    return {int(lock.read_text()) for lock in warmth.folder.glob("*.lock")}


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


def parent_of(pid: int) -> int:
    return int(subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout)


def wait_for_end(pid: int) -> None:
    give_up = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not is_alive(pid)


def plainly(outcome: Trace | TraceFailure) -> Trace | TraceFailure:
    return dataclasses.replace(outcome, seconds=0.0) if isinstance(outcome, Trace) else outcome


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that workers import from."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("libraries")
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


@pytest.fixture(scope="module")
def warmth(tmp_path_factory: pytest.TempPathFactory, libraries: Path) -> Iterator[Warmth]:
    """A place for servers, all of which are ended at the end."""
    made = Warmth(tmp_path_factory.mktemp("cache") / "warm", 120.0)
    yield made
    for pid in servers_of(made):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_answers_equal_the_cold_ones_also_after_libraries_were_imported_ahead(warmth: Warmth) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs lintgpu[hf]")
    targets = [Target(name, "huggingface", SPAN, {"config": config}) for name, config in CONFIGS.items()]
    with Worker() as cold:
        expected = [plainly(cold.trace(one, SMALL)) for one in targets]
    assert all(isinstance(trace, Trace) for trace in expected), expected
    for _ in range(2):
        for one, trace in zip(targets, expected, strict=True):
            with Worker(warmth=warmth) as worker:
                assert plainly(worker.trace(one, SMALL)) == trace
                assert parent_of(worker.hello["pid"]) in servers_of(warmth)


def test_code_of_a_project_runs_in_a_fork_under_the_same_confinement(warmth: Warmth, project: Path) -> None:
    with Worker(trust=True, project_root=str(project)) as cold, Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
        assert plainly(worker.trace(target("plain", project), SMALL)) == plainly(cold.trace(target("plain", project), SMALL))
        assert worker.hello | {"pid": 0} == cold.hello | {"pid": 0}
        (project / "models.py").write_text(MODELS.replace("40", "48"))
    with Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
        trace = worker.trace(target("plain", project), SMALL)
        assert isinstance(trace, Trace)
        assert {op.gemm.n for op in trace.ops if op.gemm and op.phase == "forward"} == {48}
        assert worker.hello["pid"] != os.getpid()


def test_a_check_reports_the_same(warmth: Warmth, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINTGPU_CACHE_DIR", str(warmth.folder.parent))
    monkeypatch.chdir(project)
    (project / "pyproject.toml").write_text('[tool.lintgpu.targets.net]\nmodel = "models:plain"\n')
    outputs = []
    for options in ([], ["--warm"]):
        report = json.loads(CliRunner().invoke(main, ["check", "-f", "json", "--no-cache", *options, "."]).stdout)
        for one in report["targets"]:
            assert one["basis"] == "traced"
            one.pop("trace_seconds")
        outputs.append(report)
    assert outputs[0] == outputs[1]
    (project / "pyproject.toml").write_text("[tool.lintgpu]\nwarm = true\n")
    assert discover(str(project)).warm


def test_a_death_is_told_by_a_cold_worker_and_a_limit_at_once(warmth: Warmth, project: Path) -> None:
    with Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
        failure = worker.trace(target("dies", project), SMALL)
        assert isinstance(failure, TraceFailure)
        assert (failure.stage, failure.reason) == ("crash", "the worker ended with exit status 3")
    with Worker(limits=Limits(seconds=3), trust=True, project_root=str(project), warmth=warmth) as worker:
        failure = worker.trace(target("hangs", project), SMALL)
        assert isinstance(failure, TraceFailure)
        assert failure.stage == "limit"
        wait_for_end(worker.hello["pid"])


def test_a_killed_server_in_the_middle_of_an_answer_means_a_cold_worker(warmth: Warmth, project: Path) -> None:
    killed = []

    def kill(stage: str) -> None:
        if stage == "building" and not killed:
            killed.extend([worker.hello["pid"], parent_of(worker.hello["pid"])])
            os.kill(killed[1], signal.SIGKILL)

    with Worker(trust=True, project_root=str(project), progress=kill, warmth=warmth) as worker:
        assert isinstance(worker.trace(target("slow", project), SMALL), Trace)
        assert parent_of(worker.hello["pid"]) == os.getpid()
    if sys.platform.startswith("linux"):
        wait_for_end(killed[0])
    with Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
        assert isinstance(worker.trace(target("plain", project), SMALL), Trace)
        assert parent_of(worker.hello["pid"]) in servers_of(warmth) - set(killed)


def test_an_idle_server_ends_and_leaves_no_socket_and_its_folder_is_the_users_alone(tmp_path: Path, project: Path) -> None:
    short = Warmth(tmp_path / "w", 1.0)
    short.folder.mkdir()
    short.folder.chmod(0o777)
    with Worker(trust=True, project_root=str(project), warmth=short) as worker:
        assert isinstance(worker.trace(target("slow", project), SMALL), Trace)
        (pid,) = servers_of(short)
        assert parent_of(worker.hello["pid"]) == pid
    assert short.folder.stat().st_mode & 0o777 == 0o700
    wait_for_end(pid)
    assert sorted(path.suffix for path in short.folder.iterdir()) == [".lock"]
    (tmp_path / "link").symlink_to(short.folder)
    assert warm.borrow(Warmth(tmp_path / "link"), sys.executable, os.environ, "/", None, 2) is None


def test_of_servers_that_race_one_serves_all(tmp_path: Path, project: Path) -> None:
    fresh = Warmth(tmp_path / "w", 1.0)

    def ask(_: int) -> tuple[bool, int]:
        with Worker(trust=True, project_root=str(project), warmth=fresh) as worker:
            return isinstance(worker.trace(target("plain", project), SMALL), Trace), parent_of(worker.hello["pid"])

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    (pid,) = servers_of(fresh)
    assert answers == [(True, pid)] * 4


def test_a_changed_library_ends_the_server(warmth: Warmth, project: Path, libraries: Path) -> None:
    servers = []
    for number in range(2):
        with Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
            assert isinstance(worker.trace(target("plain", project), SMALL), Trace)
            servers.append(parent_of(worker.hello["pid"]))
        (libraries / f"new_{number}.py").write_text("")
    assert servers[0] != servers[1]
    assert servers[1] in servers_of(warmth)


def test_a_project_that_shadows_a_library_gets_a_cold_worker(warmth: Warmth, project: Path) -> None:
    (project / "torch_like").mkdir()
    with Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
        worker.trace(target("plain", project), SMALL)
        assert parent_of(worker.hello["pid"]) in servers_of(warmth)
    (project / "numpy").mkdir()
    with Worker(trust=True, project_root=str(project), warmth=warmth) as worker:
        worker.trace(target("plain", project), SMALL)
        assert not worker.hello or parent_of(worker.hello["pid"]) == os.getpid()


def test_every_part_of_a_servers_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(**changes: str) -> str:
        return warm.server_name(sys.executable, {"PATH": "/bin", "TMPDIR": "/scratch", "PWD": "/", **changes}, "/scratch")

    names = {name(), name(PATH="/usr/bin"), name(PYTHONPATH="/lib"), name(HF_HOME="/elsewhere")}
    assert len(names) == 4
    assert name(PWD="/home", SHLVL="3") == name()
    assert warm.server_name(sys.executable, {"PATH": "/bin", "TMPDIR": "/other"}, "/other") == name()
    before = name()
    monkeypatch.setattr(warm, "code_stamp", lambda: ["another lintgpu"])
    assert name() != before
