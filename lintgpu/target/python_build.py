"""Build a model from the linted project's own Python. Runs in the worker, and only on the owner's say-so.

A spec is JSON data:
  root        the project's folder, importable while building
  module      "pkg.mod" to import, or
  extract     a file whose classes and functions are taken without running its other statements
  attribute   the class or function that makes the model
  config      {"module" or nothing for the same one, "attribute", "values"}, or {"values"} alone, or nothing
  kwargs      keyword arguments beside the config
  origins     {"config.n_embd": knob id, "kwargs.depth": knob id}: the values that are knobs of a file
  example_inputs, loss   "pkg.mod:function"; example_inputs may be a table {name: {"shape": [...], "dtype": "int64"}}
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from lintgpu.target.base import Built
from lintgpu.trace import standins
from lintgpu.trace.errors import BuildError, TraceError
from lintgpu.trace.literals import Literals, identifier, rewrite
from lintgpu.trace.module_inputs import for_module
from lintgpu.trace.origin import TracedInt
from lintgpu.workload import Workload

# Calls that only make a value; an assignment that makes any other call is work, and is left out when a file is extracted.
_PURE_CALLS = frozenset(
    {
        "dict",
        "list",
        "tuple",
        "set",
        "frozenset",
        "int",
        "float",
        "str",
        "bool",
        "range",
        "len",
        "min",
        "max",
        "TypeVar",
        "namedtuple",
        "NewType",
    }
)


def build(spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
    """The model of a spec with the knobs in `changes` replaced. Raises BuildError with a true reason."""
    root = spec["root"]
    literals = Literals([root], root, changes)
    literals.install()
    standins.install(root, literals.covers)
    _make_importable(root)
    values = _with_origins(spec, changes)
    home = _home(spec, literals)
    maker = _attribute(home, spec["attribute"])
    model = _call(lambda: _instance(maker, home, values))
    extra: Any = None
    if isinstance(model, tuple) and len(model) == 2:
        model, extra = model
    if not hasattr(model, "named_modules"):
        raise BuildError(
            f"{spec['attribute']} gave a {type(model).__name__}, not a torch.nn.Module", "name the class or a factory of the model"
        )
    example = spec.get("example_inputs")
    if isinstance(example, str):
        example = _named(example)
    loss = _named(spec["loss"]) if spec.get("loss") else None
    return for_module(model, workload, example if example is not None else extra, loss)


def _make_importable(root: str) -> None:
    for folder in (os.path.join(root, "src"), root):
        if os.path.isdir(folder) and folder not in sys.path:
            sys.path.insert(0, folder)


def _with_origins(spec: Mapping[str, Any], changes: Mapping[str, int]) -> dict[str, Any]:
    """{"config": {...} or None, "kwargs": {...}} with traced ints where a value is a knob."""
    config = spec.get("config")
    values: dict[str, Any] = {"config": None if config is None else {**config, "values": dict(config.get("values") or {})}}
    values["kwargs"] = dict(spec.get("kwargs") or {})
    for place, knob in (spec.get("origins") or {}).items():
        part, *path = place.split(".")
        table = values["config"]["values"] if part == "config" else values["kwargs"]
        for key in path[:-1]:
            table[key] = dict(table[key])
            table = table[key]
        table[path[-1]] = TracedInt(changes.get(knob, table[path[-1]]), f"{{{knob}}}")
    return values


def _home(spec: Mapping[str, Any], literals: Literals) -> Any:
    if spec.get("extract"):
        return extract(spec["extract"], literals)
    return _import(spec["module"])


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"install {missing.partition('.')[0]} in the environment of the worker" if missing else ""
        raise TraceError.from_exception("environment" if missing else "build", error, hint) from error
    except SystemExit as error:
        raise BuildError(f"importing {name} ends the program (exit status {error.code})", "guard its work with __name__") from error


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return _attribute(_import(module), attribute)


def _attribute(home: Any, name: str) -> Any:
    value = home
    for part in name.split("."):
        if not hasattr(value, part):
            absent = getattr(home, "__lintgpu_absent__", {})
            because = f" ({'; '.join(absent.values())})" if absent else ""
            raise BuildError(f"{home.__name__} has no {name}{because}", "", stage="config")
        value = getattr(value, part)
    return value


def _instance(maker: Any, home: Any, values: Mapping[str, Any]) -> Any:
    config, kwargs = values["config"], values["kwargs"]
    if config is None:
        return maker(**kwargs)
    if config.get("attribute"):
        where = _import(config["module"]) if config.get("module") else home
        return maker(_attribute(where, config["attribute"])(**config["values"]), **kwargs)
    return _from_values(maker, config["values"], kwargs)


def _from_values(maker: Any, values: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Values of a config file: keyword arguments where the names fit, else one config argument made of them."""
    parameters = inspect.signature(maker).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any or set(values) <= set(parameters):
        return maker(**{**values, **kwargs})
    first = next((parameter for name, parameter in parameters.items() if name not in kwargs), None)
    if first is None:
        raise BuildError(f"{maker.__name__} takes none of the keys of its config", "name a config class", stage="config")
    kind = inspect.get_annotations(maker.__init__ if inspect.isclass(maker) else maker, eval_str=True).get(first.name)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        names = {field.name for field in dataclasses.fields(kind)}
        return maker(kind(**{name: value for name, value in values.items() if name in names}), **kwargs)
    return maker(types.SimpleNamespace(**values), **kwargs)


def _call(make: Any) -> Any:
    try:
        return make()
    except (TraceError, MemoryError):
        raise
    except Exception as error:
        raise TraceError.from_exception("build", error) from error


def extract(path: str, literals: Literals) -> types.ModuleType:
    """A module of a file's imports, classes, functions and plain constants; its other statements do not run.

    An import that fails leaves its names out, since often only the dropped statements want them.
    """
    with open(path, "rb") as file:
        source = file.read()
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        raise BuildError(f"invalid Python: {error.msg}", path=path, line=error.lineno or 0, stage="config") from error
    kept = [statement for statement in tree.body if is_definition(statement)]
    module = types.ModuleType(f"lintgpu_target_{os.path.splitext(os.path.basename(path))[0]}")
    module.__file__ = path
    package = _package(path, literals)
    if package:
        module.__package__ = package
        _import(package)
    sys.modules[module.__name__] = module
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    absent: dict[str, str] = {}
    module.__dict__["__lintgpu_absent__"] = absent
    name = identifier(source, literals.relative(path))
    for statement in kept:
        part = rewrite(ast.Module([statement], []), name)
        try:
            exec(compile(part, path, "exec", dont_inherit=True, flags=_future_flags(tree)), module.__dict__)
        except ImportError as error:
            absent[ast.unparse(statement)] = str(error)
        except NameError as error:
            absent[getattr(statement, "name", ast.unparse(statement))] = str(error)
        except Exception as error:
            raise TraceError.from_exception("build", error) from error
    return module


def _package(path: str, literals: Literals) -> str:
    """The dotted package a file belongs to by __init__.py files, empty outside one."""
    parts: list[str] = []
    folder = os.path.dirname(os.path.abspath(path))
    while os.path.isfile(os.path.join(folder, "__init__.py")) and literals.covers(os.path.join(folder, "__init__.py")):
        parts.insert(0, os.path.basename(folder))
        folder = os.path.dirname(folder)
    if parts and folder not in sys.path:
        sys.path.insert(0, folder)
    return ".".join(parts)


def _future_flags(tree: ast.Module) -> int:
    import __future__

    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__" for alias in node.names]
    return sum(getattr(__future__, name).compiler_flag for name in names if hasattr(__future__, name))


def is_definition(statement: ast.stmt) -> bool:
    """Whether a statement only defines: imports, classes, functions, constants, and try or if around those."""
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return True
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        plain_targets = all(isinstance(target, (ast.Name, ast.Tuple)) for target in _targets(statement))
        return plain_targets and (statement.value is None or _is_pure(statement.value))
    if isinstance(statement, ast.Try):
        parts = [
            *statement.body,
            *statement.orelse,
            *statement.finalbody,
            *(part for handler in statement.handlers for part in handler.body),
        ]
        return all(is_definition(part) or isinstance(part, ast.Pass) for part in parts)
    if isinstance(statement, ast.If):
        return (
            _is_pure(statement.test)
            and "__name__" not in ast.unparse(statement.test)
            and all(is_definition(part) or isinstance(part, ast.Pass) for part in (*statement.body, *statement.orelse))
        )
    return False


def _targets(statement: ast.Assign | ast.AnnAssign) -> Iterable[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _is_pure(expression: ast.expr) -> bool:
    """Whether evaluating an expression makes a value and nothing else happens."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _PURE_CALLS):
            return False
        if isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
    return True
