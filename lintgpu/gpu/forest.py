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


@dataclass(frozen=True, eq=False)
class Forest:
    """`trees` oblivious trees of equal depth.

    feature, border: [trees, depth], the question of a level is x[feature] > border; leaf: [trees, 2**depth], the first level is
    the lowest bit of the leaf's index. `bias` is added to the sum.
    """

    feature: NDArray[np.int16]
    border: NDArray[np.float32]
    leaf: NDArray[np.float32]
    bias: float = 0.0

    def predict(self, x: FloatArray) -> FloatArray:
        """x: [rows, features] -> [rows]."""
        rows = x.shape[0]
        total = np.full(rows, self.bias, dtype=np.float64)
        if rows == 0:
            return total
        columns = np.ascontiguousarray(x.T, dtype=np.float32)
        index = np.empty(rows, dtype=np.int16)
        for tree in range(self.feature.shape[0]):
            index.fill(0)
            for level in range(self.feature.shape[1]):
                answer = columns[self.feature[tree, level]] > self.border[tree, level]
                index |= answer.astype(np.int16) << level
            total += self.leaf[tree][index]
        return total

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that `from_arrays` reads back."""
        return {"feature": self.feature, "border": self.border, "leaf": self.leaf, "bias": np.array([self.bias])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Forest:
        """The inverse of `arrays`. Raises KeyError on a missing one."""
        return cls(
            feature=arrays["feature"].astype(np.int16),
            border=arrays["border"].astype(np.float32),
            leaf=arrays["leaf"].astype(np.float32),
            bias=float(arrays["bias"][0]),
        )
