"""Tiles and waves: the output is cut into tiles, an SM works on one at a time, and the last wave may leave most SMs idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.gemms import Gemms

FloatArray = NDArray[np.float64]

K_STEP_BYTES = 128
"""A kernel advances through K in steps of about this many bytes a row."""
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)

# Rows x columns that the libraries' kernels come in (cuBLAS 13 kernel names on Hopper; CUTLASS's default set elsewhere).
_MENUS: dict[str, tuple[tuple[int, int], ...]] = {
    "Hopper": (
        (320, 128), (256, 128), (128, 256), (256, 160), (192, 192), (192, 128), (128, 192), (160, 128), (128, 160), (128, 128),
        (128, 96), (96, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (64, 16), (16, 64), (64, 8), (8, 64),
    ),
    "": (
        (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32),
        (64, 16), (16, 64),
    ),
}  # fmt: skip
_MENUS["Blackwell"] = (*_MENUS["Hopper"], (256, 256), (256, 192), (192, 256))


@dataclass(frozen=True, eq=False)
class Tiling:
    """The tile, split of K and waves that the analytic model finds fastest, one entry a GEMM."""

    us: FloatArray
    """Time of the main loop in microseconds, memory and fixed cost apart."""
    tile_m: NDArray[np.int64]
    tile_n: NDArray[np.int64]
    split: NDArray[np.int64]
    waves: FloatArray
    """Tiles x split over the SMs: 2.1 leaves 90 % of a third wave idle."""
    idle: FloatArray
    """Share of the SMs' time in which they wait for the last wave, 0..1."""


def menu(architecture: str) -> tuple[tuple[int, int], ...]:
    """The (rows, columns) tiles of an architecture."""
    return _MENUS.get(architecture, _MENUS[""])


def best_tiling(gemms: Gemms, sms: int, sm_flops: FloatArray, feed_bytes: float, prologue_us: float, architecture: str) -> Tiling:
    """The fastest of all tiles and splits.

    sm_flops: FLOP/s one SM reaches, an entry a GEMM; feed_bytes: bytes/s one SM takes from L2; prologue_us: fill and drain of one tile's
    pipeline. A tile's time is its K steps at the slower of the two rates.
    """
    tiles = np.array(menu(architecture), dtype=np.int64)
    size = gemms.element_bytes.astype(np.float64)
    step = np.maximum(1, K_STEP_BYTES // gemms.element_bytes)
    steps = -(-gemms.k // step)
    best = np.full(len(gemms), np.inf)
    choice = np.zeros((4, len(gemms)), dtype=np.int64)
    for tile_m, tile_n in tiles:
        blocks = -(-gemms.m // tile_m) * -(-gemms.n // tile_n) * gemms.batch
        math = 2.0 * tile_m * tile_n * step / sm_flops
        feed = (tile_m + tile_n) * step * size / feed_bytes
        step_us = np.maximum(math, feed) * 1e6
        for split in SPLITS:
            waves = np.ceil(blocks * split / sms)
            us = waves * (-(-steps // split) * step_us + prologue_us) + (split > 1) * prologue_us
            # A split of fewer than four steps never pays, and a full GPU needs none.
            us = np.where((split > 1) & ((steps < 4 * split) | (blocks * (split - 1) >= 2 * sms)), np.inf, us)
            better = us < best
            best = np.where(better, us, best)
            for row, value in enumerate((tile_m, tile_n, split)):
                choice[row] = np.where(better, value, choice[row])
    blocks = -(-gemms.m // choice[0]) * -(-gemms.n // choice[1]) * gemms.batch * choice[2]
    waves = blocks / sms
    return Tiling(best, choice[0], choice[1], choice[2], waves, 1.0 - waves / np.ceil(waves))
