"""Ops bound by memory: bytes over the bandwidth that a transfer of that size reaches.

Measured on an H200 (elementwise, normalisation, softmax and reduction kernels): a floor of 1-2 us, an L2-resident range well above the
DRAM rate, and about 92 % of the datasheet's bandwidth on tensors of a gigabyte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.profiles import Profile

FloatArray = NDArray[np.float64]

FLOOR_US = {
    "pointwise": 1.0, "copy": 1.2, "reduction": 2.4, "norm": 2.4, "softmax": 2.2, "embedding": 2.0, "loss": 2.5, "scatter": 3.0,
    "sort": 12.0, "random": 1.5, "opaque": 3.0, "view": 0.0,
}  # fmt: skip
# Share of the streaming rate that kernels of a kind reach.
EFFICIENCY = {
    "pointwise": 0.98, "copy": 0.9, "reduction": 0.85, "norm": 0.75, "softmax": 0.75, "embedding": 0.8, "loss": 0.7, "scatter": 0.4,
    "sort": 0.1, "random": 0.7, "opaque": 0.6, "view": 1.0,
}  # fmt: skip
STREAMING = 0.92
L2_SPEEDUP = 2.2
"""Rate of a transfer that stays in L2 over the DRAM rate."""


def transfer_us(kind: NDArray[np.str_], moved: FloatArray, profile: Profile) -> FloatArray:
    """Time in microseconds to read and write `moved` bytes in total with ops of `kind`."""
    floor = np.array([FLOOR_US.get(str(k), 2.0) for k in kind])
    efficiency = np.array([EFFICIENCY.get(str(k), 0.6) for k in kind])
    rate = profile.bandwidth_gbps * 1e9 * STREAMING * efficiency
    cached = np.minimum(moved, 0.5 * profile.l2_mb * 1e6)
    seconds = cached / (rate * L2_SPEEDUP) + (moved - cached) / rate
    return np.where(moved > 0, floor + seconds * 1e6, floor)
