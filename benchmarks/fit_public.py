"""Fit profiles to published bf16 NT times: python3 benchmarks/fit_public.py --rows ROWS.csv.gz [--held 0.15] [-o lintgpu/gpu/profiles]

ROWS has the columns gpu, m, n, k, us (CUDA-graph times of torch's F.linear, aligned sizes). For each GPU a small forest (CatBoost's
oblivious trees, a development dependency only) learns log(time / analytic time); bands are quantiles over rows held back, and so are
the errors printed. Only the fitted coefficients are written. What the rows lack (other dtypes, narrow loads) keeps the analytic
model's time times the same correction, under a band as wide as a specification's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from accuracy import PUBLIC_GPUS, Row, held_back, read
from fit_gemm import quantiles, train

from lintgpu.gpu import profiles
from lintgpu.gpu.calibration import Calibration, save_calibration
from lintgpu.gpu.features import features
from lintgpu.gpu.gemm import SPECIFICATION_BAND, band_groups, gemm_times
from lintgpu.gpu.gemms import Gemms, columns

TREES, DEPTH, RATE = 500, 6, 0.12


def gemms_of(rows: list[Row]) -> Gemms:
    """bf16 NT GEMMs of the rows."""
    sizes = {name: [int(row[name]) for row in rows] for name in "mnk"}
    count = len(rows)
    return columns(dtypes=["bf16"] * count, batch=[1] * count, layout=["NT"] * count, **sizes)


def fit(profile: profiles.Profile, rows: list[Row], held: float) -> tuple[Calibration, float, float]:
    """(calibration, mean absolute error on the rows held back, share of them inside the 80 % band)."""
    bare = replace(profile, calibration=None, basis=profiles.SPECIFICATION)
    gemms, us = gemms_of(rows), np.array([float(row["us"]) for row in rows])
    analytic = gemm_times(gemms, bare)
    x = features(gemms, analytic.us, analytic.math_us, analytic.memory_us, analytic.tiling, profile.sms)
    y = np.log(us / analytic.us)
    # One part fits, one sets the bands, one judges both.
    judging = np.array(held_back(len(rows), held))
    banding = ~judging & (np.random.RandomState(0).rand(len(rows)) < held)
    fitted = ~judging & ~banding
    forest = train(x[:, fitted], y[fitted], TREES, DEPTH, RATE)
    residual = y - forest.predict(x)
    groups = band_groups(gemms, analytic.us * np.exp(forest.predict(x)), analytic.alignment)
    bands = quantiles(groups[banding], residual[banding], least=40)
    bands |= {name.replace("bf16", "fp16"): band for name, band in bands.items()}
    bands["all"] = (-SPECIFICATION_BAND, SPECIFICATION_BAND)
    found = tuple((name, low, high) for name, (low, high) in sorted(bands.items()))
    versions = (("source", "published CUDA-graph times of F.linear, bf16"), ("command", "benchmarks/fit_public.py"))
    calibration = Calibration(profile.name, profiles.CALIBRATED, {}, forest, found, versions)
    times = gemm_times(gemms, replace(profile, calibration=calibration, basis=profiles.CALIBRATED))
    error = np.abs(times.us / us - 1)[judging].mean()
    inside = ((times.low <= us) & (us <= times.high))[judging].mean()
    return calibration, float(error), float(inside)


def main() -> None:
    """Fit every GPU of the rows that has no profile of its own measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--held", type=float, default=0.15)
    parser.add_argument("-o", "--output", type=Path, default=Path("lintgpu/gpu/profiles"))
    options = parser.parse_args()
    rows = read(options.rows)
    for gpu in sorted({row["gpu"] for row in rows}):
        profile = profiles.find(PUBLIC_GPUS.get(gpu, gpu))
        if profile.architecture == "Hopper":
            continue  # The H200's own measurements know narrow loads and layouts, which these rows lack.
        calibration, error, inside = fit(profile, [row for row in rows if row["gpu"] == gpu], options.held)
        path = options.output / f"{profiles.slug(profile.name)}.npz"
        save_calibration(calibration, path)
        print(
            f"{profile.name:24} held rows: mean absolute error {error:.1%}, inside the band {inside:.0%}, {path.stat().st_size >> 10} KiB"
        )


if __name__ == "__main__":
    main()
