"""GPU time of GEMMs: an analytic model (tiles, waves, roofline, alignment), corrected by a forest where measurements exist.

The analytic model's coefficients, all with defaults for a GPU that nobody measured:
  math_BF16 ...  share of the datasheet's peak that large aligned GEMMs of a dtype reach
  narrow_4 / narrow_2  rate of kernels with 4..8-byte / 1..2-byte loads relative to aligned ones, 16-bit types
  narrow_tf32    the same for TF32 off the 16-byte grid
  memory         share of the DRAM bandwidth reached
  fixed_us       time of an empty kernel
  prologue_us    fill and drain of one tile
  feed           bytes an SM takes from L2 each cycle of the boost clock
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.features import features
from lintgpu.gpu.gemms import DTYPES, Gemms
from lintgpu.gpu.profiles import SIBLING, SPECIFICATION, Profile
from lintgpu.gpu.tiles import Tiling, best_tiling

FloatArray = NDArray[np.float64]

# Fitted by hand to the published times of nine GPUs together: benchmarks/accuracy.py shows what they reach on each, unfitted.
DEFAULTS: dict[str, float] = {"memory": 0.8, "fixed_us": 1.5, "prologue_us": 1.5, "feed": 64.0} | {f"math_{d}": 0.8 for d in DTYPES}
# Measured: 4096-cubed bf16 on an H200 (797 / 270 / 130 TFLOP/s), fp16 on an A100 (216 / 136 / 86), TF32 on an A100 (101 / 65).
_NARROW: dict[str, dict[str, float]] = {
    "Hopper": {"narrow_4": 0.33, "narrow_2": 0.17, "narrow_tf32": 0.55},
    "Blackwell": {"narrow_4": 0.30, "narrow_2": 0.15, "narrow_tf32": 0.55},
    "Ampere": {"narrow_4": 0.63, "narrow_2": 0.40, "narrow_tf32": 0.61},
    "Ada": {"narrow_4": 0.63, "narrow_2": 0.45, "narrow_tf32": 0.61},
}
SPECIFICATION_BAND = 0.45
SIBLING_WIDENING = 0.12
SUSTAINED_TERMS = 11
NARROW_SHRINKAGE = 0.13


@dataclass(frozen=True, eq=False)
class GemmTimes:
    """One entry a GEMM; times in microseconds."""

    us: FloatArray
    low: FloatArray
    high: FloatArray
    math_us: FloatArray
    """What the FLOPs take at the rate the kernel class reaches, waves apart."""
    memory_us: FloatArray
    tiling: Tiling
    alignment: NDArray[np.int64]
    """Smallest alignment class of the three leading dimensions, in bytes."""
    basis: tuple[str, ...]
    """What the time rests on: the profile's basis where its measurements held such GEMMs, else specification."""


def coefficients(profile: Profile) -> dict[str, float]:
    """The analytic model's coefficients for a GPU: its calibration's over its architecture's over the defaults."""
    fitted: Mapping[str, float] = profile.calibration.coefficients if profile.calibration else {}
    return DEFAULTS | _NARROW.get(profile.architecture, _NARROW["Ampere"]) | dict(fitted)


def gemm_times(gemms: Gemms, profile: Profile) -> GemmTimes:
    """Time of each GEMM on `profile`, with its 80 % band."""
    values = coefficients(profile)
    alignment = np.minimum.reduce(gemms.classes())
    rate = _rates(gemms, alignment, profile, values)
    tiling = best_tiling(
        gemms, profile.sms, rate / profile.sms, values["feed"] * profile.boost_mhz * 1e6, values["prologue_us"], profile.architecture
    )
    math = gemms.flops / rate * 1e6
    memory = gemms.bytes / (values["memory"] * profile.bandwidth_gbps * 1e9) * 1e6
    us = values["fixed_us"] + np.maximum(tiling.us, memory)
    if profile.calibration is not None and profile.calibration.forest is not None:
        us = us * np.exp(correction(gemms, us, math, memory, tiling, alignment, profile))
    low, high, basis = bands(gemms, us, alignment, profile)
    return GemmTimes(us, us * low, us * high, math, memory, tiling, alignment, basis)


def correction(
    gemms: Gemms,
    us: FloatArray,
    math_us: FloatArray,
    memory_us: FloatArray,
    tiling: Tiling,
    alignment: NDArray[np.int64],
    profile: Profile,
) -> FloatArray:
    """log(time / analytic time) from the calibration's forest, under the load of a training step."""
    calibration = profile.calibration
    assert calibration is not None
    assert calibration.forest is not None
    values = coefficients(profile)
    x = features(gemms, us, math_us, memory_us, tiling, profile.sms)
    found = calibration.forest.predict(x)
    others = gemms.dtype != DTYPES.index("bf16")
    if calibration.dtypes_forest is not None and others.any():
        found[others] += calibration.dtypes_forest.predict(x[:, others])
    # Two kernels with narrow loads differ by less than the forest thinks: it has seen few of each size.
    for name, group in (("narrow_4_mean", (alignment < 16) & (alignment >= 4)), ("narrow_2_mean", alignment < 4)):
        if name in values:
            found = np.where(group, found + NARROW_SHRINKAGE * (values[name] - found), found)
    if "sustained_0" in values:
        weights = np.array([values[f"sustained_{i}"] for i in range(SUSTAINED_TERMS)])
        found = found + weights @ sustained_terms(gemms, us * np.exp(found), alignment)
    return found


def sustained_terms(gemms: Gemms, us: FloatArray, alignment: NDArray[np.int64]) -> FloatArray:
    """[SUSTAINED_TERMS, GEMMs]: what the slow-down by sustained load depends on, size and width of loads.

    A power-capped GPU lowers its clock under load, most for the kernels that draw most.
    """
    knots = np.log([5.0, 20.0, 100.0, 500.0, 2500.0])
    sizes = [np.interp(np.log(us), knots, row) for row in np.eye(len(knots))]
    a, b, c = gemms.classes()
    narrow = alignment < 16
    terms = [
        *sizes,
        narrow & (alignment >= 4),
        alignment < 4,
        narrow * (sizes[3] + sizes[4]),
        narrow & (np.minimum(a, b) >= 16),
        narrow & (c >= 16),
        (gemms.m <= 32),
    ]
    return np.stack([np.asarray(term, dtype=np.float64) for term in terms])


def _rates(gemms: Gemms, alignment: NDArray[np.int64], profile: Profile, values: Mapping[str, float]) -> FloatArray:
    """FLOP/s that the kernel class of each GEMM reaches on a large problem."""
    peak = np.array([profile.peak(d) * values[f"math_{d}"] for d in DTYPES])[gemms.dtype]
    narrow = np.ones(len(gemms))
    half = np.isin(gemms.dtype, [DTYPES.index("bf16"), DTYPES.index("fp16")])
    narrow[half & (alignment < 16)] = values["narrow_4"]
    narrow[half & (alignment < 4)] = values["narrow_2"]
    narrow[(gemms.dtype == DTYPES.index("tf32")) & (alignment < 16)] = values["narrow_tf32"]
    return np.maximum(peak * narrow, 1.0)


def bands(gemms: Gemms, us: FloatArray, alignment: NDArray[np.int64], profile: Profile) -> tuple[FloatArray, FloatArray, tuple[str, ...]]:
    """Factors on the predicted time that hold 80 % of the measured ones, and what each rests on."""
    widening = SIBLING_WIDENING if profile.basis == SIBLING else 0.0
    known = {name: (below - widening, above + widening) for name, below, above in profile.calibration.bands} if profile.calibration else {}
    unknown = (-SPECIFICATION_BAND, SPECIFICATION_BAND)
    groups = band_groups(gemms, us, alignment).tolist()
    found = np.array([known.get(name, unknown) for name in groups], dtype=np.float64).reshape(-1, 2)
    inherited = frozenset(profile.calibration.inherited) if profile.calibration else frozenset()
    basis = tuple(SIBLING if name in inherited else profile.basis if name in known else SPECIFICATION for name in groups)
    # Rows measured at other clocks than a step's may all lie on one side; the prediction is still inside its own band.
    return np.exp(np.minimum(found[:, 0], 0.0)), np.exp(np.maximum(found[:, 1], 0.0)), basis


def band_groups(gemms: Gemms, us: FloatArray, alignment: NDArray[np.int64]) -> NDArray[np.str_]:
    """The group whose band holds for each GEMM: dtype, small / middle / large, aligned or narrow."""
    size = np.where(us < 12, "small", np.where(us < 120, "middle", "large"))
    load = np.where(alignment < 16, "narrow", "aligned")
    dtype = np.array(DTYPES)[gemms.dtype]
    return np.array([f"{d} {s} {w}" for d, s, w in zip(dtype, size, load, strict=True)], dtype=np.str_)
