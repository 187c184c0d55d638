"""[tool.lintgpu] of pyproject.toml: discovery and plain data. The command line overrides it field by field."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lintgpu.finding import Severity
from lintgpu.source import SourceFile, UnreadableFile, read
from lintgpu.workload import Mode

DEFAULT_GPU = "H200"
DTYPES = ("bf16", "fp16", "tf32", "fp32")
COMPILE = ("none", "default", "reduce-overhead")


class SettingsError(Exception):
    """[tool.lintgpu] cannot be used; has the file and position."""

    def __init__(self, path: str, line: int, column: int, message: str) -> None:
        super().__init__(message)
        self.path, self.line, self.column, self.message = path, line, column, message


@dataclass(frozen=True)
class Settings:
    """What the project and the command line ask for."""

    root: str = "."
    """Folder of the pyproject.toml that was used, or the folder the search began in."""
    file: SourceFile | None = None
    """That pyproject.toml, for spans; None where there is none."""
    select: tuple[str, ...] = ("LG",)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpus: tuple[str, ...] = (DEFAULT_GPU,)
    gpus_given: bool = False
    fail_on: Severity = Severity.WARNING
    workload: Mapping[str, Any] = field(default_factory=dict)
    """Workload fields that are set here (batch, sequence, dtype, mode, compile, autocast, optimizer, ...)."""
    targets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """[tool.lintgpu.targets.NAME] tables: their presence is the owner's say-so to import the code they name."""
    model: str | None = None
    """--model pkg.mod:factory"""
    trust: bool = False
    python: str = sys.executable
    """Interpreter of the worker: the environment that holds torch."""
    static: bool = False
    """Do not trace; read the config's numbers only."""
    warm: bool = False
    """Borrow traces' processes from a server that stays (POSIX only)."""
    time_limit: float = 300.0
    """Seconds one trace may take."""
    memory_limit_gb: float = 16.0

    @property
    def interpreter(self) -> str:
        """`python` as an absolute path: a relative one is below `root`, a plain name is looked up; as it is where there is none."""
        if os.path.dirname(self.python):
            return os.path.abspath(os.path.join(self.root, self.python))
        return shutil.which(self.python) or self.python


def discover(path: str) -> Settings:
    """The settings that hold for `path`: those of the nearest pyproject.toml upwards with a [tool.lintgpu] table.

    Raises SettingsError where that file is broken or holds an unknown key or a bad value.
    """
    start = Path(path).resolve()
    folder = start if start.is_dir() else start.parent
    for candidate in (folder, *folder.parents):
        file = candidate / "pyproject.toml"
        # A cheap look first: most pyproject.toml files say nothing about lintgpu and need no parser.
        if file.is_file() and b"tool.lintgpu" in file.read_bytes():
            return load(str(file))
    return Settings(root=str(folder))


def load(path: str) -> Settings:
    """Read [tool.lintgpu] of the file at `path`. Raises SettingsError on a broken file, an unknown key or a bad value."""
    try:
        file = read(path, os.path.relpath(path))
        file.check()
    except UnreadableFile as error:
        raise SettingsError(error.path, error.line, error.column, error.message) from error
    root = str(Path(path).resolve().parent)
    node = file.root.get("tool.lintgpu")
    table = node.value if node is not None else {}
    settings = Settings(root=root, file=file)
    for key, value in table.items():
        reader = _READERS.get(key)
        try:
            if reader is None:
                raise ValueError(f"unknown key {key!r} in [tool.lintgpu]; known: {', '.join(sorted(_READERS))}")
            settings = replace(settings, **reader(value))
        except ValueError as error:
            place = file.root.get(f"tool.lintgpu.{key}")
            span = place.key_span or place.span if place is not None else None
            raise SettingsError(file.path, span.line if span else 1, span.column if span else 1, str(error)) from error
    return settings


def workload_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Check a table of workload fields. Raises ValueError that names the field and what it accepts."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = _WORKLOAD_ALIASES.get(key, key.replace("-", "_"))
        check = _WORKLOAD_FIELDS.get(name)
        if check is None:
            raise ValueError(f"unknown workload field {key!r}; known: {', '.join(sorted(_WORKLOAD_FIELDS))}")
        values[name] = check(key, value)
    return values


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, not {value!r}")
    return value


def _choice(*choices: str) -> Any:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return check


def _mode(name: str, value: Any) -> Mode:
    return Mode(_choice(*(mode.value for mode in Mode))(name, value))


def _compile(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "default" if value else "none"
    return str(_choice(*COMPILE)(name, value))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


_WORKLOAD_ALIASES = {"seq": "sequence", "tp": "tensor_parallel", "ep": "expert_parallel"}
_WORKLOAD_FIELDS: dict[str, Any] = {
    "mode": _mode,
    "batch": _positive,
    "sequence": _positive,
    "dtype": _choice(*DTYPES),
    "autocast": _flag,
    "compile": _compile,
    "optimizer": _choice("adamw-fused", "adamw-foreach", "sgd", "none"),
    "tensor_parallel": _positive,
    "expert_parallel": _positive,
}


def _strings(field_name: str, key: str) -> Any:
    def reader(value: Any) -> dict[str, Any]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{key} must be a string or a list of strings")
        return {field_name: tuple(items)}

    return reader


def _fail_on(value: Any) -> dict[str, Any]:
    return {"fail_on": Severity(_choice(*(s.value for s in Severity))("fail-on", value))}


def _gpus(value: Any) -> dict[str, Any]:
    gpus: dict[str, Any] = _strings("gpus", "gpu")(value)
    if not gpus["gpus"]:
        raise ValueError("gpu must name at least one GPU")
    return gpus | {"gpus_given": True}


def _targets(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(table, dict) for table in value.values()):
        raise ValueError("targets must be tables: [tool.lintgpu.targets.NAME]")
    return {"targets": value}


def _workload(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("workload must be a table: [tool.lintgpu.workload]")
    return {"workload": workload_values(value)}


def _number(field_name: str, key: str) -> Any:
    def reader(value: Any) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{key} must be a positive number")
        return {field_name: float(value)}

    return reader


def _warm(value: Any) -> dict[str, Any]:
    return {"warm": _flag("warm", value)}


def _python(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError("python must be the path of an interpreter")
    return {"python": value}


_READERS: dict[str, Any] = {
    "select": _strings("select", "select"),
    "ignore": _strings("ignore", "ignore"),
    "exclude": _strings("exclude", "exclude"),
    "gpu": _gpus,
    "fail-on": _fail_on,
    "workload": _workload,
    "targets": _targets,
    "python": _python,
    "warm": _warm,
    "time-limit": _number("time_limit", "time-limit"),
    "memory-limit-gb": _number("memory_limit_gb", "memory-limit-gb"),
}
