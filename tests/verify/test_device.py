"""What the driver says about a card, and what becomes of it. The lines are nvidia-smi's own format."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from lintgpu.verify import device as devices


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([["1980 MHz", "1980 MHz", "0x0000000000000000"], ["345 MHz", "1980 MHz", "0x0000000000000001"]], ""),  # idle is no slowdown
        (
            [["1980 MHz", "1980 MHz", "0x0000000000000000"], ["1410 MHz", "1980 MHz", "0x0000000000000004"]],
            "its power cap while it was measured (1410 MHz of 1980 MHz)",
        ),
        ([["900 MHz", "1980 MHz", "0x0000000000000060"]], "slowed down by its temperature while"),
        ([["900 MHz", "1980 MHz", "0x000000000000000c"]], "its power cap and a hardware slowdown"),
        ([["[N/A]", "[N/A]", "[N/A]"], ["15"]], ""),
    ],
)
def test_throttled_clocks_are_one_line(samples: list[list[str]], said: str) -> None:
    line = devices.slowdown(samples)
    assert said in line
    assert bool(said) == bool(line)


def test_a_busy_card_is_refused() -> None:
    with pytest.raises(devices.NoDevice, match=r"GPU 0 is 97 % busy.*: nothing can be timed beside other work"):
        devices._refuse_busy(torch.device("cuda", 0), {"utilization.gpu": "97"}, ["python3 (4711)"])
    devices._refuse_busy(torch.device("cuda", 0), {"utilization.gpu": "3"}, [])
    devices._refuse_busy(torch.device("cuda", 0), {}, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_reason() -> None:
    with pytest.raises(devices.NoDevice, match=r"torch"):
        devices.choose("0")


def test_watching_a_cpu_says_nothing() -> None:
    watch = devices.Watch(torch.device("cpu"))
    assert watch.slowed() == ""
    watch.close()
