"""One output format a file: each module here with a NAME and a `render(report)` is one."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from lintgpu.report.base import Format, Report


def formats() -> dict[str, Format]:
    """The output formats by name. Adding a file adds a format."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {module.NAME: cast(Format, module) for module in modules if hasattr(module, "NAME") and hasattr(module, "render")}


__all__ = ["Report", "formats"]
