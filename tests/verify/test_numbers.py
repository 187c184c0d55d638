"""Whether wrong numbers are seen. All on the CPU: the arithmetic is the same."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from lintgpu.target.base import Built
from lintgpu.trace.records import FORWARD, GRAD_WEIGHT, Gemm, Op
from lintgpu.verify import numbers
from lintgpu.verify.models import Models, Step, default_layers
from lintgpu.verify.records import Item, LayersJob, Model, NumbersJob, Variant, knob_name
from lintgpu.verify.rounds import KernelTime
from lintgpu.verify.steps import is_math, wait_of
from lintgpu.workload import Mode, Workload

CPU = torch.device("cpu")
WORKLOAD = Workload(mode=Mode.TRAIN, batch=2, sequence=8, dtype="fp32", autocast=False)


class Words(nn.Module):
    """A vocabulary with an embedding and a head; `wrong` plants an error into the outputs of a padded one."""

    def __init__(self, vocabulary: int, wrong: float = 0.0) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary, bias=False)
        self.wrong = wrong

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.wte(idx))
        return logits + self.wrong * logits[..., -1:] + self.wrong


class Made(Models):
    """Models that are made here instead of by a family."""

    def __init__(self, base: nn.Module, variant: nn.Module) -> None:
        super().__init__(CPU)
        self._made = {"base": base, "variant": variant}

    def built(self, variant: Variant) -> Built:
        return Built(self._made[variant.label], lambda: ((torch.zeros(2, 8, dtype=torch.int64),), {}))


def compared(base: nn.Module, variant: nn.Module, kind: str = numbers.PADDED) -> dict[str, tuple[bool, tuple[float, float] | None]]:
    job = NumbersJob(Model("m", "none", {}), kind, Variant("base", WORKLOAD), Variant("variant", WORKLOAD), ("vocabulary",))
    result = numbers.measure(job, Made(base, variant), lambda text: None)
    return {check.what: (check.passed, check.pair) for check in result.checks}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_padded_vocabulary_computes_the_same() -> None:
    found = compared(Words(50), Words(64))
    assert len(found) == 5
    assert all(passed for passed, _ in found.values())


def test_a_padded_model_that_computes_something_else_is_seen_with_both_numbers() -> None:
    found = compared(Words(50), Words(64, wrong=0.5))
    passed, pair = found["padded model: outputs on the real rows"]
    assert not passed
    assert pair is not None
    assert pair[1] - pair[0] == pytest.approx(0.5, abs=1e-4), "the planted error"


def test_attention_that_differs_is_seen() -> None:
    assert not compared(Words(50), Words(50, wrong=0.1), numbers.ATTENTION)["SDPA and hand-written attention: equal outputs"][0]
    assert all(passed for passed, _ in compared(Words(50), Words(50), numbers.ATTENTION).values())


def test_nan_never_passes() -> None:
    base, broken = Words(50), Words(64, wrong=math.nan)
    assert not compared(base, broken)["padded model: outputs on the real rows"][0]


def test_embedded_weights_are_the_corner_and_zeros() -> None:
    source, target = nn.Linear(3, 5), nn.Linear(4, 8)
    numbers.embed_weights(source, target)
    assert torch.equal(target.weight[:5, :3], source.weight)
    assert target.weight[5:].abs().sum() + target.weight[:, 3:].abs().sum() == 0


@pytest.mark.parametrize("layout", ["NT", "NN", "TN", "TT"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gemms_are_compared_with_float64_in_every_layout(layout: str, dtype: str) -> None:
    def op(n: int) -> Op:
        gemm = Gemm(1, 40, n, 24, layout, 40 if layout[0] == "T" else 24, 24 if layout[1] == "T" else n, n)
        return Op("gemm", "mm", FORWARD, dtype, module="head", gemm=gemm)

    (check,) = numbers.gemm_checks(LayersJob((Item(op(33), 1.0),), (Item(op(40), 1.0),)), CPU)
    assert check.passed
    assert check.value > 0
    assert check.pair is not None


def test_a_longer_sum_is_filled_with_zeros() -> None:
    one = Op("gemm", "mm", GRAD_WEIGHT, "fp32", gemm=Gemm(1, 16, 16, 50, "TN", 16, 16, 16))
    two = Op("gemm", "mm", GRAD_WEIGHT, "fp32", gemm=Gemm(1, 16, 16, 64, "TN", 16, 16, 16))
    (check,) = numbers.gemm_checks(LayersJob((Item(one, 1.0),), (Item(two, 1.0),)), CPU)
    assert check.passed


# Steps


def test_a_training_step_learns_nothing_and_leaves_no_gradients() -> None:
    model = Words(50)
    step = Step(Built(model, lambda: ((torch.zeros(2, 8, dtype=torch.int64),), {})), WORKLOAD, CPU)
    before = model.head.weight.detach().clone()
    step()
    assert model.head.weight.grad is None
    assert not torch.equal(before, model.head.weight), "the optimizer has run"
    assert torch.allclose(before, model.head.weight, atol=1e-4)


def test_tokens_are_random_and_within_the_vocabulary() -> None:
    step = Step(Built(Words(50), lambda: ((torch.zeros(2, 8, dtype=torch.int64),), {})), WORKLOAD, CPU)
    assert 1 < len(step.args[0].unique()) <= 16
    assert int(step.args[0].max()) < 50


@pytest.mark.parametrize(
    ("kernels", "step_ms", "bound"),
    [
        ([("nvjet_tst_128x256", 9_000), ("vectorized_elementwise_kernel", 500)], 10.0, "math"),
        ([("nvjet_tst_128x256", 2_000), ("vectorized_elementwise_kernel", 7_500)], 10.0, "memory"),
        ([("nvjet_tst_128x256", 3_000)], 10.0, "python"),
    ],
)
def test_the_wait_that_dominates(kernels: list[tuple[str, float]], step_ms: float, bound: str) -> None:
    busy, found = wait_of([KernelTime(name, us) for name, us in kernels], step_ms)
    assert found == bound
    assert busy == sum(us for _, us in kernels) / 1e3


@pytest.mark.parametrize(
    "name", ["sm90_xmma_gemm_bf16", "flash_fwd_kernel", "Cijk_Ailk_Bljk", "cutlass_80_tensorop", "triton_mm_template_mma"]
)
def test_kernels_that_multiply_matrices(name: str) -> None:
    assert is_math(name)
    assert not is_math("vectorized_layer_norm_kernel")


# Depth


def test_the_depth_is_halved_down_to_one_layer() -> None:
    models = Models(CPU)
    model = Model("m", "none", {}, (("n_layer", 12),))
    models.start(model, ())
    depths = []
    while models.cut():
        depths.append(models.depth["n_layer"])
    assert depths == [6, 3, 1]
    assert models.cuts() == (("n_layer", 12, 1),)


def test_layers_that_no_file_states_are_known_from_the_built_model() -> None:
    class Config:
        n_layer, n_head, hidden_size = 12, 12, 768

        def __init__(self) -> None:
            self.num_hidden_layers, self.n_head, self.use_cache = 12, 12, True

    model = Words(10)
    model.config = Config()  # type: ignore[assignment]
    assert default_layers(model) == (("default:num_hidden_layers=12", 12),)
    assert default_layers(Words(10)) == ()
    assert knob_name("default:num_hidden_layers=12") == "num_hidden_layers"
