"""The measuring process: what it answers, and the one line where it cannot measure."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lintgpu.cli import main
from lintgpu.trace.records import FORWARD, Gemm, Op
from lintgpu.verify.client import NoVerification, Verifier, gpu_environment
from lintgpu.verify.records import (
    Device,
    Failure,
    Item,
    LayersJob,
    LayersResult,
    Model,
    NumbersJob,
    StepsJob,
    TimedItem,
    Variant,
    from_json,
    to_json,
)
from lintgpu.workload import Workload

from .conftest import needs_models

GEMM = Gemm(batch=1, m=48, n=33, k=16, layout="NT", lda=16, ldb=16, ldc=33, bias=True)
OP = Op("gemm", "addmm", FORWARD, "fp32", 1000, 500, 3, "head", gemm=GEMM)
JOB = LayersJob((Item(OP, 5.0),), (Item(dataclasses.replace(OP, gemm=dataclasses.replace(GEMM, n=40, ldc=40)), 4.0),))
MODEL = Model("k", "huggingface", {"config": {"model_type": "gpt2", "layers": [1, 2]}}, (("n_layer", 12),), 10, 20)


def interpreter(folder: Path, script: str) -> str:
    """An interpreter that runs `script` in the place of the measuring process."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    "record",
    [
        JOB,
        StepsJob(MODEL, (Variant("a", Workload(batch=3), (("vocab_size", 8),)),), True),
        NumbersJob(
            MODEL, "padded", Variant("a", Workload()), Variant("b", Workload(), spec={"config": {"x": [1, {"y": None}]}}), ("vocabulary",)
        ),
        TimedItem(Item(OP, 1.0), None, ("kernel",), "1x2x3", "why"),
        Device("NVIDIA H200", versions=(("torch", "2"),), notes=("a", "b")),
        Failure("why"),
    ],
)
def test_records_survive_the_way_through_json(record: object) -> None:
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


@needs_models
def test_a_dry_run_times_gemms_and_outlives_a_job_that_fails() -> None:
    with Verifier("cpu") as verifier:
        assert verifier.device.kind == "cpu"
        broken = StepsJob(dataclasses.replace(MODEL, spec={"config": {"model_type": "no such"}}), (Variant("a", Workload()),))
        failed = verifier.run(broken, 5)
        result = verifier.run(JOB, 0.1)
    assert not isinstance(failed, LayersResult)
    assert isinstance(result, LayersResult)
    assert result.rounds >= 8
    assert [item.item.op.gemm.n for item in (*result.before, *result.after) if item.item.op.gemm] == [33, 40]
    (check,) = result.numbers
    assert check.passed
    assert check.value > 0, "fp32 is compared with float64"


def test_an_interpreter_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoVerification, match=r"cannot start .*: No such file or directory"), Verifier("0", str(tmp_path / "none")):
        pass


def test_an_interpreter_without_torch_is_one_line(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "import sys, runpy\nsys.modules['torch'] = None\nsys.argv = sys.argv[2:]\nexec(sys.argv[0])\n")
    with pytest.raises(NoVerification) as error, Verifier("0", python):
        pass
    assert "torch" in str(error.value)
    assert "pip install" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_process_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "import sys\nsys.stderr.write('one\\nCUDA driver is gone\\n')\nsys.exit(3)\n")
    with pytest.raises(NoVerification, match="the measuring process ended with status 3: CUDA driver is gone"), Verifier("0", python):
        pass


_HANGS = """import json, sys, time
sys.stdin.readline()
print(json.dumps({"hello": {"kind_": "Device", "name": "GPU"}}), flush=True)
time.sleep(600)
"""


def test_a_job_that_takes_too_long_is_a_failure_and_its_process_is_ended(tmp_path: Path) -> None:
    with Verifier("0", interpreter(tmp_path, _HANGS)) as verifier:
        child = verifier._child
        result = verifier.run(JOB, 0.1, grace=0.1)
        assert isinstance(result, Failure)
        assert "gave no answer" in result.reason
        assert child is not None
        assert child.poll() is not None


def test_the_process_sees_gpus_and_no_tokens() -> None:
    current = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "secret", "OMP_NUM_THREADS": "4", "ROCR_VISIBLE_DEVICES": "0"}
    found = gpu_environment(current, "/tmp/x", None)
    assert (found["CUDA_VISIBLE_DEVICES"], found["ROCR_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("1", "0", "4")
    assert "HF_TOKEN" not in found
    assert "CUDA_VISIBLE_DEVICES" not in gpu_environment({"PATH": "/bin"}, "/tmp/x", None)
    assert "TRITON_CACHE_DIR" not in gpu_environment({"PATH": "/bin"}, "/tmp/x", None), "a compiler's cache outlives the run"


# The command


@needs_models
def test_without_a_gpu_the_static_result_stands_and_one_line_says_why(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plain = CliRunner().invoke(main, ["check", config, "-f", "concise"])
    result = CliRunner().invoke(main, ["check", config, "-f", "concise", "--verify"])
    assert plain.exit_code == 0
    assert result.exit_code == 2
    (line,) = [line for line in result.stdout.splitlines() if line not in plain.stdout.splitlines() and line.startswith("GPU 0")]
    assert line.endswith("nothing was measured, the predictions stand")
    assert "The verification is not whole." in result.stdout


@pytest.mark.parametrize(
    ("text", "said"), [("soon", "'soon' is no time such as 60s or 2m"), ("-1s", "is no time"), ("0", "is no time"), ("", "is no time")]
)
def test_a_budget_that_is_no_time_is_one_line(text: str, said: str) -> None:
    result = CliRunner().invoke(main, ["check", "--verify", "--verify-budget", text])
    assert result.exit_code == 2
    assert said in result.output


def test_verify_takes_only_what_check_wrote(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    path.write_text("{}")
    for argument, said in ((path, "this is not the output of lintgpu check -f json"), (tmp_path / "none.json", "No such file")):
        result = CliRunner().invoke(main, ["verify", str(argument)])
        assert result.exit_code == 2
        assert said in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)


@needs_models
def test_verify_finds_the_targets_of_the_file_again(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    document = tmp_path / "findings.json"
    assert CliRunner().invoke(main, ["check", config, "--batch", "3", "-f", "json", "-o", str(document)]).exit_code == 0
    result = CliRunner().invoke(main, ["verify", str(document), "-f", "json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 2
    assert [error["kind"] for error in found["errors"]] == ["verify"]
    assert found["targets"][0]["workload"] == json.loads(document.read_text())["targets"][0]["workload"]
    assert os.path.realpath(found["targets"][0]["path"]) == os.path.realpath(config)
