"""Where things are in the model and in its source: module paths, constructor sites and call sites."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from lintgpu.trace.records import Site

_HERE = Path(__file__).resolve().parent
_SKIPPED = (str(Path(torch.__file__).resolve().parent), str(Path(__file__).resolve().parent))


class Sites:
    """Turns frames into Sites, once for each instruction."""

    def __init__(self) -> None:
        """Starts with nothing seen."""
        self._sites: dict[tuple[CodeType, int], Site] = {}

    def of(self, frame: FrameType) -> Site:
        """The place that `frame` is executing."""
        key = (frame.f_code, frame.f_lasti)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _site(frame.f_code, frame.f_lasti, frame.f_lineno)
        return site

    def caller(self) -> Site | None:
        """The innermost place of the model's code or what it calls, torch left out; None where there is none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_entry(frame.f_code):
            if _is_users(frame.f_code):
                return self.of(frame)
            frame = frame.f_back
        return None

    def constructor(self, module: nn.Module) -> Site | None:
        """The call that constructs `module`, asked from inside its nn.Module.__init__."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_entry(frame.f_code):
            if not _initialises(frame, module) and _is_users(frame.f_code):
                return self.of(frame)
            frame = frame.f_back
        return None


class ConstructorSites:
    """Remembers where each module was constructed, through nn.Module.__init__."""

    def __init__(self, sites: Sites) -> None:
        """`sites` caches the places."""
        self._sites = sites
        self._of: dict[int, Site | None] = {}

    def of(self, module: nn.Module) -> Site | None:
        """The constructor call of `module`; None where it was copied or unpickled."""
        return self._of.get(id(module))

    def note(self, module: nn.Module) -> None:
        """Called as `module` is being initialised. A reused id is overwritten by its new owner."""
        self._of[id(module)] = self._sites.constructor(module)


class ModuleStack:
    """Which module is running. `calls` may be replaced to run a module another way (block memoisation)."""

    def __init__(self, constructors: ConstructorSites) -> None:
        """Knows no module yet."""
        self.constructors = constructors
        self.stack: list[nn.Module] = []
        self.calls: Any = None
        self.on_exit: Callable[[], None] | None = None
        """Called as a module returns, while it is still the running one."""
        self._paths: dict[int, list[str]] = {}
        # Holding them keeps their ids from being reused when a model swaps its parts while it runs.
        self._named: list[nn.Module] = []
        self._sites: dict[int, Site | None] = {}

    def name_all(self, root: nn.Module) -> None:
        """Name every module below `root`, which has to outlive this object; a shared module has several names."""
        for path, module in _named(root, "", ()):
            names = self._paths.setdefault(id(module), [])
            names.append(path)
            self._named.append(module)
            if len(names) > 1:
                continue
            parent = path.rpartition(".")[0]
            site = self.constructors.of(module)
            # A deep-copied module never ran __init__: the best known place is its parent's.
            self._sites[id(module)] = site if site is not None else self._parent_site(root, parent)

    def _parent_site(self, root: nn.Module, parent: str) -> Site | None:
        try:
            return self._sites.get(id(root.get_submodule(parent)))
        except AttributeError:
            return None

    def path(self, module: nn.Module) -> str:
        """The path of `module` below the root; of one that the root does not own, the path of its caller.

        A shared module goes by its name inside the module that runs it.
        """
        names = self._paths.get(id(module), ())
        if len(names) == 1:
            return names[0]
        for depth in range(len(self.stack) - 1, -1, -1):
            outer = self.stack[depth]
            if outer is module or id(outer) not in self._paths:
                continue
            around = self._paths[id(outer)][0] if len(self._paths[id(outer)]) == 1 else self._path_at(depth)
            if not names:
                # Put there after the model was built, or owned by nobody.
                held = next((name for name, child in outer._modules.items() if child is module), None)
                return around if held is None else f"{around}.{held}" if around else held
            inside = [name for name in names if name.startswith(f"{around}." if around else "")]
            if inside:
                return inside[0]
        return names[0] if names else ""

    def _path_at(self, depth: int) -> str:
        """The path of a shared module that is on the stack itself."""
        names = self._paths[id(self.stack[depth])]
        for outer in reversed(self.stack[:depth]):
            for around in self._paths.get(id(outer), ()):
                inside = [name for name in names if name.startswith(f"{around}." if around else "")]
                if inside:
                    return inside[0]
        return names[0]

    def site(self, module: nn.Module) -> Site | None:
        """Where `module` was constructed."""
        return self._sites.get(id(module)) or self.constructors.of(module)

    @property
    def current(self) -> nn.Module | None:
        """The innermost running module."""
        return self.stack[-1] if self.stack else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Follow every module call while the context lasts."""
        original = nn.Module.__call__
        stack = self.stack

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            depth = len(stack)
            stack.append(module)
            try:
                run = self.calls
                return original(module, *args, **kwargs) if run is None else run(original, module, args, kwargs)
            finally:
                if self.on_exit is not None:
                    self.on_exit()
                del stack[depth:]

        nn.Module.__call__ = call
        try:
            yield
        finally:
            nn.Module.__call__ = original
            stack.clear()


def _named(module: nn.Module, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Every path to every module, parents first."""
    yield path, module
    above = (*above, id(module))
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            yield from _named(child, f"{path}.{name}" if path else name, above)


def _initialises(frame: FrameType, module: nn.Module) -> bool:
    code = frame.f_code
    return code.co_name == "__init__" and bool(code.co_varnames) and frame.f_locals.get(code.co_varnames[0]) is module


@cache
def _is_users(code: CodeType) -> bool:
    filename = code.co_filename
    return not filename.startswith("<") and not filename.startswith(_SKIPPED)


@cache
def _is_entry(code: CodeType) -> bool:
    """Frames outside the one that builds the model or runs the step belong to the worker."""
    return code.co_filename == str(_HERE / "record.py") or (code.co_filename == str(_HERE / "building.py") and code.co_name == "build")


@cache
def _positions(code: CodeType) -> list[Any]:
    positions = getattr(code, "co_positions", None)  # Python >= 3.11
    return list(positions()) if positions is not None else []


@cache
def _line_bytes(filename: str, line: int) -> bytes:
    import linecache

    return linecache.getline(filename, line).encode()


def _column(filename: str, line: int, offset: int | None) -> int:
    """co_positions counts UTF-8 bytes from 0; a Site counts characters from 1."""
    if offset is None:
        return 0
    return len(_line_bytes(filename, line)[:offset].decode(errors="ignore")) + 1


def _site(code: CodeType, instruction: int, line: int) -> Site:
    name = getattr(code, "co_qualname", code.co_name)
    positions = _positions(code)
    if instruction < 0 or instruction // 2 >= len(positions):
        return Site(code.co_filename, line, function=name)
    start, end, column, end_column = positions[instruction // 2]
    if start is None or end is None or column is None or end_column is None:
        return Site(code.co_filename, line, function=name)
    return Site(code.co_filename, start, _column(code.co_filename, start, column), end, _column(code.co_filename, end, end_column), name)
