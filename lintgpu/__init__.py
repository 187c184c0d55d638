"""lintgpu: a linter for the GPU speed of PyTorch models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__version__ = "0.1.0"


def _load_rules_of_checkout() -> None:
    """Make the top-level rules/ folder importable as lintgpu.rules in an uninstalled checkout.

    Wheels and editable installs map it themselves; this does nothing there.
    """
    package = Path(__file__).resolve().parent
    rules = package.parent / "rules"
    if (package / "rules").is_dir() or not (rules / "__init__.py").is_file() or not (package.parent / "pyproject.toml").is_file():
        return
    spec = importlib.util.spec_from_file_location("lintgpu.rules", rules / "__init__.py", submodule_search_locations=[str(rules)])
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["lintgpu.rules"] = module
    spec.loader.exec_module(module)
    setattr(sys.modules[__name__], "rules", module)  # noqa: B010 - what an import statement would do


_load_rules_of_checkout()
