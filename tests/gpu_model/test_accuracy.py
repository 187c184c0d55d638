"""The cost model's accuracy on a sample of measured groups (60 layers of one H200), in bands: a fit that gets worse fails here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lintgpu.gpu.profiles import find

HERE = Path(__file__).resolve().parent
SAMPLE = HERE / "h200_pairs_sample.csv.gz"


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", HERE.parent.parent / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    spec.loader.exec_module(module)
    return module


def test_padding_advice_is_right(accuracy: ModuleType) -> None:
    rows = accuracy.read(SAMPLE)
    groups = accuracy.groups_of(rows, accuracy.costs_of(rows, find("H200")))
    large = [group for group in groups if group.base[0] >= 20]
    counts = accuracy.paddings(large, 1.05)
    assert counts.true_positives > 40
    assert counts.true_positives / (counts.true_positives + counts.false_positives) >= 0.88
    assert counts.true_positives / (counts.true_positives + counts.false_negatives) >= 0.9
    assert accuracy.regret(large) <= 0.03


def test_times_and_bands(accuracy: ModuleType) -> None:
    rows = accuracy.read(SAMPLE)
    mean, _, inside = accuracy.errors([float(row["us"]) for row in rows], accuracy.costs_of(rows, find("H200")))
    assert mean <= 0.11
    assert 0.7 <= inside <= 0.93
