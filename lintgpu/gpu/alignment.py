"""Alignment classes: the largest power of two, in bytes and up to 128, that divides the leading dimension of an operand.

Tensor-core kernels load 16 bytes at a time (cp.async on Ampere, TMA on Hopper), so a leading dimension off that grid makes cuBLAS
take a slower kernel with narrower loads. Only leading dimensions count; the sizes of the other dimensions never do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST = 128


def alignment_class(elements: int, element_bytes: int) -> int:
    """The class in bytes of one leading dimension of `elements`; LARGEST for 0."""
    size = elements * element_bytes
    return min(size & -size, LARGEST) if size else LARGEST


def alignment_classes(elements: NDArray[np.int64], element_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """`alignment_class` of arrays."""
    size = elements * element_bytes
    return np.where(size == 0, LARGEST, np.minimum(size & -size, LARGEST))


def is_aligned(elements: int, element_bytes: int) -> bool:
    """Whether 16-byte loads are possible."""
    return alignment_class(elements, element_bytes) >= 16
