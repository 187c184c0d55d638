"""Which family of kernels cuBLAS picks for a GEMM: a rule over dtype, alignment and shape.

Read off the kernel names of some 30,000 GEMMs on an H200 (cuBLAS 13): benchmarks/accuracy.py prints how often the rule names the family
that ran.
"""

from __future__ import annotations

GEMV = "gemv"
"""One row or column: dot products, bound by memory."""
SPLIT_K = "split-k"
_FEW = 128
"""Rows or columns from which Hopper's own TF32 kernels are taken."""
_HALF = ("bf16", "fp16")
_BLACKWELL_OR_HOPPER = ("Hopper", "Blackwell")


def family(dtype: str, alignment: int, m: int, n: int, layout: str, split: int, architecture: str) -> str:
    """The family's name, as in the kernel's: nvjet (TMA), cutlass_80 align2, cutlass_75 align1, xmma, simt, gemv; split-k added.

    alignment: smallest class of the three leading dimensions, in bytes. layout: NT, NN, TN or TT.
    """
    if min(m, n) == 1 and (alignment < 16 or dtype in ("fp32", "tf32")) and not (layout == "TN" and alignment >= 16):
        return GEMV
    found = _gemm_family(dtype, alignment, min(m, n), architecture)
    return f"{found} {SPLIT_K}" if split > 1 else found


def _gemm_family(dtype: str, alignment: int, narrower: int, architecture: str) -> str:
    if dtype in ("fp32", "fp64"):
        return "simt" if dtype == "fp32" else "xmma"
    if dtype == "tf32":
        if alignment >= 16 and narrower > _FEW and architecture == "Hopper":
            return "xmma"
        return f"cutlass_80 align{4 if alignment >= 16 else 1}"
    if dtype == "int8":
        return f"cutlass_80 align{16 if alignment >= 16 else 4}"
    if dtype in _HALF and alignment < 16:
        return "cutlass_75 align1" if alignment < 4 else "cutlass_80 align2"
    return "nvjet" if architecture in _BLACKWELL_OR_HOPPER else "cutlass_80 align8"


def named(kernel: str) -> str:
    """The family of a kernel by the name that the profiler shows; empty where it is of none that `family` names.

    FP32 kernels without tensor cores are called cutlass_80_simt, xmma ffma or sgemm: all of them simt.
    """
    if kernel.startswith("nvjet"):
        return "nvjet"
    if any(word in kernel for word in ("simt", "ffma", "sgemm", "f32f32_f32f32")):
        return "simt"
    if any(word in kernel for word in ("gemv", "gemmSN", "std::enable_if", "dot_kernel")):
        return GEMV
    for name in ("cutlass_80", "cutlass_75"):
        if name in kernel:
            _, _, align = kernel.partition("align")
            digits = "".join(c for c in align[:2] if c.isdigit())
            return f"{name} align{digits}" if digits else name
    return "xmma" if "xmma" in kernel else ""
