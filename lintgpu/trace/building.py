"""Builds a model on meta while noting where each module and each dim came from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lintgpu.trace.functions import Functions
from lintgpu.trace.modules import ConstructorSites
from lintgpu.trace.origin import TracingInt, collect_inexact, expression
from lintgpu.trace.recorder import Recorder
from lintgpu.trace.shadow import unmoded
from lintgpu.trace.shapes import META
from lintgpu.trace.substitutes import without_compilers
from lintgpu.trace.weights import Origins

if TYPE_CHECKING:
    from lintgpu.target.base import Built

_FACTORIES = frozenset([torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand, torch.full, torch.empty_strided, torch.normal])


@dataclass
class Provenance:
    """What was noted while a model was built."""

    factories: dict[int, Origins] = field(default_factory=dict)
    """Storage id -> the origin of each dim, for tensors made by a factory call with traced ints."""
    inexact: list[str] = field(default_factory=list)
    compile_calls: list[str] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    """Storages behind `factories`, so that no address is reused."""

    def note(self, tensor: torch.Tensor, origins: Origins) -> None:
        """Say what the dims of a new tensor came from, where that is said of each."""
        if len(origins) == tensor.dim():
            storage = tensor.untyped_storage()
            self.factories[int(storage._cdata)] = origins
            self.kept.append(storage)


def build(make: Callable[[], Built], dtype: torch.dtype, recorder: Recorder) -> tuple[Built, Provenance]:
    """Call `make` with torch on meta and `dtype` as the default dtype; whatever it raises goes through.

    `recorder` keeps the values of small constants that the constructors make, and learns where modules are constructed.
    """
    provenance = Provenance()
    with ExitStack() as stack:
        stack.enter_context(default_dtype(dtype))
        stack.enter_context(without_compilers(provenance.compile_calls))
        provenance.inexact = stack.enter_context(collect_inexact())
        stack.enter_context(_noting_constructors(recorder.modules.constructors))
        stack.enter_context(_without_initialisation())
        stack.enter_context(torch.device("meta"))
        stack.enter_context(Functions(recorder))
        stack.enter_context(_Factories(provenance))
        stack.enter_context(recorder.silent())
        stack.enter_context(recorder)
        random.seed(0)
        built = make()
    recorder.modules.name_all(built.model)
    recorder.weights.add_model(built.model, provenance.factories)
    return built, provenance


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Factories(TorchFunctionMode):  # type: ignore[misc]
    """Notes the origins of the dims that tensor factories are called with."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and "out" not in kwargs:
            # Most parameters are made this way; there are no values to follow.
            with unmoded():
                output = func(*args, **{**kwargs, "device": META, "pin_memory": False})
        else:
            output = func(*args, **kwargs)
        if func in _FACTORIES:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            origins = tuple(expression(dim) for dim in size if isinstance(dim, int))
            if any(origins):
                with unmoded():
                    self._provenance.note(output, origins)
        return output


@contextmanager
def _noting_constructors(constructors: ConstructorSites) -> Iterator[None]:
    original = nn.Module.__init__
    shimmed: list[dict[str, Any]] = []

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        constructors.note(module)
        _keep_ints_traced(type(module), shimmed)

    nn.Module.__init__ = init
    try:
        yield
    finally:
        nn.Module.__init__ = original
        for names in shimmed:
            names.pop("int", None)


def _keep_ints_traced(cls: type, shimmed: list[dict[str, Any]]) -> None:
    """Bind `int` to TracingInt in the file of a module class while it builds, so that int(d * 8 / 3) keeps its origin."""
    if cls.__module__.startswith("torch."):
        return
    module = sys.modules.get(cls.__module__)
    if module is not None and "int" not in module.__dict__:
        module.__dict__["int"] = TracingInt
        shimmed.append(module.__dict__)


@contextmanager
def _without_initialisation() -> Iterator[None]:
    """torch.nn.init does nothing: values are never looked at on meta, and each call costs time."""
    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_") and callable(getattr(nn.init, name))]
    before = {name: getattr(nn.init, name) for name in names}

    def skip(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    for name in names:
        setattr(nn.init, name, skip)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)
