"""`lintgpu predict` as a user runs it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.cli import main
from lintgpu.gpu.predict import LAYOUTS, Shape, parse_shape, read_shapes, to_csv
from lintgpu.gpu.profiles import find


def predict(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["predict", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_odd_vocabulary_takes_several_times_as_long() -> None:
    odd, even = (float(rows(predict("--shape", f"16384x{n}x768").stdout)[0]["us"]) for n in (50257, 50304))
    assert 3 < odd / even < 8


def test_the_number_of_tokens_is_no_leading_dimension() -> None:
    odd, even = (float(rows(predict("--shape", f"{m}x4096x4096").stdout)[0]["us"]) for m in (4095, 4096))
    assert odd == pytest.approx(even, rel=0.05)


def test_a_file_of_shapes_gives_a_row_each_with_a_band(tmp_path: Path) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text("M,N,K,dtype,layout,B,op\n4096,4096,4096,,,,\n512,512,64,fp16,TN,8,bmm\n\n")
    found = rows(predict(str(path), "--gpu", "A100").stdout)
    assert [(r["dtype"], r["layout"], r["B"]) for r in found] == [("bf16", "NT", "1"), ("fp16", "TN", "8")]
    assert all(0 < float(r["us_low"]) < float(r["us"]) < float(r["us_high"]) for r in found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("M,N\n1,2\n", ":1: no column K"),
        ("M,N,K\n1,2,x\n", ":2: K: 'x' is not a whole number from 1"),
        ("M,N,K\n1,2,3\n1,0,3\n", ":3: N: '0' is not a whole number from 1"),
        ("M,N,K,dtype\n1,2,3,bf8\n", ":2: dtype: 'bf8' is none of bf16"),
        ("M,N,K,layout\n1,2,3,NX\n", ":2: layout: 'NX' is none of NT"),
        ("", ":1: no column M, N, K"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(text)
    result = predict(str(path))
    assert result.exit_code == 2
    assert words in result.stderr


def test_bad_use_is_one_clear_line() -> None:
    assert "is not MxNxK" in predict("--shape", "12x").stderr
    assert "unknown GPU" in predict("--shape", "1x2x3", "--gpu", "nosuch").stderr
    assert predict("missing.csv").exit_code != 0
    assert predict().exit_code == 2


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(LAYOUTS)), max_size=5))
def test_shapes_written_are_read_back(sizes: list[tuple[int, int, int, str]]) -> None:
    text = "M,N,K,layout\n" + "".join(f"{m},{n},{k},{layout}\n" for m, n, k, layout in sizes)
    shapes = read_shapes(text, "shapes.csv")
    assert shapes == [Shape("bf16", "mm", layout, 1, m, n, k) for m, n, k, layout in sizes]
    assert [parse_shape(f"{m}x{n}x{k},{layout}") for m, n, k, layout in sizes] == shapes
    assert to_csv([], []).startswith("dtype,op,layout,B,M,N,K,us,")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("h100", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx3090", "RTX 3090"),
        ("3090 ti", "RTX 3090 Ti"),
        ("l40s", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("h100 pcie", "H100-PCIE-80GB"),
        ("Tesla T4", "T4"),
        ("mi300x", "MI300X"),
    ],
)
def test_gpus_are_found_by_the_names_people_use(name: str, row: str) -> None:
    assert find(name).name == row
