"""GPUs as data: one row of gpus.csv each, and the coefficients fitted to measurements for some of them.

`find` resolves the names people and drivers use; a calibration file written by `lintgpu calibrate` is accepted in the place
of a name.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

from lintgpu.gpu.calibration import Calibration, load_calibration

MEASURED = "measured"
CALIBRATED = "calibrated"
SIBLING = "sibling"
SPECIFICATION = "specification"

_SPEC_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
# Words that name the maker, the product line or the packaging and never tell two rows apart.
_NOISE = (
    "nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "gpu", "generation", "edition", "server", "workstation",
    "hbm2e", "hbm2", "hbm3e", "hbm3", "graphics", "card", "tensor", "core", "perx", "gcd", "per", "max", "q",
)  # fmt: skip
_VARIANT_WORDS = frozenset({"ti", "super"})


class UnknownGpu(ValueError):
    """No GPU of that name. `near` holds the closest known names."""

    def __init__(self, name: str, near: tuple[str, ...]) -> None:
        hint = f"; did you mean {', '.join(near)}?" if near else "; `lintgpu gpus` lists the known ones"
        super().__init__(f"unknown GPU {name!r}{hint}")
        self.name = name
        self.near = near


@dataclass(frozen=True)
class Profile:
    """One GPU: the vendor's figures and, where there is one, the calibration fitted to measurements."""

    name: str
    architecture: str
    compute_capability: str
    sms: int
    boost_mhz: float
    memory_gb: float
    bandwidth_gbps: float
    """DRAM bandwidth, GB/s (1e9 bytes)."""
    l2_mb: float
    peaks: tuple[tuple[str, float], ...]
    """(dtype, dense TFLOP/s with FP32 accumulation) for each dtype the datasheet states."""
    sibling: str = ""
    """The GPU whose calibration serves where this one has none."""
    note: str = ""
    basis: str = SPECIFICATION
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s for GEMMs of `dtype`; a dtype without an entry runs at the rate of the next wider one it is emulated in.

        0.0 only where not even fp32 is known.
        """
        peaks = dict(self.peaks)
        for name in (dtype, *_FALLBACK_DTYPES.get(dtype, ()), "fp32"):
            if name in peaks:
                return peaks[name] * 1e12
        return 0.0

    def ridge(self, dtype: str) -> float:
        """Arithmetic intensity in FLOP/byte above which a GEMM of `dtype` is bound by math."""
        return self.peak(dtype) / (self.bandwidth_gbps * 1e9)


_FALLBACK_DTYPES = {"fp8": ("bf16", "fp16"), "int8": ("fp16",), "fp4": ("fp8", "bf16"), "bf16": (), "tf32": (), "fp16": ()}


def all_profiles() -> tuple[Profile, ...]:
    """Every known GPU, in the order of the data file (the usual variant of a family first), without its calibration: `find` adds that."""
    return _profiles()


def find(name: str) -> Profile:
    """The profile of `name`: a row's name, what the driver calls the GPU, a short form such as `h100`, or a calibration file.

    An ambiguous name is the usual variant's. Raises UnknownGpu with near misses; ValueError with one line for a file that is not a
    calibration.
    """
    if name.endswith((".json", ".npz")) or "/" in name or "\\" in name:
        return _from_file(Path(name))
    profiles = all_profiles()
    compact = _compact(name)
    for profile in profiles:
        if _compact(profile.name) == compact:
            return _calibrated(profile)
    words = _words(name, profiles)
    if words is not None:
        for candidate in (words, {word for word in words if not _is_memory_size(word)}):
            match = next((p for p in profiles if _matches(candidate, p)), None)
            if match is not None:
                return _calibrated(match)
    raise UnknownGpu(name, _near(name, profiles))


def _from_file(path: Path) -> Profile:
    calibration = load_calibration(path)
    try:
        base = find(calibration.gpu)
    except UnknownGpu as error:
        if not calibration.sms:
            raise ValueError(f"{path}: made on {calibration.gpu!r}, which is not a known GPU, and states no specification") from error
        base = Profile(
            name=calibration.gpu,
            architecture=architecture_of(calibration.compute_capability),
            compute_capability=calibration.compute_capability,
            sms=calibration.sms,
            boost_mhz=calibration.boost_mhz,
            memory_gb=calibration.memory_gb,
            bandwidth_gbps=calibration.bandwidth_gbps,
            l2_mb=calibration.l2_mb,
            peaks=calibration.peaks,
        )
    return replace(base, calibration=calibration, basis=MEASURED)


def architecture_of(compute_capability: str) -> str:
    """The architecture of the known GPUs of that compute capability, or of its major version; empty for neither."""
    profiles = all_profiles()
    exact = [p.architecture for p in profiles if p.compute_capability == compute_capability]
    major = [p.architecture for p in profiles if p.compute_capability.partition(".")[0] == compute_capability.partition(".")[0]]
    return next(iter(exact + major), "")


@lru_cache(maxsize=1)
def _profiles() -> tuple[Profile, ...]:
    with resources.as_file(resources.files(__name__) / "gpus.csv") as path, path.open(newline="", encoding="utf-8") as file:
        return tuple(_profile(row) for row in csv.DictReader(file))


def _profile(row: dict[str, str]) -> Profile:
    basis = CALIBRATED if _has_calibration(row["name"]) else SIBLING if _has_calibration(row["sibling"]) else SPECIFICATION
    return Profile(
        name=row["name"],
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        sms=int(row["sms"]),
        boost_mhz=float(row["boost_mhz"]),
        memory_gb=float(row["memory_gb"]),
        bandwidth_gbps=float(row["bandwidth_gbps"]),
        l2_mb=float(row["l2_mb"]),
        peaks=tuple((dtype, float(row[dtype])) for dtype in _SPEC_DTYPES if row[dtype]),
        sibling=row["sibling"],
        note=row["note"],
        basis=basis,
    )


def _has_calibration(name: str) -> bool:
    return bool(name) and (resources.files(__name__) / f"{slug(name)}.npz").is_file()


@lru_cache(maxsize=8)
def _calibrated(profile: Profile) -> Profile:
    """`profile` with its own calibration, its sibling's or none, as its basis says."""
    if profile.basis == SPECIFICATION:
        return profile
    name = profile.name if profile.basis == CALIBRATED else profile.sibling
    with resources.as_file(resources.files(__name__) / f"{slug(name)}.npz") as path:
        return replace(profile, calibration=load_calibration(path))


def slug(name: str) -> str:
    """The file name of a GPU's calibration, without its ending."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _compact(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _is_memory_size(word: str) -> bool:
    return re.fullmatch(r"\d+gb", word) is not None


def _row_words(profile: Profile) -> frozenset[str]:
    words = set(re.findall(r"[a-z0-9]+", profile.name.lower()))
    # SXM4 is also written SXM; Blackwell and the like only say the generation.
    return frozenset(words | {"sxm" for word in words if word.startswith("sxm")})


def _words(name: str, profiles: tuple[Profile, ...]) -> set[str] | None:
    """The words of `name` that tell GPUs apart, split greedily where they are run together; None if a part is unknown."""
    vocabulary = sorted({w for p in profiles for w in _row_words(p)} | set(_NOISE) | {"ti", "super"}, key=len, reverse=True)
    found: set[str] = set()
    for part in re.findall(r"[a-z0-9]+", name.lower()):
        rest = part
        while rest:
            size = re.match(r"\d+gi?b", rest)
            word = size.group() if size else next((v for v in vocabulary if rest.startswith(v)), None)
            if word is None:
                return None
            rest = rest[len(word) :]
            found.add(word.replace("gib", "gb"))
    return found - set(_NOISE)


def _matches(words: set[str], profile: Profile) -> bool:
    own = _row_words(profile)
    model = {w for w in own if re.search(r"\d", w) and not _is_memory_size(w) and not w.startswith("sxm")}
    return words <= own and bool(words & model) and (own & _VARIANT_WORDS) <= words


def _near(name: str, profiles: tuple[Profile, ...]) -> tuple[str, ...]:
    names = {_compact(p.name): p.name for p in profiles}
    compact = _compact(name)
    close = difflib.get_close_matches(compact, names, n=3, cutoff=0.5)
    digits = re.findall(r"[a-z]*\d+", compact)
    starts = [c for c in names if digits and any(d in c or c.startswith(d[:3]) for d in digits)]
    return tuple(names[c] for c in dict.fromkeys([*close, *starts]))[:3]
