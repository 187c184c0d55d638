"""Teach the built-in H200 profile the dtypes that its own rows hold few of: python3 benchmarks/fit_dtypes.py --other CALIB.csv.gz

CALIB holds single GEMMs of all dtypes, measured at higher clocks than a training step's (columns dtype, op, layout, B, M, N, K, us). The
clock is taken out first: it is what the aligned bf16 GEMMs among the rows are faster by than the profile says. A second forest then learns
what is left of the other dtypes' error. Bands come from cross-validation over sizes, and reach from the faster clock to the slower. It
prints the errors of the cross-validation.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from fit_gemm import gemms_of, quantiles, read, times
from numpy.typing import NDArray

from lintgpu.gpu import profiles
from lintgpu.gpu.boosting import Growth, grow
from lintgpu.gpu.calibration import save_calibration
from lintgpu.gpu.features import features
from lintgpu.gpu.gemm import band_groups, gemm_times
from lintgpu.gpu.gemms import DTYPES, Gemms

GPU = "H200-SXM-141GB"
GROWTH = Growth(trees=500, depth=7, rate=0.1)
FOLDS = 5
BF16 = DTYPES.index("bf16")
FloatArray = NDArray[np.float64]


def unseen(x: NDArray[np.float32], target: FloatArray, gemms: Gemms) -> FloatArray:
    """Cross-validated predictions of `target`: no weight (N x K) is predicted from itself."""
    _, weight = np.unique(gemms.n * (gemms.k.max() + 1) + gemms.k, return_inverse=True)
    fold = np.random.default_rng(0).integers(0, FOLDS, weight.max() + 1)[weight]
    found = np.zeros(len(target))
    for f in range(FOLDS):
        found[fold == f] = grow(x[:, fold != f], target[fold != f], GROWTH).predict(x[:, fold == f])
    return found


def main() -> None:
    """Fit, print the errors, and write the profile in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path(f"lintgpu/gpu/profiles/{profiles.slug(GPU)}.npz"))
    options = parser.parse_args()
    profile = profiles.find(GPU)
    assert profile.calibration is not None
    known = replace(profile.calibration, dtypes_forest=None)
    profile = replace(profile, calibration=known)
    rows = [row for row in read(options.other) if row["layout"][0] in "NT" and float(row["us"]) > 0]
    gemms, us = gemms_of(rows), times(rows)
    bare = gemm_times(gemms, replace(profile, calibration=replace(known, forest=None)))
    x = features(gemms, bare.us, bare.math_us, bare.memory_us, bare.tiling, profile.sms)
    now = gemm_times(gemms, profile)
    error = np.log(us / now.us)
    clock = float(np.median(error[(gemms.dtype == BF16) & (now.alignment >= 16)]))
    others = gemms.dtype != BF16
    x, error, gemms, now_us, alignment = x[:, others], error[others], gemms.take(others), now.us[others], now.alignment[others]
    predicted = unseen(x, error - clock, gemms)
    for code in np.unique(gemms.dtype):
        chosen = gemms.dtype == code
        before, after = (np.abs(np.exp(e[chosen]) - 1).mean() for e in (clock - error, clock + predicted - error))
        print(f"{DTYPES[code]:5} {chosen.sum():6} GEMMs, clock apart: error {before:.1%} before, {after:.1%} after")
    groups = band_groups(gemms, now_us * np.exp(predicted), alignment)
    fast, slow = (quantiles(groups, error - predicted - shift) for shift in (0.0, clock))
    bands = {name: (low, high) for name, low, high in known.bands} | {name: (fast[name][0], slow[name][1]) for name in fast}
    calibration = replace(
        known,
        dtypes_forest=grow(x, error - clock, GROWTH),
        bands=tuple((name, low, high) for name, (low, high) in sorted(bands.items())),
        versions=tuple(sorted({**dict(known.versions), "dtypes": "benchmarks/fit_dtypes.py"}.items())),
    )
    save_calibration(calibration, options.output)


if __name__ == "__main__":
    main()
