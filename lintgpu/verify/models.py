"""Models built on the GPU and the steps that run them. Worker side."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lintgpu.target import family_named
from lintgpu.target.base import BUILD_DEVICE, Built
from lintgpu.target.huggingface import DEFAULT_PREFIX
from lintgpu.target.roles import role_of
from lintgpu.trace.errors import TraceError
from lintgpu.trace.origin import plain_numbers
from lintgpu.verify.records import Model, Variant
from lintgpu.workload import Mode, Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
# Integer inputs that are no token ids and keep the values they were made with.
_NOT_TOKENS = re.compile(r".*(mask|position|type|segment|grid|bbox|cache|past|length|index).*")
_MEMORY_SHARE = 0.8
"""Of the free memory that two models' weights, gradients and optimizers and one's activations may take: two are compared at a time."""
_MAX_AMENDMENTS = 12


class DoesNotFit(RuntimeError):
    """Not even one layer of the model fits the GPU's memory."""


class Models:
    """The models of one target on the GPU, each built once; another target's, and those no longer compared, are let go."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.depth: dict[str, int] = {}
        """Layer knobs that were lowered to fit the memory, with the values in use."""
        self._model: Model | None = None
        self._built: dict[object, Built] = {}
        self._defaults: dict[str, tuple[tuple[str, int], ...]] = {}
        """Layer knobs that a spec leaves to the config class, once the class has told them."""

    def start(self, model: Model, variants: Sequence[Variant]) -> None:
        """Work on these variants of `model` from now on; what they share with the last ones is kept."""
        if self._model is None or self._model.key != model.key:
            self._model = model
            self.clear()
            self.depth = self._guess_depth(model)
        wanted = {_key(variant) for variant in variants}
        for key in [key for key in self._built if key not in wanted]:
            del self._built[key]
        free(self.device)

    def clear(self) -> None:
        """Free every model."""
        self._built.clear()
        free(self.device)

    def cut(self) -> bool:
        """Free the models and halve the depth; False where it is one layer already or no knob counts layers."""
        self.clear()
        assert self._model is not None
        current = {knob: self.depth.get(knob, value) for knob, value in self.layers()}
        if not any(value > 1 for value in current.values()):
            return False
        self.depth = {knob: max(1, value // 2) for knob, value in current.items()}
        return True

    def cuts(self) -> tuple[tuple[str, int, int], ...]:
        """(knob id, value in the config, value in use) of each lowered knob."""
        assert self._model is not None
        return tuple((knob, value, self.depth[knob]) for knob, value in self.layers() if self.depth.get(knob, value) != value)

    def layers(self) -> tuple[tuple[str, int], ...]:
        """The knobs that count layers, with their values; those that the config leaves out are known after the first build."""
        assert self._model is not None
        return self._model.layers or self._defaults.get(repr(self._model.spec), ())

    def built(self, variant: Variant) -> Built:
        """The model of `variant`, with inputs that it accepts."""
        key = _key(variant)
        if key not in self._built:
            assert self._model is not None
            spec = variant.spec if variant.spec is not None else self._model.spec
            built = build(self._model.family, spec, variant.workload, {**dict(variant.changes), **self.depth}, self.device)
            if variant.channels_last:
                built.model.to(memory_format=torch.channels_last)
            self._built[key] = built
            self._defaults.setdefault(repr(self._model.spec), default_layers(built.model))
        return self._built[key]

    def _guess_depth(self, model: Model) -> dict[str, int]:
        """A depth that may fit, so that a model far too large is not built in vain. Assumes that all of it grows with the depth."""
        if self.device.type != "cuda" or not model.layers:
            return {}
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        # fp32 weight, gradient and two moments of each parameter.
        wanted = 2 * 16 * model.parameter_elements + model.activation_bytes
        share = _MEMORY_SHARE * free_bytes / max(1, wanted)
        return {knob: max(1, int(value * share)) for knob, value in model.layers} if share < 1 else {}


def default_layers(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """The knobs of a config object that count layers, named as values that no file states."""
    values = getattr(getattr(model, "config", None), "__dict__", {})
    found = {name: int(value) for name, value in values.items() if isinstance(value, int) and value > 1 and role_of(name) == "layers"}
    return tuple((f"{DEFAULT_PREFIX}{name}={value}", value) for name, value in found.items())


def build(family: str, spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int], device: torch.device) -> Built:
    """A model with its own initialisation on `device`, in the mode and dtype of `workload`."""
    token = BUILD_DEVICE.set(str(device))
    try:
        with plain_numbers(), torch.device(device), _default_dtype(weight_dtype(workload)):
            torch.manual_seed(0)
            built = family_named(family).build(spec, workload, changes)
    finally:
        BUILD_DEVICE.reset(token)
    built.model.train(workload.mode is Mode.TRAIN)
    return built


class Step:
    """One step of a model under a workload: call it, as often as you like. `outputs` runs the forward pass alone."""

    def __init__(self, built: Built, workload: Workload, device: torch.device) -> None:
        self.built, self.workload, self.device = built, workload, device
        self.model: nn.Module = built.model
        self.args, self.kwargs = self._inputs()
        self._cache_length = _cache_length(self.kwargs)
        self._run = self._compiled() if workload.compiled else self.model
        self._optimizer = self._make_optimizer() if workload.mode is Mode.TRAIN else None

    def __call__(self) -> None:
        """One step: forward, and in training backward and optimizer."""
        with precision(self.workload):
            if self.workload.compile == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            if self.workload.mode is not Mode.TRAIN:
                with torch.no_grad():
                    self._run(*self.args, **self.kwargs)
                _crop(self.kwargs, self._cache_length)
                return
            self.loss(self._run).backward()
            if self._optimizer is not None:
                self._optimizer.step()
            self.model.zero_grad(set_to_none=True)

    def loss(self, run: Callable[..., Any] | None = None) -> Any:
        """The loss of a forward pass; the sum of the floating-point outputs where the model has none."""
        with self._autocast():
            output = (self.model if run is None else run)(*self.args, **self.kwargs)
            if self.built.loss is not None:
                return self.built.loss(output)
        return sum(tensor.float().sum() for tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad)

    def outputs(self, run: Callable[..., Any] | None = None) -> list[Any]:
        """The floating-point outputs of a forward pass without gradients."""
        with torch.no_grad(), precision(self.workload), self._autocast():
            output = (self.model if run is None else run)(*self.args, **self.kwargs)
        return [tensor.detach() for tensor in tensors(output) if tensor.is_floating_point()]

    def _compiled(self) -> Any:
        mode = {"reduce-overhead": "reduce-overhead"}.get(self.workload.compile)
        # Shapes do not change here; without this the second model compiled in a process would get dynamic ones.
        return torch.compile(self.model, mode=mode, dynamic=False)

    def _autocast(self) -> Any:
        if not (self.workload.autocast and self.workload.mode is Mode.TRAIN and self.workload.dtype in ("bf16", "fp16")):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.workload.dtype])

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kind = self.workload.optimizer
        if kind == "none" or not parameters:
            return None
        if kind == "sgd":
            return torch.optim.SGD(parameters, lr=1e-6)
        return torch.optim.AdamW(parameters, lr=1e-6, fused=kind == "adamw-fused", foreach=kind == "adamw-foreach")

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model accepts, with random tokens where it takes tokens; a model that complains gets amended inputs."""
        first: Exception | None = None
        for _ in range(_MAX_AMENDMENTS):
            try:
                made = self._made()
                with _noting_vocabularies(self.model) as vocabularies:
                    self._try(*made)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                first = first or error
                amend = self.built.extra.get("amend")
                better = amend(str(error)) if amend is not None else None
                if better is None:
                    break
                self.built = better
                continue
            return self._with_random_values(made, vocabularies)
        raise first or RuntimeError(f"no inputs were found that {type(self.model).__name__} accepts")

    def _made(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.device(self.device), _default_dtype(weight_dtype(self.workload)), plain_numbers():
            args, kwargs = self.built.make_inputs()
        return args, kwargs

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One forward pass, without a trace of it in the inputs."""
        length = _cache_length(kwargs)
        with torch.no_grad(), precision(self.workload), self._autocast():
            self.model(*args, **kwargs)
        _crop(kwargs, length)
        synchronize(self.device)

    def _with_random_values(
        self, made: tuple[tuple[Any, ...], dict[str, Any]], vocabularies: Mapping[int, int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        randomised = _randomised(self.model, *made, vocabularies)
        try:
            self._try(*randomised)
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception:  # A model may ask certain tokens of its inputs; those it was made with were fine.
            return made
        return randomised


@contextlib.contextmanager
def precision(workload: Workload) -> Iterator[None]:
    """fp32 GEMMs and convolutions go through TF32 exactly where the workload says so."""
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = workload.dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution


def weight_dtype(workload: Workload) -> torch.dtype:
    """The dtype of the weights: fp32 under autocast in training."""
    if workload.autocast and workload.mode is Mode.TRAIN and workload.dtype in ("bf16", "fp16"):
        return torch.float32
    return DTYPES[workload.dtype]


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a model's output: tuples, lists, mappings, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from tensors(item)
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from tensors(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors(getattr(output, field.name))


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, TraceError):
        return error.reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


def free(device: torch.device) -> None:
    """Give freed memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _key(variant: Variant) -> object:
    """Equal for variants that can run on one model: compilation and TF32 change neither weights nor inputs."""
    dtype = "fp32" if variant.workload.dtype == "tf32" else variant.workload.dtype
    return (
        variant.changes,
        repr(variant.spec),
        variant.channels_last,
        dataclasses.replace(variant.workload, compile="none", dtype=dtype, sources=()),
    )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _noting_vocabularies(model: nn.Module) -> Iterator[dict[int, int]]:
    """Address of each tensor that reaches an embedding -> the number of its rows."""
    found: dict[int, int] = {}

    def note(module: nn.Embedding, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            found[args[0].untyped_storage().data_ptr()] = module.num_embeddings

    handles = [module.register_forward_pre_hook(note) for module in model.modules() if isinstance(module, nn.Embedding)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _randomised(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], vocabularies: Mapping[int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with random tokens and values for constant ones: equal rows would be gathered and summed in no usual time.

    Tokens are those that no attribute of the model's config names (padding, image tokens, ...). Labels of the shape of the
    tokens get tokens too.
    """
    names = list(inspect.signature(model.forward).parameters)
    named = {**{names[i] if i < len(names) else str(i): value for i, value in enumerate(args)}, **kwargs}
    ids = {name: vocabularies[_address(value)] for name, value in named.items() if _address(value) in vocabularies}
    smallest = {
        value.shape: min(size for n, size in ids.items() if named[n].shape == value.shape) for name, value in named.items() if name in ids
    }
    special = set(_special_ids(getattr(model, "config", None)))
    generator = torch.Generator().manual_seed(0)

    def filled(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _NOT_TOKENS.match(name) or value.numel() < 2 or (value != value.flatten()[0]).any():
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator).to(value)
        vocabulary = smallest.get(value.shape) if name in ids or "label" in name or "target" in name else None
        if vocabulary is None:
            return value
        tokens = torch.tensor([token for token in range(vocabulary) if token not in special] or [0])
        return tokens[torch.randint(len(tokens), value.shape, generator=generator)].to(value.device)

    positional = tuple(filled(names[i] if i < len(names) else "", value) for i, value in enumerate(args))
    return positional, {name: filled(name, value) for name, value in kwargs.items()}


def _address(value: Any) -> int:
    return int(value.untyped_storage().data_ptr()) if isinstance(value, torch.Tensor) else 0


def _special_ids(config: Any, depth: int = 0) -> Iterator[int]:
    for name, value in (vars(config) if hasattr(config, "__dict__") else {}).items():
        if name.endswith(("_id", "_ids", "_index")):
            items = value if isinstance(value, (list, tuple)) else (value,)
            yield from (item for item in items if isinstance(item, int))
        elif hasattr(value, "model_type") and depth < 3:
            yield from _special_ids(value, depth + 1)


def _cache(kwargs: Mapping[str, Any]) -> Any:
    return next((kwargs[name] for name in ("past_key_values", "cache") if kwargs.get(name) is not None), None)


def _cache_length(kwargs: Mapping[str, Any]) -> int:
    cache = _cache(kwargs)
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def _crop(kwargs: Mapping[str, Any], length: int) -> None:
    """Take the token that a decode step appended off the cache again."""
    grown = _cache_length(kwargs) - length
    if grown > 0 and hasattr(_cache(kwargs), "crop"):
        _cache(kwargs).crop(-grown)
