"""Numbers that carry the expression they came from.

A knob's value enters a build as `TracedInt(768, "{n_embd}")`. Arithmetic on it gives traced numbers again, so that a tensor
dim such as 3072 still says `(4*{n_embd})`. Expressions are Python arithmetic with each knob id in braces.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_KNOB = re.compile(r"\{([^{}]*)\}")
_MAX_LENGTH = 400
"""Longer expressions (sums built in loops) are dropped: nobody reads them, and they would grow without bound."""


_plain = False


@contextmanager
def plain_numbers() -> Iterator[None]:
    """While it is open, traced numbers come out as plain ones: a model that is run, and not only traced, should not pay for them."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


class TracedInt(int):
    """An int with the expression it came from; equal to, hashed, printed and serialised like the plain int."""

    expression: str

    def __new__(cls, value: int, expression: str) -> TracedInt:
        """The int `value` that came from `expression`, a knob id in braces or arithmetic over several."""
        if _plain:
            return int(value)  # type: ignore[return-value]
        self = int.__new__(cls, value)
        self.expression = expression
        return self

    def __copy__(self) -> TracedInt:
        """The number itself: it is immutable."""
        return self

    def __deepcopy__(self, memo: Any) -> TracedInt:
        """The number itself: it is immutable."""
        return self

    def __reduce__(self) -> tuple[type[TracedInt], tuple[int, str]]:
        """Pickles with its expression."""
        return TracedInt, (int(self), self.expression)

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]
        """The arguments that rebuild it."""
        return int(self), self.expression


class TracedFloat(float):
    """A float with the expression it came from, such as 768 / 12 on its way to a dim."""

    expression: str

    def __new__(cls, value: float, expression: str) -> TracedFloat:
        """The float `value` that came from `expression`."""
        if _plain:
            return float(value)  # type: ignore[return-value]
        self = float.__new__(cls, value)
        self.expression = expression
        return self

    def __copy__(self) -> TracedFloat:
        """The number itself: it is immutable."""
        return self

    def __deepcopy__(self, memo: Any) -> TracedFloat:
        """The number itself: it is immutable."""
        return self

    def __reduce__(self) -> tuple[type[TracedFloat], tuple[float, str]]:
        """Pickles with its expression."""
        return TracedFloat, (float(self), self.expression)


def expression(value: object) -> str | None:
    """The expression that `value` came from, or None for a plain number."""
    return value.expression if isinstance(value, (TracedInt, TracedFloat)) else None


def knobs(expr: str) -> tuple[str, ...]:
    """The knob ids in an expression, each once, in order of appearance."""
    return tuple(dict.fromkeys(_KNOB.findall(expr)))


def evaluate(expr: str, values: Mapping[str, int]) -> int:
    """The value of an expression for other knob values.

    Raises KeyError for a knob that `values` lacks, ValueError for text that is not an expression of this module, and
    ZeroDivisionError or OverflowError where the arithmetic does.
    """
    names: dict[str, str] = {}
    text = _KNOB.sub(lambda match: names.setdefault(match.group(1), f"_knob{len(names)}"), expr)
    bound: dict[str, float] = {alias: values[knob] for knob, alias in names.items()}
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not an origin expression: {expr}") from error
    return int(_value(tree.body, bound))


_inexact: list[str] | None = None


@contextmanager
def collect_inexact() -> Iterator[list[str]]:
    """Collect the divisions of one knob-carrying int by another that leave a remainder, such as hidden // heads.

    Divisions by a constant are left out: `(x + 7) // 8 * 8` rounds up on purpose.
    """
    global _inexact
    before, _inexact = _inexact, []
    try:
        yield _inexact
    finally:
        _inexact = before


class _IntType(type):
    """Makes `TracingInt` stand in for `int` where a module's own code calls it or asks isinstance of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)

    def __call__(cls, *args: Any, **kwargs: Any) -> int:
        value = builtins.int(*args, **kwargs)
        source = expression(args[0]) if len(args) == 1 else None
        if source is None:
            return value
        return TracedInt(value, source if isinstance(args[0], TracedInt) else f"int({source})")


class TracingInt(metaclass=_IntType):
    """`int` that keeps the expression: int(x) always returns a plain int, so a modeling module's name `int` is bound to this
    while it builds."""

    from_bytes = builtins.int.from_bytes


def _traced(value: Any, text: str) -> Any:
    if len(text) > _MAX_LENGTH or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return TracedInt(value, text)
    if isinstance(value, float):
        return TracedFloat(value, text)
    return value


def _text(value: object) -> str:
    return expression(value) or repr(value)


_BINARY: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "floordiv": ("//", operator.floordiv),
    "truediv": ("/", operator.truediv),
    "mod": ("%", operator.mod),
    "pow": ("**", operator.pow),
    "lshift": ("<<", operator.lshift),
    "rshift": (">>", operator.rshift),
    "and": ("&", operator.and_),
    "or": ("|", operator.or_),
    "xor": ("^", operator.xor),
}
_UNARY: dict[str, str] = {"neg": "(-{})", "invert": "(~{})", "abs": "abs({})", "ceil": "ceil({})", "floor": "floor({})", "trunc": "int({})"}


def _note_inexact(left: object, right: object) -> None:
    if _inexact is None or not isinstance(left, TracedInt) or not isinstance(right, TracedInt) or not right:
        return
    text = f"({left.expression}//{right.expression})"
    if int.__mod__(left, right) and text not in _inexact:
        _inexact.append(text)


def _unsupported(left: Any, right: Any) -> Any:
    return NotImplemented


def _binary(base: type, name: str, symbol: str, reflected: bool) -> Callable[[Any, Any], Any]:
    plain = getattr(base, f"__{'r' if reflected else ''}{name}__")
    divides = name in ("floordiv", "mod")

    def method(self: Any, other: Any) -> Any:
        result = plain(self, other)
        if result is NotImplemented and base is int and isinstance(other, float):
            # int leaves arithmetic with floats to float, which would answer with a plain one.
            result = getattr(float, f"__{'r' if reflected else ''}{name}__", _unsupported)(float(self), other)
        if result is NotImplemented:
            return result
        left, right = (other, self) if reflected else (self, other)
        text = f"({_text(left)}{symbol}{_text(right)})"
        if divides:
            _note_inexact(left, right)
        return _traced(result, text)

    return method


def _unary(base: type, name: str, pattern: str) -> Callable[[Any], Any]:
    plain = getattr(base, f"__{name}__")
    # An int's own ceil, floor and trunc change nothing, so the expression stays readable.
    same = base is int and name in ("ceil", "floor", "trunc")

    def method(self: Any) -> Any:
        return self if same else _traced(plain(self), pattern.format(self.expression))

    return method


def _divmod(self: Any, other: Any) -> Any:
    return (self // other, self % other) if isinstance(other, (int, float)) else NotImplemented


def _rdivmod(self: Any, other: Any) -> Any:
    return (other // self, other % self) if isinstance(other, (int, float)) else NotImplemented


def _round(self: Any, digits: int | None = None) -> Any:
    if isinstance(self, int) and digits is None:
        return self
    base = int if isinstance(self, int) else float
    if digits is None:
        return _traced(base.__round__(self), f"round({self.expression})")
    return _traced(base.__round__(self, digits), f"round({self.expression},{digits})")


def _install(cls: type, base: type) -> None:
    for name, (symbol, _) in _BINARY.items():
        if hasattr(base, f"__{name}__"):
            setattr(cls, f"__{name}__", _binary(base, name, symbol, reflected=False))
            setattr(cls, f"__r{name}__", _binary(base, name, symbol, reflected=True))
    for name, pattern in _UNARY.items():
        if hasattr(base, f"__{name}__"):
            setattr(cls, f"__{name}__", _unary(base, name, pattern))
    for name, method in (("divmod", _divmod), ("rdivmod", _rdivmod), ("round", _round), ("pos", lambda self: self)):
        setattr(cls, f"__{name}__", method)


_install(TracedInt, int)
_install(TracedFloat, float)

_MAX_BITS = 1 << 12
"""No dim is longer; an expression asked for odd knob values must not fill the memory."""


def _shift(value: Any, by: Any) -> Any:
    if isinstance(by, int) and by > _MAX_BITS:
        raise OverflowError(f"shift by {by} bits")
    return value << by


def _power(value: Any, exponent: Any) -> Any:
    if isinstance(value, int) and isinstance(exponent, int) and value.bit_length() * exponent > _MAX_BITS:
        raise OverflowError(f"a power of {value.bit_length() * exponent} bits")
    return value**exponent


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.LShift: _shift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "round": round,
    "ceil": math.ceil,
    "floor": math.floor,
    "abs": abs,
    "min": min,
    "max": max,
}


def _value(node: ast.expr, names: Mapping[str, float]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
        operand = _value(node.operand, names)
        return -operand if isinstance(node.op, ast.USub) else ~operand
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _FUNCTIONS[node.func.id](*(_value(argument, names) for argument in node.args))
    raise ValueError(f"not part of an origin expression: {ast.unparse(node)}")
