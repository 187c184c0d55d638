"""What the correction forest looks at: the physics of a GEMM on a GPU, one row of numbers each.

A calibration's forest was fitted on exactly these columns in this order; changing one means fitting again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.gemms import Gemms
from lintgpu.gpu.tiles import Tiling

FloatArray = NDArray[np.float64]

_TILES = (
    (320, 128), (256, 128), (128, 256), (192, 192), (256, 160), (192, 128),
    (128, 192), (128, 160), (128, 128), (64, 128), (128, 64), (64, 64),
)  # fmt: skip


def features(gemms: Gemms, us: FloatArray, math_us: FloatArray, memory_us: FloatArray, tiling: Tiling, sms: int) -> NDArray[np.float32]:
    """[features, GEMMs]; `us`, `math_us` and `memory_us` are the analytic model's times."""
    m, n, k, batch = gemms.m, gemms.n, gemms.k, gemms.batch
    log_m, log_n, log_k, log_batch = np.log2(m), np.log2(n), np.log2(k), np.log2(batch)
    a, b, c = (np.log2(x) for x in gemms.classes())
    log_math, log_memory = np.log2(math_us), np.log2(memory_us)
    columns: list[NDArray[np.generic]] = [
        gemms.dtype, gemms.bias, gemms.a_row, gemms.b_row,
        log_m, log_n, log_k, log_batch,
        a, b, c, np.minimum(np.minimum(a, b), c), np.minimum(a, b),
        np.log2(us), log_math, log_memory, log_math - log_memory,
        np.log2(tiling.us) - log_math, tiling.tile_m, tiling.tile_n, tiling.split, np.minimum(tiling.waves, 64.0), tiling.idle,
        _power_of_two(m), _power_of_two(n), _power_of_two(k),
        log_m + log_n + log_batch, log_m - log_n,
    ]  # fmt: skip
    for tile_m, tile_n in _TILES:
        blocks = -(-m // tile_m) * -(-n // tile_n) * batch
        waves = blocks / sms
        columns += [m * n * batch / (blocks * tile_m * tile_n) * waves / np.ceil(waves), np.minimum(waves, 32.0)]
    columns += [m, n, k]
    return np.stack([np.asarray(column, dtype=np.float32) for column in columns])


def _power_of_two(sizes: NDArray[np.int64]) -> FloatArray:
    """log2 of the largest power of two, up to 512, that divides each size."""
    return np.asarray(np.log2(np.minimum(sizes & -sizes, 512)), dtype=np.float64)
