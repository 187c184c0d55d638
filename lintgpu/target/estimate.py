"""The step of a transformer from its numbers alone: no torch, nothing imported, nothing run.

Each number may be a TracedInt, so that a GEMM's dims say which knob they came from just as in a real trace. Covered are
decoders, encoders and encoder-decoders with grouped-query attention, plain or gated feed-forward layers, routed experts and
an output head. What a real trace has beyond that (rotary embeddings, masks, dropout, layout copies) is left out or rough;
`Trace.basis` says "estimated".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lintgpu.target.huggingface import architectures_of
from lintgpu.trace.origin import TracedInt, expression
from lintgpu.trace.records import BACKWARD, FORWARD, GRAD_INPUT, GRAD_WEIGHT, Attention, Gemm, Op, Parameters, Trace
from lintgpu.workload import Mode, Workload

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4}


@dataclass(frozen=True)
class Shape:
    """The numbers of a transformer; ints may be TracedInts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int = 0
    """0 without token embeddings."""
    gated: bool = False
    causal: bool = True
    encoder_layers: int = 0
    """Above 0: an encoder of that many layers feeds the `layers` of the decoder through cross-attention."""
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Layers that keep the dense feed-forward beside routed ones."""
    expert_feed_forward: int = 0
    head: bool = True
    """Whether tokens are projected on the vocabulary."""
    head_transform: bool = False
    """A dense layer hidden x hidden in front of that projection, as BERT has."""
    tied: bool = True
    positions: int = 0
    """Rows of a learned position table."""
    fused_qkv: bool = False
    model_class: str = "transformer"


def estimate(shape: Shape, workload: Workload, assumptions: Iterable[str] = ()) -> Trace:
    """The ops of one step of `shape` under `workload`."""
    step = _Step(workload)
    tokens = workload.batch * (1 if workload.mode is Mode.DECODE else workload.sequence)
    if shape.vocabulary:
        step.embedding("embed", tokens, shape.vocabulary, shape.hidden)
    if shape.positions:
        step.parameters(1, shape.positions * shape.hidden)
    if shape.encoder_layers:
        _layers(step, replace(shape, causal=False), tokens, shape.encoder_layers, "encoder.layers.*", cross=False)
    _layers(step, shape, tokens, shape.layers, "layers.*", cross=bool(shape.encoder_layers))
    step.norm("norm", tokens, shape.hidden)
    if shape.head and shape.vocabulary:
        if shape.head_transform:
            step.linear("head.transform", tokens, shape.hidden, shape.hidden, bias=True)
        step.linear("lm_head", tokens, shape.hidden, shape.vocabulary, bias=False, tied=shape.tied)
        if workload.mode is Mode.TRAIN:
            step.loss(tokens, shape.vocabulary)
    said = ("estimated from the numbers of the config; the model was not built", *assumptions)
    return Trace(tuple(step.ops), step.total(), "estimated", shape.model_class, assumptions=said, knobs_seen=tuple(step.knobs))


def _layers(step: _Step, shape: Shape, tokens: int, layers: int, path: str, cross: bool) -> None:
    with_experts = layers - shape.dense_layers if shape.experts else 0
    step.count = int(layers)
    _attention(step, shape, tokens, f"{path}.attention", shape.causal)
    if cross:
        _attention(step, shape, tokens, f"{path}.cross_attention", False)
    for _ in range(3 if cross else 2):
        step.norm(f"{path}.norm", tokens, shape.hidden)
        step.pointwise(f"{path}.residual", tokens, shape.hidden, reads=2, wide=True)
    step.count = int(layers - with_experts)
    if step.count:
        _feed_forward(step, shape, tokens, f"{path}.mlp", shape.feed_forward)
    step.count = int(with_experts)
    if step.count:
        _experts(step, shape, tokens, f"{path}.experts")
    step.count = 1


def _attention(step: _Step, shape: Shape, tokens: int, path: str, causal: bool) -> None:
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.fused_qkv:
        step.linear(f"{path}.qkv", tokens, shape.hidden, query + 2 * key_value)
    else:
        step.linear(f"{path}.q", tokens, shape.hidden, query)
        step.linear(f"{path}.k", tokens, shape.hidden, key_value)
        step.linear(f"{path}.v", tokens, shape.hidden, key_value)
    step.attention(path, shape, causal)
    step.linear(f"{path}.o", tokens, query, shape.hidden)


def _feed_forward(step: _Step, shape: Shape, tokens: int, path: str, size: int) -> None:
    if shape.gated:
        step.linear(f"{path}.gate", tokens, shape.hidden, size)
    step.linear(f"{path}.up", tokens, shape.hidden, size)
    step.pointwise(f"{path}.activation", tokens, size, reads=2 if shape.gated else 1)
    step.linear(f"{path}.down", tokens, size, shape.hidden)


def _experts(step: _Step, shape: Shape, tokens: int, path: str) -> None:
    size = shape.expert_feed_forward or shape.feed_forward
    step.linear(f"{path}.router", tokens, shape.hidden, shape.experts)
    routed = tokens * max(1, shape.experts_per_token)
    step.grouped(f"{path}.gate_up", routed, shape.hidden, (2 if shape.gated else 1) * size, shape.experts)
    step.pointwise(f"{path}.activation", routed, size, reads=2 if shape.gated else 1)
    step.grouped(f"{path}.down", routed, size, shape.hidden, shape.experts)
    if shape.shared_experts:
        _feed_forward(step, shape, tokens, f"{path}.shared", shape.shared_experts * size)


@dataclass
class _Step:
    """Collects ops; `count` is how many identical layers the next ops stand for."""

    workload: Workload
    ops: list[Op] = field(default_factory=list)
    knobs: dict[str, None] = field(default_factory=dict)
    count: int = 1
    tensors: int = 0
    elements: int = 0

    @property
    def train(self) -> bool:
        return self.workload.mode is Mode.TRAIN

    @property
    def size(self) -> int:
        return _BYTES[self.workload.dtype]

    @property
    def wide(self) -> int:
        """Bytes of what autocast leaves in fp32: weights, norms, the residual stream."""
        return 4 if self.workload.autocast else self.size

    def total(self) -> Parameters:
        """What the layers so far hold."""
        dtype = "fp32" if self.workload.autocast or self.workload.dtype == "tf32" else self.workload.dtype
        return Parameters(self.tensors, self.elements, self.tensors, self.elements, dtype)

    def parameters(self, tensors: int, elements: int) -> None:
        self.tensors += tensors * self.count
        self.elements += int(elements) * self.count

    def linear(self, path: str, rows: int, inputs: int, outputs: int, bias: bool = False, tied: bool = False) -> None:
        """y[rows, outputs] = x[rows, inputs] @ W[outputs, inputs]^T with its two gradients."""
        if not tied:
            self.parameters(1 + bias, inputs * outputs + (outputs if bias else 0))
        self._cast(path, inputs, outputs)
        self._gemm(path, FORWARD, "NT", (rows, outputs, inputs), (inputs, inputs, outputs), bias)
        if self.train:
            self._gemm(path, GRAD_INPUT, "NN", (rows, inputs, outputs), (outputs, inputs, inputs))
            self._gemm(path, GRAD_WEIGHT, "TN", (outputs, inputs, rows), (outputs, inputs, inputs))

    def grouped(self, path: str, rows: int, inputs: int, outputs: int, groups: int) -> None:
        """The same for `groups` weights W[inputs, outputs], each on its even share of the rows."""
        self.parameters(1, groups * inputs * outputs)
        self._cast(path, inputs, groups * outputs)
        self._gemm(path, FORWARD, "NN", (rows, outputs, inputs), (inputs, outputs, outputs), groups=groups, ragged="M")
        if self.train:
            self._gemm(path, GRAD_INPUT, "NT", (rows, inputs, outputs), (outputs, outputs, inputs), groups=groups, ragged="M")
            self._gemm(path, GRAD_WEIGHT, "TN", (inputs, outputs, rows), (inputs, outputs, outputs), groups=groups, ragged="K")

    def attention(self, path: str, shape: Shape, causal: bool) -> None:
        decode = self.workload.mode is Mode.DECODE
        queries = 1 if decode else self.workload.sequence
        batch, length = self.workload.batch, self.workload.sequence
        origins = tuple(self._origins(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim))
        record = Attention(
            batch, int(shape.heads), int(shape.kv_heads), queries, length, int(shape.head_dim), int(shape.head_dim),
            causal=causal and not decode, origins=origins,
        )  # fmt: skip
        query = int(batch * shape.heads * queries * shape.head_dim * self.size)
        keys = int(2 * batch * shape.kv_heads * length * shape.head_dim * self.size)
        output = (batch, int(shape.heads), queries, int(shape.head_dim))
        self._add("attention", path, FORWARD, query + keys, query, output, attention=record)
        if self.train:
            self._add("attention", path, BACKWARD, 3 * query + keys, query + keys, output, attention=record)

    def norm(self, path: str, rows: int, width: int) -> None:
        """Autocast keeps norms in fp32, and what follows takes their result to half precision."""
        self.parameters(1, width)
        shape = (int(rows), int(width))
        elements = int(rows * width)
        self._add("norm", path, FORWARD, elements * self.wide, elements * self.wide, shape)
        if self.wide != self.size:
            self._add("copy", path, FORWARD, elements * self.wide, elements * self.size, shape)
        if self.train:
            self._add("norm", path, BACKWARD, 2 * elements * self.wide, elements * self.wide, shape)

    def pointwise(self, path: str, rows: int, width: int, reads: int, wide: bool = False) -> None:
        """An activation or a residual; `wide` where autocast leaves it in fp32."""
        moved = int(rows * width) * (self.wide if wide else self.size)
        shape = (int(rows), int(width))
        self._add("pointwise", path, FORWARD, reads * moved, moved, shape)
        if self.train:
            self._add("pointwise", path, BACKWARD, (reads + 1) * moved, reads * moved, shape)

    def embedding(self, path: str, rows: int, vocabulary: int, width: int) -> None:
        """Rows looked up, and in training a gradient as large as the table."""
        self.parameters(1, vocabulary * width)
        moved = int(rows * width) * self.wide
        self._add("embedding", path, FORWARD, moved, moved, (int(rows), int(width)))
        if self.train:
            self._add("scatter", path, BACKWARD, moved, int(vocabulary * width) * self.wide, (int(vocabulary), int(width)))

    def loss(self, rows: int, vocabulary: int) -> None:
        """Cross entropy over logits taken to fp32, as the usual losses do."""
        logits = int(rows * vocabulary)
        shape = (int(rows), int(vocabulary))
        self._add("copy", "loss", FORWARD, logits * self.size, logits * 4, shape)
        self._add("softmax", "loss", FORWARD, logits * 4, logits * 4, shape)
        self._add("softmax", "loss", BACKWARD, logits * 4, logits * 4, shape)
        self._add("copy", "loss", BACKWARD, logits * 4, logits * self.size, shape)

    def _cast(self, path: str, inputs: int, outputs: int) -> None:
        """Autocast takes an fp32 weight to half precision once a step, and its gradient back."""
        if self.wide == self.size:
            return
        elements, shape = int(inputs * outputs), (int(outputs), int(inputs))
        self._add("copy", path, FORWARD, elements * self.wide, elements * self.size, shape)
        if self.train:
            self._add("copy", path, BACKWARD, elements * self.size, elements * self.wide, shape)

    def _gemm(
        self,
        path: str,
        phase: str,
        layout: str,
        mnk: tuple[int, int, int],
        leading: tuple[int, int, int],
        bias: bool = False,
        groups: int = 1,
        ragged: str = "",
    ) -> None:
        m, n, k = mnk
        lda, ldb, ldc = leading
        origins = tuple(self._origins(m=m, n=n, k=k, lda=lda, ldb=ldb, ldc=ldc))
        gemm = Gemm(int(groups), int(m), int(n), int(k), layout, int(lda), int(ldb), int(ldc), bias=bias, groups=ragged, origins=origins)
        weights = 1 if not ragged else int(groups)
        elements = {"m": int(m), "n": int(n), "k": int(k)}
        a, b, c = elements["m"] * elements["k"], elements["k"] * elements["n"] * weights, elements["m"] * elements["n"]
        if ragged == "K":
            b, c = elements["k"] * elements["n"], c * weights
        self._add("gemm", path, phase, (a + b) * self.size, c * self.size, (int(m), int(n)), gemm=gemm)

    def _origins(self, **dims: int) -> Iterable[tuple[str, str]]:
        from lintgpu.trace.origin import knobs

        for name, value in dims.items():
            source = expression(value)
            if source is not None:
                self.knobs.update(dict.fromkeys(knobs(source)))
                yield name, source

    def _add(self, kind: str, path: str, phase: str, read: int, written: int, shape: tuple[int, ...], **record: Any) -> None:
        name = {"gemm": "mm", "attention": "scaled_dot_product_attention"}.get(kind, kind)
        common: dict[str, Any] = {"module": path, "shape": shape, "in_layer": self.count > 1}
        self.ops.append(Op(kind, name, phase, self.workload.dtype, read, written, self.count, **common, **record))


_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "hidden_dim", "embed_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "encoder_layers": ("encoder_layers", "num_encoder_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv", "kv_channels"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "ffn_embed_dim", "d_inner"),
    "vocabulary": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_k"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "dense_layers": ("first_k_dense_replace",),
    "expert_feed_forward": ("moe_intermediate_size", "expert_dim"),
}


def estimate_config(data: Mapping[str, Any], values: Mapping[str, int], workload: Workload, changes: Mapping[str, int]) -> Trace | None:
    """The estimate for a config's keys, or None where they describe no transformer over tokens.

    `values` maps knob ids (dotted key paths) to their values; `changes` replaces some of them.
    """
    prefix = next((f"{part}." for part in ("text_config", "llm_config", "language_config") if isinstance(data.get(part), Mapping)), "")
    part: Mapping[str, Any] = data[prefix[:-1]] if prefix else data
    traced = {knob: TracedInt(changes.get(knob, value), f"{{{knob}}}") for knob, value in values.items()}
    nested = {key.removeprefix(prefix): value for key, value in traced.items() if key.startswith(prefix)}
    traits = {**part, "architectures": data.get("architectures") or part.get("architectures")}
    shape = shape_of(numbers_of({**traced, **nested}), traits)
    return estimate(shape, workload) if shape is not None else None


_TOO_LARGE = 1 << 31
"""No dimension of a tensor that fits a GPU, and products of three such numbers would not fit an int64."""


def numbers_of(named: Mapping[str, int]) -> dict[str, int]:
    """The Shape fields that integers set, by the names configs and sources give them."""
    found = {name: next((named[key] for key in keys if named.get(key, 0) > 0), 0) for name, keys in _KEYS.items()}
    return {name: value for name, value in found.items() if value}


def shape_of(numbers: Mapping[str, int], traits: Mapping[str, Any]) -> Shape | None:
    """Fill in what the numbers leave open from the usual conventions; None without a hidden size, layers and a vocabulary."""
    hidden, layers, heads = numbers.get("hidden", 0), numbers.get("layers", 0), numbers.get("heads", 0)
    if not (hidden and layers and heads and numbers.get("vocabulary")) or max(numbers.values()) >= _TOO_LARGE:
        return None
    kind = next(iter(architectures_of(traits)), "")
    activation = str(traits.get("hidden_act") or traits.get("hidden_activation") or traits.get("activation_function") or "")
    modern = "rms_norm_eps" in traits
    kv_heads = numbers.get("kv_heads") or (1 if traits.get("multi_query") else heads)
    encoder = ("type_vocab_size" in traits or "MaskedLM" in kind) and not traits.get("is_decoder")
    encoder_layers = numbers.get("encoder_layers", 0)
    if not encoder_layers and traits.get("is_encoder_decoder"):
        encoder_layers = layers
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=numbers.get("head_dim") or hidden // heads,
        feed_forward=numbers.get("feed_forward") or 4 * hidden,
        vocabulary=numbers["vocabulary"],
        gated=modern or activation in ("silu", "swiglu", "swish") or "gated" in str(traits.get("feed_forward_proj", "")),
        causal=not encoder,
        encoder_layers=encoder_layers,
        experts=numbers.get("experts", 0) if numbers.get("experts", 0) > 1 else 0,
        experts_per_token=numbers.get("experts_per_token", 1),
        shared_experts=numbers.get("shared_experts", 0),
        dense_layers=numbers.get("dense_layers", 0),
        expert_feed_forward=numbers.get("expert_feed_forward", 0),
        head=not kind.endswith("Model") or kind.endswith("LMHeadModel"),
        head_transform=encoder and not encoder_layers,
        tied=bool(traits.get("tie_word_embeddings", not modern)),
        fused_qkv="n_embd" in traits or "n_embed" in traits,
        model_class=kind or "transformer",
    )
