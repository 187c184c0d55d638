"""The function mode: torch calls that would leave the meta device or read values in C++, before they reach the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lintgpu.trace import oracle
from lintgpu.trace.recorder import Recorder
from lintgpu.trace.shadow import unmoded
from lintgpu.trace.shapes import META

Tensor: Any = torch.Tensor


class Functions(TorchFunctionMode):  # type: ignore[misc]
    """Enter it together with a Recorder. Everything lives on meta, whatever device the code names."""

    def __init__(self, recorder: Recorder) -> None:
        """`recorder` knows the values."""
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or the stand-in for it."""
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and func not in _MOVES and not _is_cpu(device):
            kwargs = {**kwargs, "device": META}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(self.recorder, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _is_cpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"


def _tensor(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.tensor(data): a meta tensor with known contents, unless the CPU is asked for by name."""
    kwargs = dict(kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    if _is_cpu(kwargs.get("device")):
        return NotImplemented
    kwargs["device"] = "cpu"
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, Tensor):
        if func is torch.tensor or not data.is_meta:
            return NotImplemented if data.is_meta else recorder.shadows.lift(data)
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        return data if dtype is None else data.to(dtype)
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(data)):
        data = tree_map_only(Tensor, lambda leaf: _known_or_oracle(recorder, leaf), data)
    with unmoded():
        value = func(data, *args[1:], **{key: item for key, item in kwargs.items() if key != "data"})
        lifted = recorder.shadows.lift(value)
    return lifted.requires_grad_() if requires_grad else lifted


def _known_or_oracle(recorder: Recorder, tensor: Any) -> Any:
    value = recorder.shadows.value(tensor)
    if value is None:
        recorder.assume("values that depend on weights or data were taken to be alike")
        value = oracle.contents(tensor)
    with unmoded():
        return value.item() if not value.dim() else value.tolist()


def _tolist(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not tensor.is_meta:
        return NotImplemented
    value = recorder.shadows.value(tensor)
    if value is None:
        recorder.assume("values that depend on weights or data were taken to be alike (split sizes: an even split)")
    with unmoded():
        values = (oracle.contents(tensor) if value is None else value).tolist()
    if value is not None:
        return values
    return oracle.EvenSizes(values) if isinstance(values, list) and tensor.dim() == 1 else values


def _numpy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not tensor.is_meta:
        return NotImplemented
    value = recorder.shadows.value(tensor)
    if value is None:
        recorder.assume("values that depend on weights or data were taken to be alike")
        value = oracle.contents(tensor)
    with unmoded():
        return value.numpy()


def _format(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not tensor.is_meta or tensor.dim():
        return NotImplemented
    value = recorder.shadows.value(tensor)
    with unmoded():
        return format(oracle.scalar(tensor) if value is None else value.item(), args[1])


def _split(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("split_size_or_sections", "split_size", "split_sizes")
    sizes = args[1] if len(args) > 1 else next((kwargs[name] for name in names if name in kwargs), None)
    if not isinstance(sizes, oracle.EvenSizes):
        return NotImplemented
    tensor = args[0]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    share, rest = divmod(tensor.shape[dim], max(1, len(sizes)))
    recorder.assume(f"split sizes that depend on data were taken to be even ({share} each)")
    return func(tensor, [share + (i < rest) for i in range(len(sizes))], dim)


def _index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Lists as indices become tensors in C++, on the device of the indexed tensor: their values would be lost there."""
    tensor, index = args[:2]
    if not tensor.is_meta:
        return NotImplemented
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, list) and part for part in parts):
        return NotImplemented
    lifted = tuple(_lifted_list(recorder, part) for part in parts)
    return func(tensor, lifted if isinstance(index, tuple) else lifted[0], *args[2:])


def _lifted_list(recorder: Recorder, part: Any) -> Any:
    if not isinstance(part, list) or any(not isinstance(leaf, (bool, int)) for leaf in tree_leaves(part)):
        return part
    with unmoded():
        return recorder.shadows.lift(torch.tensor(part, device="cpu"))


def _stay(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if args[0].is_meta else NotImplemented


def _to(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensor.to without its device: meta tensors stay, CPU tensors that are sent to a GPU come to meta."""
    tensor = args[0]
    places = [
        item for item in (*args[1:], kwargs.get("device")) if isinstance(item, (torch.device, str, int)) and not isinstance(item, bool)
    ]
    others = [item for item in (*args[1:], kwargs.get("other")) if isinstance(item, Tensor)]
    moves = [place for place in places if isinstance(place, int) or torch.device(place).type != "cpu"]
    if not tensor.is_meta:
        if not moves and not any(other.is_meta for other in others):
            return NotImplemented
        tensor = recorder.shadows.lift(tensor)
    dtype = kwargs.get("dtype", next((item for item in args[1:] if isinstance(item, torch.dtype)), None))
    if dtype is None and others:
        dtype = others[0].dtype
    options = {key: kwargs[key] for key in ("memory_format", "copy") if key in kwargs}
    if dtype is None and not options:
        return tensor
    return func(tensor, tensor.dtype if dtype is None else dtype, **options)


_MOVES = frozenset([Tensor.to, Tensor.cuda, Tensor.cpu])
_HANDLERS: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.asarray: _tensor,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
    Tensor.__format__: _format,
    Tensor.cpu: _stay,
    Tensor.cuda: _stay,
    Tensor.pin_memory: _stay,
    Tensor.to: _to,
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _index,
    torch.split: _split,
    Tensor.split: _split,
    torch.split_with_sizes: _split,
    Tensor.split_with_sizes: _split,
}
