"""torch.autocast for meta tensors, with the policy that it has on CUDA.

torch's own autocast does nothing for meta tensors. Here its cast rules are registered as kernels of a dispatch key that no
device uses; while autocast is on, that key is switched on for this thread. The casts thus sit where torch puts them: above
autograd, also for ops that are called from C++. The ops come from the installed torch (those with a CUDA autocast kernel);
the policies are those of ATen/autocast_mode.h.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_KEY_NAME = "AutocastIPU"
_KEY = getattr(torch._C.DispatchKey, _KEY_NAME)
_KEYS = torch._C.DispatchKeySet(_KEY)
_GPU_NAMES = ("cuda", "meta")

_LOWER = frozenset(
    [
        "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
        "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm",
        "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    ]
)  # fmt: skip
_PROMOTE = frozenset(
    [
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
        "cat", "stack",
    ]
)  # fmt: skip
_SET_DTYPE = frozenset(["prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"])


class Autocast:
    """The state of autocast during one trace, and the casts of weights that it keeps."""

    def __init__(self) -> None:
        """Starts switched off."""
        self.enabled = False
        self.dtype = torch.float16
        self._cache_enabled = True
        self._depth = 0
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._activations: dict[int, torch.Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Register the kernels and make torch.autocast and its queries speak for this object."""
        ops, fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        fallback.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
        for name in autocast_ops():
            ops.impl(name, self._kernel(name), _KEY_NAME)
        try:
            with self._speaking_for_torch():
                yield
        finally:
            self._switch(False)
            ops._destroy()
            fallback._destroy()

    @contextmanager
    def on(self, dtype: torch.dtype) -> Iterator[None]:
        """As `with torch.autocast("cuda", dtype)`."""
        before = self._enter(True, dtype, True)
        try:
            yield
        finally:
            self._exit(before)

    def state(self, weights: Sequence[torch.Tensor]) -> Hashable:
        """What a run of a module with these weights depends on; None where some of them have been cast before."""
        if self._casts and any(id(weight) in self._casts for weight in weights):
            return None
        return self.enabled, self.dtype

    def ran(self, weights: Sequence[torch.Tensor], model: Sequence[torch.Tensor]) -> None:
        """A module ran as one with the weights `model` did: its own have been cast where those were."""
        if not self._casts:
            return
        for parameter, other in zip(weights, model, strict=True):
            if id(other) in self._casts:
                self._casts.setdefault(id(parameter), (parameter, None))

    def is_activation(self, tensor: torch.Tensor) -> None:
        """`tensor` is a leaf of the graph only because a block is traced by itself: its casts are not kept."""
        self._activations[id(tensor)] = tensor

    # -- the state

    def _enter(self, enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> tuple[bool, torch.dtype, bool]:
        before = self.enabled, self.dtype, self._cache_enabled
        self.dtype, self._cache_enabled = dtype, cache_enabled
        self._depth += 1
        self._switch(enabled)
        return before

    def _exit(self, before: tuple[bool, torch.dtype, bool]) -> None:
        enabled, self.dtype, self._cache_enabled = before
        self._depth -= 1
        if not self._depth:
            self._casts.clear()
        self._switch(enabled)

    def _switch(self, enabled: bool) -> None:
        self.enabled = enabled
        # Autocast keys are excluded by default, so that both lists have to change.
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not enabled)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, enabled)

    # -- the kernels

    def _kernel(self, qualified: str) -> Callable[..., Any]:
        name, _, overload = qualified.partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        if name in _SET_DTYPE:
            return self._setting_dtype(op)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                dtype = self._target(name, args, kwargs)
                return op(*self._cast(args, dtype), **{key: self._cast(value, dtype) for key, value in kwargs.items()})

        return kernel

    def _target(self, name: str, args: Any, kwargs: Any) -> torch.dtype:
        if name in _LOWER:
            return self.dtype
        if name not in _PROMOTE:
            return torch.float32
        tensors = _floating([args, list(kwargs.values())])
        return torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else self.dtype

    def _setting_dtype(self, op: Any) -> Callable[..., Any]:
        names = [argument.name for argument in op._schema.arguments]
        position = names.index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_KEYS):
                given = kwargs.get("dtype", args[position] if len(args) > position else None)
                if given is None and _is_castable(args[0]):
                    return op(*args[:position], **{**kwargs, "dtype": torch.float32})
                return op(*args, **kwargs)

        return kernel

    def _cast(self, tree: Any, dtype: torch.dtype) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._cast_tensor(tree, dtype) if _is_castable(tree) and tree.dtype != dtype else tree
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._cast(item, dtype) for item in tree)
        return tree

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        keeps = (
            self._cache_enabled
            and dtype == self.dtype
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and id(tensor) not in self._activations
            and not tensor._is_view()
        )
        if not keeps:
            return tensor.to(dtype)
        cast = self._casts.get(id(tensor), (tensor, None))[1]
        if cast is None:
            cast = tensor.to(dtype)
            self._casts[id(tensor)] = (tensor, cast)
        return cast

    # -- torch's own names

    @contextmanager
    def _speaking_for_torch(self) -> Iterator[None]:
        kind = torch.amp.autocast_mode.autocast
        state = self
        originals = {name: kind.__dict__[name] for name in ("__init__", "__enter__", "__exit__")}

        def init(
            context: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
        ) -> None:
            if device_type not in _GPU_NAMES:
                originals["__init__"](context, device_type, dtype, enabled, cache_enabled)
                return
            context._lintgpu = (enabled, dtype, True if cache_enabled is None else cache_enabled)
            context._enabled, context.device, context.fast_dtype = enabled, device_type, dtype or state.dtype

        def enter(context: Any) -> Any:
            wanted = getattr(context, "_lintgpu", None)
            if wanted is None:
                return originals["__enter__"](context)
            context._lintgpu_before = state._enter(wanted[0], wanted[1] or state.dtype, wanted[2])
            return context

        def leave(context: Any, *error: Any) -> Any:
            if not hasattr(context, "_lintgpu"):
                return originals["__exit__"](context, *error)
            state._exit(context._lintgpu_before)
            return False

        def is_enabled(device_type: str = "cuda") -> bool:
            return state.enabled if device_type in _GPU_NAMES else queries["is_autocast_enabled"](device_type)

        def get_dtype(device_type: str = "cuda") -> Any:
            return state.dtype if device_type in _GPU_NAMES else queries["get_autocast_dtype"](device_type)

        names = {"is_autocast_enabled": is_enabled, "get_autocast_dtype": get_dtype, "get_autocast_gpu_dtype": lambda: state.dtype}
        queries = {name: getattr(torch, name) for name in names if hasattr(torch, name)}
        kind.__init__, kind.__enter__, kind.__exit__ = init, enter, leave
        for name in queries:
            setattr(torch, name, names[name])
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(kind, name, original)
            for name, query in queries.items():
                setattr(torch, name, query)


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64 and value.is_meta


def _floating(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in _floating(item)]
    return [tree] if _is_castable(tree) else []


def autocast_ops() -> list[str]:
    """The aten ops with a kernel for AutocastCUDA in the installed torch, as name or name.overload."""
    if not _OPS:
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
                _OPS.append(name.removeprefix("aten::"))
    return _OPS


_OPS: list[str] = []
