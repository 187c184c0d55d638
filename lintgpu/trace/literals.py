"""Give every integer literal of the project's own modules an origin, so that a traced dim can name the literal it came from.

An import hook rewrites the syntax tree of trusted project files: a literal of at least 8 becomes a call that answers with a
TracedInt (see lintgpu.trace.origin) whose knob id is "path:LINE:COLUMN", path relative to the project root, line and column
counting from 1 in characters. A build with `changes` answers other values. Positions in tracebacks stay those of the file.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

from lintgpu.trace.origin import TracedInt

SMALLEST = 8
"""Smaller literals are counts, exponents and indices, hardly ever sizes."""

HOOK = "__lintgpu_literal__"
"""The builtin that a rewritten literal calls."""


def identify(path: str, line: int, column: int) -> str:
    """The knob id of the literal at `line` and `column` (from 1, in characters) of `path` (relative to the project root)."""
    return f"{path.replace(os.sep, '/')}:{line}:{column}"


def parse_id(knob_id: str) -> tuple[str, int, int] | None:
    """(path, line, column) of a literal's knob id, or None for an id of another kind."""
    path, _, rest = knob_id.rpartition(":")
    path, _, line = path.rpartition(":")
    if not path or not line.isdecimal() or not rest.isdecimal():
        return None
    return path, int(line), int(rest)


def literals(tree: ast.AST) -> list[ast.Constant]:
    """The int literals of a tree that are rewritten, in order of position.

    Left alone are subscripts and slices, match patterns, annotations, decorators, f-strings, bodies of enums and everything
    that is no number of at least 8.
    """
    finder = _Finder()
    finder.visit(tree)
    return sorted(finder.found, key=lambda node: (node.lineno, node.col_offset))


def rewrite(tree: ast.Module, identify_node: Callable[[ast.Constant], str]) -> ast.Module:
    """Replace the tree's literals by calls of the hook with their id and value, in place."""
    _Replacer({id(node) for node in literals(tree)}, identify_node).visit(tree)
    return ast.fix_missing_locations(tree)


def compile_source(source: bytes, filename: str, path: str) -> CodeType:
    """Compile a project file with its literals rewritten. `path` is what knob ids call it. Raises SyntaxError."""
    tree = ast.parse(source, filename)
    return compile(rewrite(tree, identifier(source, path)), filename, "exec", dont_inherit=True)


def identifier(source: bytes, path: str) -> Callable[[ast.Constant], str]:
    """A function from a literal's node to its knob id."""
    lines = source.removeprefix(b"\xef\xbb\xbf").splitlines()

    def name(node: ast.Constant) -> str:
        # ast counts columns in UTF-8 bytes.
        before = lines[node.lineno - 1][: node.col_offset] if node.lineno <= len(lines) else b""
        return identify(path, node.lineno, len(before.decode("utf-8", "replace")) + 1)

    return name


class Literals:
    """The hook of one build: install() before importing, then import; it stays until the next build installs its own."""

    def __init__(self, roots: Sequence[str], base: str, changes: Mapping[str, int]) -> None:
        """Rewrite modules below `roots`; ids are relative to `base`; `changes` maps ids to other values."""
        self._roots = tuple(os.path.realpath(root) + os.sep for root in roots)
        self._base = os.path.realpath(base)
        self._changes = changes
        self.values: dict[str, int] = {}
        """The value of every literal that was evaluated, by id."""
        self._traced: dict[str, TracedInt] = {}

    def install(self) -> None:
        """Take the place of an earlier build's hook and forget the project modules it imported."""
        for finder in [finder for finder in sys.meta_path if isinstance(finder, _PathFinder)]:
            sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if self.covers(getattr(module, "__file__", None)):
                del sys.modules[name]
        setattr(builtins, HOOK, self.value_of)
        sys.meta_path.insert(0, _PathFinder(self))

    def covers(self, filename: str | None) -> bool:
        """Whether a file is the project's own source: below a root, and not in an environment kept there."""
        if not filename or not filename.endswith(".py"):
            return False
        real = os.path.realpath(filename)
        installed = f"{os.sep}site-packages{os.sep}" in real or real.startswith(os.path.realpath(sys.prefix) + os.sep)
        return real.startswith(self._roots) and not installed

    def relative(self, filename: str) -> str:
        """What knob ids call a file."""
        return os.path.relpath(os.path.realpath(filename), self._base)

    def value_of(self, knob_id: str, value: int) -> int:
        """The traced int of a literal, changed if this build changes it."""
        if knob_id not in self._traced:
            self.values[knob_id] = value
            self._traced[knob_id] = TracedInt(self._changes.get(knob_id, value), f"{{{knob_id}}}")
        return self._traced[knob_id]


class _PathFinder(importlib.abc.MetaPathFinder):
    def __init__(self, hook: Literals) -> None:
        self._hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not self._hook.covers(spec.origin):
            return None
        spec.loader = _Loader(fullname, spec.origin, self._hook)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, hook: Literals) -> None:
        super().__init__(fullname, path)
        self._hook = hook

    def get_code(self, fullname: str) -> CodeType:
        # Not through the bytecode cache: rewritten code must neither be read from it nor written to it.
        path = self.get_filename(fullname)
        return compile_source(self.get_data(path), path, self._hook.relative(path))


class _Finder(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[ast.Constant] = []

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int and node.value >= SMALLEST:
            self.found.append(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Neither values nor format specs: they are text for people."""

    visit_TemplateStr = visit_JoinedStr

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Only an annotation is inside."""

    def visit_match_case(self, node: ast.match_case) -> None:
        for part in (*([node.guard] if node.guard else []), *node.body):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any("Enum" in ast.unparse(base) or "Flag" in ast.unparse(base) for base in node.bases):
            return  # Members must stay plain values.
        for part in (*node.bases, *node.keywords, *node.body):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (node.args, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_TypeAlias(self, node: ast.AST) -> None:
        """A type, not a value."""


class _Replacer(ast.NodeTransformer):
    def __init__(self, chosen: set[int], identify_node: Callable[[ast.Constant], str]) -> None:
        self._chosen = chosen
        self._identify = identify_node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if id(node) not in self._chosen:
            return node
        name = ast.Name(HOOK, ast.Load())
        call = ast.Call(name, [ast.Constant(self._identify(node)), ast.Constant(node.value)], [])
        for part in (call, name, *call.args):
            ast.copy_location(part, node)
        return call
