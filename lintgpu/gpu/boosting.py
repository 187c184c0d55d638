"""Gradient boosting of oblivious trees in plain numpy, so that a machine with a GPU fits its own profile without another library.

Every level of a tree asks one question of all its leaves (CatBoost's shape of tree: Prokhorenkova et al., NeurIPS 2018), which is what
lintgpu.gpu.forest evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.forest import Forest

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """How a forest grows: `rate` shrinks each tree, `smoothing` each leaf; a tree sees shares of the rows and of the columns."""

    trees: int
    depth: int = 6
    rate: float = 0.12
    smoothing: float = 2.0
    bins: int = 128
    row_share: float = 0.5
    column_share: float = 0.4
    seed: int = 1


def grow(columns: NDArray[np.float32], target: FloatArray, growth: Growth) -> Forest:
    """The forest that predicts `target` [rows] from `columns` [features, rows] with the least squared error.

    Raises ValueError where there are no rows.
    """
    if not len(target):
        raise ValueError("no rows to fit")
    rng = np.random.default_rng(growth.seed)
    borders = [_borders(column, growth.bins) for column in columns]
    binned = np.stack([np.searchsorted(b, column, side="left").astype(np.uint8) for b, column in zip(borders, columns, strict=True)])
    bias = float(np.median(target))
    residual = np.asarray(target - bias, dtype=np.float64)
    feature = np.zeros((growth.trees, growth.depth), dtype=np.int16)
    border = np.full((growth.trees, growth.depth), np.inf, dtype=np.float32)
    leaf = np.zeros((growth.trees, 2**growth.depth), dtype=np.float32)
    usable = np.array([i for i, b in enumerate(borders) if len(b)], dtype=np.int64)
    for tree in range(growth.trees):
        splits = _splits(binned, residual, usable, growth, rng)
        index = np.zeros(len(residual), dtype=np.int64)
        for level, (chosen, cut) in enumerate(splits):
            feature[tree, level], border[tree, level] = chosen, borders[chosen][cut]
            index |= (binned[chosen] > cut).astype(np.int64) << level
        leaf[tree] = _leaves(index, residual, growth)
        residual -= leaf[tree][index]
    return Forest(feature, border, leaf, bias)


def stacked(lower: Forest, upper: Forest) -> Forest:
    """One forest that predicts the sum of two."""
    depth = max(lower.feature.shape[1], upper.feature.shape[1])
    pairs = [_deepened(forest, depth) for forest in (lower, upper)]
    parts = [np.concatenate(arrays) for arrays in zip(*((f.feature, f.border, f.leaf) for f in pairs), strict=True)]
    return Forest(parts[0], parts[1], parts[2], lower.bias + upper.bias)


def _deepened(forest: Forest, depth: int) -> Forest:
    """The same forest with questions that nothing answers with yes below its own."""
    trees, had = forest.feature.shape
    missing = depth - had
    return Forest(
        np.concatenate([forest.feature, np.zeros((trees, missing), dtype=np.int16)], axis=1),
        np.concatenate([forest.border, np.full((trees, missing), np.inf, dtype=np.float32)], axis=1),
        np.concatenate([forest.leaf, np.zeros((trees, 2**depth - 2**had), dtype=np.float32)], axis=1),
        forest.bias,
    )


def _borders(column: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """At most bins - 1 borders between the values of a column, with about the same number of rows between two."""
    values = np.unique(column)
    if len(values) > bins:
        values = np.unique(np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1], method="lower"))
        return np.asarray(values[values < column.max()], dtype=np.float32)
    return np.asarray((values[:-1] + values[1:]) / 2, dtype=np.float32)


def _splits(
    binned: NDArray[np.uint8], residual: FloatArray, usable: NDArray[np.int64], growth: Growth, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """(feature, bin) of each level: x goes right where its bin is greater."""
    rows = np.flatnonzero(rng.random(len(residual)) < growth.row_share)
    if len(rows) < 2 or not len(usable):
        return []
    count = max(1, round(growth.column_share * len(usable)))
    chosen = np.sort(rng.choice(usable, size=count, replace=False))
    values = residual[rows]
    sample = binned[chosen][:, rows]
    index = np.zeros(len(rows), dtype=np.int64)
    found: list[tuple[int, int]] = []
    for level in range(growth.depth):
        column, cut = _best(sample, index, values, 2**level, growth)
        if cut < 0:
            break
        found.append((int(chosen[column]), cut))
        index |= (sample[column] > cut).astype(np.int64) << level
    return found


def _best(sample: NDArray[np.uint8], index: NDArray[np.int64], values: FloatArray, leaves: int, growth: Growth) -> tuple[int, int]:
    """The column of `sample` and its bin whose question lowers the squared error most; bin -1 where none does."""
    best, found = 1e-12, (0, -1)
    offset = index * growth.bins
    cells = leaves * growth.bins
    for column, bins in enumerate(sample):
        at = offset + bins
        sums = np.bincount(at, weights=values, minlength=cells).reshape(leaves, growth.bins).cumsum(axis=1)
        counts = np.bincount(at, minlength=cells).reshape(leaves, growth.bins).cumsum(axis=1)
        total, number = sums[:, -1:], counts[:, -1:]
        right, fewer = total - sums, number - counts
        gain = sums * sums / (counts + growth.smoothing) + right * right / (fewer + growth.smoothing)
        gain -= total * total / (number + growth.smoothing)
        summed = gain.sum(axis=0)
        cut = int(summed.argmax())
        if summed[cut] > best:
            best, found = float(summed[cut]), (column, cut)
    return found


def _leaves(index: NDArray[np.int64], residual: FloatArray, growth: Growth) -> NDArray[np.float32]:
    sums = np.bincount(index, weights=residual, minlength=2**growth.depth)
    counts = np.bincount(index, minlength=2**growth.depth)
    shrunk = growth.rate * sums / (counts + growth.smoothing)
    # Profiles keep leaves as half-precision numbers.
    return np.asarray(shrunk.astype(np.float16), dtype=np.float32)
