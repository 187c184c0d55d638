"""Forests grown in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from lintgpu.gpu.boosting import Growth, grow, stacked
from lintgpu.gpu.forest import Forest

GROWTH = Growth(trees=150, depth=4, rate=0.2)


def surface(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).uniform(-1, 1, size=(4, rows)).astype(np.float32)
    return x, np.where(x[0] > 0.2, 1.0, 0.0) + 0.8 * x[1].astype(np.float64) * x[2]


def test_a_forest_learns_steps_and_products_of_columns_it_has_not_seen() -> None:
    forest = grow(*surface(6000, 1), GROWTH)
    x, y = surface(2000, 2)
    assert np.std(y - forest.predict(x)) < 0.25 * np.std(y)


def test_the_same_rows_grow_the_same_forest_and_it_survives_its_file() -> None:
    one, two = grow(*surface(500, 1), GROWTH), grow(*surface(500, 1), GROWTH)
    x, _ = surface(300, 3)
    assert (one.predict(x) == two.predict(x)).all()
    assert (Forest.from_arrays(one.arrays()).predict(x) == one.predict(x)).all()


def test_stacked_forests_add_up_whatever_their_depths() -> None:
    x, y = surface(1500, 1)
    lower = grow(x, y, Growth(trees=10, depth=2))
    upper = grow(x, y - lower.predict(x), Growth(trees=10, depth=5))
    assert stacked(lower, upper).predict(x) == pytest.approx(lower.predict(x) + upper.predict(x), abs=1e-5)
    assert np.std(y - stacked(lower, upper).predict(x)) < np.std(y - lower.predict(x))


def test_columns_without_values_to_tell_apart_leave_the_median() -> None:
    x = np.ones((2, 50), dtype=np.float32)
    assert grow(x, np.full(50, 3.0), Growth(trees=3)).predict(x) == pytest.approx(3.0)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        grow(np.zeros((2, 0), dtype=np.float32), np.zeros(0), GROWTH)
