"""The hooks, through the real pre-commit on a small model repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pre_commit") is None, reason="needs pre-commit")


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def model_repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "config.json").write_text((TOP / "examples" / "gpt2" / "config.json").read_text())
    (folder / "notes.py").write_text("x = 1\n")
    git(folder, "add", ".")
    return folder


@pytest.fixture
def lintgpu_repository(tmp_path: Path) -> Path:
    """This checkout as a repository of one commit, uncommitted changes included."""
    folder = tmp_path / "lintgpu"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=TOP, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (TOP / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((TOP / name).read_bytes())
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")
    return folder


def try_repo(hook: str, models: Path, repository: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PRE_COMMIT_HOME": str(tmp_path / "pre-commit"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pre_commit", "try-repo", str(repository), hook, "--all-files", "--verbose"]
    return subprocess.run(command, cwd=models, capture_output=True, text=True, env=env, check=False)


def test_the_static_hook_needs_no_torch(model_repository: Path, lintgpu_repository: Path, tmp_path: Path) -> None:
    result = try_repo("lintgpu", model_repository, lintgpu_repository, tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "config.json:4:17" in result.stdout
    assert "LG101" in result.stdout
    assert "torch" in result.stdout, "it says that nothing was traced and how to change that"
    git(model_repository, "rm", "-qf", "config.json")
    result = try_repo("lintgpu", model_repository, lintgpu_repository, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs lintgpu[hf]")
def test_the_trace_hook_uses_the_users_environment(model_repository: Path, lintgpu_repository: Path, tmp_path: Path) -> None:
    result = try_repo("lintgpu-trace", model_repository, lintgpu_repository, tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "config.json:4:17" in result.stdout
    assert "GPT2LMHeadModel" in result.stdout
