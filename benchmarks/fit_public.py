"""Fit profiles to published GEMM times: python3 benchmarks/fit_public.py --data FOLDER [-o lintgpu/gpu/profiles]

FOLDER holds public/gemm_bf16_nt_other_gpus.csv.gz and public/gemm_fp16_a100_a40_h100.csv.gz (columns gpu, m, n, k, us: times of torch's
F.linear, aligned sizes). Each GPU is fitted as `lintgpu calibrate` fits one, from its datasheet on (the H100 from the H200's fit on, the
same chip): coefficients of the analytic model, a small forest for what it misses, bands; a share of the rows is held back and judges.
Only what was fitted is written, none of the rows. What the rows lack (other dtypes, narrow loads, other layouts) keeps the analytic
model's time times the same correction, under a band as wide as a specification's. The H200 has measurements of its own
(benchmarks/fit_gemm.py).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from accuracy import PublicRow, gemms_of, public_rows

from lintgpu.gpu import profiles
from lintgpu.gpu.boosting import Growth
from lintgpu.gpu.calibration import Calibration, save_calibration
from lintgpu.gpu.fit import fit

GROWTH = Growth(trees=500, depth=6, rate=0.12)
MEASURED_HERE = "H200-SXM-141GB"
BUILT_ON = {"H100-SXM5-80GB": MEASURED_HERE}
"""GPUs of the same chip: what the published rows lack (narrow loads, other dtypes and layouts) is the other's, under wider bands."""


def fitted(gpu: str, rows: list[PublicRow]) -> Calibration:
    """The calibration of `gpu` from published rows; prints its errors on the rows held back."""
    known = profiles.find(BUILT_ON[gpu]).calibration if gpu in BUILT_ON else None
    base = replace(profiles.find(gpu), calibration=known, basis=profiles.SIBLING if known else profiles.SPECIFICATION)
    us = np.array([row.us for row in rows])
    result = fit(base, gemms_of(rows), us, np.arange(len(rows)), GROWTH)
    print(f"{gpu:24} {len(rows)} GEMMs, error held back {result.before:.1%} -> {result.error:.1%}, {result.inside:.0%} in the band")
    versions = (("source", f"published times of F.linear, {rows[0].dtype}"), ("command", "benchmarks/fit_public.py"))
    return replace(result.calibration, basis=profiles.CALIBRATED, versions=versions)


def main() -> None:
    """Fit every GPU of the rows that has no measurements of its own; bf16 rows before fp16 rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("lintgpu/gpu/profiles"))
    options = parser.parse_args()
    for gpu, rows in public_rows(options.data).items():
        if gpu != MEASURED_HERE:
            save_calibration(fitted(gpu, rows), options.output / f"{profiles.slug(gpu)}.npz")


if __name__ == "__main__":
    main()
