"""From rows that `lintgpu calibrate` measured to a profile of the GPU they were measured on."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import lintgpu
from lintgpu.gpu.boosting import Growth
from lintgpu.gpu.fit import Fit, fit
from lintgpu.gpu.gemms import DTYPES, Gemms, columns
from lintgpu.gpu.profiles import MEASURED, Profile, UnknownGpu, all_profiles, find
from lintgpu.trace.client import BOOTSTRAP

GROWTH = Growth(trees=500, depth=6, rate=0.12)
_WASTED = 5.0
"""A GEMM whose slowest launch took so many times its fastest was interrupted."""
_INTEGERS = ("B", "M", "N", "K")


class MeasuringFailed(Exception):
    """Nothing could be measured, or not read back; one line that says why."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Measured GEMMs: `us` and `group` have one entry each; `versions` say on what (gpu, driver, torch, cublas, date, ...)."""

    gemms: Gemms
    us: NDArray[np.float64]
    group: NDArray[np.int64]
    versions: Mapping[str, str]


def measure(folder: Path, minutes: float, device: int, python: str, line: Callable[[str], None]) -> None:
    """Measure for `minutes` in a process of its own and leave the rows in `folder`; `line` is called with each line it says.

    Raises MeasuringFailed.
    """
    package = str(Path(lintgpu.__file__).resolve().parent)
    arguments = ["--seconds", str(60 * minutes), "--rows", str(folder), "--device", str(device)]
    try:
        child = subprocess.Popen(
            [python, "-c", BOOTSTRAP, package, "lintgpu.gpu.calibrate", *arguments], stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
    except OSError as error:
        raise MeasuringFailed(f"{python}: {error.strerror or error}") from error
    last = ""
    assert child.stderr is not None
    try:
        for text in child.stderr:
            last = text.strip() or last
            if text.startswith("measured "):
                line(text.strip())
        code = child.wait()
    finally:
        child.kill()
        child.wait()
    if code:
        raise MeasuringFailed(last or f"the measuring process ended with code {code}")


def read_rows(folder: Path) -> Rows:
    """The rows in `folder`. Raises MeasuringFailed, with file and line, on what is missing or wrong."""
    paths = sorted(folder.glob("gemms_*.csv.gz"))
    if not paths:
        raise MeasuringFailed(f"{folder}: no measured rows (gemms_*.csv.gz) there")
    rows = [row for path in paths for row in _rows_of(path)]
    try:
        versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
        gpu = str(versions["gpu"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeasuringFailed(f"{folder / 'versions.json'}: does not say which GPU was measured ({error})") from None
    return _columns(rows, {**{str(k): str(v) for k, v in versions.items()}, "gpu": gpu})


def _rows_of(path: Path) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise MeasuringFailed(f"{path}: cannot be read ({error})") from None
    for number, row in enumerate(found, start=2):
        try:
            wrong = row["dtype"] not in DTYPES or len(row["layout"]) != 2 or min(int(row[name]) for name in _INTEGERS) < 1
            wrong = wrong or int(row["group"]) < 0 or not float(row["us"]) > 0
        except (KeyError, TypeError, ValueError):
            wrong = True
        if wrong:
            raise MeasuringFailed(f"{path}:{number}: not a measured GEMM (group,dtype,op,layout,B,M,N,K,us,us_min,us_max)")
    return [row for row in found if float(row.get("us_max") or 0) <= _WASTED * float(row.get("us_min") or 1)]


def _columns(rows: Sequence[Mapping[str, str]], versions: Mapping[str, str]) -> Rows:
    sizes = {name: [int(row[name]) for row in rows] for name in _INTEGERS}
    gemms = columns(
        dtypes=[row["dtype"] for row in rows],
        batch=sizes["B"],
        m=sizes["M"],
        n=sizes["N"],
        k=sizes["K"],
        layout=[row["layout"] for row in rows],
        bias=[row["op"] == "addmm" for row in rows],
    )
    us = np.array([float(row["us"]) for row in rows], dtype=np.float64)
    return Rows(gemms, us, np.array([int(row["group"]) for row in rows], dtype=np.int64), versions)


def calibrated(rows: Rows, command: str, growth: Growth = GROWTH) -> Fit:
    """The calibration that the rows make, on top of what is known of their GPU. Raises MeasuringFailed where there are too few."""
    base = base_profile(rows.versions)
    try:
        found = fit(base, rows.gemms, rows.us, rows.group, growth)
    except ValueError as error:
        raise MeasuringFailed(str(error)) from error
    facts = {
        "compute_capability": base.compute_capability,
        "sms": base.sms,
        "boost_mhz": base.boost_mhz,
        "memory_gb": base.memory_gb,
        "bandwidth_gbps": base.bandwidth_gbps,
        "l2_mb": base.l2_mb,
        "peaks": base.peaks,
    }
    versions = tuple(sorted({**rows.versions, "command": command, "lintgpu": lintgpu.__version__}.items()))
    calibration = replace(found.calibration, gpu=base.name, basis=MEASURED, versions=versions, **facts)  # type: ignore[arg-type]
    return replace(found, calibration=calibration)


def base_profile(versions: Mapping[str, str]) -> Profile:
    """What is known of the measured GPU: its row, or for a GPU that has none the driver's figures with the rates of its likest relative.

    Raises MeasuringFailed where the driver's figures are missing.
    """
    name = versions["gpu"]
    try:
        return find(name)
    except UnknownGpu:
        pass
    try:
        sms, mhz = int(versions["sms"]), float(versions["boost_mhz"])
        relative = _relative(versions["compute_capability"])
        per_cycle = sms * mhz / (relative.sms * relative.boost_mhz)
        return Profile(
            name=name,
            architecture=relative.architecture,
            compute_capability=versions["compute_capability"],
            sms=sms,
            boost_mhz=mhz,
            memory_gb=float(versions["memory_gb"]),
            bandwidth_gbps=float(versions["bandwidth_gbps"]),
            l2_mb=float(versions["l2_mb"]),
            peaks=tuple((dtype, peak * per_cycle) for dtype, peak in relative.peaks),
        )
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise MeasuringFailed(f"{name} is not a known GPU and its figures are incomplete ({error})") from error


def _relative(compute_capability: str) -> Profile:
    """The known GPU of the nearest compute capability. Raises ValueError where it is no number."""
    wanted = float(compute_capability)
    numbered = [p for p in all_profiles() if p.compute_capability.replace(".", "").isdigit()]
    return min(numbered, key=lambda p: abs(float(p.compute_capability) - wanted))


def kept(folder: Path | None) -> tuple[Path, Callable[[], None]]:
    """(folder for rows, what to call at the end): `folder`, or a temporary one that the call removes."""
    if folder is not None:
        return folder, lambda: None
    scratch = Path(tempfile.mkdtemp(prefix="lintgpu-"))
    return scratch, lambda: shutil.rmtree(scratch, ignore_errors=True)
