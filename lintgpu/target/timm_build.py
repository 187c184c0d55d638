"""Build a timm model from a hub config or the arguments of train.py. Runs in the worker; torch and timm are imported inside."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lintgpu.target.base import Built
from lintgpu.target.huggingface import DEFAULT_PREFIX
from lintgpu.target.huggingface_build import default_knob, with_changes
from lintgpu.trace.errors import BuildError, TraceError
from lintgpu.trace.placeholders import placeholders
from lintgpu.workload import Mode, Workload

_HUB = ("hf_hub:", "hf-hub:")


def build(data: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
    """The model of a config with the knobs in `changes` replaced. Raises BuildError with a true reason."""
    if workload.mode is Mode.DECODE:
        raise BuildError("timm's models generate no tokens: there is no decode step", "trace with --mode infer", stage="inputs")
    timm = import_timm()
    values = with_changes(data, {key: value for key, value in changes.items() if not key.startswith(DEFAULT_PREFIX)})
    name = _architecture(timm, str(values.get("architecture") or values["model"]))
    with _named_defaults(changes):
        model = _created(timm, name, _arguments(values))
    size = _image(values, model)
    last = bool(values.get("channels_last"))
    if last:
        import torch

        model = model.to(memory_format=torch.channels_last)
    return Built(model, lambda: ((_pixels((workload.batch, *size), last),), {}), _loss(model))


def import_timm() -> Any:
    """The library. Raises BuildError where it is absent."""
    try:
        # timm imports torchvision for its data loaders; building a model needs none of it.
        with placeholders("torchvision"):
            timm = importlib.import_module("timm")
            importlib.import_module("timm.models._builder")
        return timm
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "timm"
        reason = "timm is not installed" if absent else f"timm cannot be imported: {error}"
        raise BuildError(reason, "pip install 'lintgpu[timm]'", stage="environment", error_type=type(error).__name__) from error


def _architecture(timm: Any, name: str) -> str:
    """The name that timm registers, of a name as users write it."""
    plain = name
    for prefix in _HUB:
        plain = plain.removeprefix(prefix)
    owner, _, plain = plain.rpartition("/")
    known = timm.is_model(plain.partition(".")[0])
    if owner and not (owner == "timm" and known):
        raise BuildError(f"the config of {name!r} is on the hub, which lintgpu never asks", "lint its config.json", stage="config")
    if not known:
        raise BuildError(f"timm {timm.__version__} has no model {plain!r}", "install the release that has it", stage="config")
    return plain


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the file gives to create_model, as timm's hub loader and train.py give it."""
    given = {key: values[key] for key in ("num_classes", "in_chans", "global_pool") if values.get(key) is not None}
    if "gp" in values and values["gp"] is not None:
        given["global_pool"] = values["gp"]
    channels = values.get("input_size")
    if channels and "in_chans" not in given:
        given["in_chans"] = channels[0]
    for key in ("model_args", "model_kwargs"):
        given.update(values.get(key) or {})
    return given


def _created(timm: Any, name: str, given: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, pretrained=False, **given)
    except (TraceError, MemoryError):
        raise
    except Exception as error:
        raise TraceError.from_exception("build", error) from error


@contextmanager
def _named_defaults(changes: Mapping[str, int]) -> Iterator[None]:
    """The sizes that an architecture's name stands for enter the model as knobs ("default:embed_dim=768").

    They pass through one function of timm's builder; a release without it builds the same model, without those knobs.
    """
    from lintgpu.trace.substitutes import replaced

    builder = importlib.import_module("timm.models._builder")
    original: Callable[..., None] | None = getattr(builder, "_update_default_model_kwargs", None)

    def update(pretrained_cfg: Any, kwargs: dict[str, Any], kwargs_filter: Any) -> None:
        assert original is not None
        original(pretrained_cfg, kwargs, kwargs_filter)
        for key, value in list(kwargs.items()):
            kwargs[key] = _named((key,), value, changes)

    with replaced(builder, _update_default_model_kwargs=update):
        yield


def _named(path: tuple[str | int, ...], value: Any, changes: Mapping[str, int]) -> Any:
    if type(value) is int:
        return default_knob(path, value, changes)
    if type(value) in (tuple, list):
        return type(value)(_named((*path, index), item, changes) for index, item in enumerate(value))
    return value


def _image(values: Mapping[str, Any], model: Any) -> tuple[int, ...]:
    """(channels, height, width): what the file says, else the size the architecture was made for."""
    stated, side = values.get("input_size"), values.get("img_size")
    default = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224)
    if stated:
        return tuple(int(dim) for dim in stated)
    channels = int(values.get("in_chans") or default[0])
    own = (values.get("pretrained_cfg") or {}).get("input_size") or default
    return (channels, int(side), int(side)) if side else (channels, int(own[1]), int(own[2]))


def _pixels(shape: tuple[int, ...], channels_last: bool) -> Any:
    import torch

    images = torch.zeros(shape)
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


def _loss(model: Any) -> Any:
    """Cross-entropy over the classes, where the output is one row of scores an image; None lets backward start from the outputs."""
    import torch

    def loss(output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.dim() != 2 or output.shape[1] != getattr(model, "num_classes", 0):
            return None
        return torch.nn.functional.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long))

    return loss
