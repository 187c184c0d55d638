"""Models of a project whose packages of GPU kernels are not installed: what is recorded in their place, and what is said."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lintgpu.finding import Span  # noqa: E402
from lintgpu.target.base import Target  # noqa: E402
from lintgpu.trace.client import Worker  # noqa: E402
from lintgpu.trace.records import Op, Trace, TraceFailure  # noqa: E402
from lintgpu.workload import Mode, Workload  # noqa: E402

BATCH, LENGTH, HEADS, DIM = 2, 16, 4, 8
WIDTH = HEADS * DIM
PROJECT = {
    "flash.py": """
        import torch
        from torch import nn
        from flash_attn import flash_attn_func
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        from flash_attn.bert_padding import pad_input, unpad_input

        class Dense(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = nn.Linear(32, 48)
                self.out = nn.Linear(32, 32)
            def forward(self, x):
                b, l, _ = x.shape
                q, k, v = self.qkv(x).split([32, 8, 8], dim=-1)
                q, k, v = q.view(b, l, 4, 8), k.view(b, l, 1, 8), v.view(b, l, 1, 8)
                return self.out(flash_attn_func(q, k, v, causal=True).reshape(b, l, 32))

        class Varlen(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = nn.Linear(32, 96)
            def forward(self, x):
                b, l, _ = x.shape
                mask = torch.ones(b, l, dtype=torch.bool)
                rows, indices, lengths, longest, _ = unpad_input(x, mask)
                q, k, v = self.qkv(rows).view(-1, 3, 4, 8).unbind(1)
                out = flash_attn_varlen_func(q, k, v, lengths, lengths, longest, longest, 0.0, None, True)
                return pad_input(out.flatten(1), indices, b, l)
        """,
    "memory.py": """
        from torch import nn
        import xformers.ops as xops

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.q = nn.Linear(32, 32)
            def forward(self, x):
                q = self.q(x).view(2, 16, 4, 8)
                return xops.memory_efficient_attention(q, q, q, attn_bias=xops.LowerTriangularMask(), p=0.1)
        """,
    "norms.py": """
        from torch import nn
        from apex.normalization import FusedLayerNorm, FusedRMSNorm

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.up, self.second = FusedLayerNorm(32), nn.Linear(32, 64), FusedRMSNorm(64)
            def forward(self, x):
                return self.second(self.up(self.first(x)))
        """,
    "engine.py": """
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up = te.LayerNormLinear(32, 64, bias=False)
                self.down = te.Linear(64, 32)
            def forward(self, x):
                with te.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling()):
                    return self.down(self.up(x))

        def plain():
            return te.Linear(32, 64)
        """,
    "bits.py": """
        import torch
        from torch import nn
        import bitsandbytes as bnb

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(32, 48)
                self.four = bnb.nn.Linear4bit(48, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                self.eight = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
            def forward(self, x):
                return self.eight(self.four(self.first(x)))
        """,
    "scan.py": """
        from torch import nn
        from mamba_ssm import Mamba
        from mamba_ssm.modules.mamba2 import Mamba2

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Mamba(d_model=32, d_state=8) for _ in range(3)])
                self.last = Mamba2(32, d_state=8, headdim=16)
            def forward(self, x):
                for block in self.blocks:
                    x = x + block(x)
                return self.last(x)
        """,
    "convolve.py": """
        from torch import nn
        from causal_conv1d import causal_conv1d_fn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(32, 32, 4, groups=32)
                self.proj = nn.Linear(32, 32)
            def forward(self, x):
                x = self.proj(x).transpose(1, 2)
                return causal_conv1d_fn(x, self.conv.weight.squeeze(1), self.conv.bias, activation="silu")
        """,
    "tritons.py": """
        import torch
        import triton
        import triton.language as tl
        from torch import nn

        @triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["n"])
        @triton.jit
        def square(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
            tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr))

        class Squared(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                y = torch.empty_like(x)
                square[(triton.cdiv(x.numel(), 128),)](x, y, x.numel())
                return y
            @staticmethod
            def backward(ctx, dy):
                dx = torch.empty_like(dy)
                square[lambda meta: (1,)](dy, dx, dy.numel())
                return dx

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = nn.Linear(32, 48)
            def forward(self, x):
                return Squared.apply(self.proj(x))
        """,
    "setup.py": """
        from setuptools import setup
        setup(ext_modules=[CUDAExtension(name="fused_here", sources=["a.cu"])])
        """,
    "compiled.py": """
        import fused_here
        from torch import nn
        from torch.utils.cpp_extension import load

        built = load(name="built_here", sources=["b.cpp"])

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj, self.out = nn.Linear(32, 48), nn.Linear(48, 32)
            def forward(self, x):
                return self.out(built.scale(fused_here.swish(self.proj(x), 2.0), 3))
        """,
    "guarded.py": """
        from torch import nn
        try:
            from flash_attn import no_such_name
        except ImportError:
            no_such_name = None

        def model():
            assert no_such_name is None
            return nn.Linear(32, 48)
        """,
    "unknown.py": """
        import transformer_engine.pytorch as te

        def model():
            return te.TransformerLayer(32, 64, 4)
        """,
    "looking.py": """
        from transformers.utils import is_flash_attn_2_available
        from transformers.utils.import_utils import is_bitsandbytes_available, is_causal_conv1d_available
        from torch import nn

        def model():
            assert not (is_flash_attn_2_available() or is_bitsandbytes_available() or is_causal_conv1d_available())
            return nn.Linear(32, 48)
        """,
}
ABSENT = ("flash_attn", "xformers", "apex", "transformer_engine", "bitsandbytes", "mamba_ssm", "causal_conv1d", "triton")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import textwrap

    root = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (root / name).write_text(textwrap.dedent(text))
    return root


@pytest.fixture(scope="module")
def worker(project: Path) -> Iterator[Worker]:
    with Worker(trust=True, project_root=str(project)) as running:
        yield running


def run(worker: Worker, project: Path, model: str, mode: str = "train", **options: Any) -> Trace | TraceFailure:
    module, _, attribute = model.partition(":")
    example = {"x": {"shape": ["batch", "sequence", WIDTH]}}
    parameter = {"model": "input", "plain": "inp"}.get(attribute, "x")
    spec = {"root": str(project), "module": module, "attribute": attribute, "example_inputs": {parameter: example["x"]}}
    workload = Workload(mode=Mode(mode), batch=BATCH, sequence=LENGTH, **{"autocast": False, **options})
    return worker.trace(Target(model, "python", Span(f"{module}.py", 1, 1, 1, 1), spec, runs_project_code=True), workload)


def traced(worker: Worker, project: Path, model: str, mode: str = "train", **options: Any) -> Trace:
    package = {"flash": "flash_attn", "memory": "xformers", "norms": "apex", "engine": "transformer_engine", "bits": "bitsandbytes",
               "scan": "mamba_ssm", "convolve": "causal_conv1d", "tritons": "triton"}.get(model.partition(":")[0], "")  # fmt: skip
    if package and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed: nothing stands in for it")
    trace = run(worker, project, model, mode, **options)
    assert isinstance(trace, Trace), trace
    return trace


def gemms(trace: Trace, module: str) -> dict[str, tuple[Any, ...]]:
    """phase -> (dtype, weight dtype, m, n, k) of the GEMMs of a module."""
    found = [op for op in trace.ops if op.module == module and op.gemm is not None and op.kind == "gemm"]
    return {op.phase: (op.dtype, op.gemm.weight_dtype, op.gemm.m, op.gemm.n, op.gemm.k) for op in found if op.gemm is not None}


def kernels(trace: Trace) -> list[tuple[str, str, int]]:
    return [(op.name, op.phase, op.count) for op in trace.ops if op.kind == "opaque"]


def attentions(trace: Trace) -> list[Op]:
    return [op for op in trace.ops if op.attention is not None]


def test_flash_attention_is_attention_with_its_grouped_heads(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "flash:Dense")
    assert [op.phase for op in attentions(trace)] == ["forward", "backward"]
    attention = attentions(trace)[0].attention
    assert attention is not None
    assert (attention.batch, attention.heads, attention.kv_heads, attention.q_len, attention.head_dim) == (BATCH, HEADS, 1, LENGTH, DIM)
    assert attention.causal
    assert gemms(trace, "out")["forward"][2:] == (BATCH * LENGTH, 32, 32)
    assert any("flash_attn is not installed" in text for text in trace.assumptions)


def test_variable_lengths_are_taken_to_be_equal_and_that_is_said(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "flash:Varlen")
    attention = attentions(trace)[0].attention
    assert attention is not None
    assert (attention.batch, attention.heads, attention.q_len, attention.kv_len, attention.causal) == (BATCH, HEADS, LENGTH, LENGTH, True)
    assert any("equally long" in text for text in trace.assumptions)


def test_memory_efficient_attention_knows_its_causal_mask(worker: Worker, project: Path) -> None:
    attention = attentions(traced(worker, project, "memory:Model"))[0].attention
    assert attention is not None
    assert (attention.heads, attention.causal, attention.mask, attention.dropout) == (HEADS, True, "", 0.1)


def test_fused_norms_are_norms(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "norms:Model")
    assert {op.module for op in trace.ops if op.kind == "norm" and op.phase == "forward"} == {"first", "second"}
    assert any("apex is not installed" in text for text in trace.assumptions)


def test_fp8_layers_multiply_in_fp8_forward_and_backward(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "engine:Model")
    rows = BATCH * LENGTH
    assert gemms(trace, "up") == {
        "forward": ("fp8", "", rows, 64, 32),
        "grad-input": ("fp8", "", rows, 32, 64),
        "grad-weight": ("fp8", "", 64, 32, rows),
    }
    assert gemms(trace, "down")["forward"] == ("fp8", "", rows, 32, 64)


def test_an_fp8_layer_outside_fp8_autocast_is_plain(worker: Worker, project: Path) -> None:
    assert gemms(traced(worker, project, "engine:plain"), "")["forward"][:2] == ("bf16", "")


def test_weights_of_few_bits_keep_their_type_and_train_nothing(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "bits:Model")
    rows = BATCH * LENGTH
    assert gemms(trace, "four") == {"forward": ("bf16", "nf4", rows, 64, 48), "grad-input": ("bf16", "nf4", rows, 48, 64)}
    assert gemms(trace, "eight")["forward"] == ("int8", "", rows, 32, 64)
    assert [name for name, *_ in kernels(trace)] == ["dequantize_nf4", "dequantize_nf4"]


def test_few_bits_under_autocast_compute_in_its_type(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "bits:Model", autocast=True, dtype="fp16")
    assert gemms(trace, "four")["forward"][:2] == ("fp16", "nf4")


def test_mamba_blocks_show_their_projections_and_one_scan_each(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "scan:Model")
    rows = BATCH * LENGTH
    assert gemms(trace, "blocks.*.in_proj")["forward"][2:] == (rows, 128, 32)
    assert gemms(trace, "last.in_proj")["forward"][2:] == (rows, 64 + 64 + 16 + 4, 32)
    named = {(name, phase): count for name, phase, count in kernels(trace)}
    assert named[("selective_scan_fn", "forward")] == named[("selective_scan_fn_backward", "backward")] == 3
    assert named[("mamba_chunk_scan_combined", "forward")] == 1


def test_a_causal_convolution_is_a_kernel_with_its_bytes(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "convolve:Model")
    [forward] = [op for op in trace.ops if op.name == "causal_conv1d_fn"]
    elements = BATCH * LENGTH * WIDTH
    assert (forward.kind, forward.bytes_written, forward.bytes_read) == ("opaque", 2 * elements, 2 * (elements + 32 * 4 + 32))


def test_triton_launches_are_kernels_of_their_phase(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "tritons:Model")
    assert kernels(trace) == [("triton.square", "forward", 1), ("triton.square", "backward", 1)]
    assert any("Triton kernel square" in text for text in trace.assumptions)


def test_compiled_extensions_of_the_project_are_opaque_and_said(worker: Worker, project: Path) -> None:
    trace = traced(worker, project, "compiled:Model")
    assert [name for name, phase, _ in kernels(trace) if phase == "forward"] == ["fused_here.swish", "built_here.scale"]
    assert gemms(trace, "out")["forward"][2:] == (BATCH * LENGTH, 32, 48)
    assert any("compiled extension" in text for text in trace.assumptions)


def test_a_name_that_nothing_stands_in_for_is_an_import_error_or_a_true_reason(worker: Worker, project: Path) -> None:
    traced(worker, project, "guarded:model")
    failure = run(worker, project, "unknown:model")
    assert isinstance(failure, TraceFailure)
    assert failure.reason == "transformer_engine is not installed, and what stands in for it has no TransformerLayer"


def test_libraries_that_look_for_packages_find_the_truth(worker: Worker, project: Path) -> None:
    pytest.importorskip("transformers")
    if any(importlib.util.find_spec(package) is not None for package in ABSENT):
        pytest.skip("some of them are installed")
    traced(worker, project, "looking:model")
    traced(worker, project, "bits:Model")
    traced(worker, project, "looking:model")
