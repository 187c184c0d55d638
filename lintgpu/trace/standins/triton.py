"""triton: kernels of the project's own. They are not run; each launch is one kernel over the tensors that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lintgpu.trace.kernels import launched, say
from lintgpu.trace.placeholders import Anything

SUBMODULES = ("language",)
"""The parts of dotted names below the package."""


language = Anything("triton.language")


class JITFunction:
    """A kernel."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", getattr(getattr(function, "fn", None), "__name__", "kernel"))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launch over a grid."""
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Notes the launch."""
        say(f"the Triton kernel {self.__name__} was recorded by the tensors that it is given")
        launched(f"triton.{self.__name__}", [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])


def jit(function: Any = None, **options: Any) -> Any:
    """A kernel of a function."""
    return JITFunction if function is None else JITFunction(function)


def autotune(*args: Any, **options: Any) -> Any:
    """The kernel as it is: which configuration is taken changes no shape."""
    return lambda kernel: kernel


heuristics = autotune


class Config:
    """A configuration to tune over."""

    def __init__(self, kwargs: Any, *args: Any, **options: Any) -> None:
        self.kwargs = kwargs


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()
