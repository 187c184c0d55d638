from __future__ import annotations

import pytest

from lintgpu.workload import Mode, Source, Stated, describe, resolve, values


def test_what_was_given_wins_over_what_was_read() -> None:
    workload = resolve([Stated("batch", 4), Stated("sequence", 512)], {"batch": 16})
    assert (workload.batch, workload.source_of("batch")) == (16, Source.GIVEN)
    assert (workload.sequence, workload.source_of("sequence")) == (512, Source.READ)
    assert workload.source_of("dtype") is Source.ASSUMED


def test_positions_cap_the_assumed_sequence_only() -> None:
    assert resolve([Stated("max_sequence", 512)], {}).sequence == 512
    assert resolve([Stated("max_sequence", 131072)], {}).sequence == 1024
    assert resolve([Stated("max_sequence", 512)], {"sequence": 600}).sequence == 600


@pytest.mark.parametrize(("mode", "autocast"), [("train", True), ("infer", False), ("decode", False)])
def test_autocast_is_assumed_in_training_only(mode: str, autocast: bool) -> None:
    assert resolve([], {"mode": Mode(mode)}).autocast is autocast


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_full_precision_has_no_autocast(dtype: str) -> None:
    assert resolve([], {"dtype": dtype}).autocast is False


def test_the_description_says_everything_that_bears_on_the_step() -> None:
    workload = resolve([], {"batch": 16, "compile": "default", "tensor_parallel": 2})
    assert describe(workload) == "train, batch 16 x 1024, bf16 autocast, compiled, TP 2"
    assert describe(resolve([], {"mode": Mode.DECODE})) == "decode, batch 8 x context 1024, bf16, eager"


def test_values_say_where_each_comes_from() -> None:
    found = {name: (value, source) for name, value, source in values(resolve([Stated("dtype", "fp16")], {"batch": 2}))}
    assert found["batch"] == ("2", Source.GIVEN)
    assert found["dtype"] == ("fp16", Source.READ)
    assert found["sequence"] == ("1024", Source.ASSUMED)
    assert found["autocast"] == ("on", Source.ASSUMED)
