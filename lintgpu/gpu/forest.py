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

_CHUNK = 256
"""Rows at a time: all trees take a step together, and their work stays in the processor's cache."""


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
        index = np.zeros((len(self.feature), columns.shape[1]), dtype=np.uint8)
        for level, (features, borders) in enumerate(zip(self.feature.T, self.border.T, strict=True)):
            answer = columns[features] > borders[:, None]
            index |= answer.view(np.uint8) << level
        leaves = np.take_along_axis(self.leaf, index.astype(np.intp), axis=1)
        return np.asarray(leaves.sum(axis=0, dtype=np.float64))

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
