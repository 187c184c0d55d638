"""The worker process as its callers see it: answers, limits, confinement, and no code of a project without its owner's say-so."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lintgpu.finding import Span  # noqa: E402
from lintgpu.target.base import Target  # noqa: E402
from lintgpu.trace.client import Limits, Worker, environment  # noqa: E402
from lintgpu.trace.records import Trace, TraceFailure  # noqa: E402
from lintgpu.workload import Workload  # noqa: E402

SPAN = Span("models.py", 1, 1, 1, 1)
SMALL = Workload(batch=2, sequence=16)

MODELS = """
import json, os, socket, sys, time
import torch
from torch import nn

print("printed while importing")

def plain():
    return nn.Linear(24, 40)

def noisy():
    print('{"trace": "not this"}', flush=True)
    os.write(1, b"raw bytes\\n")
    sys.stderr.write("more\\n")
    return nn.Linear(24, 40)

def dies():
    os._exit(3)

def leaves():
    sys.exit("enough")

def hangs():
    time.sleep(600)

def hungry():
    return nn.Linear(int(len(bytearray(64 << 30)) > 0), 8)

def tries():
    def attempt(action):
        try:
            action()
            return "allowed"
        except OSError as error:
            return type(error).__name__
    results = {
        "connect": attempt(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1)),
        "socket": attempt(lambda: socket.socket(socket.AF_UNIX)),
        "write project": attempt(lambda: open(os.path.join(os.path.dirname(__file__), "written"), "w")),
        "write home": attempt(lambda: open(os.path.expanduser("~/.lintgpu-written"), "w")),
        "read secret": attempt(lambda: open(os.environ["LINTGPU_TEST_SECRET"]).read()),
        "read project": attempt(lambda: open(__file__).read()),
        "write scratch": attempt(lambda: open(os.path.join(os.environ["TMPDIR"], "x"), "w")),
    }
    raise RuntimeError(json.dumps(results))
"""


def target(attribute: str, root: Path) -> Target:
    spec = {"root": str(root), "module": "models", "attribute": attribute}
    return Target(attribute, "python", SPAN, spec, runs_project_code=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "models.py").write_text(MODELS)
    return root


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elsewhere") / "secret"
    path.write_text("secret")
    return path


@pytest.fixture(scope="module")
def worker(project: Path, secret: Path) -> Worker:
    with pytest.MonkeyPatch.context() as patch, Worker(trust=True, project_root=str(project)) as running:
        patch.setenv("LINTGPU_TEST_SECRET", str(secret))
        yield running


def test_one_process_answers_many_requests(worker: Worker, project: Path) -> None:
    first = worker.trace(target("plain", project), SMALL)
    pid = worker.hello["pid"]
    second = worker.trace(target("plain", project), SMALL)
    assert isinstance(first, Trace)
    assert isinstance(second, Trace)
    assert first.model_class == "Linear"
    assert first.ops == second.ops
    assert worker.hello["pid"] == pid


def test_what_a_model_prints_does_not_reach_the_answers(worker: Worker, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(worker.trace(target("noisy", project), SMALL), Trace)
    assert capfd.readouterr() == ("", "")


def test_stages_are_reported_in_order(project: Path) -> None:
    stages: list[str] = []
    with Worker(trust=True, project_root=str(project), progress=stages.append) as worker:
        worker.trace(target("plain", project), SMALL)
    assert stages == ["importing", "building", "tracing"]


def test_a_death_is_an_answer_and_the_next_request_starts_anew(worker: Worker, project: Path) -> None:
    worker.trace(target("plain", project), SMALL)
    pid = worker.hello["pid"]
    failure = worker.trace(target("dies", project), SMALL)
    assert isinstance(failure, TraceFailure)
    assert failure.stage == "crash"
    assert "exit status 3" in failure.reason
    assert isinstance(worker.trace(target("plain", project), SMALL), Trace)
    assert worker.hello["pid"] != pid


def test_sys_exit_of_a_model_does_not_end_the_worker(worker: Worker, project: Path) -> None:
    worker.trace(target("plain", project), SMALL)
    pid = worker.hello["pid"]
    failure = worker.trace(target("leaves", project), SMALL)
    assert isinstance(failure, TraceFailure)
    assert "enough" in failure.reason
    assert isinstance(worker.trace(target("plain", project), SMALL), Trace)
    assert worker.hello["pid"] == pid


def test_the_time_limit_ends_a_request(project: Path) -> None:
    with Worker(limits=Limits(seconds=4), trust=True, project_root=str(project)) as worker:
        failure = worker.trace(target("hangs", project), SMALL)
    assert isinstance(failure, TraceFailure)
    assert (failure.stage, failure.reason) == ("limit", "took longer than the 4 s it was allowed")
    assert "time-limit" in failure.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Windows enforces no memory limit")
def test_the_memory_limit_is_named_as_such(worker: Worker, project: Path) -> None:
    failure = worker.trace(target("hungry", project), SMALL)
    assert isinstance(failure, TraceFailure)
    assert failure.stage == "limit"
    assert "memory" in failure.reason
    assert "memory-limit-gb" in failure.hint


def test_no_network_no_writes_and_no_reads_elsewhere(worker: Worker, project: Path) -> None:
    failure = worker.trace(target("tries", project), SMALL)
    assert isinstance(failure, TraceFailure)
    if worker.hello["missing"]:
        pytest.skip(f"this kernel cannot enforce: {worker.hello['missing']}")
    results = json.loads(failure.reason)
    assert {name for name, result in results.items() if result == "allowed"} == {"read project", "write scratch"}
    assert not (project / "written").exists()


def test_what_is_enforced_is_said(worker: Worker, project: Path) -> None:
    worker.trace(target("plain", project), SMALL)
    named = [*worker.hello["enforced"], *(item.partition(" (")[0] for item in worker.hello["missing"])]
    assert sorted(named) == ["no network", "no new privileges", "read-only files", "resource limits"]


def test_project_code_needs_a_say_so(project: Path) -> None:
    with Worker(project_root=str(project)) as worker:
        failure = worker.trace(target("plain", project), SMALL)
        assert worker.hello == {}
    assert isinstance(failure, TraceFailure)
    assert failure.stage == "trust"
    assert "--trust" in failure.hint


def test_an_interpreter_without_torch_says_how_to_get_it(tmp_path: Path, project: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=sys.platform != "win32")
    python = tmp_path / "bare" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    with Worker(python=str(python)) as worker:
        failure = worker.trace(Target("gpt2", "huggingface", SPAN, {"config": {"model_type": "gpt2"}}), SMALL)
    assert isinstance(failure, TraceFailure)
    assert failure.stage == "environment"
    assert "torch is not installed" in failure.reason
    assert failure.hint == "pip install 'lintgpu[trace]'"


def test_an_environment_without_transformers_says_how_to_get_it() -> None:
    code = textwrap.dedent("""
        import dataclasses, json, sys
        sys.modules["transformers"] = None
        from lintgpu.trace.worker import answer
        from lintgpu.workload import Workload
        request = {"family": "huggingface", "spec": {"config": {"model_type": "gpt2"}}, "changes": {}}
        request["workload"] = dataclasses.asdict(Workload())
        print(json.dumps(dataclasses.asdict(answer(request, lambda stage: None))))
    """)
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    failure = json.loads(finished.stdout)
    assert failure["stage"] == "environment"
    assert failure["hint"] == "pip install 'lintgpu[hf]'"


@pytest.mark.parametrize("python", ["no-such-interpreter", "/nowhere/python"])
def test_a_missing_interpreter_is_an_environment_failure(python: str) -> None:
    with Worker(python=python) as worker:
        failure = worker.trace(Target("gpt2", "huggingface", SPAN, {"config": {"model_type": "gpt2"}}), SMALL)
    assert isinstance(failure, TraceFailure)
    assert failure.stage == "environment"
    assert "cannot start" in failure.reason


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_program_that_is_no_python_is_an_environment_failure(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho this is no python >&2\nexit 7\n")
    program.chmod(0o755)
    with Worker(python=str(program)) as worker:
        failure = worker.trace(Target("gpt2", "huggingface", SPAN, {"config": {"model_type": "gpt2"}}), SMALL)
    assert isinstance(failure, TraceFailure)
    assert failure.stage == "environment"
    assert "this is no python" in failure.reason


def test_an_untrusted_environment_holds_no_secrets_and_no_path_into_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outside = tmp_path.parent / "outside"
    path = f"{tmp_path}:{tmp_path}/src:.:{outside}"
    current = {"PATH": "/bin", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0", "RANK": "3"}
    made = environment(current, "/scratch", None)
    assert made["PATH"] == "/bin"
    assert made["PYTHONPATH"] == str(outside)
    assert made["CUDA_VISIBLE_DEVICES"] == ""
    assert made["HF_HUB_OFFLINE"] == "1"
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RANK"} & set(made)


def test_a_trusted_environment_is_the_owners_own_without_a_launchers_leftovers() -> None:
    made = environment({"DATA_DIR": "/data", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "/scratch", "/project")
    assert made["DATA_DIR"] == "/data"
    assert not {"WORLD_SIZE", "LOCAL_RANK"} & set(made)
