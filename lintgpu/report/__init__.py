"""One output format a file: each module here with a NAME and a `render(report)` is one."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import cast

from lintgpu.report.base import Format, Report


def formats() -> dict[str, Format]:
    """The output formats by name. Adding a file adds a format."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {module.NAME: cast(Format, module) for module in modules if hasattr(module, "NAME") and hasattr(module, "render")}


def find(name: str) -> Format | None:
    """The output format called `name`, or None. The file of that name is looked at first, so that a run imports one format."""
    for module_name in (name, f"{name}_"):
        if importlib.util.find_spec(f"{__name__}.{module_name}") is not None:
            module = importlib.import_module(f"{__name__}.{module_name}")
            if getattr(module, "NAME", None) == name and hasattr(module, "render"):
                return cast(Format, module)
    return formats().get(name)


__all__ = ["Report", "find", "formats"]
