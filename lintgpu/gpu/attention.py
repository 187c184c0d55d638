"""scaled_dot_product_attention: which backend runs it, and how long.

flash (FlashAttention or cuDNN's: 16-bit, head_dim up to 256), efficient (fp32, older GPUs), math (a mask that needs a gradient, a value
dim that differs on older backends). Shares of the peak are fits to an H200 (torch 2.11, benchmarks/measure_ops.py).
"""

from __future__ import annotations

from lintgpu.gpu.profiles import Profile
from lintgpu.trace.records import BACKWARD, Attention

FLASH = "flash"
EFFICIENT = "efficient"
MATH = "math"
_TILE = 128
"""Queries and keys are handled in blocks of about this many."""
_BACKWARD_FLOPS = 2.5

# (padded head dim -> share of the dense 16-bit peak), forward and backward, on long sequences.
_FLASH_HOPPER = {64: (0.47, 0.40), 128: (0.69, 0.60), 256: (0.62, 0.30)}
_FLASH_AMPERE = {64: (0.60, 0.45), 128: (0.65, 0.52), 256: (0.55, 0.40)}
_EFFICIENT_SHARE = (0.62, 0.55)
"""Of the fp32 peak; of a third of it for 16-bit types on the tensor cores."""
_BLOCK_US = (1.1, 4.0)
"""SM-microseconds that each block of queries costs besides its products, forward and backward."""
_MASK = {FLASH: (1.8, 1.6), EFFICIENT: (1.17, 1.05)}
"""Slow-down by a mask tensor, forward and backward."""
_DROPOUT = {FLASH: (2.2, 2.2), EFFICIENT: (1.4, 1.4), MATH: (1.0, 1.0)}
"""The same by dropout, which cuDNN's kernels leave to older ones: fits to whole GPT-2 training steps of transformers, fp32 and bf16."""
_RAGGED_MASK = {FLASH: (3.2, 1.9), EFFICIENT: (1.2, 1.07)}
"""The same where the rows of the mask are off the 16-byte grid."""


def backend(attention: Attention, dtype: str, profile: Profile) -> str:
    """The backend that PyTorch's dispatcher takes for this call."""
    half = dtype in ("bf16", "fp16")
    modern = profile.architecture not in ("Pascal", "Volta", "Turing")
    if attention.mask == "grad":
        return MATH
    if half and modern and attention.head_dim <= 256 and (not attention.mask or profile.architecture in ("Hopper", "Blackwell")):
        return FLASH
    return EFFICIENT


def attention_us(attention: Attention, dtype: str, phase: str, profile: Profile) -> tuple[float, float, float, str]:
    """(time, math time, memory time, backend), in microseconds."""
    kind = backend(attention, dtype, profile)
    backward = phase == BACKWARD
    memory = _bytes(attention, dtype, kind, backward) / (profile.bandwidth_gbps * 0.85e3)
    flops = _flops(attention, backward, whole=kind == MATH)
    rate = _rate(attention, dtype, kind, backward, profile)
    math = flops / rate * 1e6 if rate else 0.0
    blocks = attention.batch * attention.heads * -(-attention.q_len // _TILE)
    fixed = (8.0 if backward else 3.0) + blocks / profile.sms * _BLOCK_US[backward]
    slower = _mask_factor(attention, kind, backward) * (_DROPOUT[kind][backward] if attention.dropout else 1.0)
    return fixed + max(math * slower, memory), math, memory, kind


def _flops(attention: Attention, backward: bool, whole: bool) -> float:
    """FLOPs in whole blocks, with what causality skips left out."""
    queries, keys = (-(-n // _TILE) * _TILE if n > 1 else 1 for n in (attention.q_len, attention.kv_len))
    padded = 2 * _padded(attention.head_dim)
    flops = 2.0 * attention.batch * attention.heads * queries * keys * padded * (_BACKWARD_FLOPS if backward else 1.0)
    if attention.causal and not whole:
        covered = 1 - 0.5 * keys / queries if queries > keys else 0.5 * queries / keys
        # Blocks on the diagonal and an uneven load cost a share that shrinks with the length.
        flops *= covered + 0.5 * min(1.0, 420 / max(attention.q_len, attention.kv_len)) ** 0.85
    return flops


def _padded(head_dim: int) -> int:
    return next((size for size in (64, 128, 256) if head_dim <= size), -(-head_dim // 64) * 64)


def _rate(attention: Attention, dtype: str, kind: str, backward: bool, profile: Profile) -> float:
    if kind == FLASH:
        table = _FLASH_HOPPER if profile.architecture in ("Hopper", "Blackwell") else _FLASH_AMPERE
        return profile.peak(dtype) * table.get(_padded(attention.head_dim), table[256])[backward]
    if kind == EFFICIENT:
        peak = profile.peak("fp32") if dtype == "fp32" else profile.peak(dtype) * 0.33
        return peak * _EFFICIENT_SHARE[backward]
    return profile.peak(dtype) * 0.5


def _bytes(attention: Attention, dtype: str, kind: str, backward: bool) -> float:
    size = 2 if dtype in ("bf16", "fp16") else 4
    width = attention.head_dim + attention.value_dim
    seen = min(attention.kv_len, attention.q_len) if attention.causal else attention.kv_len
    rows = attention.heads * attention.q_len + attention.kv_heads * seen
    moved = attention.batch * rows * width * size * (_BACKWARD_FLOPS if backward else 1.0)
    scores = attention.batch * attention.heads * attention.q_len * attention.kv_len
    if kind == MATH:
        # Scores written and read by the two products, the scale, the mask and the softmax.
        moved += scores * size * (10 if backward else 8)
    elif attention.mask:
        moved += scores / attention.heads * size
    return moved


def _mask_factor(attention: Attention, kind: str, backward: bool) -> float:
    if not attention.mask or kind == MATH:
        return 1.0
    return (_MASK if attention.kv_len % 8 == 0 else _RAGGED_MASK)[kind][backward]
