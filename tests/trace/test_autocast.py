"""Autocast on meta, against torch's own where the CPU has the same policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lintgpu.trace.kinds import dtype_name  # noqa: E402
from lintgpu.trace.records import FORWARD, Op, Trace  # noqa: E402

TraceModel = Callable[..., Trace]


class Mixer(nn.Module):
    """Linear layers, a convolution, attention by matmuls and by einsum, a tied weight and an own region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        x = self.second(F.gelu(self.first(x)))
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=True)[0]
        scores = torch.einsum("bsd,btd->bst", x, x)
        return self.second(scores @ x)


class Dtypes(TorchDispatchMode):
    names = frozenset(["mm", "addmm", "bmm", "baddbmm", "convolution"])

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in self.names:
            self.seen[(name, dtype_name(output.dtype))] += 1
        return output


def inputs() -> tuple[Any, ...]:
    return (torch.zeros(2, 4, 8),)


@pytest.mark.parametrize("memoise", [False, True])
def test_gemms_run_in_the_dtypes_of_torchs_own_autocast(memoise: bool, trace_model: TraceModel) -> None:
    trace = trace_model(Mixer, inputs, lambda output: output.float().sum(), dtype="bf16", autocast=True, memoise=memoise)
    recorded: Counter[tuple[str, str]] = Counter()
    for op in trace.ops:
        if op.name in Dtypes.names:
            recorded[(op.name, op.dtype)] += op.count
    model = Mixer()
    with Dtypes() as real:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(*inputs())
        output.float().sum().backward()
    assert recorded == real.seen
    assert {dtype for _, dtype in recorded} == {"bf16"}


def casts(trace: Trace, module: str) -> list[Op]:
    return [op for op in trace.ops if op.name == "_to_copy" and op.module == module and op.phase == FORWARD]


def test_each_weight_is_cast_once_a_step(trace_model: TraceModel) -> None:
    trace = trace_model(Mixer, inputs, lambda output: output.float().sum(), dtype="bf16", autocast=True)
    # `second` runs twice: its weight is cast in the first run alone.
    assert [(op.shape, op.count, op.dtype) for op in casts(trace, "second")] == [((8, 8), 1, "bf16")]
    assert trace.parameters.dtype == "fp32"


def test_norms_softmax_and_sums_stay_in_fp32(trace_model: TraceModel) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            return self.norm(self.layer(x)).sum(-1) + self.layer(x).softmax(-1).sum(-1)

    trace = trace_model(Model, inputs, dtype="bf16", autocast=True)
    kinds = {op.kind: op.dtype for op in trace.ops if op.phase == FORWARD and op.kind in ("norm", "softmax", "reduction", "gemm")}
    assert kinds == {"norm": "fp32", "softmax": "fp32", "reduction": "fp32", "gemm": "bf16"}


def test_a_region_that_switches_autocast_off_is_honoured(trace_model: TraceModel) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.full = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            assert torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", enabled=False):
                x = self.full(x)
                assert not torch.is_autocast_enabled("cuda")
            return self.low(x)

    trace = trace_model(Model, inputs, dtype="bf16", autocast=True)
    assert {op.module: op.dtype for op in trace.ops if op.kind == "gemm" and op.phase == FORWARD} == {"full": "fp32", "low": "bf16"}


def test_a_region_of_the_models_own_is_honoured_without_autocast(trace_model: TraceModel) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.full = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            with torch.autocast("cuda", dtype=torch.float16):
                y = self.low(x)
            return self.full(y.float())

    trace = trace_model(Model, inputs, dtype="fp32")
    assert {op.module: op.dtype for op in trace.ops if op.kind == "gemm" and op.phase == FORWARD} == {"full": "fp32", "low": "fp16"}


def test_a_model_that_refuses_half_weights_is_traced_under_autocast_and_it_is_said(trace_model: TraceModel) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            if x.dtype == torch.bfloat16:
                raise RuntimeError("Unsupported dtype BFloat16")
            return self.layer(x)

    trace = trace_model(Model, inputs, mode="infer", dtype="bf16")
    assert {op.dtype for op in trace.ops if op.kind == "gemm"} == {"bf16"}
    assert trace.parameters.dtype == "fp32"
    assert any("Unsupported dtype BFloat16" in text for text in trace.assumptions)


def test_torch_is_as_before_afterwards(trace_model: TraceModel) -> None:
    before = (torch.is_autocast_enabled, torch.autocast.__enter__, torch.compile, nn.Module.__call__, torch.get_default_dtype())
    trace_model(Mixer, inputs, dtype="bf16", autocast=True)
    assert (torch.is_autocast_enabled, torch.autocast.__enter__, torch.compile, nn.Module.__call__, torch.get_default_dtype()) == before
    meta = torch.empty(2, 8, device="meta")
    assert nn.Linear(8, 8, device="meta")(meta).dtype == torch.float32
