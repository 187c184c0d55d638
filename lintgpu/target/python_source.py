"""What Python source says about a model without running it: classes, constants, arguments, and what a literal is called."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lintgpu.finding import Span
from lintgpu.target.base import Knob
from lintgpu.target.roles import role_of
from lintgpu.trace.literals import identify, literals, parse_id

if TYPE_CHECKING:
    from lintgpu.source import SourceFile

# The first arguments of layers that are usually given by position.
_POSITIONAL = {
    "Linear": ("in_features", "out_features"),
    "Embedding": ("num_embeddings", "embedding_dim"),
    "LayerNorm": ("normalized_shape",),
    "RMSNorm": ("normalized_shape",),
    "MultiheadAttention": ("embed_dim", "num_heads"),
}


@dataclass(frozen=True)
class Constant:
    """A value that source gives a name: a module constant, a dataclass field, a keyword, a flag's or parameter's default."""

    name: str
    value: Any
    node: ast.expr


def literal_knob(root: str, knob_id: str, shown: str | None = None) -> Knob | None:
    """The knob behind a literal's id ("model.py:12:25", relative to `root`), or None where the file does not hold it."""
    parsed = parse_id(knob_id)
    if parsed is None:
        return None
    path, line, column = parsed
    file = _read(os.path.normpath(os.path.join(root, path)), shown)
    if file is None:
        return None
    for node in literals(file.tree):
        span = file.span(node)
        if (span.line, span.column) == (line, column):
            name = name_of(file.tree, node)
            return Knob(knob_id, name, int(str(node.value)), span, role_of(name))
    return None


def display_path(path: str) -> str:
    """A path as messages show it: relative to the working directory where that is shorter."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _read(path: str, shown: str | None) -> SourceFile | None:
    try:
        return _read_at(path, shown or display_path(path), os.stat(path).st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=64)
def _read_at(path: str, shown: str, modified: int) -> SourceFile | None:
    from lintgpu.source import UnreadableFile, read

    try:
        file = read(path, shown)
        file.check()
    except UnreadableFile:
        return None
    return file if file.language == "python" else None


def sibling(file: SourceFile, name: str) -> SourceFile | None:
    """The Python file `name` in the folder of `file`, or None."""
    path = os.path.join(os.path.dirname(file.path), name)
    return _read(path, path)


def name_of(tree: ast.Module, literal: ast.Constant) -> str:
    """What a literal is called: the variable, field, keyword, flag, parameter or argument that it sets."""
    chain = _ancestors(tree, literal)
    for child, parent in pairwise(chain):
        found = _name_from(parent, child)
        if found:
            return found
    return str(literal.value)


def _ancestors(tree: ast.Module, node: ast.AST) -> list[ast.AST]:
    """The node, its parent and so on up to the module."""
    parents = {id(child): parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    chain = [node]
    while id(chain[-1]) in parents:
        chain.append(parents[id(chain[-1])])
    return chain


def _name_from(parent: ast.AST, child: ast.AST) -> str:
    if isinstance(parent, ast.keyword) and parent.arg not in (None, "default"):
        return str(parent.arg)
    if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and parent.value is child:
        target = parent.targets[0] if isinstance(parent, ast.Assign) else parent.target
        return _last_name(target)
    if isinstance(parent, ast.Call):
        return _argument_name(parent, child)
    if isinstance(parent, ast.Dict):
        return _dict_key(parent, child)
    if isinstance(parent, ast.arguments):
        return next((constant.name for constant in defaults(parent) if constant.node is child), "")
    return ""


def _last_name(target: ast.AST) -> str:
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return target.id if isinstance(target, ast.Name) else ""


def _argument_name(call: ast.Call, child: ast.AST) -> str:
    callee = _last_name(call.func)
    if callee == "add_argument":
        return flag_name(call)
    if child not in call.args:
        return ""
    index = call.args.index(child)
    named = _POSITIONAL.get(callee, ())
    if index < len(named):
        return named[index]
    # min(x, 512) and int(x) pass on what they get; the name is further out.
    return "" if callee in ("int", "min", "max", "round", "field", "Field") else f"{callee} argument {index + 1}"


def _dict_key(node: ast.Dict, child: ast.AST) -> str:
    for key, value in zip(node.keys, node.values, strict=True):
        if value is child and isinstance(key, ast.Constant):
            return str(key.value)
    return ""


def flag_name(call: ast.Call) -> str:
    """The name argparse gives a flag: "--n-embd" is n_embd."""
    flags = [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
    longest = max(flags, key=len, default="")
    return longest.lstrip("-").replace("-", "_")


def defaults(arguments: ast.arguments) -> Iterator[Constant]:
    """The parameters of a function that have a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if default is not None:
            yield Constant(argument.arg, literal_value(default), default)


def literal_value(node: ast.expr | None) -> Any:
    """The value of a constant expression, arithmetic on numbers included; None where it is none."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _arithmetic(node)


def _arithmetic(node: ast.expr) -> int | float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _arithmetic(node.left), _arithmetic(node.right)
    if left is None or right is None:
        return None
    try:
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Pow) and abs(right) < 64 and abs(left) < 1 << 16:
            return left**right
    except ArithmeticError:
        pass
    return None


def constants(body: list[ast.stmt]) -> dict[str, Constant]:
    """Names assigned in a body, the last assignment of each; the value is None where it is no constant."""
    found: dict[str, Constant] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            pairs = [pair for target in statement.targets for pair in _unpacked(target, statement.value)]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            pairs = _unpacked(statement.target, statement.value)
        else:
            continue
        for name, value in pairs:
            found[name] = Constant(name, literal_value(value), value)
    return found


def _unpacked(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for part, item in zip(target.elts, value.elts, strict=True) for pair in _unpacked(part, item)]
    return []


def flags(tree: ast.Module) -> dict[str, Constant]:
    """The argparse flags of a file with their defaults, by name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) == "add_argument":
            default = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
            if default is not None:
                found[flag_name(node)] = Constant(flag_name(node), literal_value(default), default)
    return found


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """The classes at the top level of a file, by name."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def is_module_class(node: ast.ClassDef) -> bool:
    """Whether a class derives from nn.Module by name."""
    return any(ast.unparse(base).split(".")[-1] in ("Module", "LightningModule", "PreTrainedModel") for base in node.bases)


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass by its decorator."""
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def fields(node: ast.ClassDef) -> dict[str, Constant]:
    """A dataclass's fields with a constant default, by name."""
    found = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
            value = statement.value
            if isinstance(value, ast.Call):  # field(default=768)
                value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), value)
            found[statement.target.id] = Constant(statement.target.id, literal_value(value), value)
    return found


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A method of a class by name."""
    return next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == name), None)


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function, class or method by its last name, in order of position."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) == name]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def span_of(file: SourceFile, node: ast.expr | ast.stmt) -> Span:
    """The span of a node; of a class or function only the name's line."""
    span = file.span(node)
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return Span(
            span.path, span.line, span.column, span.line, span.column + len(file.positions.line(span.line).rstrip()) - span.column + 1
        )
    return span


def knob_of(file: SourceFile, constant: Constant, root: str) -> Knob | None:
    """The knob of a plain integer constant; its id is that which the import hook gives the literal."""
    node = constant.node
    if not (isinstance(node, ast.Constant) and type(node.value) is int):
        return None
    span = file.span(node)
    path = os.path.relpath(os.path.realpath(file.path), os.path.realpath(root))
    return Knob(identify(path, span.line, span.column), constant.name, node.value, span, role_of(constant.name))


def integers_of(found: Mapping[str, Constant]) -> dict[str, int]:
    """The integer values among constants."""
    return {name: constant.value for name, constant in found.items() if type(constant.value) is int}
