"""Keep out of a trace what it never uses: torch's compiler, and beside transformers its distributed tensors and optional packages.

Those cost more time than the model's own modules. torch asks its compiler for decorators that do nothing outside it, so a
stand-in answers those and makes way for the real package at the first other question. transformers takes a torch without
distributed support and missing optional packages as it finds them; both are real again after the import.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

_OPTIONAL = ("accelerate", "bitsandbytes", "deepspeed", "kernels", "librosa", "pandas", "peft", "scipy", "sklearn", "torchaudio")
"""Packages that transformers looks for and imports beside a model without needing them to build or run it on meta."""

_COMPILER = "torch._dynamo"
_ITEM_TRANSFORM = "torch._dynamo._trace_wrapped_higher_order_op"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_SYMBOLIC_FUNCTIONS = "torch.utils._sympy.functions"
_ALGEBRA = "sympy"


_LIGHT = "_lintgpu_light"
"""Set on a transformers that was imported here: what it found missing then it goes on to do without."""


@contextlib.contextmanager
def light_imports() -> Iterator[None]:
    """For the time of an import of transformers or of its modules: no optional packages and no distributed torch.

    Does nothing where somebody else imported transformers before: it has seen what is there and relies on it.
    """
    import torch.distributed

    if "transformers" in sys.modules and not hasattr(sys.modules["transformers"], _LIGHT):
        yield
        return
    hidden = [name for name in _OPTIONAL if name not in sys.modules]
    available = torch.distributed.is_available
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = available
        for name in hidden:
            sys.modules.pop(name, None)
        if "transformers" in sys.modules:
            setattr(sys.modules["transformers"], _LIGHT, True)


def defer_compiler() -> None:
    """Put stand-ins in the place of torch's compiler, its symbolic shapes and sympy; does nothing for what is imported already."""
    import torch
    import torch.fx.experimental

    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _StandIn(_COMPILER, dict.fromkeys(_DECORATORS, _decorator), is_package=True)
        sys.modules[_ITEM_TRANSFORM] = _StandIn(_ITEM_TRANSFORM, {"TransformGetItemToIndex": _transform_get_item})
    if _ALGEBRA not in sys.modules:
        # torch asks whether a number is a sympy expression; where sympy was not imported, none is.
        sys.modules[_ALGEBRA] = _StandIn(_ALGEBRA, {"Basic": _NoExpression}, is_package=True)
    if _SYMBOLS not in sys.modules:
        answers = {name: _plainly(name) for name in _PLAIN} | {"free_unbacked_symbols": _free_symbols}
        sys.modules[_SYMBOLS] = torch.fx.experimental.symbolic_shapes = _StandIn(_SYMBOLS, answers)
    if _SYMBOLIC_FUNCTIONS not in sys.modules:
        sys.modules[_SYMBOLIC_FUNCTIONS] = _StandIn(_SYMBOLIC_FUNCTIONS, {"Max": max})
    sys.meta_path.insert(0, _MakeWay())


class _NoExpression:
    """Nothing is an instance of it."""


_DECORATORS = frozenset(
    {
        "allow_in_graph",
        "assume_constant_result",
        "disable",
        "disallow_in_graph",
        "forbid_in_graph",
        "nonstrict_trace",
        "substitute_in_graph",
    }
)


def _decorator(function: Any = None, *args: Any, **options: Any) -> Any:
    return function if callable(function) else _decorator


def _transform_get_item(*args: Any, **options: Any) -> Any:
    return _real(_ITEM_TRANSFORM).TransformGetItemToIndex(*args, **options)


_PLAIN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"), bool),
    "guarding_hint_or_throw": lambda value: value,
    "has_guarding_hint": lambda value: True,
    "is_nested_int": lambda value: False,
    "sym_and": lambda *conditions: all(conditions),
    "sym_eq": lambda left, right: left == right,
    "sym_or": lambda *conditions: any(conditions),
}
"""What torch's questions about symbolic sizes come to for plain numbers, the only ones in a trace."""


def _plainly(name: str) -> Callable[..., Any]:
    answer = _PLAIN[name]

    def asked(*values: Any, **options: Any) -> Any:
        if not options and _is_plain(values):
            return answer(*values)
        return getattr(_real(_SYMBOLS), name)(*values, **options)

    return asked


def _free_symbols(value: Any) -> set[Any]:
    if _is_plain(value) or _is_plain(tuple(getattr(value, "shape", (None,)))):
        return set()
    return _real(_SYMBOLS).free_unbacked_symbols(value)  # type: ignore[no-any-return]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float))


class _StandIn(ModuleType):
    """Stands for a module while nothing is asked of it but what `answers` holds; at another question the real one is imported."""

    def __init__(self, name: str, answers: Mapping[str, Any], is_package: bool = False) -> None:
        super().__init__(name)
        self.__dict__["_answers"] = answers
        if is_package:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        answers = self.__dict__["_answers"]
        if name in answers:
            return answers[name]
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> ModuleType:
    """The real module; the stand-ins for it and for what is inside its package make way."""
    top = _ALGEBRA if name.startswith(_ALGEBRA) else _COMPILER if name.startswith(_COMPILER) else name
    for other, module in list(sys.modules.items()):
        if isinstance(module, _StandIn) and (other == top or other.startswith(f"{top}.")):
            del sys.modules[other]
            parent, _, child = other.rpartition(".")
            if isinstance(vars(sys.modules.get(parent, ModuleType(""))).get(child), _StandIn):
                delattr(sys.modules[parent], child)
    return importlib.import_module(name)


class _MakeWay(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Whoever imports a submodule of a package that a stand-in stands for wants the real one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = _ALGEBRA if fullname.startswith(f"{_ALGEBRA}.") else _COMPILER if fullname.startswith(f"{_COMPILER}.") else ""
        if not isinstance(sys.modules.get(top), _StandIn):
            return None
        _real(fullname)
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module that the real import has made."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has run already."""
