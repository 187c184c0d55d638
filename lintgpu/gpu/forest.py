"""Sums of oblivious trees: every level of a tree asks one question, so a leaf's index is the bits of its answers.

That makes numpy inference a few vector operations a level, and the model a handful of small arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_CHUNK = 8192
"""Rows at a time, so that a tree's work stays in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Forest:
    """`trees` oblivious trees of equal depth, 8 at most.

    feature, border: [trees, depth], the question of a level is x[feature] > border; leaf: [trees, 2**depth], the first level is
    the lowest bit of the leaf's index. `bias` is added to the sum.
    """

    feature: NDArray[np.int16]
    border: NDArray[np.float32]
    leaf: NDArray[np.float32]
    bias: float = 0.0

    def predict(self, columns: NDArray[np.float32]) -> FloatArray:
        """columns: [features, rows] -> [rows]."""
        rows = columns.shape[1]
        total = np.full(rows, self.bias, dtype=np.float64)
        for start in range(0, rows, _CHUNK):
            total[start : start + _CHUNK] += self._chunk(columns[:, start : start + _CHUNK])
        return total

    def _chunk(self, columns: NDArray[np.float32]) -> FloatArray:
        rows = columns.shape[1]
        total = np.zeros(rows, dtype=np.float64)
        index, answer = np.empty(rows, dtype=np.uint8), np.empty(rows, dtype=np.bool_)
        bit = answer.view(np.uint8)
        for features, borders, leaves in zip(self.feature.tolist(), self.border, self.leaf, strict=True):
            index.fill(0)
            for level, feature in enumerate(features):
                np.greater(columns[feature], borders[level], out=answer)
                np.left_shift(bit, level, out=bit)
                np.bitwise_or(index, bit, out=index)
            total += leaves[index]
        return total

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that `from_arrays` reads back."""
        leaf = self.leaf.astype(np.float16)
        return {"feature": self.feature.astype(np.uint8), "border": self.border, "leaf": leaf, "bias": np.array([self.bias])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Forest:
        """The inverse of `arrays`. Raises KeyError on a missing one."""
        return cls(
            feature=arrays["feature"].astype(np.int16),
            border=arrays["border"].astype(np.float32),
            leaf=arrays["leaf"].astype(np.float32),
            bias=float(arrays["bias"][0]),
        )
