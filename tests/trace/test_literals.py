"""Literals of project files carry their origin, can be changed for a rebuild, and change nothing else."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.trace import literals
from lintgpu.trace.literals import HOOK, Literals, compile_source, parse_id
from lintgpu.trace.origin import TracedInt, expression


def found(source: str) -> list[tuple[int, int, int]]:
    """(line, column, value) of the literals that would be rewritten."""
    tree = ast.parse(source)
    name = literals.identifier(source.encode(), "m.py")
    return [(*parse_id(name(node))[1:], node.value) for node in literals.literals(tree)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("n_embd = 768", [(1, 10, 768)]),
        ("x = 7", []),
        ("x = 8", [(1, 5, 8)]),
        ("x = True", []),
        ("x = 16.0", []),
        ("x = -100", [(1, 6, 100)]),
        ("x = 4 * 1_024", [(1, 9, 1024)]),
        ("x = 0x100", [(1, 5, 256)]),
        ("f(64, b=128)", [(1, 3, 64), (1, 9, 128)]),
        ("def f(a=64, *, b=128) -> None: ...", [(1, 9, 64), (1, 18, 128)]),
        ("lambda a=64: a", [(1, 10, 64)]),
        ("class C:\n    a: int = 64", [(2, 14, 64)]),
        ("é = 'ü'; n = 512", [(1, 14, 512)]),
        ("x[64]", []),
        ("x[8:16, ::32]", []),
        ("f(64)[32]", [(1, 3, 64)]),
        ("a: Annotated[int, 64]", []),
        ("a: Annotated[int, 64] = 32", [(1, 25, 32)]),
        ("def f(a: L[64]) -> L[64]: ...", []),
        ("@cache(64)\ndef f(): ...", []),
        ("@register(64)\nclass C: ...", []),
        ("f'{x:>64} {64}'", []),
        ("'64'", []),
        ("b'64'", []),
        ("match x:\n    case 64: y = 32", [(2, 18, 32)]),
        ("match 64:\n    case _ if x > 32: ...", [(1, 7, 64), (2, 19, 32)]),
        ("class C(Enum):\n    A = 64", []),
        ("class C(enum.IntFlag):\n    A = 64", []),
        ("{64: 128}", [(1, 2, 64), (1, 6, 128)]),
    ],
)
def test_which_literals_are_rewritten(source: str, expected: list[tuple[int, int, int]]) -> None:
    assert found(source) == expected


numbers = st.integers(0, 1 << 40)
expressions = st.recursive(
    numbers.map(str) | st.sampled_from(["3.5", "'text'", "True", "(1, 64)[0]", "f'{64}'"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%", "==", "<", "and", "or"]), inner).map(
            lambda p: f"({p[0]} {p[1]} {p[2]})"
        ),
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        inner.map(lambda item: f"(-{item})"),
        inner.map(lambda item: f"(lambda a={item}, b=64: (a, b))()"),
        inner.map(lambda item: f"dict(a={item}, b=[64] * 9)"),
    ),
    max_leaves=8,
)


@given(expressions)
def test_rewritten_source_evaluates_equal(source: str) -> None:
    hook = Literals([], ".", {})
    text = f"import warnings\nvalue = {source}\n"
    plain, rewritten = _run(compile(text, "m.py", "exec")), _run(compile_source(text.encode(), "m.py", "m.py"), hook)
    assert plain == rewritten
    assert repr(plain) == repr(rewritten)


def _run(code: Any, hook: Literals | None = None) -> Any:
    names: dict[str, Any] = {HOOK: hook.value_of} if hook else {}
    try:
        exec(code, names)
    except (TypeError, ZeroDivisionError, ValueError, OverflowError, MemoryError) as error:
        return type(error)
    return names["value"]


@given(st.integers(8, 1 << 40), st.integers(1, 1 << 40))
def test_a_change_replaces_one_literal(value: int, other: int) -> None:
    source = f"a = {value}\nb = {value}\n".encode()
    names: dict[str, Any] = {HOOK: Literals([], ".", {"m.py:1:5": other}).value_of}
    exec(compile_source(source, "m.py", "m.py"), names)
    assert (names["a"], names["b"]) == (other, value)
    assert expression(names["a"]) == "{m.py:1:5}"


def test_positions_in_tracebacks_stay() -> None:
    code = compile_source(b"a = 64\n\nb = [16,\n  1 / 0, 32]\n", "m.py", "m.py")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(code, {HOOK: Literals([], ".", {}).value_of})
    assert caught.traceback[-1].lineno + 1 == 4


def test_a_byte_order_mark_moves_no_column() -> None:
    names: dict[str, Any] = {HOOK: Literals([], ".", {}).value_of}
    exec(compile_source(b"\xef\xbb\xbfa = 64\n", "m.py", "m.py"), names)
    assert expression(names["a"]) == "{m.py:1:5}"


@pytest.mark.parametrize("text", ["vocab_size", "text_config.vocab_size", "default:n=4", "a.py:1", "a.py:x:2", ":1:2"])
def test_ids_of_other_kinds_are_no_literals(text: str) -> None:
    assert parse_id(text) is None


def test_an_id_may_hold_colons_in_its_path() -> None:
    assert parse_id("C:/m.py:12:5") == ("C:/m.py", 12, 5)


@pytest.fixture
def clean_imports() -> Iterator[None]:
    modules, finders, path = dict(sys.modules), list(sys.meta_path), list(sys.path)
    yield
    sys.modules.clear()
    sys.modules.update(modules)
    sys.meta_path[:], sys.path[:] = finders, path
    if hasattr(builtins, HOOK):
        delattr(builtins, HOOK)


@pytest.mark.usefixtures("clean_imports")
def test_only_the_projects_own_modules_are_rewritten(tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    for folder in (project / "package", project / ".venv" / "lib" / "site-packages", other):
        folder.mkdir(parents=True)
    (project / "package" / "__init__.py").write_text("from package.sizes import WIDTH\n")
    (project / "package" / "sizes.py").write_text("WIDTH = 96\n")
    (project / ".venv" / "lib" / "site-packages" / "installed_there.py").write_text("WIDTH = 96\n")
    (other / "elsewhere.py").write_text("WIDTH = 96\n")
    sys.path[:0] = [str(project), str(other), str(project / ".venv" / "lib" / "site-packages")]

    Literals([str(project)], str(project), {}).install()
    width = importlib.import_module("package").WIDTH
    assert isinstance(width, TracedInt)
    assert width.expression == "{package/sizes.py:1:9}"
    assert type(importlib.import_module("elsewhere").WIDTH) is int
    assert type(importlib.import_module("installed_there").WIDTH) is int


@pytest.mark.usefixtures("clean_imports")
def test_the_next_build_imports_anew_with_its_own_values(tmp_path: Path) -> None:
    (tmp_path / "sized.py").write_text("def width(n=96):\n    return n * 16\n")
    sys.path.insert(0, str(tmp_path))
    Literals([str(tmp_path)], str(tmp_path), {}).install()
    first = importlib.import_module("sized")
    assert first.width() == 96 * 16
    second_hook = Literals([str(tmp_path)], str(tmp_path), {"sized.py:1:13": 128})
    second_hook.install()
    second = importlib.import_module("sized")
    assert second is not first
    assert second.width() == 128 * 16
    assert second_hook.values == {"sized.py:1:13": 96, "sized.py:2:16": 16}
    assert sum(type(finder).__module__ == literals.__name__ for finder in sys.meta_path) == 1


@pytest.mark.usefixtures("clean_imports")
def test_no_bytecode_of_rewritten_modules_is_left(tmp_path: Path) -> None:
    (tmp_path / "cached.py").write_text("WIDTH = 96\n")
    sys.path.insert(0, str(tmp_path))
    Literals([str(tmp_path)], str(tmp_path), {}).install()
    importlib.import_module("cached")
    assert not (tmp_path / "__pycache__").exists()
