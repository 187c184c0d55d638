"""What sort of kernel an aten op runs, and the bytes it has to move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}

_VIEWS = frozenset(
    [
        "_unsafe_view", "_reshape_alias", "lift_fresh", "lift", "detach", "alias", "detach_", "empty", "empty_strided", "empty_like",
        "new_empty", "new_empty_strided", "set_", "resize_", "_to_dense", "_local_scalar_dense", "sym_size", "is_same_size", "_version",
        "record_stream",
    ]
)  # fmt: skip
_COPIES = frozenset(
    [
        "_to_copy", "clone", "copy_", "copy", "cat", "stack", "fill_", "fill", "zero_", "zeros", "ones", "full", "arange", "linspace",
        "eye", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "scalar_tensor", "constant_pad_nd",
        "repeat", "roll", "flip", "slice_backward", "select_backward", "slice_scatter", "select_scatter", "unfold_backward", "im2col",
        "col2im", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "tril", "triu", "tril_", "triu_", "tril_indices",
        "triu_indices", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
        "replication_pad3d", "split_with_sizes_copy", "as_strided_copy", "as_strided_scatter", "diag_embed", "_pack_padded_sequence",
        "unfold_copy", "constant_pad_nd_backward", "logspace", "diagonal_backward", "view_as_real_copy", "view_as_complex_copy",
        "_conj_physical", "complex", "block_diag", "rot90", "expand_copy",
    ]
)  # fmt: skip
_EMBEDDINGS = frozenset(
    [
        "embedding", "embedding_dense_backward", "_embedding_bag", "_embedding_bag_forward_only", "index_select", "gather", "index",
        "take", "take_along_dim", "embedding_renorm_", "_embedding_bag_dense_backward", "_unsafe_index",
    ]
)  # fmt: skip
_SCATTERS = frozenset(
    [
        "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_put", "index_put_",
        "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "masked_scatter",
        "masked_scatter_", "put_", "put", "_unsafe_index_put", "masked_scatter_backward", "index_reduce_",
        "_unsafe_masked_index_put_accumulate",
    ]
)  # fmt: skip
_SORTS = frozenset(
    [
        "sort", "topk", "argsort", "msort", "kthvalue", "median", "mode", "nanmedian", "unique_dim", "_unique2", "unique_consecutive",
        "searchsorted", "bucketize", "nonzero", "masked_select", "histc", "bincount", "nonzero_static",
        "value_selecting_reduction_backward",
    ]
)  # fmt: skip
_RANDOMS = frozenset(
    [
        "native_dropout", "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm",
        "normal", "normal_", "uniform_", "uniform", "multinomial", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
        "_fused_dropout", "rrelu_with_noise", "poisson", "random",
    ]
)  # fmt: skip
_REDUCTIONS = frozenset(
    [
        "sum", "mean", "amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "std_mean", "any", "all",
        "prod", "linalg_vector_norm", "norm", "logsumexp", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "nansum",
        "count_nonzero", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "fractional_max_pool2d",
        "_cdist_forward", "_cdist_backward", "_pdist_forward", "linalg_matrix_norm", "dist", "renorm", "segment_reduce",
        "_segment_reduce_backward", "trace", "equal", "_cummax_helper", "nanmean",
    ]
)  # fmt: skip
_POINTWISE = frozenset(
    [
        "where", "masked_fill", "masked_fill_", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
        "threshold_backward", "native_dropout_backward", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
        "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa", "_upsample_nearest_exact2d", "grid_sampler_2d", "grid_sampler_3d", "affine_grid_generator", "glu",
        "glu_backward", "log_sigmoid_forward", "log_sigmoid_backward", "_prelu_kernel", "_prelu_kernel_backward", "lerp", "lerp_",
        "addcmul", "addcdiv", "hardtanh_backward", "hardswish_backward", "elu_backward", "hardsigmoid_backward", "leaky_relu_backward",
        "softplus_backward", "mish_backward", "rsub", "polar", "isin", "clamp", "nan_to_num", "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell", "hardshrink_backward", "softshrink_backward", "cross", "linalg_cross", "addr", "celu",
        "local_response_norm", "infinitely_differentiable_gelu_backward", "xlogy", "isclose", "frexp", "rrelu_with_noise_backward",
    ]
)  # fmt: skip
_ELEMENTWISE = frozenset(
    [
        "add", "sub", "mul", "div", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "silu", "gelu", "relu",
        "pow", "cos", "sin", "erf", "clamp_min", "clamp_max", "clamp", "maximum", "minimum", "gelu_backward", "silu_backward",
        "tanh_backward", "sigmoid_backward", "threshold_backward", "softplus", "leaky_relu", "elu", "hardtanh", "addcmul", "addcdiv",
        "expm1", "log1p", "square", "hardswish", "hardsigmoid", "mish", "log2", "leaky_relu_backward",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class OpPlan:
    """What the recorder has to know about an op, worked out once an op."""

    name: str
    kind: str
    is_view: bool
    is_elementwise: bool
    """The output has the dtype of the operands and their broadcast shape."""
    has_device: bool
    written: tuple[int, ...]
    """Positions of the arguments that the op writes into."""
    written_names: tuple[str, ...]


@cache
def plan(func: Any) -> OpPlan:
    """The plan of an OpOverload."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = [i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None and argument.alias_info.is_write]
    kind = _kind(func, name)
    return OpPlan(
        name=name if schema.name.startswith("aten::") else schema.name,
        kind=kind,
        is_view=kind == "view",
        is_elementwise=kind == "pointwise" and name.rstrip("_") in _ELEMENTWISE,
        has_device=any(argument.name == "device" for argument in schema.arguments),
        written=tuple(i for i in written if not schema.arguments[i].kwarg_only),
        written_names=tuple(schema.arguments[i].name for i in written),
    )


def _kind(func: Any, name: str) -> str:
    schema = func._schema
    if name in _VIEWS or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return "view"
    for kind, names in (
        ("copy", _COPIES),
        ("embedding", _EMBEDDINGS),
        ("scatter", _SCATTERS),
        ("sort", _SORTS),
        ("random", _RANDOMS),
        ("pointwise", _POINTWISE),
    ):
        if name in names:
            return kind
    if "loss" in name:
        return "loss"
    if "softmax" in name:
        return "softmax"
    if "norm" in name and name not in _REDUCTIONS:
        return "norm"
    if name in _REDUCTIONS or "pool" in name:
        return "reduction"
    if torch.Tag.pointwise in func.tags or "upsample" in name:
        return "pointwise"
    return "copy" if name.endswith(("_copy", "pad1d_backward", "pad2d_backward", "pad3d_backward")) else "opaque"


_FILLS = frozenset(
    ["fill_", "fill", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"]
)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: bf16, fp32, fp8, int64, ..."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        text = str(dtype).removeprefix("torch.")
        name = DTYPE_NAMES[dtype] = "fp8" if text.startswith("float8") else "fp4" if text.startswith("float4") else text
    return name


def footprint(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a tensor: a broadcast (stride 0) dim counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            elements *= size
    return int(elements * tensor.itemsize)


def traffic(name: str, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> tuple[int, int]:
    """(bytes read, bytes written) of one run of an op that reads each input and writes each output once."""
    if kind == "view":
        return 0, 0
    written = sum(footprint(tensor) for tensor in outputs)
    if name in ("embedding", "index_select", "gather", "index", "take", "_unsafe_index"):
        # Only the rows looked up are read, beside the indices.
        return written + sum(footprint(tensor) for tensor in inputs[1:]), written
    if name in _FILLS or (kind == "random" and name.endswith("_")):
        return 0, written
    if name == "copy_":
        return sum(footprint(tensor) for tensor in inputs[1:2]), written
    if kind == "scatter" and name.endswith("_"):
        # In-place scatters touch what the source covers, not the whole table.
        moved = sum(footprint(tensor) for tensor in inputs[1:])
        return moved, min(moved, written)
    return sum(footprint(tensor) for tensor in inputs), written
