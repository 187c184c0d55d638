"""What the tracer makes of models that people write themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from lintgpu.trace.errors import TraceError  # noqa: E402
from lintgpu.trace.origin import TracedInt  # noqa: E402
from lintgpu.trace.records import BACKWARD, FORWARD, GRAD_INPUT, GRAD_WEIGHT, Op, Trace  # noqa: E402

TraceModel = Callable[..., Trace]
Gemms = Callable[..., list[Op]]


def knob(name: str, value: int) -> TracedInt:
    return TracedInt(value, f"{{{name}}}")


def floats(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.zeros(*shape),)


def ids(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.ones(*shape, dtype=torch.long),)


class Wrapper(nn.Module):
    """A module out of a function of the input and a dict of modules."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.parts, *inputs)


def shapes(ops: list[Op]) -> set[tuple[int, int, int]]:
    return {(op.gemm.m, op.gemm.n, op.gemm.k) for op in ops if op.gemm is not None}


# -- values


def branching(index: int, value: int) -> Callable[[Any, Any], Any]:
    """Writes `value` through a view and branches on what the base then holds."""

    def forward(parts: Any, x: Any) -> Any:
        flags = torch.zeros(4, 4, dtype=torch.long)
        row = flags.view(16)[4:8].t() if False else flags[1]
        row[index].fill_(value)
        flags.view(-1)[5] += value
        return parts["wide"](x) if flags[1, index].item() == value and flags.sum().item() == 2 * value else parts["narrow"](x)

    return forward


def test_a_write_through_a_view_is_seen_by_its_base(trace_model: TraceModel, gemms: Gemms) -> None:
    parts = lambda: {"wide": nn.Linear(8, 64), "narrow": nn.Linear(8, 16)}  # noqa: E731
    trace = trace_model(lambda: Wrapper(branching(2, 7), **parts()), floats(3, 8))
    assert shapes(gemms(trace, FORWARD)) == {(3, 64, 8)}
    assert not trace.assumptions[1:]


def test_a_write_to_a_base_is_seen_by_its_views(trace_model: TraceModel, gemms: Gemms) -> None:
    def forward(parts: Any, x: Any) -> Any:
        base = torch.arange(12).reshape(3, 4)
        view = base.t()[1]
        base.mul_(10)
        base[0, 1] = 5
        return x.repeat(1, int(view[0])) @ x.repeat(1, int(view[0])).t() if view.tolist() == [5, 50, 90] else x

    trace = trace_model(lambda: Wrapper(forward), floats(3, 8), mode="infer")
    assert shapes(gemms(trace)) == {(3, 3, 40)}
    assert trace.assumptions == ()


def test_lists_as_indices_keep_their_values(trace_model: TraceModel) -> None:
    def forward(parts: Any, x: Any) -> Any:
        positions = torch.arange(8).view(2, 4)
        positions[:, [0, 3]] = -1
        return x.sum() if positions[:, [-1, 0]].max().item() == -1 and positions[0, [1, 2]].tolist() == [1, 2] else x

    trace = trace_model(lambda: Wrapper(forward), floats(3, 8), mode="infer")
    assert trace.assumptions == ()
    assert [op.name for op in trace.ops if op.kind == "reduction"].count("sum") == 1


def test_unknown_contents_written_into_known_ones_are_unknown(trace_model: TraceModel) -> None:
    def forward(parts: Any, x: Any) -> Any:
        known = torch.zeros(4)
        view = known[1:3]
        view.copy_(parts["layer"](x)[0, :2])
        return x.sum() if known[0].item() > 0 else x.mean()

    trace = trace_model(lambda: Wrapper(forward, layer=nn.Linear(8, 8)), floats(3, 8), mode="infer")
    assert any("depends on weights or data" in text for text in trace.assumptions)


def test_a_branch_on_data_is_answered_and_said(trace_model: TraceModel, gemms: Gemms) -> None:
    def forward(parts: Any, x: Any) -> Any:
        return parts["layer"](x) if (x.mean() > 0).item() else x

    trace = trace_model(lambda: Wrapper(forward, layer=nn.Linear(8, 24)), lambda: (torch.randn(3, 8),), mode="infer")
    assert shapes(gemms(trace)) == {(3, 24, 8)}
    (said,) = trace.assumptions
    assert "taken to be True" in said
    assert "test_tracer.py:" in said


def test_layer_drop_keeps_the_layers(trace_model: TraceModel, gemms: Gemms) -> None:
    def forward(parts: Any, x: Any) -> Any:
        return parts["layer"](x) if torch.rand([]) >= 0.1 else x

    trace = trace_model(lambda: Wrapper(forward, layer=nn.Linear(8, 24)), floats(3, 8), mode="infer")
    assert shapes(gemms(trace)) == {(3, 24, 8)}


# -- mixtures of experts


class LoopedExperts(nn.Module):
    """The textbook loop: each expert takes the tokens that chose it."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(16, experts, bias=False)
        self.experts = nn.ModuleList([nn.Linear(16, 32) for _ in range(experts)])
        self.chosen = chosen

    def forward(self, x: Any) -> Any:
        weights, picks = self.router(x).softmax(-1).topk(self.chosen, dim=-1)
        out = x.new_zeros(x.shape[0], 32)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(picks == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class OneHotExperts(LoopedExperts):
    def forward(self, x: Any) -> Any:
        picks = self.router(x).topk(self.chosen, dim=-1)[1]
        mask = F.one_hot(picks, num_classes=len(self.experts)).permute(2, 1, 0)
        out = x.new_zeros(x.shape[0], 32)
        for number, expert in enumerate(self.experts):
            token = torch.where(mask[number])[1]
            out.index_add_(0, token, expert(x[token]))
        return out


@pytest.mark.parametrize("kind", [LoopedExperts, OneHotExperts])
def test_each_expert_of_a_loop_gets_its_even_share(kind: type[LoopedExperts], trace_model: TraceModel, gemms: Gemms) -> None:
    trace = trace_model(lambda: kind(8, 2), floats(64, 16))
    experts = [op for op in gemms(trace, FORWARD) if op.module == "experts.*"]
    assert shapes(experts) == {(16, 32, 16)}
    assert sum(op.count for op in experts) == 8
    assert all(op.assumed for op in experts)
    assert any("even share, one in 8" in text for text in trace.assumptions)
    (router,) = [op for op in gemms(trace, FORWARD) if op.module == "router"]
    assert not router.assumed


def test_split_sizes_that_depend_on_data_are_even(trace_model: TraceModel, gemms: Gemms) -> None:
    def forward(parts: Any, x: Any) -> Any:
        sizes = torch.bincount(parts["router"](x).argmax(-1), minlength=4).tolist()
        return torch.cat([parts["expert"](part) for part in x.split(sizes)])

    trace = trace_model(lambda: Wrapper(forward, router=nn.Linear(16, 4), expert=nn.Linear(16, 32)), floats(64, 16))
    assert (16, 32, 16) in shapes(gemms(trace, FORWARD))
    assert any("even" in text for text in trace.assumptions)


# -- where dims come from


@dataclass
class Config:
    vocab_size: int = 96
    n_embd: int = 48
    n_head: int = 4
    n_layer: int = 3
    block_size: int = 32


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head
        self.head_dim = config.n_embd // config.n_head

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.n_head, self.head_dim).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Feed(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = int(config.n_embd * 8 / 3)
        self.up = nn.Parameter(torch.empty(config.n_embd, hidden))
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(x @ self.up))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), Attention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), Feed(config)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens.flatten())


def traced_config(**changes: int) -> Config:
    values = {**vars(Config()), **changes}
    return Config(**{name: knob(name, value) for name, value in values.items()})


@pytest.fixture
def own(trace_model: TraceModel) -> Trace:
    return trace_model(lambda: Model(traced_config()), ids(2, 24), lambda loss: loss, sequence=24)


def origins_of(trace: Trace, gemms: Gemms, phase: str) -> dict[str, dict[str, str]]:
    return {op.module: dict(op.gemm.origins) for op in gemms(trace, phase) if op.gemm is not None}


def test_dims_say_which_knob_they_came_from(own: Trace, gemms: Gemms) -> None:
    forward = origins_of(own, gemms, FORWARD)
    assert forward["lm_head"] == {"n": "{vocab_size}", "k": "{n_embd}", "lda": "{n_embd}", "ldb": "{n_embd}", "ldc": "{vocab_size}"}
    assert forward["h.*.attn.c_attn"]["n"] == "(3*{n_embd})"
    assert forward["h.*.mlp"] == {
        "n": "int((({n_embd}*8)/3))",
        "k": "{n_embd}",
        "lda": "{n_embd}",
        "ldb": "int((({n_embd}*8)/3))",
        "ldc": "int((({n_embd}*8)/3))",
    }
    assert set(own.knobs_seen) == {"vocab_size", "n_embd", "n_head", "block_size"}


def test_gradients_know_their_dims_by_the_role_they_had(own: Trace, gemms: Gemms) -> None:
    weight, input_ = (origins_of(own, gemms, phase)["lm_head"] for phase in (GRAD_WEIGHT, GRAD_INPUT))
    assert (weight["m"], weight["n"], weight.get("k")) == ("{vocab_size}", "{n_embd}", None)
    assert (input_.get("m"), input_["n"], input_["k"]) == (None, "{n_embd}", "{vocab_size}")
    assert input_["lda"] == "{vocab_size}"


def test_attention_knows_its_heads(own: Trace) -> None:
    attention = next(op.attention for op in own.ops if op.attention is not None)
    assert dict(attention.origins)["head_dim"] == "({n_embd}//{n_head})"
    assert dict(attention.origins)["heads"] == "{n_head}"


def test_a_remainder_of_heads_is_told(trace_model: TraceModel) -> None:
    build = lambda: nn.Linear(knob("hidden", 50) // knob("heads", 12), 8)  # noqa: E731
    trace = trace_model(build, floats(2, 4), mode="infer")
    assert trace.inexact_divisions == ("({hidden}//{heads})",)


def test_constructor_and_call_are_told_apart(own: Trace, gemms: Gemms) -> None:
    (op,) = [op for op in gemms(own, FORWARD) if op.module == "h.*.attn.c_attn"]
    assert op.constructor_site is not None
    assert op.call_site is not None
    lines = Path(__file__).read_text().splitlines()
    assert "self.c_attn = nn.Linear(" in lines[op.constructor_site.line - 1]
    assert "self.c_attn(x)" in lines[op.call_site.line - 1]
    assert op.constructor_site.path == __file__
    if op.constructor_site.column:
        line = lines[op.constructor_site.line - 1]
        assert line[op.constructor_site.column - 1 : op.constructor_site.end_column - 1] == "nn.Linear(config.n_embd, 3 * config.n_embd)"


def test_own_model_memoised_is_the_full_one(trace_model: TraceModel) -> None:
    arguments = (lambda: Model(traced_config()), ids(2, 24), lambda loss: loss)
    assert trace_model(*arguments).ops == trace_model(*arguments, memoise=False).ops


@pytest.mark.parametrize(("rates", "runs"), [((1, 1, 1, 1), 2), ((1, 2, 3, 4), 4)])
def test_blocks_that_keep_a_module_of_their_own_outside_the_tree_run_once_where_these_are_alike(
    rates: tuple[int, ...], runs: int, trace_model: TraceModel
) -> None:
    seen: list[nn.Module] = []

    class Tool(nn.Module):
        def __init__(self, rate: int) -> None:
            super().__init__()
            self.rate = f"rate {rate}"
            self.tools = [self]

        def forward(self, x: Any) -> Any:
            seen.append(self)
            return x * len(self.rate)

    class Block(nn.Module):
        def __init__(self, rate: int) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.tools = {"scale": Tool(rate)}

        def forward(self, x: Any) -> Any:
            return self.fc(self.tools["scale"](x))

    trace_model(lambda: nn.Sequential(*(Block(rate) for rate in rates)), floats(4, 16), mode="infer")
    # The model's input is another kind of tensor than what the first block hands on.
    assert len(seen) == runs


def test_parts_of_fused_and_stacked_weights_keep_their_origin(trace_model: TraceModel, gemms: Gemms) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.empty(3 * knob("d", 24), knob("d", 24)))
            self.experts = nn.Parameter(torch.empty(knob("e", 4), knob("d", 24), knob("ff", 40)))

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv.chunk(3)
            x = F.linear(x, q) + F.linear(x, k) + F.linear(x, v)
            return torch.bmm(x.expand(4, -1, -1), self.experts)

    trace = trace_model(Fused, floats(10, 24), mode="infer")
    projections = [op for op in gemms(trace) if op.name == "mm"]
    assert {(dict(op.gemm.origins)["n"], dict(op.gemm.origins)["k"]) for op in projections if op.gemm} == {("((3*{d})//3)", "{d}")}
    (experts,) = [op for op in gemms(trace) if op.name == "bmm"]
    assert experts.gemm is not None
    assert dict(experts.gemm.origins)["n"] == "{ff}"
    assert dict(experts.gemm.origins)["k"] == "{d}"


# -- phases, layouts, wrappers


def test_a_custom_function_runs_its_own_backward(trace_model: TraceModel, gemms: Gemms) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), x.t() @ gradient

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.weight = nn.Parameter(torch.empty(knob("rows", 8), knob("columns", 12)))

        def forward(self, x: Any) -> Any:
            return Product.apply(self.first(x), self.weight)

    trace = trace_model(Layer, floats(5, 6))
    assert (8, 12, 5) in shapes(gemms(trace, GRAD_WEIGHT))
    assert (5, 8, 12) in shapes(gemms(trace, GRAD_INPUT))
    gradient = next(op for op in gemms(trace, GRAD_WEIGHT) if op.gemm and op.gemm.n == 12)
    assert dict(gradient.gemm.origins)["n"] == "{columns}"  # type: ignore[union-attr]


def test_matmul_of_activations_has_no_weight_gradient(trace_model: TraceModel, gemms: Gemms) -> None:
    def forward(parts: Any, x: Any) -> Any:
        return parts["q"](x) @ parts["k"](x).transpose(-1, -2)

    trace = trace_model(lambda: Wrapper(forward, q=nn.Linear(8, 4), k=nn.Linear(8, 4)), floats(2, 5, 8))
    scores = [op for op in gemms(trace) if op.name == "bmm"]
    assert [(op.phase, op.count) for op in scores] == [(FORWARD, 1), (GRAD_INPUT, 2)] or [op.phase for op in scores] == [
        FORWARD,
        GRAD_INPUT,
        GRAD_INPUT,
    ]


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_carry_their_implicit_gemm(channels_last: bool, trace_model: TraceModel, gemms: Gemms) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, knob("width", 8), 3, padding=1), nn.ReLU(), nn.Conv2d(knob("width", 8), 16, 3, stride=2, groups=2)
        )
        return model.to(memory_format=torch.channels_last) if channels_last else model

    def inputs() -> tuple[Any, ...]:
        images = torch.zeros(2, 3, 10, 10)
        return (images.to(memory_format=torch.channels_last) if channels_last else images,)

    trace = trace_model(build, inputs)
    forward = gemms(trace, FORWARD)
    assert shapes(forward) == {(200, 8, 27), (32, 8, 36)}
    assert {op.gemm.batch for op in forward if op.gemm} == {1, 2}
    assert {op.conv.channels_last for op in forward if op.conv} == {channels_last}
    assert dict(forward[0].gemm.origins)["n"] == "{width}"  # type: ignore[union-attr]
    flops = {phase: sum(op.count * op.gemm.flops for op in gemms(trace, phase) if op.gemm) for phase in (FORWARD, GRAD_INPUT, GRAD_WEIGHT)}
    assert flops[GRAD_WEIGHT] == flops[FORWARD]
    # The images need no gradient.
    assert flops[GRAD_INPUT] == 2 * 2 * 32 * 8 * 36


def test_weight_norm_and_parametrizations_stay_weights(trace_model: TraceModel, gemms: Gemms) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: Any) -> Any:
            return weight.triu() + weight.triu(1).t()

    def build() -> nn.Module:
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        symmetric = nn.Linear(8, 8)
        nn.utils.parametrize.register_parametrization(symmetric, "weight", Symmetric())
        return nn.Sequential(normed, symmetric)

    trace = trace_model(build, floats(5, 8))
    assert sum(op.count for op in gemms(trace, GRAD_WEIGHT)) == 2
    assert sum(op.count for op in gemms(trace, FORWARD)) == 2


def test_lora_adapters_train_alone(trace_model: TraceModel, gemms: Gemms) -> None:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "1"]))

    trace = trace_model(build, floats(5, 16))
    assert {(op.gemm.m, op.gemm.n) for op in gemms(trace, GRAD_WEIGHT) if op.gemm} == {(4, 16), (32, 4), (4, 32), (8, 4)}
    assert trace.parameters.trainable_elements == 4 * (16 + 32) + 4 * (32 + 8)
    assert trace.parameters.elements > trace.parameters.trainable_elements


def test_checkpointing_is_left_out_and_said(trace_model: TraceModel, gemms: Gemms) -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(parts: Any, x: Any) -> Any:
        return checkpoint(parts["a"], parts["b"](x), use_reentrant=False) + checkpoint(parts["a"], x, use_reentrant=True)

    trace = trace_model(lambda: Wrapper(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), floats(5, 8))
    assert sum(op.count for op in gemms(trace, FORWARD)) == 3
    assert any("checkpointing" in text for text in trace.assumptions)


def test_compile_is_noted_and_looked_through(trace_model: TraceModel, gemms: Gemms) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        model[0] = torch.compile(model[0])
        return torch.compile(model, mode="reduce-overhead")  # type: ignore[no-any-return]

    trace = trace_model(build, floats(5, 8))
    assert trace.compile_calls == ("Linear", "Sequential")
    assert len(gemms(trace, FORWARD)) == 1


def test_flex_attention_is_an_attention(trace_model: TraceModel) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def forward(parts: Any, x: Any) -> Any:
        q = parts["q"](x).view(2, 128, 2, 16).transpose(1, 2)
        mask = create_block_mask(causal, None, None, 128, 128, device="cpu", _compile=False)
        return flex_attention(q, q, q, block_mask=mask.to(q.device))

    trace = trace_model(lambda: Wrapper(forward, q=nn.Linear(32, 32)), floats(2, 128, 32))
    attention = [op for op in trace.ops if op.attention is not None]
    assert [op.phase for op in attention] == [FORWARD, BACKWARD]
    assert attention[0].attention is not None
    assert attention[0].attention.causal
    assert (attention[0].attention.heads, attention[0].attention.q_len) == (2, 128)


def test_an_unaligned_or_strided_head_is_told(trace_model: TraceModel) -> None:
    def forward(parts: Any, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(6, 6, dtype=torch.bool))

    trace = trace_model(lambda: Wrapper(forward), floats(2, 3, 6, 20), mode="infer", dtype="bf16")
    (attention,) = [op.attention for op in trace.ops if op.attention is not None]
    assert not attention.aligned
    assert attention.mask == "bool"


def test_ops_without_a_meta_kernel_are_opaque_and_said(trace_model: TraceModel) -> None:
    name = "lintgpu_test_opaque"
    torch.library.define(f"{name}::twice", "(Tensor x) -> Tensor")

    def forward(parts: Any, x: Any) -> Any:
        return getattr(torch.ops, name).twice(x) + 1

    trace = trace_model(lambda: Wrapper(forward), floats(2, 3), mode="infer")
    (opaque,) = [op for op in trace.ops if op.kind == "opaque"]
    assert opaque.name == f"{name}::twice"
    assert any("no meta kernel" in text for text in trace.assumptions)


# -- failures


def test_a_failure_says_the_stage_and_the_line(trace_model: TraceModel) -> None:
    def forward(parts: Any, x: Any) -> Any:
        return parts["layer"](x[:, :7])

    with pytest.raises(TraceError) as caught:
        trace_model(lambda: Wrapper(forward, layer=nn.Linear(8, 8)), floats(5, 8))
    failure = caught.value.failure
    assert failure.stage == "forward"
    assert failure.path == __file__
    assert "parts[" in Path(__file__).read_text().splitlines()[failure.line - 1]
    assert failure.error_type == "RuntimeError"


def test_a_failing_constructor_is_a_build_failure(trace_model: TraceModel) -> None:
    def build() -> nn.Module:
        raise ValueError("hidden_size must be divisible\nby num_heads")

    with pytest.raises(TraceError) as caught:
        trace_model(build, floats(1, 1))
    assert caught.value.stage == "build"
    assert caught.value.reason == "hidden_size must be divisible"


def test_a_model_without_trainable_outputs_has_no_backward(trace_model: TraceModel) -> None:
    with pytest.raises(TraceError) as caught:
        trace_model(lambda: Wrapper(lambda parts, x: x.argmax(-1)), floats(2, 3))
    assert caught.value.stage == "backward"


# -- blocks with effects beyond their outputs


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Any, seen: list[Any]) -> Any:
        seen.append(x.mean())
        return self.layer(x)


def test_blocks_that_fill_a_list_run_in_full(trace_model: TraceModel) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Remembering() for _ in range(4)])

        def forward(self, x: Any) -> Any:
            seen: list[Any] = []
            for block in self.blocks:
                x = block(x, seen)
            assert len(seen) == 4
            return x.sum() + torch.stack(seen).sum()

    memoised, full = (trace_model(Stack, floats(3, 8), lambda loss: loss, memoise=memoise) for memoise in (True, False))
    assert memoised.ops == full.ops


def test_blocks_with_hooks_run_in_full(trace_model: TraceModel) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
        for block in model:
            block.register_forward_hook(lambda module, args, output: output @ output.t() @ output)
        return model

    memoised, full = (trace_model(build, floats(3, 8), memoise=memoise) for memoise in (True, False))
    assert memoised.ops == full.ops
    assert sum(op.count for op in memoised.ops if op.kind == "gemm" and op.phase == FORWARD) == 12


def test_blocks_that_share_a_weight_or_an_input_add_up_their_gradients(trace_model: TraceModel) -> None:
    class Cross(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(8, 8)

        def forward(self, x: Any, *, memory: Any) -> Any:
            return self.own(self.shared(x) + self.own(memory)) + memory

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(8, 8)
            self.encoder = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([Cross(shared) for _ in range(4)])

        def forward(self, x: Any) -> Any:
            memory = self.encoder(x)
            for block in self.blocks:
                x = block(x, memory=memory)
            return x

    memoised, full = (trace_model(Stack, floats(3, 8), memoise=memoise) for memoise in (True, False))
    assert memoised.ops == full.ops


def test_blocks_that_differ_in_what_they_do_are_told_apart(trace_model: TraceModel) -> None:
    class Alternating(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.wide = index, index % 2 == 0
            self.up = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: Any) -> Any:
            return self.up(x) @ x.new_zeros(8, 8) if self.wide else self.up(x)

    memoised, full = (
        trace_model(lambda: nn.Sequential(*[Alternating(i) for i in range(6)]), floats(3, 8), memoise=memoise) for memoise in (True, False)
    )
    assert memoised.ops == full.ops
    assert sum(op.count for op in full.ops if op.kind == "gemm" and op.phase == FORWARD) == 9


def test_blocks_inside_blocks_fold_over_both_depths(trace_model: TraceModel) -> None:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))

    def build() -> nn.Module:
        stages = [nn.Sequential(*[block(8) for _ in range(3)]) for _ in range(4)]
        return nn.Sequential(*stages, nn.Linear(8, 16), nn.Sequential(*[block(16) for _ in range(2)]))

    memoised, full = (trace_model(build, floats(3, 8), memoise=memoise) for memoise in (True, False))
    assert memoised.ops == full.ops
    forward = {(op.module, op.gemm.n): op.count for op in memoised.ops if op.gemm is not None and op.phase == FORWARD}
    assert forward == {("*.*.0", 8): 12, ("4", 16): 1, ("5.*.0", 16): 2}


def test_a_failed_trace_leaves_nothing_behind(trace_model: TraceModel) -> None:
    call, init = nn.Module.__call__, nn.Module.__init__
    with pytest.raises(TraceError):
        trace_model(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9)), floats(3, 8))
    assert (nn.Module.__call__, nn.Module.__init__) == (call, init)
    assert nn.Linear(2, 2)(torch.ones(1, 2)).requires_grad
    assert not torch.overrides._get_current_function_mode_stack()


def test_decoding_attends_to_the_cache(trace_model: TraceModel) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Any, past: Any) -> Any:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            k, v = torch.cat([past, k], 1), torch.cat([past, v], 1)
            return F.scaled_dot_product_attention(*(t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v)))

    trace = trace_model(Cached, lambda: (torch.zeros(2, 1, 16), torch.zeros(2, 32, 16)), mode="decode", sequence=32)
    (attention,) = [op.attention for op in trace.ops if op.attention is not None]
    assert (attention.q_len, attention.kv_len) == (1, 33)
    assert {op.phase for op in trace.ops} == {FORWARD}


class Strided(nn.Module):
    """Its stride is the number of the block in its sequence, plus one."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, stride=stride, padding=1)
        self.norm = nn.Sequential(nn.BatchNorm2d(8))

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x))


def test_strides_that_count_up_are_no_positions(trace_model: TraceModel) -> None:
    build = lambda: nn.Sequential(*(Strided(stride) for stride in (1, 2, 3)))  # noqa: E731
    trace = trace_model(build, lambda: (torch.zeros(2, 8, 24, 24),))
    shapes = [op.shape for op in trace.ops if op.kind == "conv" and op.phase == "forward"]
    assert shapes == [(2, 8, 24, 24), (2, 8, 12, 12), (2, 8, 4, 4)]
