"""Stand-ins for packages of GPU kernels that are not installed where a model is traced: one file a package, named as it is imported.

Only modules of the linted project get them, and only where the real package is absent: libraries that look for optional packages
must find out the truth. A stand-in has the names that models use, in one flat file for the package and all its submodules.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

from lintgpu.trace.placeholders import Anything, opaque_module

_MACHINERY = ("<frozen importlib", os.path.dirname(importlib.__file__), os.path.dirname(os.path.dirname(__file__)))
_EXTENSION = re.compile(r"(?:CUDA|Cpp)Extension\(\s*(?:name\s*=\s*)?[\"']([\w.]+)[\"']")
_BUILDER = "torch.utils.cpp_extension"


def install(root: str, is_project: Callable[[str | None], bool]) -> None:
    """Serve the modules of the project at `root` from now on, in the place of an earlier project; `is_project` knows its files."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, (_Absent, _Builder))]:
        sys.meta_path.remove(finder)
    for name in [name for name, module in sys.modules.items() if hasattr(module, "__lintgpu_standin__")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Builder(is_project))
    sys.meta_path.append(_Absent(is_project, _extensions(root)))


def packages() -> frozenset[str]:
    """The packages that have a stand-in."""
    return frozenset(module.name for module in pkgutil.iter_modules(__path__))


def _extensions(root: str) -> frozenset[str]:
    """The C++ and CUDA extensions that the project's setup.py builds."""
    try:
        with open(os.path.join(root, "setup.py"), encoding="utf-8", errors="replace") as file:
            return frozenset(_EXTENSION.findall(file.read()))
    except OSError:
        return frozenset()


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, is_project: Callable[[str | None], bool]) -> None:
        self._is_project = is_project

    def _asked_by_project(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
            frame = frame.f_back
        return frame is not None and self._is_project(frame.f_code.co_filename)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stand-in."""
        raise NotImplementedError

    def exec_module(self, module: ModuleType) -> None:
        """It is complete as it was created."""


class _Absent(_Loader):
    """The last finder: it is asked where nobody else has the package."""

    def __init__(self, is_project: Callable[[str | None], bool], extensions: frozenset[str]) -> None:
        super().__init__(is_project)
        self._packages = packages()
        self._extensions = extensions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a package with a stand-in, anything below it, and the project's own compiled extensions."""
        package, *inner = fullname.split(".")
        if fullname in self._extensions or (package in self._packages and self._serves(package, inner)):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def _serves(self, package: str, inner: list[str]) -> bool:
        if not inner:
            return self._asked_by_project()
        return isinstance(sys.modules.get(package), _StandIn) and set(inner) <= set(_names(package).SUBMODULES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The names of the package's file, or a module of kernels of which nothing is known."""
        package, _, inner = spec.name.partition(".")
        if package not in self._packages:
            return opaque_module(spec.name)
        held = getattr(_names(package), inner, None)
        if isinstance(held, Anything):
            held.__dict__["__lintgpu_standin__"] = spec.name
            return held
        return _StandIn(spec.name, _names(package))


class _Builder(_Loader):
    """torch.utils.cpp_extension as the project sees it: building an extension gives kernels of which nothing is known."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for that one module."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == _BUILDER and self._asked_by_project() else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """`load` and `load_inline`."""
        module = ModuleType(spec.name)
        build: Callable[..., Any] = lambda name, *args, **options: opaque_module(name)  # noqa: E731
        module.__dict__.update(load=build, load_inline=build, __lintgpu_standin__=spec.name)
        return module


def _names(package: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{package}")


class _StandIn(ModuleType):
    """The names that a package's file defines, under the package's own name or that of one of its submodules."""

    def __init__(self, name: str, names: ModuleType) -> None:
        super().__init__(name)
        self.__dict__.update({key: value for key, value in vars(names).items() if _is_own(value)})
        self.__dict__["__lintgpu_standin__"] = name

    def __getattr__(self, name: str) -> Any:
        package = self.__name__.partition(".")[0]
        if name in _names(package).SUBMODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"{package} is not installed, and what stands in for it has no {name}")


def _is_own(value: Any) -> bool:
    """Whether a file of this folder defines a value."""
    return isinstance(value, Anything) or str(getattr(value, "__module__", "")).startswith(f"{__name__}.")
