"""A calibration from measured GEMMs: coefficients of the analytic model, a forest for what it misses, bands from rows held back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lintgpu.gpu.boosting import Growth, grow, stacked
from lintgpu.gpu.calibration import Calibration
from lintgpu.gpu.features import features
from lintgpu.gpu.gemm import SIBLING_WIDENING, SPECIFICATION_BAND, band_groups, coefficients, gemm_times
from lintgpu.gpu.gemms import DTYPES, Gemms
from lintgpu.gpu.profiles import CALIBRATED, MEASURED, Profile

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

LEAST_ROWS = 200
"""Fewer measured GEMMs make no profile."""
_HELD = 0.15
"""Of the groups of rows, the share that judges, and the share that sets the bands."""
_LEAST_IN_BAND = 40
_LARGE_US = 30.0
_TWINS = (("bf16", "fp16"), ("fp16", "bf16"))
"""16-bit types run through the same kernels at the same rate (Ampere and later)."""


@dataclass(frozen=True)
class Fit:
    """A calibration and how good it is on the GEMMs that neither fitted nor banded it; errors are means of |predicted / measured - 1|."""

    calibration: Calibration
    rows: int
    before: float
    """The error of what was known of the GPU before."""
    error: float
    inside: float
    """Share of the measured times inside the 80 % band."""


def fit(base: Profile, gemms: Gemms, us: FloatArray, groups: IntArray, growth: Growth) -> Fit:
    """Fit `us` [rows], microseconds, on top of what `base` knows; rows of one group are held back together.

    A base without a forest gets coefficients of the analytic model first. Raises ValueError with fewer than LEAST_ROWS rows.
    """
    if len(us) < LEAST_ROWS:
        raise ValueError(f"{len(us)} measured GEMMs are too few for a profile; {LEAST_ROWS} at least")
    drawn = parts(groups)
    fitting, banding, judging = (drawn == part for part in ("fit", "band", "judge"))
    before = gemm_times(gemms, base)
    start = _started(base, gemms.take(fitting), us[fitting])
    begun = gemm_times(gemms, start)
    assert start.calibration is not None
    bare = gemm_times(gemms, replace(start, calibration=replace(start.calibration, forest=None)))
    x = features(gemms, bare.us, bare.math_us, bare.memory_us, bare.tiling, start.sms)
    forest = grow(x[:, fitting], np.log(us / begun.us)[fitting], growth)
    known = start.calibration.forest
    grown = replace(start.calibration, forest=stacked(known, forest) if known else forest)
    predicted = gemm_times(gemms, replace(start, calibration=grown))
    named = band_groups(gemms, predicted.us, predicted.alignment)
    bands = _bands(named[banding], np.log(us / predicted.us)[banding], measured_kinds(named[fitting]))
    lent = {name: band for name, band in _lent(base).items() if name not in bands}
    found = tuple((name, low, high) for name, (low, high) in sorted((bands | lent).items()))
    calibration = replace(grown, bands=found, inherited=tuple(sorted(lent)))
    after = gemm_times(gemms.take(judging), replace(start, calibration=calibration, basis=MEASURED))
    truth = us[judging]
    return Fit(
        calibration,
        rows=len(us),
        before=float(np.abs(before.us[judging] / truth - 1).mean()),
        error=float(np.abs(after.us / truth - 1).mean()),
        inside=float(((after.low <= truth) & (truth <= after.high)).mean()),
    )


def parts(groups: IntArray) -> NDArray[np.str_]:
    """What each of the rows is for: fit, band or judge. The rows of a group share it, and the same groups always draw the same."""
    names, at = np.unique(groups, return_inverse=True)
    draw = np.random.default_rng(0).random(len(names))
    return np.where(draw < _HELD, "judge", np.where(draw < 2 * _HELD, "band", "fit"))[at]


def _started(base: Profile, gemms: Gemms, us: FloatArray) -> Profile:
    """What the forest builds on: the calibration of the GPU or its sibling without what it says of load, or fitted coefficients.

    All coefficients are written down, the defaults too: a forest corrects the analytic model that it was fitted on, and no other.
    """
    known = base.calibration
    if known is None or known.forest is None:
        known = Calibration(base.name, CALIBRATED, coefficients=_coefficients(base, gemms, us))
    elsewhere = ("sustained_", "narrow_4_mean", "narrow_2_mean")
    own = {name: value for name, value in known.coefficients.items() if not name.startswith(elsewhere)}
    pinned = coefficients(replace(base, calibration=replace(known, coefficients=own)))
    return replace(base, calibration=replace(known, gpu=base.name, coefficients=pinned, bands=()), basis=CALIBRATED)


def _coefficients(base: Profile, gemms: Gemms, us: FloatArray) -> dict[str, float]:
    """The analytic model's coefficients that center it on large GEMMs: rates by dtype, bandwidth, narrow loads; those seen only."""
    found: dict[str, float] = {"fixed_us": float(max(0.5, np.quantile(us, 0.01) * 0.8))} if len(us) else {}
    for _ in range(3):
        times = gemm_times(gemms, replace(base, calibration=Calibration(base.name, CALIBRATED, coefficients=found)))
        ratio = us / times.us
        large = us > _LARGE_US
        math = large & (times.math_us > 1.5 * times.memory_us)
        narrow = times.alignment < 16
        masks = {f"math_{d}": math & ~narrow & (gemms.dtype == i) for i, d in enumerate(DTYPES)}
        half = np.isin(gemms.dtype, [DTYPES.index("bf16"), DTYPES.index("fp16")])
        masks |= {
            "narrow_4": math & half & narrow & (times.alignment >= 4),
            "narrow_2": math & half & (times.alignment < 4),
            "narrow_tf32": math & narrow & (gemms.dtype == DTYPES.index("tf32")),
            "memory": large & ~narrow & (times.memory_us > 1.5 * times.math_us),
        }
        found |= _centered(base, found, ratio, masks)
    return found


def _centered(base: Profile, values: Mapping[str, float], ratio: FloatArray, masks: Mapping[str, NDArray[np.bool_]]) -> dict[str, float]:
    now = coefficients(replace(base, calibration=Calibration(base.name, CALIBRATED, coefficients=dict(values))))
    return {name: float(now[name] / np.median(ratio[mask])) for name, mask in masks.items() if mask.sum() >= 20}


def measured_kinds(groups: NDArray[np.str_]) -> frozenset[str]:
    """'dtype load' of the band groups that rows exist for."""
    kinds, counts = np.unique([_kind(name) for name in groups.tolist()], return_counts=True)
    return frozenset(str(kind) for kind, count in zip(kinds, counts, strict=True) if count >= _LEAST_IN_BAND)


def _kind(group: str) -> str:
    dtype, _, load = group.split(" ")
    return f"{dtype} {load}"


def _bands(groups: NDArray[np.str_], residuals: FloatArray, kinds: frozenset[str]) -> dict[str, tuple[float, float]]:
    """Quantiles of log(measured / predicted) of each band group that hold 80 % of unseen rows.

    A group of few rows takes those of its dtype and load at all sizes, else of everything; kinds that were not measured have none.
    """
    everything = _quantiles(residuals) if len(residuals) else (-SPECIFICATION_BAND, SPECIFICATION_BAND)
    named = np.array([_kind(name) for name in groups.tolist()], dtype=np.str_)
    found: dict[str, tuple[float, float]] = {}
    for kind in sorted(kinds):
        dtype, load = kind.split(" ")
        pooled = residuals[named == kind]
        wide = _quantiles(pooled) if len(pooled) >= _LEAST_IN_BAND else everything
        for size in ("small", "middle", "large"):
            name = f"{dtype} {size} {load}"
            own = residuals[groups == name]
            found[name] = _quantiles(own) if len(own) >= _LEAST_IN_BAND else wide
    for one, twin in _TWINS:
        for name, band in list(found.items()):
            if name.startswith(f"{one} "):
                found.setdefault(name.replace(one, twin, 1), band)
    return found


def _lent(base: Profile) -> dict[str, tuple[float, float]]:
    """The bands of what `base` rests on, widened: for the kinds of GEMMs that were not measured."""
    known = base.calibration
    if known is None or known.forest is None:
        return {}
    return {name: (low - SIBLING_WIDENING, high + SIBLING_WIDENING) for name, low, high in known.bands}


def _quantiles(residuals: FloatArray) -> tuple[float, float]:
    # One in ten beyond either end of the rows that set a band is a little more of those that did not.
    return float(np.quantile(residuals, 0.09)), float(np.quantile(residuals, 0.91))
