"""Runs alike blocks once: the first run is recorded, later runs with alike inputs only note that they happened.

In the forward pass every run of such a block becomes one node of the autograd graph, over detached inputs. When gradients
reach the node, the recorded run is differentiated with gradients of the shapes that arrived, once for each kind of them.
Blocks with effects beyond their outputs (hooks, caches, attributes set while running) run in full.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lintgpu.trace.autocast import Autocast
from lintgpu.trace.events import Block, Replay, split
from lintgpu.trace.recorder import Recorder
from lintgpu.trace.shadow import storage_id, unmoded
from lintgpu.trace.signature import alike, contents_hash
from lintgpu.trace.state import Snapshot

_VALUES = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class _Meta:
    """What there is to know of a meta tensor without contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Meta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        with unmoded():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass
class _Result:
    """One leaf of a block's output: an input handed back, a new tensor, or a value."""

    from_input: int | None = None
    tensor: torch.Tensor | None = None
    value: Any = None


@dataclass
class _Run:
    """A recorded run of a block."""

    module: nn.Module
    block: Block
    spec: TreeSpec
    results: list[_Result]
    leaves: list[torch.Tensor]
    """The detached inputs that need a gradient, then the block's own parameters that do."""
    assumed: list[bool]
    kept: list[Any]
    """The inputs: keys hold ids of theirs."""
    backward: dict[Hashable, tuple[Block, list[_Meta | None]]] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """The outputs that need a gradient."""
        return [r.tensor for r in self.results if r.tensor is not None and r.from_input is None and r.tensor.requires_grad]


class _Unsafe(Exception):
    """The block did something that a replay would miss."""


class _BlockRun(torch.autograd.Function):  # type: ignore[misc]
    """Stands in the outer graph for one run of a block."""

    @staticmethod
    def forward(ctx: Any, memo: Memo, run: _Run, path: str, *inputs: torch.Tensor) -> Any:
        ctx.memo, ctx.run, ctx.path = memo, run, path
        ctx.set_materialize_grads(False)
        return tuple(_Meta.of(tensor).make() for tensor in run.differentiable)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, None, *ctx.memo.differentiate(ctx.run, ctx.path, gradients))


class Memo:
    """Block memoisation for one trace. Give `call` to ModuleStack.calls."""

    def __init__(self, root: nn.Module, recorder: Recorder, autocast: Autocast) -> None:
        """`autocast` is what else a run depends on: it casts each weight once."""
        self._recorder = recorder
        self._autocast = autocast
        with unmoded():  # Thousands of looks at shapes and strides, none of which a mode has to see.
            self._kinds = alike(root, recorder.shadows, recorder.weights, recorder.modules.site)
        self._runs: dict[Hashable, _Run] = {}
        self._unsafe: set[int] = set()
        self._hashes: dict[tuple[int, int], tuple[torch.Tensor, int | None]] = {}
        self._parts: dict[int, tuple[list[nn.Module], list[nn.Parameter]]] = {}

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run `module`, or note that it ran as one before it did."""
        kind = self._kinds.get(id(module))
        if kind is None or kind in self._unsafe:
            return original(module, *args, **kwargs)
        modules, parameters = self._parts_of(module)
        if _have_hooks(modules):
            return original(module, *args, **kwargs)
        casts = self._autocast.state(parameters)
        if casts is None:
            return original(module, *args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        with unmoded():
            key = (kind, str(spec), self._key(leaves), torch.is_grad_enabled(), casts)
        run = self._runs.get(key)
        if run is None:
            try:
                run = self._runs[key] = self._record(original, module, leaves, spec)
            except _Unsafe:
                self._unsafe.add(kind)
                return original(module, *args, **kwargs)
        return self._replay(run, module, leaves)

    def _parts_of(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
        """The modules and the parameters of a block."""
        parts = self._parts.get(id(module))
        if parts is None:
            parts = self._parts[id(module)] = (list(module.modules()), list(module.parameters()))
        return parts

    # -- keys

    def _key(self, leaves: list[Any]) -> Hashable:
        """What a run depends on of its inputs."""
        seen: dict[int, int] = {}
        parts: list[Hashable] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                parts.append((self._tensor_key(leaf), seen.setdefault(id(leaf), index)))
            elif isinstance(leaf, _VALUES):
                parts.append((type(leaf), leaf))
            else:
                parts.append((type(leaf), id(leaf)))
        return tuple(parts)

    def _tensor_key(self, tensor: torch.Tensor) -> Hashable:
        recorder = self._recorder
        contents = self._contents(tensor) if recorder.shadows.knows(tensor) else None
        return (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.requires_grad,
            tensor.is_meta,
            _alignment(tensor),
            contents,
            storage_id(tensor) in recorder.tainted,
            recorder.weights.holds(tensor),
            recorder.classes.classes_of(tensor),
            recorder.classes.share_of(tensor),
        )

    def _contents(self, tensor: torch.Tensor) -> int | None:
        """A hash of known contents; the same masks and tables go into every block, so it is taken once."""
        entry = self._hashes.get((id(tensor), tensor._version))
        if entry is None:
            value = self._recorder.shadows.value(tensor)
            entry = self._hashes[(id(tensor), tensor._version)] = (tensor, None if value is None else contents_hash(value))
        return entry[1]

    # -- the first run

    def _record(self, original: Callable[..., Any], module: nn.Module, leaves: list[Any], spec: TreeSpec) -> _Run:
        recorder = self._recorder
        own: dict[int, torch.Tensor] = {}
        with recorder.silent():
            inputs = [self._detached(leaf, own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(inputs, spec)
        before = Snapshot([module, *args, *kwargs.values()])
        versions = [leaf._version for leaf in inputs if isinstance(leaf, torch.Tensor)]
        outer, recorder.items = recorder.items, []
        assumptions = dict(recorder.assumptions)
        try:
            output = original(module, *args, **kwargs)
            block = Block(split(recorder.modules.path(module)), recorder.items)
            run = self._run_of(module, block, inputs, output, leaves)
            if before.changed() or versions != [leaf._version for leaf in inputs if isinstance(leaf, torch.Tensor)]:
                raise _Unsafe
        except _Unsafe:
            recorder.assumptions = assumptions
            before.restore()
            raise
        except RuntimeError as error:
            before.restore()
            if "leaf Variable" in str(error):
                recorder.assumptions = assumptions
                raise _Unsafe from error
            raise
        finally:
            recorder.items = outer
        return run

    def _detached(self, tensor: torch.Tensor, own: dict[int, torch.Tensor]) -> torch.Tensor:
        """A leaf in the place of an input that needs a gradient; the same one for the same tensor."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        if id(tensor) not in own:
            own[id(tensor)] = tensor.detach().requires_grad_()
            self._autocast.is_activation(own[id(tensor)])
        return own[id(tensor)]

    def _run_of(self, module: nn.Module, block: Block, inputs: list[Any], output: Any, originals: list[Any]) -> _Run:
        flat, spec = tree_flatten(output)
        places = {id(leaf): index for index, leaf in reversed(list(enumerate(inputs))) if isinstance(leaf, torch.Tensor)}
        results = []
        for leaf in flat:
            if id(leaf) in places:
                results.append(_Result(from_input=places[id(leaf)]))
            elif isinstance(leaf, torch.Tensor):
                results.append(_Result(tensor=leaf))
            elif isinstance(leaf, _VALUES):
                results.append(_Result(value=leaf))
            else:
                raise _Unsafe
        detached = {id(leaf): leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf}
        leaves = [*detached.values(), *(p for p in self._parts_of(module)[1] if p.requires_grad and id(p) not in detached)]
        tainted = self._recorder.tainted
        assumed = [r.tensor is not None and storage_id(r.tensor) in tainted for r in results]
        run = _Run(module, block, spec, results, leaves, assumed, [inputs, originals])
        if torch.is_grad_enabled() and not _closed(run.differentiable, leaves):
            raise _Unsafe
        return run

    # -- later runs

    def _replay(self, run: _Run, module: nn.Module, leaves: list[Any]) -> Any:
        recorder = self._recorder
        path = recorder.modules.path(module)
        recorder.items.append(Replay(run.block, split(path)))
        if module is not run.module:
            self._autocast.ran(self._parts_of(module)[1], self._parts_of(run.module)[1])
        fresh = iter(self._differentiable(run, module, path, leaves))
        output: list[Any] = []
        for result, assumed in zip(run.results, run.assumed, strict=True):
            if result.from_input is not None:
                output.append(leaves[result.from_input])
            elif result.tensor is None:
                output.append(result.value)
            elif result.tensor.requires_grad:
                output.append(next(fresh))
            else:
                output.append(self._copy(result.tensor))
            if assumed:
                recorder.tainted[storage_id(output[-1])] = output[-1].untyped_storage()
        return tree_unflatten(output, run.spec)

    def _differentiable(self, run: _Run, module: nn.Module, path: str, leaves: list[Any]) -> Any:
        if not run.differentiable:
            return ()
        inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        parameters = [p for p in self._parts_of(module)[1] if p.requires_grad and id(p) not in inputs]
        return _BlockRun.apply(self, run, path, *inputs.values(), *parameters)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like an output without gradient, with its contents where they are known."""
        if not tensor.is_meta:
            return tensor
        made = _Meta.of(tensor).make()
        value = self._recorder.shadows.value(tensor)
        if value is not None:
            self._recorder.shadows.attach(made, value)
        self._recorder.classes.copy(tensor, made)
        return made

    # -- gradients

    def differentiate(self, run: _Run, path: str, gradients: Any) -> list[torch.Tensor | None]:
        """The gradients of a run's leaves for gradients of its outputs (None where none arrived)."""
        key = tuple(None if gradient is None else (_Meta.of(gradient), _alignment(gradient)) for gradient in gradients)
        known = run.backward.get(key)
        if known is None:
            known = run.backward[key] = self._record_backward(run, gradients)
        block, results = known
        self._recorder.items.append(Replay(block, split(path)))
        return [None if result is None else result.make() for result in results]

    def _record_backward(self, run: _Run, gradients: Any) -> tuple[Block, list[_Meta | None]]:
        recorder = self._recorder
        reached = [(tensor, gradient) for tensor, gradient in zip(run.differentiable, gradients, strict=True) if gradient is not None]
        outer, recorder.items = recorder.items, []
        try:
            results = differentiated([tensor for tensor, _ in reached], [gradient for _, gradient in reached], run.leaves)
            block = Block(run.block.path, recorder.items)
        finally:
            recorder.items = outer
        return block, [None if result is None else _Meta.of(result) for result in results]


def _alignment(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset() * tensor.itemsize % 128)


def differentiated(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor] = ()) -> Any:
    """As torch.autograd.grad (without `leaves` as torch.autograd.backward), keeping the graph; torch's own functions import sympy first."""
    engine = torch.autograd.Variable._execution_engine
    accumulate = not leaves
    return engine.run_backward(
        tuple(outputs), tuple(gradients), bool(leaves), False, tuple(leaves), allow_unreachable=True, accumulate_grad=accumulate
    )


def _have_hooks(modules: list[nn.Module]) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def _closed(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> bool:
    """Whether the graph behind `outputs` ends at `leaves` alone, so that no gradient gets lost."""
    known = {id(leaf) for leaf in leaves}
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    if any(tensor.grad_fn is None and id(tensor) not in known for tensor in outputs):
        return False
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            return False
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return True
