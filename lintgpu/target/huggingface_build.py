"""Build a transformers model from a config's values. Runs in the worker; torch and transformers are imported inside."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lintgpu.target.base import Built
from lintgpu.target.huggingface import DEFAULT_PREFIX, Path, architectures_of, integers, knob_id
from lintgpu.trace.errors import BuildError, TraceError
from lintgpu.trace.origin import TracedInt
from lintgpu.workload import Workload

# Heads in the order in which a model of several is taken for what it is; the other mappings of the library follow.
_HEADS = (
    "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "MASKED_LM", "CTC", "RNNT", "TDT",
    "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "IMAGE_CLASSIFICATION",
    "DEPTH_ESTIMATION", "AUDIO_CLASSIFICATION", "PRETRAINING",
)  # fmt: skip
_MOST_CLASSES = 5
"""How many classes of a config that names none are tried."""
# Keys that steer loading or generation, not the architecture.
_DROPPED = ("quantization_config", "auto_map", "architectures", "gradient_checkpointing", "_name_or_path", "model_type")


def build(data: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
    """The model of the config `data` with the knobs in `changes` replaced. Raises BuildError with a true reason."""
    import torch

    from lintgpu.trace import inputs
    from lintgpu.trace.imports import light_imports

    with light_imports():
        transformers = _transformers()
        kind, config_kind, values = _classes(transformers, with_changes(data, changes))
        config = _config(config_kind, values, changes)
        kinds = [kind] if kind is not None else _natural_classes(transformers, config)
    assumptions: list[str] = []
    if data.get("quantization_config"):
        assumptions.append("the weights are traced in the compute precision: the config's quantisation is left out")
    _settle(config)
    # The recorder has made the model's dtype the default and meta the device; transformers wants the dtype said again.
    model = _first_that_builds(kinds, config, torch.get_default_dtype(), values, assumptions)
    return inputs.for_transformers(model, config, workload, assumptions)


def with_changes(data: Mapping[str, Any], changes: Mapping[str, int]) -> dict[str, Any]:
    """A copy of `data` whose integers are TracedInts named by their key path, with `changes` applied.

    Changes of defaults ("default:KEY=VALUE") become keys of their own.
    """
    values = copy.deepcopy(dict(data))
    for path, value in list(integers(data)):
        name = knob_id(path)
        _set(values, path, TracedInt(changes.get(name, value), f"{{{name}}}"))
    for name, value in changes.items():
        if name.startswith(DEFAULT_PREFIX):
            key = name.removeprefix(DEFAULT_PREFIX).partition("=")[0]
            _set(values, tuple(key.split(".")), TracedInt(value, f"{{{name}}}"))
    return values


def _set(values: Any, path: Path, value: int) -> None:
    for part in path[:-1]:
        if isinstance(values, dict):
            values.setdefault(part, {})
        values = values[part]
    values[path[-1]] = value


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        reason = "transformers is not installed" if absent else f"transformers cannot be imported: {error}"
        raise BuildError(reason, "pip install 'lintgpu[hf]'", stage="environment", error_type=type(error).__name__) from error


def _classes(transformers: Any, values: dict[str, Any]) -> tuple[Any | None, Any, dict[str, Any]]:
    """(model class or None for the natural one, config class, the values that config class reads)."""
    named = _named_class(transformers, values)
    model_type = values.get("model_type")
    by_type = _config_class(transformers, model_type) if model_type else None
    if named is None:
        if by_type is None:
            raise BuildError(_unknown(transformers, values), _way_out(values), stage="config")
        return None, by_type, values
    config_kind = named.config_class
    if by_type is None or by_type is config_kind or issubclass(by_type, config_kind):
        return named, by_type or config_kind, values
    if by_type.__module__.rpartition(".")[0] != config_kind.__module__.rpartition(".")[0]:
        reason = f"architectures names {named.__name__}, which is no model of the model_type {model_type!r}"
        raise BuildError(reason, "make the two agree", stage="config")
    # A part of a composite model, such as Gemma3ForCausalLM of gemma3: its own values are nested in newer files, flat in older ones.
    for value in values.values():
        if isinstance(value, dict) and value.get("model_type") == config_kind.model_type:
            return named, config_kind, value
    return named, config_kind, values


def _named_class(transformers: Any, values: Mapping[str, Any]) -> Any | None:
    names = architectures_of(values)
    if not names:
        return None
    for name in names:
        with contextlib.suppress(AttributeError):
            kind = getattr(transformers, name)
            if _is_placeholder(kind):
                raise BuildError(f"{name} {_needs(kind)}", stage="environment")
            if hasattr(kind, "config_class") and kind.config_class is not None:
                return kind
    raise BuildError(_unknown(transformers, values, names[0]), _way_out(values), stage="config")


def _needs(kind: Any) -> str:
    backends = getattr(kind, "_backends", None) or ["more packages"]
    return f"needs {', '.join(str(name) for name in backends)}"


def _config_class(transformers: Any, model_type: str) -> Any | None:
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    try:
        return mapping[model_type]
    except KeyError:
        return None


def _unknown(transformers: Any, values: Mapping[str, Any], architecture: str = "") -> str:
    what = f"class {architecture}" if architecture else f"model_type {values.get('model_type')!r}"
    installed = f"transformers {transformers.__version__} has no {what}"
    auto_map = values.get("auto_map")
    if isinstance(auto_map, dict) and auto_map:
        code = list(auto_map.values())[-1]
        return f"{installed}: it is remote code of the model's repository (auto_map: {code}), which lintgpu never runs"
    if values.get("_diffusers_version"):
        return f"{installed}: it is a config of diffusers, which lintgpu does not build from its config yet"
    written_by = str(values.get("transformers_version") or "")
    if _version(written_by) > _version(transformers.__version__):
        return f"{installed}: the config was written by transformers {written_by}"
    return f"{installed}: the model belongs to a fork, to remote code or to another release"


def _way_out(values: Mapping[str, Any]) -> str:
    if values.get("auto_map"):
        return "if you trust that code, keep it in your project and name its class in [tool.lintgpu.targets]"
    return "install the release that has it, or name the class in [tool.lintgpu.targets]"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition(".dev")[0])[:3])


def _config(kind: Any, values: Mapping[str, Any], changes: Mapping[str, int]) -> Any:
    given = {key: value for key, value in values.items() if key not in _DROPPED}
    for key, value in list(given.items()):
        if isinstance(value, dict):
            given[key] = {k: v for k, v in value.items() if k != "quantization_config"}
    aliases = getattr(kind, "attribute_map", {})
    stated = set(given) | {aliases.get(key, key) for key in given}
    for name, value in _integer_defaults(kind):
        if name not in stated:
            given[name] = default_knob((name,), value, changes)
    try:
        config = kind.from_dict(given)
    except Exception as error:  # Validation of any kind: the library's own words are the reason.
        raise TraceError.from_exception("config", error, "the library itself refuses this config") from error
    _name_nested_defaults(config, values, (), changes)
    return config


def default_knob(path: Path, value: int, changes: Mapping[str, int]) -> TracedInt:
    """A default of the config class as a traced int whose id holds its value."""
    name = f"{DEFAULT_PREFIX}{knob_id(path)}={value}"
    return TracedInt(changes.get(name, value), f"{{{name}}}")


def _integer_defaults(kind: Any) -> Iterator[tuple[str, int]]:
    """The constructor arguments with an int default, token ids and the like left out."""
    if dataclasses.is_dataclass(kind):
        defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    else:
        defaults = {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()}
    for path, value in integers(defaults):
        yield str(path[0]), value


def _name_nested_defaults(config: Any, values: Mapping[str, Any], path: Path, changes: Mapping[str, int]) -> None:
    """Name the defaults of nested configs, which the library makes itself."""
    for key, nested in list(vars(config).items()):
        if not hasattr(nested, "to_dict") or not hasattr(nested, "model_type"):
            continue
        stated = values.get(key)
        defaults = dict(_integer_defaults(type(nested)))
        for name, value in list(vars(nested).items()):
            if type(value) is int and defaults.get(name) == value:
                with contextlib.suppress(Exception):
                    setattr(nested, name, default_knob((*path, key, name), value, changes))
        _name_nested_defaults(nested, stated if isinstance(stated, dict) else {}, (*path, key), changes)


def _natural_classes(transformers: Any, config: Any) -> list[Any]:
    """The model classes of a config that names none, the one it is usually used with first."""
    modeling = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = {name: value for name, value in vars(modeling).items() if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")}
    found: dict[str, Any] = {}
    for name in _heads(config, mappings):
        entry = mappings[name].get(config.model_type)
        class_name = entry[0] if isinstance(entry, (tuple, list)) else entry
        if class_name and class_name not in found and len(found) < _MOST_CLASSES:
            found[class_name] = getattr(transformers, class_name, None)
    kinds = [kind for kind in found.values() if kind is not None and not _is_placeholder(kind)]
    if not kinds and any(kind is not None for kind in found.values()):
        name, kind = next((name, kind) for name, kind in found.items() if kind is not None)
        raise BuildError(f"{name} {_needs(kind)}", stage="environment")
    kinds = kinds or [kind for kind in [_class_of_module(config)] if kind is not None]
    if not kinds:
        reason = f"transformers {transformers.__version__} has the config of {config.model_type!r} but no model class for it"
        raise BuildError(reason, "name the class in architectures", stage="config")
    return kinds


def _is_placeholder(kind: Any) -> bool:
    """Whether a class only stands for one whose package is missing."""
    return "dummy_" in getattr(kind, "__module__", "")


def _first_that_builds(kinds: Sequence[Any], config: Any, dtype: Any, values: Mapping[str, Any], assumptions: list[str]) -> Any:
    """The model of the first class that this config can build; the first class's own reason where none can."""
    first: TraceError | None = None
    for kind in kinds:
        try:
            model = _instance(kind, config, dtype, values, assumptions)
        except TraceError as error:
            first = first or error
            continue
        if first is not None:
            assumptions.append(f"{kinds[0].__name__} cannot be built of this config ({first.reason[:100]}): {kind.__name__} was")
        return model
    assert first is not None
    raise first


def _heads(config: Any, mappings: Mapping[str, Any]) -> list[str]:
    """The library's mapping names, the natural head first."""
    heads = list(_HEADS)
    if getattr(config, "is_encoder_decoder", False):
        heads.sort(key=lambda head: "SEQ" not in head)
    elif config.model_type in mappings["MODEL_FOR_MASKED_LM_MAPPING_NAMES"] and not getattr(config, "is_decoder", False):
        heads.insert(0, "MASKED_LM")
    preferred = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in heads if f"MODEL_FOR_{head}_MAPPING_NAMES" in mappings]
    rest = [name for name in mappings if name not in preferred and name != "MODEL_MAPPING_NAMES"]
    return [*preferred, *rest, "MODEL_MAPPING_NAMES"]


def _class_of_module(config: Any) -> Any | None:
    """A model class of the module beside the config's, for types that no mapping lists."""
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and kind.__module__ == module.__name__
        and getattr(kind, "config_class", None) is type(config)
        and not kind.__name__.endswith("PreTrainedModel")
        and getattr(kind, "forward", None) is not None
    ]
    return min(kinds, key=lambda kind: (not kind.__name__.endswith("Model"), len(kind.__name__)), default=None)


def _settle(config: Any) -> None:
    """Switch off what only changes how a step is run: the KV cache (decode mode asks for it again) and dict outputs stay default."""
    for part in _parts(config):
        if getattr(part, "use_cache", None) is True:
            with contextlib.suppress(Exception):
                part.use_cache = False


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)


def _instance(kind: Any, config: Any, dtype: Any, values: Mapping[str, Any], assumptions: list[str]) -> Any:
    forward = getattr(kind, "forward", None)
    if forward is None or forward.__name__ == "_forward_unimplemented":
        raise BuildError(
            f"{kind.__name__} has no forward of its own: it is used through other methods", "name one of its parts in architectures"
        )
    asked = values.get("_attn_implementation") or values.get("attn_implementation")
    # flash_attention_2 needs its package and a GPU; SDPA is the same attention to the cost model. eager is another matter.
    attention = "eager" if asked == "eager" else "sdpa"
    if not hasattr(kind, "_from_config"):
        return _guarded(lambda: kind(config))
    try:
        return _guarded(lambda: kind._from_config(config, dtype=dtype, attn_implementation=attention))
    except TraceError as error:
        if attention == "eager" or ("scaled_dot_product_attention" not in error.reason and "sdpa" not in error.reason):
            raise
    assumptions.append(f"{kind.__name__} has no scaled_dot_product_attention: its own attention is traced")
    return _guarded(lambda: kind._from_config(config, dtype=dtype, attn_implementation="eager"))


def _guarded(build: Any) -> Any:
    try:
        return build()
    except (TraceError, MemoryError):
        raise
    except ImportError as error:
        raise TraceError.from_exception("environment", error) from error
    except Exception as error:
        raise TraceError.from_exception("build", error) from error
