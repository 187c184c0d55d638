"""Builds a target on meta, runs one step of it and gives the ops: the worker's way from a Family to a Trace."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lintgpu.trace.attention import AttentionOverride
from lintgpu.trace.autocast import Autocast
from lintgpu.trace.building import Provenance, build, default_dtype
from lintgpu.trace.errors import TraceError
from lintgpu.trace.events import fold
from lintgpu.trace.functions import Functions
from lintgpu.trace.kinds import dtype_name
from lintgpu.trace.memo import Memo, differentiated
from lintgpu.trace.modules import ConstructorSites, ModuleStack, Sites
from lintgpu.trace.origin import knobs
from lintgpu.trace.recorder import Recorder
from lintgpu.trace.records import Op, Parameters, Trace
from lintgpu.trace.substitutes import flex_attention, plain_checks, without_checkpointing, without_compilers, without_inference_mode
from lintgpu.trace.weights import Weights
from lintgpu.workload import Mode, Workload

if TYPE_CHECKING:
    from lintgpu.target.base import Built

_DTYPE_COMPLAINT = re.compile(r"dtype|scalar type", re.IGNORECASE)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32, "fp64": torch.float64}


def record(build_target: Callable[[], Built], workload: Workload, memoise: bool = True) -> Trace:
    """Build a model and record the ops of one step under `workload`.

    `build_target` is called on the meta device with the model's dtype as torch's default. With `memoise` equal blocks with equal
    inputs run once. Raises TraceError, with the stage that failed.
    """
    if workload.dtype not in DTYPES:
        raise TraceError("config", f"unknown dtype {workload.dtype!r}", f"one of {', '.join(DTYPES)}")
    autocast = uses_autocast(workload)
    with _no_collection():
        try:
            return _record(build_target, workload, autocast, memoise)
        except TraceError as error:
            half = workload.dtype in ("bf16", "fp16") and not autocast
            if not half or error.stage not in ("build", "forward", "backward") or not _DTYPE_COMPLAINT.search(error.reason):
                raise
            trace = _record(build_target, workload, True, memoise)
            said = f"the model does not run with {workload.dtype} weights: it was traced under autocast, with fp32 weights ({error.reason})"
            return dataclasses.replace(trace, assumptions=(*trace.assumptions, said))


def _record(build_target: Callable[[], Built], workload: Workload, autocast: bool, memoise: bool) -> Trace:
    started = time.perf_counter()
    # Autocast keeps the weights in fp32.
    dtype = torch.float32 if autocast else DTYPES[workload.dtype]
    sites = Sites()
    recorder = Recorder(ModuleStack(ConstructorSites(sites)), Weights(), sites)
    recorder.token_sizes = frozenset((workload.batch, workload.sequence, workload.batch * workload.sequence, 1))
    with _stage("build"):
        built, provenance = build(build_target, dtype, recorder)
    step = _Step(built, recorder, workload, dtype, autocast)
    step.run(memoise)
    return step.trace(provenance, time.perf_counter() - started)


@contextmanager
def _no_collection() -> Iterator[None]:
    """One garbage collection walks all of torch and the model library, and takes as long as a trace."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def uses_autocast(workload: Workload) -> bool:
    """Whether the step runs under torch.autocast: training in half precision with fp32 weights."""
    return workload.autocast and workload.mode is Mode.TRAIN and workload.dtype in ("bf16", "fp16")


class _Step:
    """One step of a built model under a recorder."""

    def __init__(self, built: Built, recorder: Recorder, workload: Workload, dtype: torch.dtype, autocast: bool) -> None:
        self.built = built
        self.model: nn.Module = built.model
        self.recorder = recorder
        self.workload = workload
        self.dtype = dtype
        self.training = workload.mode is Mode.TRAIN
        self.autocasts = autocast
        self.autocast = Autocast()
        self.inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self.assumptions: list[str] = []

    def run(self, memoise: bool) -> None:
        """Forward and, in training, backward. Where the model refuses its inputs, the maker of the inputs is asked for others."""
        self.model.train(self.training)
        self.recorder.restart()
        first: TraceError | None = None
        while True:
            try:
                with self._modes():
                    self._run_once(memoise)
                return
            except TraceError as error:
                first = first or error
                amend = self.built.extra.get("amend")
                better = amend(_complaint(error)) if amend is not None and error.stage in ("inputs", "forward") else None
                if better is None and first is error:
                    raise
                if better is None:
                    # The first complaint is about the likeliest inputs; later ones are about guesses.
                    raise first from first.__cause__
                self.built = better
                self.recorder.restart()

    def _run_once(self, memoise: bool) -> None:
        _seed()
        _clear_caches(self.model)
        recorder = self.recorder
        with _stage("inputs"), recorder.silent(), default_dtype(self.dtype), recorder.modules.running():
            args, kwargs = self.built.make_inputs()
        self.inputs = tuple(_named_shapes(args, kwargs))
        recorder.modules.calls = Memo(self.model, recorder, self.autocast).call if memoise else None
        with _stage("forward"), torch.set_grad_enabled(self.training), self._casting(), recorder.modules.running():
            output = self.model(*args, **kwargs)
            loss = self.built.loss(output) if self.training and self.built.loss is not None else None
        if self.training:
            with _stage("backward"):
                self._backward(output, loss)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(without_compilers([]))
            stack.enter_context(plain_checks())
            stack.enter_context(self.autocast.installed())
            stack.enter_context(without_inference_mode())
            stack.enter_context(without_checkpointing(self.recorder))
            attention = stack.enter_context(AttentionOverride(self.recorder.note_attention, self.recorder.attention_origins))
            stack.enter_context(flex_attention(attention))
            stack.enter_context(Functions(self.recorder))
            stack.enter_context(self.recorder)
            yield

    def _casting(self) -> AbstractContextManager[None]:
        return self.autocast.on(DTYPES[self.workload.dtype]) if self.autocasts else nullcontext()

    def _backward(self, output: Any, loss: Any) -> None:
        if loss is not None:
            loss.backward()
            return
        self.assumptions.append("the loss was left out: the backward pass starts from the model's floating-point outputs")
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point()]
        if not outputs:
            raise TraceError("backward", "no output of the model needs a gradient", "name a loss, or trace with --mode infer")
        with self.recorder.silent():
            gradients = [torch.empty_like(tensor) for tensor in outputs]
        differentiated(outputs, gradients)

    def trace(self, provenance: Provenance, seconds: float) -> Trace:
        """The folded ops and what goes with them."""
        ops = fold(self.recorder.items)
        return Trace(
            ops=ops,
            parameters=_parameters(self.model),
            basis="traced",
            model_class=type(self.model).__name__,
            inputs=self.inputs,
            versions=_versions(self.model),
            assumptions=tuple(dict.fromkeys([*self.built.assumptions, *self.assumptions, *self.recorder.assumptions])),
            inexact_divisions=tuple(provenance.inexact),
            knobs_seen=_knobs_of(ops, provenance),
            compile_calls=tuple(dict.fromkeys(provenance.compile_calls)),
            seconds=seconds,
        )


def _seed() -> None:
    """Random choices in Python code (layer drop, masked spans) come out alike each time."""
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


def _clear_caches(model: nn.Module) -> None:
    """Empty the caches of the model's own functions and methods: tensors that an earlier trace left there hold no values any more."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")}
    homes = [sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    for owner in (*kinds, *homes):
        for value in list(vars(owner).values()):
            value = getattr(value, "__func__", value)
            cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()] if inspect.isfunction(value) else []
            for cached in (value, *cells):
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()


def _complaint(error: TraceError) -> str:
    """All that the model said, for the maker of its inputs to read."""
    return str(error.__cause__) if error.__cause__ is not None else error.reason


@contextmanager
def _stage(stage: str) -> Iterator[None]:
    """Whatever fails inside is a TraceError of this stage."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError.from_exception(stage, error) from error


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a model's output: tuples, lists, dicts, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))


def _named_shapes(args: Any, kwargs: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield str(index), tuple(value.shape)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield name, tuple(value.shape)


def _parameters(model: nn.Module) -> Parameters:
    """Each parameter once, however often it is tied."""
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    dtype = dtype_name(sizes.most_common(1)[0][0]) if sizes else "fp32"
    return Parameters(len(parameters), sum(sizes.values()), len(trainable), sum(parameter.numel() for parameter in trainable), dtype)


def _versions(model: nn.Module) -> tuple[tuple[str, str], ...]:
    names = dict.fromkeys(["torch", type(model).__module__.partition(".")[0]])
    found = ((name, getattr(sys.modules.get(name), "__version__", "")) for name in names)
    return tuple((name, str(version)) for name, version in found if version)


def _knobs_of(ops: tuple[Op, ...], provenance: Provenance) -> tuple[str, ...]:
    """Knobs in any tensor's shape, in order of appearance in the build, then in the ops."""
    seen: dict[str, None] = {}
    for origins in provenance.factories.values():
        for origin in origins:
            seen.update(dict.fromkeys(knobs(origin) if origin else ()))
    for op in ops:
        for _, origin in (op.gemm.origins if op.gemm else ()) + (op.attention.origins if op.attention else ()):
            seen.update(dict.fromkeys(knobs(origin)))
    return tuple(seen)
