"""`lintgpu calibrate`: from measured rows to a profile that --gpu accepts, and what is said where nothing can be measured."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lintgpu.cli import main
from lintgpu.gpu.gemm import gemm_times
from lintgpu.gpu.gemms import columns
from lintgpu.gpu.profiles import Profile, find

FIELDS = ["group", "dtype", "op", "layout", "B", "M", "N", "K", "us", "us_min", "us_max", "kernel"]
UNKNOWN = {
    "gpu": "NVIDIA X900",
    "sms": "100",
    "compute_capability": "9.1",
    "boost_mhz": "1800",
    "memory_gb": "96",
    "bandwidth_gbps": "4000",
    "l2_mb": "50",
}


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write_rows(folder: Path, versions: Mapping[str, str], truth: Profile, slower: float, count: int = 700) -> None:
    """Rows of a GPU that takes `slower` times what the model says of `truth`, with 3 % of noise."""
    rng = np.random.default_rng(3)
    sizes = {name: (2 ** rng.uniform(6, 13, count)).astype(int) // 8 * 8 for name in "mnk"}
    gemms = columns(dtypes=["bf16"] * count, batch=[1] * count, layout=["NT"] * count, **{n: v.tolist() for n, v in sizes.items()})
    us = gemm_times(gemms, truth).us * slower * np.exp(rng.normal(0, 0.03, count))
    folder.mkdir()
    with gzip.open(folder / "gemms_0.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for i in range(count):
            writer.writerow([i, "bf16", "mm", "NT", 1, *(sizes[n][i] for n in "mnk"), *[f"{us[i]:.3f}"] * 3, "nvjet"])
    (folder / "versions.json").write_text(json.dumps(versions))


def predicted(gpu: str, shape: str = "4096x4096x4096") -> dict[str, str]:
    return next(csv.DictReader(run("predict", "--shape", shape, "--gpu", gpu).stdout.splitlines()))


@pytest.mark.parametrize(
    ("versions", "slower", "unmeasured"),
    [({"gpu": "NVIDIA H100 80GB HBM3"}, 1.3, "sibling"), (UNKNOWN, 0.8, "specification")],
    ids=["known", "unknown"],
)
def test_a_profile_predicts_what_was_measured(tmp_path: Path, versions: dict[str, str], slower: float, unmeasured: str) -> None:
    truth = find("H100")
    write_rows(tmp_path / "rows", versions, truth, slower)
    profile = str(tmp_path / "mine.npz")
    result = run("calibrate", "--from-rows", str(tmp_path / "rows"), "-o", profile)
    assert result.exit_code == 0, result.output
    assert "700 GEMMs" in result.output
    row, known = predicted(profile), predicted("H100")
    assert float(row["us"]) == pytest.approx(slower * float(known["us"]), rel=0.12)
    assert float(row["us_low"]) < float(row["us"]) < float(row["us_high"])
    assert row["basis"] == "measured"
    other = predicted(profile, "4096x4096x4096,fp8")
    assert other["basis"] == unmeasured
    assert float(other["us_high"]) / float(other["us_low"]) > 1.5 > float(row["us_high"]) / float(row["us_low"])


def test_too_few_rows_make_no_profile(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", UNKNOWN, find("H100"), 1.0, count=20)
    result = run("calibrate", "--from-rows", str(tmp_path / "rows"), "-o", str(tmp_path / "mine.npz"))
    assert result.exit_code == 2
    assert "20 measured GEMMs are too few" in result.stderr
    assert not (tmp_path / "mine.npz").exists()


def test_an_unknown_gpu_without_its_figures_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", {"gpu": "NVIDIA X900"}, find("H100"), 1.0)
    result = run("calibrate", "--from-rows", str(tmp_path / "rows"))
    assert result.exit_code == 2
    assert "NVIDIA X900 is not a known GPU" in result.stderr


@pytest.mark.parametrize(
    "row", ["0,bf16,mm,NT,1,0,8,8,5,5,5,x", "0,bf8,mm,NT,1,8,8,8,5,5,5,x", "0,bf16,mm,NT,1,8,8,8,nan,5,5,x", "0,bf16,mm,NT"]
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, row: str) -> None:
    write_rows(tmp_path / "rows", UNKNOWN, find("H100"), 1.0)
    with gzip.open(tmp_path / "rows" / "gemms_0.csv.gz", "at") as file:
        file.write(row + "\n")
    result = run("calibrate", "--from-rows", str(tmp_path / "rows"))
    assert result.exit_code == 2
    assert "gemms_0.csv.gz:702: not a measured GEMM" in result.stderr


@pytest.mark.parametrize("break_it", ["nothing", "no versions", "cut short"])
def test_folders_that_hold_no_rows_get_one_clear_line(tmp_path: Path, break_it: str) -> None:
    folder = tmp_path / "rows"
    if break_it == "nothing":
        folder.mkdir()
    else:
        write_rows(folder, UNKNOWN, find("H100"), 1.0)
    if break_it == "no versions":
        (folder / "versions.json").write_text("{}")
    if break_it == "cut short":
        path = folder / "gemms_0.csv.gz"
        path.write_bytes(path.read_bytes()[:2000])
    result = run("calibrate", "--from-rows", str(folder))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert str(folder) in result.stderr


def test_a_profile_that_cannot_be_written_is_exit_code_2(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", UNKNOWN, find("H100"), 1.0)
    result = run("calibrate", "--from-rows", str(tmp_path / "rows"), "-o", str(tmp_path / "no" / "mine.npz"))
    assert result.exit_code == 2
    assert "mine.npz" in result.stderr


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run("calibrate", "--python", str(tmp_path / "nopython"))
    assert result.exit_code == 2
    assert "nopython" in result.stderr


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
def test_without_a_gpu_one_line_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([sys.executable, "-m", "lintgpu", "calibrate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["lintgpu calibrate: torch sees no CUDA GPU on this machine"]


@needs_torch
def test_the_measuring_process_leaves_rows_that_are_read_back(tmp_path: Path) -> None:
    from lintgpu.gpu.measured import read_rows

    command = [sys.executable, "-m", "lintgpu.gpu.calibrate", "--dry-run", "--seconds", "2", "--rows", str(tmp_path / "rows")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("measured ")
    rows = read_rows(tmp_path / "rows")
    assert len(rows.us) > 10
    assert (rows.us > 0).all()
    assert rows.versions["gpu"] == "cpu"
