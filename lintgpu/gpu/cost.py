"""GPU time of each op of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lintgpu.gpu import attention as attention_model
from lintgpu.gpu.costs import MATH, MEMORY, OpCost
from lintgpu.gpu.gemm import GemmTimes, gemm_times
from lintgpu.gpu.gemms import DTYPES, Gemms, gemms_of
from lintgpu.gpu.kernels import family
from lintgpu.gpu.memory import memory_us
from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import Op
from lintgpu.workload import Workload

LATENCY = "latency"
_LATENCY_WAVES = 0.5
_LATENCY_US = 3.0
_MEMORY_BAND = (0.8, 1.25)
_ATTENTION_BAND = (0.75, 1.35)


def cost_ops(ops: Sequence[Op], profile: Profile, workload: Workload) -> tuple[OpCost, ...]:
    """The cost of one occurrence of each op, in the order given."""
    costs: list[OpCost | None] = [None] * len(ops)
    gemm_at = [i for i, op in enumerate(ops) if op.gemm is not None]
    for i, cost in zip(gemm_at, _gemm_costs([ops[i] for i in gemm_at], profile, workload), strict=True):
        costs[i] = cost
    attention_at = [i for i, op in enumerate(ops) if op.gemm is None and op.attention is not None]
    for i in attention_at:
        costs[i] = _attention_cost(ops[i], profile)
    rest = [i for i, cost in enumerate(costs) if cost is None]
    for i, cost in zip(rest, _memory_costs([ops[i] for i in rest], profile), strict=True):
        costs[i] = cost
    return tuple(cost for cost in costs if cost is not None)


class KnownCosts:
    """`cost_ops` that costs an op once: a what-if changes a few ops of a step, and many what-ifs are asked of one step."""

    def __init__(self) -> None:
        self._known: dict[tuple[Op, str, Workload], OpCost] = {}

    def __call__(self, ops: Sequence[Op], profile: Profile, workload: Workload) -> tuple[OpCost, ...]:
        """The cost of one occurrence of each op, in the order given."""
        keys = [(replace(op, count=1), profile.name, workload) for op in ops]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        self._known |= zip(missing, cost_ops([op for op, _, _ in missing], profile, workload), strict=True)
        return tuple(self._known[key] for key in keys)


def compute_dtype(dtype: str, workload: Workload) -> str:
    """The dtype a GEMM computes in: fp32 tensors go through TF32 where the workload allows it."""
    return "tf32" if dtype == "fp32" and workload.dtype == "tf32" else dtype


def _gemm_costs(ops: Sequence[Op], profile: Profile, workload: Workload) -> list[OpCost]:
    gemms = gemms_of([op.gemm for op in ops if op.gemm is not None], [compute_dtype(op.dtype, workload) for op in ops])
    return gemm_costs(gemms, profile)


def gemm_costs(gemms: Gemms, profile: Profile) -> list[OpCost]:
    """The cost of each GEMM."""
    if len(gemms) == 0:
        return []
    times = gemm_times(gemms, profile)
    return [_gemm_cost(i, gemms, times, profile) for i in range(len(gemms))]


def _gemm_cost(i: int, gemms: Gemms, times: GemmTimes, profile: Profile) -> OpCost:
    tiling, dtype = times.tiling, DTYPES[gemms.dtype[i]]
    layout = ("N" if gemms.a_row[i] else "T") + ("N" if gemms.b_row[i] else "T")
    bound = MATH if times.math_us[i] >= times.memory_us[i] else MEMORY
    if tiling.waves[i] < _LATENCY_WAVES and times.us[i] > 3 * max(times.math_us[i], times.memory_us[i]):
        bound = LATENCY
    return OpCost(
        us=float(times.us[i]),
        low=float(times.low[i]),
        high=float(times.high[i]),
        bound=bound,
        kernel=family(dtype, int(times.alignment[i]), int(gemms.m[i]), int(gemms.n[i]), layout, int(tiling.split[i]), profile.architecture),
        tile=(int(tiling.tile_m[i]), int(tiling.tile_n[i])),
        waves=round(float(tiling.waves[i]), 3),
        alignment=int(times.alignment[i]),
        basis=times.basis[i],
    )


def _attention_cost(op: Op, profile: Profile) -> OpCost:
    assert op.attention is not None
    us, math, memory, kind = attention_model.attention_us(op.attention, op.dtype, op.phase, profile)
    low, high = _ATTENTION_BAND
    return OpCost(us, us * low, us * high, MATH if math >= memory else MEMORY, kernel=kind, basis=profile.basis)


def _memory_costs(ops: Sequence[Op], profile: Profile) -> list[OpCost]:
    low, high = _MEMORY_BAND
    return [
        OpCost(float(us), float(us) * low, float(us) * high, LATENCY if us < _LATENCY_US else MEMORY, kernel=op.kind, basis=profile.basis)
        for op, us in zip(ops, memory_us(ops, profile), strict=True)
    ]
