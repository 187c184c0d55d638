"""Models of the linted project that its owner names: [tool.lintgpu.targets.NAME] in pyproject.toml, or --model pkg.mod:factory."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lintgpu.finding import Span
from lintgpu.target import python_source
from lintgpu.target.base import Built, Family, Knob, Target, WorkloadHint
from lintgpu.target.roles import role_of

if TYPE_CHECKING:
    from lintgpu.settings import Settings
    from lintgpu.source import Node, SourceFile
    from lintgpu.workload import Workload

_KEYS = frozenset({"model", "config", "kwargs", "example_inputs", "loss"})


class PythonModule(Family):
    """A class or factory of the project's own code. Naming it is its owner's say-so to import that code."""

    name = "python"
    order = 10

    def find(self, file: SourceFile, settings: Settings) -> Iterator[Target]:
        """None: these targets are declared, not found."""
        return iter(())

    def declared(self, settings: Settings) -> Iterator[Target]:
        """The targets of the settings. Raises SettingsError where a table is wrong or its config cannot be read."""
        for name in settings.targets:
            yield _of_table(name, settings)
        if settings.model:
            yield _of_name(settings.model, settings)

    def build(self, spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
        """Import the module and call the class or factory."""
        from lintgpu.target import python_build

        return python_build.build(spec, workload, changes)

    def resolve(self, target: Target, knob_id: str) -> Knob | None:
        """Also the literals of the project's modules."""
        return super().resolve(target, knob_id) or python_source.literal_knob(target.spec["root"], knob_id)


def _of_name(model: str, settings: Settings) -> Target:
    module, _, attribute = model.partition(":")
    if not module or not attribute:
        raise _error(settings, None, f"--model must be pkg.mod:Class or pkg.mod:factory, not {model!r}")
    spec = {"root": os.path.abspath(settings.root), "module": module, "attribute": attribute}
    span, files = _definition(settings.root, module, attribute)
    return Target(model, PythonModule.name, span or Span(module, 0, 0, 0, 0), spec, runs_project_code=True, files=files)


def _of_table(name: str, settings: Settings) -> Target:
    table = settings.targets[name]
    node = settings.file.root.get(f"tool.lintgpu.targets.{name}") if settings.file else None
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise _error(settings, node, f"unknown key {unknown[0]!r} in target {name!r}; known: {', '.join(sorted(_KEYS))}")
    model = table.get("model")
    if not isinstance(model, str) or ":" not in model:
        raise _error(settings, node, f'target {name!r} needs model = "pkg.mod:Class"')
    module, _, attribute = model.partition(":")
    spec: dict[str, Any] = {"root": os.path.abspath(settings.root), "module": module, "attribute": attribute, "origins": {}}
    knobs: list[Knob] = []
    files: list[str] = []
    if isinstance(table.get("kwargs"), Mapping):
        spec["kwargs"] = table["kwargs"]
        knobs += _knobs_of(node.children.get("kwargs") if node else None, "kwargs", spec["origins"])
    spec["config"], config_node, config_path = _config(table.get("config"), node, settings)
    if config_node is not None:
        knobs += _knobs_of(config_node, "config", spec["origins"])
    if config_path:
        files.append(config_path)
    for key in ("example_inputs", "loss"):
        if key in table:
            spec[key] = table[key]
    span, found = _definition(settings.root, module, attribute)
    model_node = node.children.get("model") if node else None
    place = model_node.span if model_node is not None else span or Span("pyproject.toml", 1, 1, 1, 1)
    declared_in = (settings.file.path,) if settings.file else ()
    return Target(
        name,
        PythonModule.name,
        place,
        spec,
        tuple(knobs),
        tuple(_hints(knobs)),
        runs_project_code=True,
        files=(*declared_in, *files, *found),
    )


def _config(value: Any, node: Node | None, settings: Settings) -> tuple[dict[str, Any] | None, Node | None, str]:
    """(config part of the spec, the node its values are in, the file they were read from)."""
    from lintgpu.source import UnreadableFile, read

    if value is None:
        return None, None, ""
    place = node.children.get("config") if node else None
    if isinstance(value, Mapping):
        return {"values": dict(value)}, place, ""
    if not isinstance(value, str):
        raise _error(settings, place, 'config must be a file, "pkg.mod:Class" or a table')
    if ":" in value and not value.endswith((".json", ".yaml", ".yml", ".toml")):
        module, _, attribute = value.partition(":")
        return {"module": module, "attribute": attribute, "values": {}}, None, ""
    path = os.path.join(settings.root, value)
    try:
        file = read(path, python_source.display_path(path))
        root = file.root
    except UnreadableFile as error:
        raise _error(settings, place, f"config {value}: {error.message}") from error
    if not isinstance(root.value, dict):
        raise _error(settings, place, f"config {value} holds no keys and values")
    return {"values": root.value}, root, path


def _knobs_of(node: Node | None, prefix: str, origins: dict[str, str]) -> Iterator[Knob]:
    for path, child in node.walk() if node is not None else ():
        if isinstance(child.value, int) and not isinstance(child.value, bool) and "\\" not in path:
            knob_id = path if prefix == "config" else f"{prefix}.{path}"
            if not any(part.isdecimal() for part in path.split(".")):
                origins[f"{prefix}.{path}"] = knob_id
                yield Knob(knob_id, path.rsplit(".", 1)[-1], child.value, child.span, role_of(path))


def _hints(knobs: list[Knob]) -> Iterator[WorkloadHint]:
    for knob in knobs:
        if knob.role == "positions":
            yield WorkloadHint("max_sequence", knob.value, knob.span)


def _definition(root: str, module: str, attribute: str) -> tuple[Span | None, tuple[str, ...]]:
    """Where a class or function of a module is defined and its file; (None, ()) where that cannot be seen without running code."""
    from lintgpu.source import UnreadableFile, read

    parts = module.split(".")
    for base in (root, os.path.join(root, "src")):
        for tail in ((*parts[:-1], f"{parts[-1]}.py"), (*parts, "__init__.py")):
            path = os.path.join(base, *tail)
            if not os.path.isfile(path):
                continue
            try:
                file = read(path, python_source.display_path(path))
                body = file.tree.body
            except UnreadableFile:
                return None, (path,)
            for node in body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == attribute:
                    return python_source.span_of(file, node), (path,)
            return Span(file.path, 1, 1, 1, 1), (path,)
    return None, ()


def _error(settings: Settings, node: Node | None, message: str) -> Exception:
    from lintgpu.settings import SettingsError

    path = settings.file.path if settings.file else "pyproject.toml"
    span = (node.key_span or node.span) if node is not None else None
    return SettingsError(path, span.line if span else 1, span.column if span else 1, message)
