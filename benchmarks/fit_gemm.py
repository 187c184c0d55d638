"""Fit the built-in H200 profile: python3 benchmarks/fit_gemm.py --rows FOLDER... --pairs PAIRS.csv.gz --other CALIB.csv.gz -o PROFILE.npz

Rows come from `python3 -m lintgpu.gpu.calibrate`. The forest (CatBoost's oblivious trees, a development dependency only) predicts
log(time / analytic time); shapes that occur in PAIRS are left out. What sustained load changes is a handful of coefficients fitted to
PAIRS, and the bands are quantiles of residuals: on PAIRS with the load's coefficients cross-validated by weight, and on OTHER for the
dtypes that PAIRS lacks.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lintgpu.gpu import profiles
from lintgpu.gpu.calibration import Calibration, save_calibration
from lintgpu.gpu.features import features
from lintgpu.gpu.forest import Forest
from lintgpu.gpu.gemm import band_groups, gemm_times, sustained_terms
from lintgpu.gpu.gemms import Gemms, columns

Rows = list[dict[str, str]]
KEY = ("dtype", "op", "layout", "B", "M", "N", "K")
DEPTH, TREES, RATE = 8, 1300, 0.16
GROUP_SHARE = 0.6
"""Of a group's mean residual, what is taken for the clock it ran at."""


def read(path: Path) -> Rows:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def gemms_of(rows: Rows) -> Gemms:
    sizes = {name: [int(r[name]) for r in rows] for name in "BMNK"}
    return columns(
        dtypes=[r["dtype"] for r in rows],
        batch=sizes["B"],
        m=sizes["M"],
        n=sizes["N"],
        k=sizes["K"],
        layout=[r["layout"] for r in rows],
        bias=[r["op"] == "addmm" for r in rows],
    )


def times(rows: Rows) -> Any:
    return np.array([float(r["us"]) for r in rows])


def analytic(rows: Rows, profile: profiles.Profile) -> tuple[Any, Any]:
    """(columns of features, analytic time)."""
    bare = replace(profile, calibration=None)
    gemms = gemms_of(rows)
    t = gemm_times(gemms, bare)
    return features(gemms, t.us, t.math_us, t.memory_us, t.tiling, profile.sms), t.us


def train(x: Any, y: Any, trees: int = TREES, depth: int = DEPTH, rate: float = RATE, cache: Path | None = None) -> Forest:
    from catboost import CatBoostRegressor

    options = {"l2_leaf_reg": 2, "border_count": 128, "bootstrap_type": "Bernoulli", "subsample": 0.5, "rsm": 0.4, "boosting_type": "Plain"}
    model = CatBoostRegressor(iterations=trees, depth=depth, learning_rate=rate, thread_count=2, random_seed=1, verbose=100, **options)
    if cache is not None and cache.exists():
        model.load_model(str(cache))
    else:
        model.fit(np.ascontiguousarray(x.T), y)
        if cache is not None:
            model.save_model(str(cache))
    return exported(model)


def exported(model: Any) -> Forest:
    path = Path("/tmp/forest.json")
    model.save_model(str(path), format="json")
    data = json.loads(path.read_text())
    trees = data["oblivious_trees"]
    depth = max(len(t["splits"]) for t in trees)
    feature = np.zeros((len(trees), depth), np.int16)
    border = np.full((len(trees), depth), np.inf, np.float32)
    leaf = np.zeros((len(trees), 2**depth), np.float32)
    scale, (bias,) = data["scale_and_bias"]
    for i, tree in enumerate(trees):
        for level, split in enumerate(tree["splits"]):
            feature[i, level], border[i, level] = split["float_feature_index"], split["border"]
        leaf[i, : len(tree["leaf_values"])] = np.array(tree["leaf_values"]) * scale
    return Forest(feature, border, leaf.astype(np.float16).astype(np.float32), float(bias))


def ridge(terms: Any, y: Any, strength: float = 30.0) -> Any:
    return np.linalg.solve(terms @ terms.T + strength * np.eye(len(terms)), terms @ y)


def by_weight(terms: Any, y: Any, weights: list[str], folds: int = 10) -> Any:
    """Cross-validated predictions of `ridge`: no weight is predicted from itself."""
    names = sorted(set(weights))
    np.random.RandomState(0).shuffle(names)
    fold = np.array([names.index(w) % folds for w in weights])
    predicted = np.zeros(len(y))
    for f in range(folds):
        predicted[fold == f] = ridge(terms[:, fold != f], y[fold != f]) @ terms[:, fold == f]
    return predicted


def quantiles(groups: Any, residuals: Any, least: int = 60) -> dict[str, tuple[float, float]]:
    found = {}
    for name in np.unique(groups):
        chosen = residuals[groups == name]
        if len(chosen) >= least:
            found[str(name)] = (float(np.quantile(chosen, 0.1)), float(np.quantile(chosen, 0.9)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--model", type=Path, help="CatBoost model to load, or to save after training")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    profile = replace(profiles.find(options.gpu), calibration=None, basis=profiles.CALIBRATED)
    pairs, other = read(options.pairs), read(options.other)
    held = {tuple(r[k] for k in KEY) for r in pairs}
    rows = [
        r | {"group": f"{i} {r['group']}"}
        for i, folder in enumerate(options.rows)
        for p in sorted(folder.glob("gemms_*.csv.gz"))
        for r in read(p)
    ]
    rows = [r for r in rows if tuple(r[k] for k in KEY) not in held and float(r["us"]) > 0 and float(r["us_max"]) < 5 * float(r["us_min"])]
    x, base = analytic(rows, profile)
    y = np.log(times(rows) / base)
    if options.model is None or not options.model.exists():
        y = y - clock_effect(train(x, y, trees=500, rate=0.12).predict(x) - y, [r["group"] for r in rows])
    forest = train(x, y, cache=options.model)
    predicted = forest.predict(x)
    narrow = np.minimum.reduce(gemms_of(rows).classes())
    values = {
        "narrow_4_mean": float(predicted[(narrow < 16) & (narrow >= 4)].mean()),
        "narrow_2_mean": float(predicted[narrow < 4].mean()),
    }
    profile = replace(profile, calibration=Calibration(profile.name, profiles.CALIBRATED, values, forest))
    calibration = finish(profile, pairs, other)
    versions = json.loads((options.rows[0] / "versions.json").read_text())
    command = "python3 -m lintgpu.gpu.calibrate --seconds 365 --seed 7; --seconds 185 --seed 101 --min-us 12; benchmarks/fit_gemm.py"
    save_calibration(replace(calibration, versions=tuple(sorted({**versions, "command": command}.items()))), options.output)


def clock_effect(error: Any, groups: list[str]) -> Any:
    """What a group's common residual says about the clock it ran at."""
    _, at, count = np.unique(groups, return_inverse=True, return_counts=True)
    mean = np.bincount(at, -error) / count
    return np.where(count[at] >= 6, GROUP_SHARE * mean[at], 0.0)


def finish(profile: profiles.Profile, pairs: Rows, other: Rows) -> Calibration:
    """Add what sustained load changes, and the bands."""
    assert profile.calibration is not None
    gemms = gemms_of(pairs)
    alone = gemm_times(gemms, profile)
    terms = sustained_terms(gemms, alone.us, alone.alignment)
    residual = np.log(times(pairs) / alone.us)
    load = ridge(terms, residual)
    unseen = by_weight(terms, residual, [r["weight"] for r in pairs])
    found = quantiles(band_groups(gemms, alone.us * np.exp(unseen), alone.alignment), residual - unseen)
    values = dict(profile.calibration.coefficients) | {f"sustained_{i}": float(v) for i, v in enumerate(load)}
    loaded = replace(profile, calibration=replace(profile.calibration, coefficients=values))
    others = gemms_of(other)
    t = gemm_times(others, loaded)
    error = np.log(times(other) / t.us)
    for name, band in quantiles(band_groups(others, t.us, t.alignment), error).items():
        found.setdefault(name, band)
    found["all"] = (float(np.quantile(error, 0.1)), float(np.quantile(error, 0.9)))
    assert loaded.calibration is not None
    return replace(loaded.calibration, bands=tuple((name, low, high) for name, (low, high) in sorted(found.items())))


if __name__ == "__main__":
    main()
