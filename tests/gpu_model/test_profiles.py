"""What the built-in profiles say of themselves."""

from __future__ import annotations

import pytest

from lintgpu.gpu.predict import parse_shape, predict
from lintgpu.gpu.profiles import UnknownGpu, all_profiles, find


@pytest.mark.parametrize(
    ("name", "basis"),
    [
        ("H200", "calibrated"),
        ("A100", "calibrated"),
        ("L40S", "calibrated"),
        ("H100", "calibrated"),
        ("A40", "calibrated"),
        ("H100 PCIe", "sibling"),
        ("A10", "sibling"),
        ("A100 PCIe", "sibling"),
        ("RTX 4090", "sibling"),
        ("T4", "specification"),
        ("MI300X", "specification"),
    ],
)
def test_the_basis_is_stated(name: str, basis: str) -> None:
    profile = find(name)
    assert profile.basis == basis
    assert (profile.calibration is None) == (basis == "specification")
    assert predict([parse_shape("4096x4096x4096")], profile)[0].basis == basis


def test_every_gpu_costs_a_gemm_between_its_peak_and_a_twentieth_of_it() -> None:
    for listed in all_profiles():
        profile = find(listed.name)
        dtype = "bf16" if "bf16" in dict(profile.peaks) else "fp16"
        (cost,) = predict([parse_shape(f"8192x8192x8192,{dtype}")], profile)
        floor = 2 * 8192**3 / profile.peak(dtype) * 1e6
        assert 0.95 * floor < cost.us < 20 * floor, profile.name
        assert cost.low < cost.us < cost.high


@pytest.mark.parametrize("name", ["", "h2o", "geforce", "RTX", "80GB"])
def test_a_name_that_fits_no_gpu_or_all_is_refused(name: str) -> None:
    with pytest.raises(UnknownGpu):
        find(name)


def test_bands_are_wider_where_less_is_known() -> None:
    def width(name: str) -> float:
        (cost,) = predict([parse_shape("4096x4096x4096")], find(name))
        return cost.high / cost.low

    assert width("A100") < width("A100 PCIe") < width("T4")
