"""No kept result outlives what it was made from: each input is changed in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lintgpu import cache as caches
from lintgpu import engine
from lintgpu.cache import Cache, key_of
from lintgpu.cli import main
from lintgpu.settings import load
from lintgpu.trace import client

GPT2 = '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],\n "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}\n'
PROJECT = """\
[tool.lintgpu.targets.net]
model = "pkg.net:Net"
kwargs = { given = 104 }
example_inputs = { x = { shape = [8, 64], dtype = "float32" } }
"""
NET = """\
import json
import os
from pathlib import Path

import tinylib
import torch.nn as nn

from pkg.sizes import HIDDEN


class Net(nn.Module):
    def __init__(self, given):
        super().__init__()
        read = json.loads((Path(__file__).parent / "sizes.json").read_text())["read"]
        sizes = given, HIDDEN, read, int(os.environ.get("NET_SIZE", "136")), tinylib.SIZE
        self.layers = nn.ModuleList(nn.Linear(64, size) for size in sizes)

    def forward(self, x):
        return sum(layer(x).mean() for layer in self.layers)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    library = folder.parent / f"{folder.name}-env" / "site-packages"
    (library / "tinylib-1.0.dist-info").mkdir(parents=True)
    (library / "tinylib.py").write_text("SIZE = 144\n")
    monkeypatch.setenv("PYTHONPATH", str(library))
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "sizes.py").write_text("HIDDEN = 112\n")
    (folder / "pkg" / "sizes.json").write_text('{"read": 128}')
    (folder / "pkg" / "net.py").write_text(NET)
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def run(command: str, *arguments: str) -> str:
    result = CliRunner().invoke(main, [command, "-f", "json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout


def widths() -> list[int]:
    """The output sizes of the net's layers."""
    (target,) = json.loads(run("shapes", "."))["targets"]
    return sorted(op["n"] for op in target["ops"] if op["kind"] == "gemm" and op["phase"] == "forward")


@contextmanager
def no_worker() -> Iterator[None]:
    """Nothing can be traced: what is answered was kept."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a worker was started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "Worker", refuse)
        yield


def test_whatever_the_build_looked_at_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path(os.environ["PYTHONPATH"])

    def upgrade() -> None:
        (library / "tinylib.py").write_text("SIZE = 208\n")
        (library / "tinylib-1.0.dist-info").rename(library / "tinylib-2.0.dist-info")

    assert widths() == [104, 112, 128, 136, 144]
    changes = (
        (lambda: (project / "pyproject.toml").write_text(PROJECT.replace("104", "168")), [112, 128, 136, 144, 168]),
        (lambda: (project / "pkg" / "sizes.py").write_text("HIDDEN = 176\n"), [128, 136, 144, 168, 176]),
        (lambda: (project / "pkg" / "sizes.json").write_text('{"read": 184}'), [136, 144, 168, 176, 184]),
        (lambda: monkeypatch.setenv("NET_SIZE", "192"), [144, 168, 176, 184, 192]),
        (upgrade, [168, 176, 184, 192, 208]),
        (lambda: (project / "pkg" / "net.py").write_text(NET.replace("tinylib.SIZE", "216")), [168, 176, 184, 192, 216]),
    )
    for change, expected in changes:
        change()
        time.sleep(0.05)  # What was written in the very moment that a run began is not kept.
        assert widths() == expected
        with no_worker():
            assert widths() == expected
    # Another variable of the environment, and another date of a file, are none of its business.
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    os.utime(project / "pkg" / "sizes.py", (1, 1))
    with no_worker():
        assert widths() == [168, 176, 184, 192, 216]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), str(project.parent)]))
    with pytest.raises(AssertionError, match="a worker was started"), no_worker():
        widths()


def test_a_source_saved_while_it_is_traced_is_traced_again(project: Path) -> None:
    request = engine.Request((".",), cache=Cache(caches.default_folder()))

    def save(progress: engine.Progress) -> None:
        if progress.stage == "tracing":
            (project / "pkg" / "sizes.py").write_text("HIDDEN = 232\n")

    engine.costs(engine.Request(request.paths, cache=request.cache, progress=save))
    assert 232 in widths()


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--batch", "2"), ("--seq", "512"), ("--dtype", "fp16"), ("--no-autocast",), ("--mode", "infer"), ("--mode", "decode")),
        *(("--compile",), ("--gpu", "A100"), ("--gpu", "H200", "--gpu", "A100"), ("--select", "LG2"), ("--ignore", "LG101")),
    ],
)
def test_every_option_counts(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "config.json").write_text(GPT2)
    first = run("check", "--static", "config.json")
    changed = run("check", "--static", "config.json", *arguments)
    assert changed != first
    assert changed == run("check", "--static", "--no-cache", "config.json", *arguments)
    assert run("check", "--static", "config.json") == first


@pytest.mark.parametrize("change", [("50257", "32001"), ("768", "1536"), (' "vocab', '\n  "vocab'), ('"n_layer": 12', '"n_layer": 3')])
def test_the_config_counts_and_so_do_its_places(folder: Path, change: tuple[str, str]) -> None:
    (folder / "config.json").write_text(GPT2)
    first = run("check", "--static", "config.json")
    (folder / "config.json").write_text(GPT2.replace(*change))
    changed = run("check", "--static", "config.json")
    assert changed != first
    assert changed == run("check", "--static", "--no-cache", "config.json")


def test_settings_count(folder: Path) -> None:
    (folder / "config.json").write_text(GPT2)
    outputs = [run("check", "--static", "config.json")]
    for settings in ("[workload]\nbatch = 2", "[workload]\noptimizer = 'none'", 'gpu = "B200"', 'ignore = ["LG1"]'):
        table, _, rest = settings.partition("]\n") if settings.startswith("[") else ("", "", settings)
        (folder / "pyproject.toml").write_text(f"[tool.lintgpu{'.workload' if table else ''}]\n{rest}\n")
        outputs.append(run("check", "--static", "config.json"))
        assert outputs[-1] == run("check", "--static", "--no-cache", "config.json")
    assert len(set(outputs)) == len(outputs)


def test_a_calibration_counts_by_its_content(folder: Path) -> None:
    profiles = Path(client.__file__).parent.parent / "gpu" / "profiles"
    (folder / "config.json").write_text(GPT2)
    outputs = []
    for name in ("h200-sxm-141gb.npz", "a100-sxm4-80gb.npz"):
        (folder / "mine.npz").write_bytes((profiles / name).read_bytes())
        outputs.append(run("check", "--static", "config.json", "--gpu", "mine.npz"))
        assert outputs[-1] == run("check", "--static", "--no-cache", "config.json", "--gpu", "mine.npz")
    assert outputs[0] != outputs[1]


def test_this_lintgpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of("a")
    assert key_of("a") == before
    monkeypatch.setattr(caches, "code_stamp", lambda: ["another version", []])
    assert key_of("a") != before


def test_an_interpreter_named_by_a_path_is_the_projects_own(folder: Path) -> None:
    found = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "pyproject.toml").write_text('[tool.lintgpu]\npython = "env/bin/python"\n')
        found.append(load(str(folder / name / "pyproject.toml")).interpreter)
    assert found == [str(folder / name / "env" / "bin" / "python") for name in ("one", "two")]


def test_sixteen_runs_at_once_report_the_same(folder: Path) -> None:
    (folder / "config.json").write_text(GPT2)
    command = [sys.executable, "-m", "lintgpu", "check", "--static", "-f", "json", "config.json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    outputs = {process.communicate()[0] for process in running}
    assert outputs == {run("check", "--static", "--no-cache", "config.json")}
    assert {process.returncode for process in running} == {1}
