"""What a rule is, and where the rules are found: every module of lintgpu.rules that defines a Rule."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from lintgpu.finding import Finding, Related, Severity, Span
from lintgpu.gpu.costs import StepCost
from lintgpu.measurement import Check
from lintgpu.target.base import Target
from lintgpu.trace.records import Op, Trace, TraceFailure
from lintgpu.workload import Workload

if TYPE_CHECKING:
    from lintgpu.gpu.profiles import Profile
    from lintgpu.whatif import WhatIf


@dataclass(frozen=True)
class Context:
    """What a rule may look at: one traced target under one workload on one GPU."""

    target: Target
    workload: Workload
    trace: Trace
    profile: Profile
    step: StepCost
    what_if: WhatIf


@dataclass(frozen=True)
class BrokenFile:
    """A file that could not be read, and where."""

    path: str
    line: int
    column: int
    message: str


@dataclass(frozen=True)
class IgnoreComment:
    """An ignore comment of a file whose models were all traced, and what it is good for."""

    span: Span
    line: int
    """The line it speaks of; 0 for the whole file."""
    codes: tuple[str, ...]
    """What it names, in upper case; empty for everything."""
    unused: tuple[str, ...]
    """Those of `codes` that were looked for and hide nothing; one empty string for a comment without codes that hides nothing."""
    unknown: tuple[str, ...]
    """Those of `codes` that no rule's code starts with."""


@dataclass(frozen=True)
class Case:
    """A small project a rule is tested on. `expect` has (knob or None, suggestions allowed) pairs; empty = must stay silent."""

    name: str
    files: Mapping[str, str]
    options: tuple[str, ...] = ()
    """Command-line options of `lintgpu check`."""
    expect: tuple[Expected, ...] = ()


@dataclass(frozen=True)
class Expected:
    """One finding a case must give."""

    path: str
    line: int
    column: int
    knob: str | None = None
    suggestions: tuple[int | str, ...] = ()
    severity: Severity | None = None
    saving: tuple[float, float] | None = None
    """Lowest and highest allowed saving_gpu_share."""


class Rule:
    """A check. Subclasses live one a file in rules/; `code` is LG and three digits, `name` in kebab-case.

    The module's docstring is the rule's documentation in markdown, in the sections "What it does", "Why is this bad?",
    "Example", "When it stays silent" and "References".
    """

    code: str = ""
    name: str = ""
    summary: str = ""
    good: tuple[Case, ...] = ()
    bad: tuple[Case, ...] = ()

    def check(self, context: Context) -> Iterator[Finding]:
        """Findings about a target that was traced (or estimated from its config)."""
        return iter(())

    def check_failure(self, target: Target, workload: Workload, failure: TraceFailure) -> Iterator[Finding]:
        """Findings about a target that could not be traced."""
        return iter(())

    def check_broken(self, file: BrokenFile) -> Iterator[Finding]:
        """Findings about a file that could not be read."""
        return iter(())

    def check_ignore(self, comment: IgnoreComment) -> Iterator[Finding]:
        """Findings about an ignore comment."""
        return iter(())

    def check_numbers(self, target: Target, finding: Finding | None, check: Check) -> Iterator[Finding]:
        """Findings about numbers that were compared on a GPU; `finding` is the one whose change was carried out, if it was one's."""
        return iter(())

    @property
    def docs(self) -> str:
        """The rule's documentation, markdown."""
        return inspect.cleandoc(inspect.getmodule(type(self)).__doc__ or "")


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code. Raises ValueError where two rules share a code or one has none."""
    package = importlib.import_module("lintgpu.rules")
    rules: dict[str, Rule] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"lintgpu.rules.{info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Rule) and kind.__module__ == module.__name__:
                if not kind.code or kind.code in rules:
                    raise ValueError(f"{module.__name__}: rule code {kind.code!r} is missing or taken")
                rules[kind.code] = kind()
    return tuple(rules[code] for code in sorted(rules))


def find_rule(code_or_name: str) -> Rule | None:
    """The rule with that code or name (any case), or None."""
    wanted = code_or_name.strip().lower()
    return next((rule for rule in all_rules() if wanted in (rule.code.lower(), rule.name)), None)


MOST_SITES = 6


def sites(ops: Iterable[Op]) -> list[Related]:
    """Where the modules of `ops` are constructed and called, each place once, the first few."""
    found: dict[Span, str] = {}
    for op in ops:
        name = op.module or op.name
        for site, what in ((op.constructor_site, f"{name} is constructed here"), (op.call_site, f"{name} runs here")):
            if site is not None and site.line > 0:
                end = (site.end_line or site.line, site.end_column or max(site.column, 1) + 1)
                found.setdefault(Span(_shown(site.path), site.line, max(site.column, 1), *end), what)
    return [Related(span, what) for span, what in found.items()][:MOST_SITES]


def _shown(path: str) -> str:
    """`path` relative to the working directory where it lies below it, as the paths of all other spans."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


@dataclass(frozen=True)
class Selection:
    """Which codes are wanted: the longest matching prefix of select and ignore decides, ignore wins a tie."""

    select: tuple[str, ...] = ("LG",)
    ignore: tuple[str, ...] = ()

    def wants(self, code: str) -> bool:
        """Whether findings of `code` are reported."""
        chosen = max((len(p) for p in self.select if code.startswith(p) or p == "ALL"), default=-1)
        dropped = max((len(p) for p in self.ignore if code.startswith(p) or p == "ALL"), default=-1)
        return chosen > dropped
