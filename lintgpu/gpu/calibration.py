"""What was fitted to one GPU's measurements: coefficients of the analytic model, a correction forest and residual bands.

A calibration is one .npz file: numpy arrays and a JSON header, nothing that is executed on loading.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lintgpu.gpu.forest import Forest

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """Fitted figures of one GPU. `coefficients` are named in lintgpu.gpu.gemm; times are in microseconds."""

    gpu: str
    basis: str
    coefficients: Mapping[str, float] = field(default_factory=dict)
    forest: Forest | None = None
    """Predicts log(time / analytic time) of a GEMM from lintgpu.gpu.features."""
    dtypes_forest: Forest | None = None
    """What is added to that for other dtypes than bf16."""
    bands: tuple[tuple[str, float, float], ...] = ()
    """(group, low, high): 10 % and 90 % quantiles of log(measured / predicted) on held-out rows of the group."""
    inherited: tuple[str, ...] = ()
    """Groups whose bands are those of what the fit was built on, widened: it measured nothing of the group."""
    versions: tuple[tuple[str, str], ...] = ()
    """(driver, torch, cublas, date, command, ...) of the measurements."""
    compute_capability: str = ""
    sms: int = 0
    boost_mhz: float = 0.0
    memory_gb: float = 0.0
    bandwidth_gbps: float = 0.0
    l2_mb: float = 0.0
    peaks: tuple[tuple[str, float], ...] = ()


_FORESTS = ("forest", "dtypes_forest")
_PLAIN = ("gpu", "basis", "compute_capability", "sms", "boost_mhz", "memory_gb", "bandwidth_gbps", "l2_mb")


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` to `path` (.npz). Raises OSError."""
    header: dict[str, Any] = {name: getattr(calibration, name) for name in _PLAIN}
    header |= {
        "format": FORMAT,
        "coefficients": dict(calibration.coefficients),
        "bands": calibration.bands,
        "inherited": calibration.inherited,
        "versions": calibration.versions,
        "peaks": calibration.peaks,
    }
    forests = {name: forest for name in _FORESTS if (forest := getattr(calibration, name)) is not None}
    arrays: dict[str, Any] = {f"{name}:{part}": array for name, forest in forests.items() for part, array in forest.arrays().items()}
    with path.open("wb") as file:
        np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)


def _forest(data: Any, name: str) -> Forest | None:
    arrays = {key.partition(":")[2]: data[key] for key in data.files if key.partition(":")[0] == name}
    return Forest.from_arrays(arrays) if arrays else None


def load_calibration(path: Path) -> Calibration:
    """Read a file written by `save_calibration`. Raises ValueError with one line where it is missing or not such a file."""
    try:
        with np.load(path, allow_pickle=False) as data:
            header = json.loads(str(data["header"]))
            if header.get("format") != FORMAT:
                raise ValueError(f"{path}: calibration format {header.get('format')!r}, this version reads {FORMAT}")
            return Calibration(
                **{name: header[name] for name in _PLAIN},
                coefficients=header["coefficients"],
                forest=_forest(data, "forest"),
                dtypes_forest=_forest(data, "dtypes_forest"),
                bands=tuple((str(g), float(low), float(high)) for g, low, high in header["bands"]),
                inherited=tuple(map(str, header.get("inherited", ()))),
                versions=tuple((str(a), str(b)) for a, b in header["versions"]),
                peaks=tuple((str(a), float(b)) for a, b in header["peaks"]),
            )
    except FileNotFoundError:
        raise ValueError(f"{path}: no such calibration file") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a calibration file ({error})") from None
