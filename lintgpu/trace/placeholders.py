"""Let a library be imported without a package that it names at its top and that a model on meta never calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def placeholders(package: str) -> Iterator[None]:
    """While it is open, `package` and all below it import as modules of placeholder classes; then the real one can be imported again.

    Does nothing where the real one has been imported. Saves its import, and lets the library import where the package is absent or broken.
    """
    if package in sys.modules:
        yield
        return
    finder = _Finder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, Anything)]:
            del sys.modules[name]


class _Named(type):
    """A class whose unknown attributes are further placeholders, such as the members of an enum."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(cls, name, made)
        return made


class Anything(ModuleType):
    """A module of which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A placeholder for the package and what is below it."""
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module that has every name."""
        return Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def opaque_module(name: str) -> ModuleType:
    """A compiled extension that is not here: each of its functions is one kernel, whose output is like the first tensor it is given."""
    return _Opaque(name)


class _Opaque(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["__lintgpu_standin__"] = name

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)
        name = f"{self.__name__}.{function}"

        def call(*args: Any, **kwargs: Any) -> Any:
            import torch

            from lintgpu.trace.kernels import kernel, say

            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if not tensors:
                return None
            say(f"{name} is a compiled extension that is not here: its output was taken to be like its first tensor")
            return kernel(name, tensors, lambda: torch.empty_like(tensors[0]))

        return call
