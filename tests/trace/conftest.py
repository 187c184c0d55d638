"""Small models and the ways to trace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lintgpu.target.base import Built
from lintgpu.trace.records import Op, Trace
from lintgpu.workload import Mode, Workload

TraceModel = Callable[..., Trace]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def trace_model() -> TraceModel:
    """trace_model(make, inputs, ...): `make()` builds the module, `inputs()` gives a tuple or a dict."""
    pytest.importorskip("torch")
    from lintgpu.trace.record import record

    def run(
        make: Callable[[], Any],
        inputs: Callable[[], Any],
        loss: Any = None,
        mode: str = "train",
        dtype: str = "fp32",
        autocast: bool = False,
        memoise: bool = True,
        batch: int = 2,
        sequence: int = 16,
    ) -> Trace:
        def make_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
            made = inputs()
            return ((), made) if isinstance(made, dict) else (tuple(made), {})

        workload = Workload(mode=Mode(mode), batch=batch, sequence=sequence, dtype=dtype, autocast=autocast)
        return record(lambda: Built(make(), make_inputs, loss), workload, memoise)

    return run


@pytest.fixture
def gemms() -> Callable[..., list[Op]]:
    """The GEMM and convolution ops of a trace, of one phase or all."""

    def select(trace: Trace, phase: str | None = None) -> list[Op]:
        return [op for op in trace.ops if op.gemm is not None and phase in (None, op.phase)]

    return select
