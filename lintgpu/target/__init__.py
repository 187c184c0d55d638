"""Config families: one file each in this folder, found by looking; there is no list to edit."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import lru_cache
from typing import Any

from lintgpu.source.file import PYTHON, SourceFile
from lintgpu.target.base import Family

LARGE = 256 * 1024
"""Characters of a data file from which it has to show what it is: hardly any model config is as large."""


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """One instance of every Family in this folder, in the order in which a file is offered to them."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.endswith("_build"):  # The half of a family that runs in the worker; it imports the tracer.
            importlib.import_module(f"{__name__}.{module.name}")
    return tuple(sorted((kind() for kind in _below(Family)), key=lambda family: (family.order, family.name)))


def may_hold_target(file: SourceFile) -> bool:
    """Whether a file is worth parsing: a large tokenizer or data set in JSON or YAML is not, and need not even be valid."""
    if file.language == PYTHON or len(file.text) <= LARGE:
        return True
    return any(re.search(rf"{re.escape(word)}\s*:", file.text) for family in families() for word in family.words)


def family_named(name: str) -> Family:
    """The family called `name`. Raises KeyError where there is none."""
    return {family.name: family for family in families()}[name]


def _below(kind: Any) -> list[Any]:
    return [found for child in kind.__subclasses__() for found in (*([] if inspect.isabstract(child) else [child]), *_below(child))]
