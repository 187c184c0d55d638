"""The shape rules against what torch computes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from lintgpu.trace.kinds import plan  # noqa: E402
from lintgpu.trace.shapes import output_of  # noqa: E402

aten = torch.ops.aten
SIZES = st.integers(1, 4)
FLOATS = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn, shape: list[int], dtype: Any = torch.float32) -> Any:
    """A CPU tensor of this shape with its dims in any order in memory, and perhaps gaps."""
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.sampled_from([1, 1, 2]))
    wide = [shape[i] for i in order]
    wide[-1:] = [wide[-1] * step] if wide else []
    made = torch.ones(wide, dtype=dtype)[..., ::step] if wide else torch.ones((), dtype=dtype)
    return made.permute([order.index(i) for i in range(len(shape))])


def on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list):
        return [on_meta(item) for item in value]
    return value


def look(value: Any) -> Any:
    """Shape, dtype and the strides that matter of what an op gives."""
    if isinstance(value, torch.Tensor):
        strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
        return tuple(value.shape), value.dtype, strides
    return [look(item) for item in value] if isinstance(value, (tuple, list)) else value


def agrees(func: Any, args: list[Any], **kwargs: Any) -> bool:
    """Compare where a rule answers; whether it did."""
    info = plan(func)
    ours = output_of(info.name, info.is_elementwise, [on_meta(arg) for arg in args], kwargs)
    if ours is NotImplemented:
        return False
    assert look(ours) == look(func(*args, **kwargs))
    return True


@st.composite
def broadcast_pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    shape = draw(st.lists(SIZES, min_size=1, max_size=4))
    other = [size if draw(st.booleans()) else 1 for size in shape][draw(st.integers(0, len(shape) - 1)) :]
    return draw(tensors(shape, draw(FLOATS))), draw(tensors(other, draw(FLOATS)))


@given(broadcast_pairs(), st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor]), st.booleans())
def test_elementwise_ops(pair: tuple[Any, Any], func: Any, swapped: bool) -> None:
    assert agrees(func, list(reversed(pair) if swapped else pair))


@given(st.data(), st.lists(SIZES, min_size=1, max_size=4), st.sampled_from([aten.neg.default, aten.silu.default, aten.exp.default]))
def test_unary_ops(data: st.DataObject, shape: list[int], func: Any) -> None:
    assert agrees(func, [data.draw(tensors(shape))])


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool])


@st.composite
def typed_pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    other = draw(st.sampled_from([shape, shape[1:], [1] * len(shape)]))
    second = draw(st.one_of(tensors(other, draw(DTYPES)), st.sampled_from([2, 2.5, True])))
    return draw(tensors(shape, draw(DTYPES))), second


@given(typed_pairs(), st.sampled_from(["eq", "ne", "lt", "ge", "logical_and", "add", "mul", "bitwise_and", "maximum"]))
def test_comparisons_and_mixed_types(pair: tuple[Any, Any], name: str) -> None:
    overload = "Tensor" if isinstance(pair[1], torch.Tensor) else "Scalar"
    func = getattr(getattr(aten, name), overload, None) or getattr(getattr(aten, name), "default", None)
    if func is None or (overload == "Scalar" and name in ("logical_and", "maximum")):
        return
    try:
        func(*pair)
    except (RuntimeError, NotImplementedError):
        return
    agrees(func, list(pair))


@given(st.data(), st.lists(SIZES, min_size=1, max_size=3), DTYPES)
def test_masks_and_index_helpers(data: st.DataObject, shape: list[int], dtype: Any) -> None:
    value = torch.ones(shape, dtype=dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert agrees(aten.cumsum.default, [value, dim])
    assert agrees(aten.all.default, [value])
    assert agrees(aten.logical_not.default, [value])
    assert agrees(aten.zeros_like.default, [data.draw(tensors(shape, dtype))], dtype=torch.bfloat16)
    assert agrees(aten.empty_like.default, [data.draw(tensors(shape, dtype))], memory_format=torch.contiguous_format)
    assert agrees(aten.arange.start_step, [1, 7, 2])
    assert agrees(aten.arange.default, [5])


@given(SIZES, SIZES, st.sampled_from([0, 1, 2]))
def test_nll_loss(rows: int, classes: int, reduction: int) -> None:
    scores, target = torch.ones(rows, classes), torch.zeros(rows, dtype=torch.long)
    assert agrees(aten.nll_loss_forward.default, [scores, target, None, reduction, -100])


@given(st.data(), SIZES, SIZES, SIZES)
def test_matrix_products(data: st.DataObject, m: int, n: int, k: int) -> None:
    a, b = data.draw(tensors([m, k])), data.draw(tensors([k, n]))
    assert agrees(aten.mm.default, [a, b])
    assert agrees(aten.addmm.default, [torch.ones(n), a, b])
    assert agrees(aten.bmm.default, [data.draw(tensors([2, m, k])), data.draw(tensors([2, k, n]))])


@given(st.lists(SIZES, min_size=1, max_size=4), st.data(), st.booleans())
def test_reductions(shape: list[int], data: st.DataObject, keepdim: bool) -> None:
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    assert agrees(aten.sum.dim_IntList, [torch.ones(shape), dims, keepdim])
    assert agrees(aten.mean.dim, [torch.ones(shape), dims, keepdim])
    assert agrees(aten.sum.default, [torch.ones(shape)])


@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_concatenations_and_norms(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    assert agrees(aten.cat.default, [[torch.ones(shape), torch.ones(shape)], dim])
    kept = data.draw(st.integers(0, len(shape) - 1))
    weight = torch.ones(shape[kept:])
    assert agrees(aten.native_layer_norm.default, [torch.ones(shape), shape[kept:], weight, weight, 1e-5])
    assert agrees(aten._softmax.default, [torch.ones(shape), dim, False])


@given(
    st.tuples(SIZES, st.integers(5, 9), st.integers(5, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)
def test_convolutions(
    image: tuple[int, int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    transposed: bool,
    channels_last: bool,
) -> None:
    batch, height, width = image
    x = torch.ones(batch, 4, height, width)
    weight = torch.ones(4, 6 // groups, *kernel) if transposed else torch.ones(6, 4 // groups, *kernel)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    extra = [0, 0]
    args = [x, weight, None, [stride] * 2, [padding] * 2, [dilation] * 2, transposed, extra, groups]
    info = plan(aten.convolution.default)
    ours = output_of(info.name, False, [on_meta(arg) for arg in args], {})
    try:
        real = aten.convolution.default(*args)
    except RuntimeError:
        assert ours is NotImplemented
        return
    assert (tuple(ours.shape), ours.dtype) == (tuple(real.shape), real.dtype)
    if channels_last and batch > 1 and min(real.shape) > 1:
        assert ours.is_contiguous(memory_format=torch.channels_last)


def test_mismatched_operands_are_left_to_torch_which_says_what_is_wrong() -> None:
    a, b = (torch.empty(shape, device="meta") for shape in ((2, 3), (4, 5)))
    assert output_of("mm", False, [a, b], {}) is NotImplemented
    assert output_of("addmm", False, [torch.empty(5, device="meta"), a, b], {}) is NotImplemented
    assert output_of("mm", False, [a, b.to(torch.bfloat16)[:3]], {}) is NotImplemented
