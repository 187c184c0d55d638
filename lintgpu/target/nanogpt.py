"""Models written in plain Python: a file with a config dataclass and the nn.Module that takes it, alone or beside a training script.

Three kinds of file are understood: the model's file, an entry that trains it (its constants, flags and constructor keywords
override the dataclass), and a file of nothing but overrides beside a configurator.py, as nanoGPT keeps them in config/. Nothing
of it runs unless its owner says so; without that the numbers are read from the syntax tree.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lintgpu.target import python_source as source
from lintgpu.target.base import Built, CompileUse, Family, Knob, Target, WorkloadHint
from lintgpu.target.estimate import estimate, numbers_of, shape_of
from lintgpu.target.python_source import Constant
from lintgpu.target.roles import role_of
from lintgpu.trace.origin import TracedInt

if TYPE_CHECKING:
    from lintgpu.settings import Settings
    from lintgpu.source import SourceFile
    from lintgpu.trace.records import Trace
    from lintgpu.workload import Workload

_CONFIG_PARAMETER = re.compile(r"(\w*_)?(config|cfg|conf|args|params|hparams|hps)")
_BATCH = ("batch_size", "device_batch_size", "micro_batch_size", "per_device_train_batch_size", "train_batch_size", "B")
_SEQUENCE = ("block_size", "sequence_length", "seq_length", "seq_len", "max_seq_len", "context_length", "T")
_COMPILE = ("compile", "torch_compile", "use_compile", "compile_model", "torchcompile")
_DTYPE = ("dtype", "ptdtype", "precision")
_DTYPE_NAMES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}
_PRECISION_WORDS = re.compile(r"autocast|bfloat16|float16|\.half\(|\bamp\b|bf16|fp16|Accelerator|Fabric|Trainer")
_TF32 = re.compile(r"allow_tf32\s*=\s*True|set_float32_matmul_precision\(\s*['\"](high|medium)")


@dataclass(frozen=True)
class _Model:
    """A model class with the config class or the keyword defaults that size it."""

    file: SourceFile
    kind: ast.ClassDef
    config: ast.ClassDef | None
    values: Mapping[str, Constant]


@dataclass(frozen=True)
class _Setup:
    """A model, the file that sets it up, and what that file and the files over it say."""

    model: _Model
    entry: SourceFile
    overrides: Mapping[str, tuple[SourceFile, Constant]] = field(default_factory=dict)
    """Model values set outside the model's own defaults."""
    settings: Mapping[str, tuple[SourceFile, Constant]] = field(default_factory=dict)
    """Every named constant of the entry and the files over it."""
    notes: tuple[str, ...] = ()
    trained: bool = False
    hidden_vocabulary: bool = False
    """The vocabulary comes from data or from a checkpoint: no file holds a number to change."""


class PlainPython(Family):
    """A config dataclass and an nn.Module in one file or folder."""

    name = "nanogpt"
    order = 60

    def find(self, file: SourceFile, settings: Settings) -> Iterator[Target]:
        """At most one target: the model that the file defines, trains or overrides."""
        if file.language != "python":
            return
        setup = _setup(file)
        if setup is None:
            return
        target = _target(file, setup, settings.root)
        if settings.trust or shape_of(numbers_of(_integers(setup)), _traits(setup)) is not None:
            yield target

    def build(self, spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
        """Take the classes out of the file without running its other statements, and build the model."""
        from lintgpu.target import python_build

        return python_build.build(spec, workload, changes)

    def resolve(self, target: Target, knob_id: str) -> Knob | None:
        """Also the literals of the model's own code."""
        return super().resolve(target, knob_id) or source.literal_knob(target.spec["root"], knob_id)

    def estimate(self, target: Target, workload: Workload, changes: Mapping[str, int]) -> Trace | None:
        """A transformer of the numbers that the files state."""
        numbers = dict(target.spec["numbers"])
        for name, knob in target.spec["names"].items():
            numbers[name] = TracedInt(changes.get(knob, numbers[name]), f"{{{knob}}}")
        shape = shape_of(numbers_of(numbers), target.spec["traits"])
        return estimate(shape, workload, target.notes) if shape is not None else None


def _setup(file: SourceFile) -> _Setup | None:
    if "nn.Module" in file.text or "(Module)" in file.text:
        own = _model_of(file)
        if own is not None:
            entry = file if _training_loop(file.tree) is not None else _entry_beside(file) or file
            return _with_entry(own, entry)
    if _training_loop(file.tree) is not None or "configurator.py" in file.text:
        model = _imported_model(file)
        return _with_entry(model, file) if model is not None else None
    return _overriding(file)


def _model_of(file: SourceFile) -> _Model | None:
    found = source.classes(file.tree)
    modules = {name: node for name, node in found.items() if source.is_module_class(node)}
    parts = {
        call.func.id
        for node in modules.values()
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id != node.name
    }
    configs = {name: node for name, node in found.items() if source.is_dataclass(node)}
    models = [_sized(file, node, configs) for name, node in modules.items() if name not in parts and source.method(node, "forward")]
    whole = [model for model in models if model is not None]
    return max(whole, key=lambda model: (model.config is not None, model.kind.lineno), default=None)


def _sized(file: SourceFile, node: ast.ClassDef, configs: Mapping[str, ast.ClassDef]) -> _Model | None:
    init = source.method(node, "__init__")
    if init is None:
        return None
    required = init.args.args[1 : len(init.args.args) - len(init.args.defaults)]
    if not required and not any(default is None for default in init.args.kw_defaults):
        return _Model(file, node, None, {constant.name: constant for constant in source.defaults(init.args)})
    if len(required) != 1:
        return None
    annotation = ast.unparse(required[0].annotation).strip("'\"").split(".")[-1] if required[0].annotation else ""
    config = configs.get(annotation)
    if config is None and len(configs) == 1 and _CONFIG_PARAMETER.fullmatch(required[0].arg):
        config = next(iter(configs.values()))
    return _Model(file, node, config, source.fields(config)) if config is not None else None


def _imported_model(file: SourceFile) -> _Model | None:
    """The model of a file beside this one: one it imports from, else model.py."""
    names = [node.module.split(".")[-1] for node in ast.walk(file.tree) if isinstance(node, ast.ImportFrom) and node.module]
    for name in dict.fromkeys([*names, "model"]):
        beside = source.sibling(file, f"{name}.py")
        if beside is not None and "Module" in beside.text:
            model = _model_of(beside)
            if model is not None:
                return model
    return None


def _entry_beside(file: SourceFile) -> SourceFile | None:
    """A training script in the same folder that imports from `file`."""
    stem = os.path.splitext(os.path.basename(file.path))[0]
    folder = os.path.dirname(file.path) or "."
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r"(pre)?train\w*\.py|main\.py|run\w*\.py", name):
            beside = source.sibling(file, name)
            if beside is not None and re.search(rf"\bfrom {re.escape(stem)} import\b", beside.text) and _training_loop(beside.tree):
                return beside
    return None


def _overriding(file: SourceFile) -> _Setup | None:
    """A file of assignments only, over the train.py beside a configurator.py in its folder or one above."""
    if not file.tree.body or not all(
        isinstance(node, (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)) or _is_docstring(node) for node in file.tree.body
    ):
        return None
    folder = os.path.dirname(os.path.abspath(file.path))
    for place in (folder, os.path.dirname(folder)):
        if os.path.isfile(os.path.join(place, "configurator.py")):
            entry = source.sibling(replace(file, path=os.path.join(source.display_path(place), "x.py")), "train.py")
            model = _imported_model(entry) if entry is not None else None
            return _with_entry(model, entry, file) if entry is not None and model is not None else None
    return None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _with_entry(model: _Model, entry: SourceFile, over: SourceFile | None = None) -> _Setup:
    named = {name: (entry, constant) for name, constant in {**source.flags(entry.tree), **source.constants(entry.tree.body)}.items()}
    if over is not None:
        named |= {name: (over, constant) for name, constant in source.constants(over.tree.body).items()}
    same_file = entry.path == model.file.path
    overrides = {
        name: placed
        for name, placed in named.items()
        if name in model.values and placed[1].value is not None and not (same_file and over is None)
    }
    overrides |= {
        name: (entry, constant)
        for name, constant in _given(_script(entry.tree), model).items()
        if name in model.values and name not in overrides
    }
    setup = _Setup(model, entry, overrides, named)
    return _from_checkpoint(_from_data(setup))


def _script(tree: ast.Module) -> ast.Module:
    """A file without its modules: how a model makes itself from published weights is no setup of the script."""
    return ast.Module([node for node in tree.body if not (isinstance(node, ast.ClassDef) and source.is_module_class(node))], [])


def _given(tree: ast.Module, model: _Model) -> dict[str, Constant]:
    """Values that an entry hands to the config or model class: keywords of the first call, and keys set in a dict of arguments."""
    found: dict[str, Constant] = {}
    for name in (model.config.name if model.config else model.kind.name, "dict"):
        for call in source.calls(tree, name):
            for keyword in call.keywords:
                if keyword.arg and keyword.arg not in found and source.literal_value(keyword.value) is not None:
                    found[keyword.arg] = Constant(keyword.arg, source.literal_value(keyword.value), keyword.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and isinstance(node.targets[0].slice, ast.Constant):
            key, value = str(node.targets[0].slice.value), node.value
            if isinstance(value, ast.IfExp):  # from the data where it says, else this
                value = value.orelse if source.literal_value(value.orelse) is not None else value.body
            if source.literal_value(value) is not None:
                found.setdefault(key, Constant(key, source.literal_value(value), value))
    return found


def _from_data(setup: _Setup) -> _Setup:
    """nanoGPT reads the vocabulary of a data set from its meta.pkl, where there is one."""
    dataset = setup.settings.get("dataset")
    if "meta.pkl" not in setup.entry.text or dataset is None or not isinstance(dataset[1].value, str):
        return setup
    path = os.path.join(os.path.dirname(setup.entry.path), "data", dataset[1].value, "meta.pkl")
    if not os.path.isfile(path):
        return setup
    return replace(
        setup,
        hidden_vocabulary=True,
        notes=(*setup.notes, f"the vocabulary comes from {path}, which is data: the default was judged instead"),
    )


def _from_checkpoint(setup: _Setup) -> _Setup:
    """A setup that starts from published weights takes its numbers from the table that the model's file keeps for them."""
    start = setup.settings.get("init_from")
    if start is None or not isinstance(start[1].value, str) or start[1].value in ("scratch", "resume"):
        return setup
    forced: dict[str, tuple[SourceFile, Constant]] = {}
    for node in ast.walk(setup.model.file.tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == start[1].value and isinstance(value, ast.Call):
                    for keyword in value.keywords:
                        constant = Constant(keyword.arg or "", source.literal_value(keyword.value), keyword.value)
                        forced[constant.name] = (setup.model.file, constant)
    if not forced:
        return setup
    given = _given(setup.model.file.tree, setup.model)
    forced |= {name: (setup.model.file, given[name]) for name in ("vocab_size", "block_size") if name in given and name not in forced}
    note = f"init_from = {start[1].value!r}: sizes and vocabulary are those of the published weights"
    return replace(setup, overrides={**setup.overrides, **forced}, trained=True, hidden_vocabulary=True, notes=(*setup.notes, note))


def _values(setup: _Setup) -> dict[str, tuple[SourceFile, Constant]]:
    return {name: (setup.model.file, constant) for name, constant in setup.model.values.items()} | dict(setup.overrides)


def _integers(setup: _Setup) -> dict[str, int]:
    return source.integers_of({name: constant for name, (_, constant) in _values(setup).items()})


def _traits(setup: _Setup) -> dict[str, Any]:
    """What shape_of wants to know beside the numbers, guessed from the words of the source."""
    text = setup.model.file.text
    gated = bool(re.search(r"silu|swiglu|\bw3\b|gate_proj", text, re.IGNORECASE))
    tied = bool(re.search(r"\.weight = self\.\w+(\.\w+)*\.weight|tie_weights", text))
    return {"hidden_act": "silu" if gated else "gelu", "tie_word_embeddings": tied, "n_embd": "n_embd" in text}


def _target(file: SourceFile, setup: _Setup, root: str) -> Target:
    root = os.path.abspath(root)
    inside = os.path.realpath(setup.model.file.path).startswith(os.path.realpath(root) + os.sep)
    root = root if inside else os.path.dirname(os.path.abspath(setup.model.file.path))
    values = _values(setup)
    knobs = {}
    for name, (holder, constant) in values.items():
        hidden = setup.hidden_vocabulary and role_of(name) == "vocabulary"
        knob = source.knob_of(holder, constant, root) if not hidden else None
        if knob is not None:
            knobs[name] = knob
    overrides = {name: constant.value for name, (_, constant) in setup.overrides.items() if constant.value is not None}
    prefix = "config" if setup.model.config is not None else "kwargs"
    config = {"attribute": setup.model.config.name, "values": overrides} if setup.model.config is not None else None
    spec = {
        "root": root,
        "extract": os.path.abspath(setup.model.file.path),
        "attribute": setup.model.kind.name,
        "config": config,
        "kwargs": {} if setup.model.config is not None else overrides,
        "origins": {f"{prefix}.{name}": knobs[name].id for name in overrides if name in knobs},
        "numbers": _integers(setup),
        "names": {name: knob.id for name, knob in knobs.items()},
        "traits": _traits(setup),
    }
    return Target(
        name=os.path.splitext(os.path.basename(file.path))[0],
        family=PlainPython.name,
        span=source.span_of(setup.model.file, setup.model.kind),
        spec=spec,
        knobs=tuple(knobs.values()),
        hints=tuple(_hints(setup)),
        runs_project_code=True,
        trained_vocabulary=setup.trained,
        files=tuple(dict.fromkeys((file.path, setup.entry.path, setup.model.file.path))),
        notes=setup.notes,
        compile=_compile_use(setup),
    )


def _hints(setup: _Setup) -> Iterator[WorkloadHint]:
    for name, (holder, constant) in _values(setup).items():
        if role_of(name) == "positions" and type(constant.value) is int:
            yield WorkloadHint("max_sequence", constant.value, holder.span(constant.node))
            break
    for hint, names in (("batch", _BATCH), ("sequence", _SEQUENCE)):
        placed = next((setup.settings[name] for name in names if name in setup.settings), None)
        if placed is not None and type(placed[1].value) is int and placed[1].value > 0:
            yield WorkloadHint(hint, placed[1].value, placed[0].span(placed[1].node))
    yield from _dtype_hint(setup)
    placed = next((setup.settings[name] for name in _COMPILE if name in setup.settings), None)
    if placed is not None and isinstance(placed[1].value, bool):
        yield WorkloadHint("compile", "default" if placed[1].value else "none", placed[0].span(placed[1].node))
    elif _compiles(setup.entry.tree):
        yield WorkloadHint("compile", "default", setup.entry.span(_compiles(setup.entry.tree)[0]))


def _dtype_hint(setup: _Setup) -> Iterator[WorkloadHint]:
    for name in _DTYPE:
        if name in setup.settings:
            holder, constant = setup.settings[name]
            # A choice by what the GPU can do is judged for a GPU that can.
            node = constant.node.body if isinstance(constant.node, ast.IfExp) else constant.node
            value = _DTYPE_NAMES.get(str(source.literal_value(node)), "") or _DTYPE_NAMES.get(ast.unparse(node).rpartition(".")[2], "")
            if value:
                yield WorkloadHint(
                    "dtype", "tf32" if value == "fp32" and _TF32.search(setup.entry.text) else value, holder.span(constant.node)
                )
                return
    for call in source.calls(setup.entry.tree, "autocast"):
        for keyword in call.keywords:
            value = _DTYPE_NAMES.get(ast.unparse(keyword.value).rpartition(".")[2], "") if keyword.arg == "dtype" else ""
            if value:
                yield WorkloadHint("dtype", value, setup.entry.span(keyword.value))
                return
    loop = _training_loop(setup.entry.tree)
    if loop is not None and not _PRECISION_WORDS.search(setup.entry.text) and not _PRECISION_WORDS.search(setup.model.file.text):
        yield WorkloadHint("dtype", "tf32" if _TF32.search(setup.entry.text) else "fp32", source.span_of(setup.entry, loop))


def _training_loop(tree: ast.Module) -> ast.For | ast.While | None:
    """The outermost loop that runs backward and steps an optimizer."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            called = {call.func.attr for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)}
            if {"backward", "step"} <= called:
                return node
    return None


def _compiles(tree: ast.Module) -> list[ast.expr]:
    """Places that compile a model: torch.compile in any form, or .compile() on something called a model."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "compile" and isinstance(node.value, (ast.Name, ast.Attribute)):
            owner = ast.unparse(node.value)
            if owner == "torch" or re.search(r"model|net|module", owner.rpartition(".")[2]):
                found.append(node)
    return found


def _compile_use(setup: _Setup) -> CompileUse | None:
    """What an entry with a training loop says about torch.compile; None for a model without one."""
    loop = _training_loop(setup.entry.tree)
    if loop is None:
        return None
    key = next((name for name in _COMPILE if name in setup.settings and isinstance(setup.settings[name][1].value, bool)), None)
    if key is not None:
        holder, constant = setup.settings[key]
        return CompileUse("on" if constant.value else "off", holder.span(constant.node), "a training loop", key)
    compiled = [*_compiles(setup.entry.tree), *_compiles(setup.model.file.tree)]
    if compiled:
        holder = setup.entry if _compiles(setup.entry.tree) else setup.model.file
        return CompileUse("on", holder.span(compiled[0]), "a training loop")
    made = source.calls(setup.entry.tree, setup.model.kind.name)
    return CompileUse("absent", setup.entry.span(made[0]) if made else _first_line(setup.entry, loop), "a training loop")


def _first_line(file: SourceFile, node: ast.stmt) -> Any:
    span = file.span(node)
    return replace(span, end_line=span.line, end_column=len(file.positions.line(span.line)) + 1)
