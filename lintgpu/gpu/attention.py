"""scaled_dot_product_attention: which backend runs it, and how long.

flash / cuDNN (16-bit, head_dim up to 256, no mask tensor but causality), efficient (a mask tensor, fp32), math (what neither takes: a
differing value dim, a mask that needs a gradient).
"""

from __future__ import annotations

from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import BACKWARD, Attention

FLASH = "flash"
EFFICIENT = "efficient"
MATH = "math"

# Share of the dense peak that each backend reaches on long sequences, forward and backward, by architecture.
_EFFICIENCY = {
    (FLASH, "Hopper"): (0.60, 0.50),
    (FLASH, "Blackwell"): (0.60, 0.45),
    (FLASH, ""): (0.62, 0.50),
    (EFFICIENT, ""): (0.30, 0.20),
}


def backend(attention: Attention, dtype: str, profile: Profile) -> str:
    """The backend that PyTorch's dispatcher takes for this call."""
    half = dtype in ("bf16", "fp16")
    modern = profile.architecture not in ("Pascal", "Volta", "Turing")
    if attention.mask == "grad":
        return MATH
    if half and modern and not attention.mask and attention.head_dim <= 256 and attention.value_dim == attention.head_dim:
        return FLASH
    return EFFICIENT


def attention_us(attention: Attention, dtype: str, phase: str, profile: Profile) -> tuple[float, float, float, str]:
    """(time, math time, memory time, backend), in microseconds; `phase` backward counts 2.5 times the FLOPs."""
    kind = backend(attention, dtype, profile)
    backward = phase == BACKWARD
    size = 2 if dtype in ("bf16", "fp16") else 4
    flops = attention.flops * (2.5 if backward else 1.0) * (0.5 if attention.causal and attention.q_len == attention.kv_len else 1.0)
    queries = attention.batch * attention.heads * attention.q_len * (attention.head_dim + attention.value_dim)
    keys = attention.batch * attention.kv_heads * attention.kv_len * (attention.head_dim + attention.value_dim)
    moved = (queries + keys) * size * (2.5 if backward else 1.0)
    if attention.mask:
        moved += attention.batch * attention.q_len * attention.kv_len * size
    scores = attention.batch * attention.heads * attention.q_len * attention.kv_len
    if kind == MATH:
        # Scores written and read by the two products, the scale, the mask and the softmax.
        moved += scores * size * (10 if backward else 8)
    share = _EFFICIENCY.get((kind, profile.architecture), _EFFICIENCY.get((kind, ""), (0.4, 0.4)))[backward]
    compute = "tf32" if dtype == "fp32" and kind != MATH else dtype
    peak = profile.peak(compute) * share
    memory = moved / (profile.bandwidth_gbps * 0.85e9) * 1e6
    math = flops / peak * 1e6 if peak else 0.0
    return 5.0 + max(math, memory), math, memory, kind
