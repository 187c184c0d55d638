"""Stand-ins, while a model is traced, for parts of torch that hide ops from the dispatcher or cannot run on meta."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lintgpu.trace.attention import AttentionOverride
from lintgpu.trace.recorder import Recorder

CHECKPOINTING = "activation checkpointing was left out: its blocks run once, without being computed again in the backward pass"


@contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    """Set attributes of `owner` for a while; those that it lacks are left out."""
    before = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    for name in before:
        setattr(owner, name, names[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def without_compilers(calls: list[str]) -> Iterator[None]:
    """torch.compile and torch.jit hand back what they are given, so that ops reach the dispatcher; `calls` notes who asked."""

    def compile_(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_(function, **options)
        calls.append(type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "?"))
        return model

    def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
        calls.append(type(module).__name__)

    with (
        replaced(torch, compile=compile_),
        replaced(nn.Module, compile=compile_in_place),
        replaced(torch.jit._state._enabled, enabled=False),
    ):
        yield


@contextmanager
def plain_checks() -> Iterator[None]:
    """torch._check compares plain ints here; the real one imports sympy to be ready for symbolic ones."""

    def check_with(error_type: type[Exception], condition: Any, message: Callable[[], str] | None) -> None:
        if not condition:
            raise error_type(message() if message is not None else "a check of torch failed")

    with replaced(torch, _check_with=check_with):
        yield


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """torch.inference_mode only switches gradients off: under the real one, composite ops would reach the recorder whole."""

    def enter(context: Any) -> None:
        context._lintgpu_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(context._lintgpu_grad and not getattr(context, "mode", True))

    def leave(context: Any, *error: Any) -> None:
        torch._C._set_grad_enabled(context._lintgpu_grad)

    with replaced(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


@contextmanager
def without_checkpointing(recorder: Recorder) -> Iterator[None]:
    """torch.utils.checkpoint runs what it is given, once."""

    def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for name in ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop"):
            options.pop(name, None)
        recorder.assumptions.setdefault(CHECKPOINTING)
        return function(*args, **options)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return checkpoint(function, *args)

    def generator(*args: Any, **options: Any) -> Iterator[None]:
        recorder.assumptions.setdefault(CHECKPOINTING)
        yield

    import torch.utils.checkpoint as module

    with replaced(module, checkpoint=checkpoint, CheckpointFunction=Reentrant, _checkpoint_without_reentrant_generator=generator):
        yield


@contextmanager
def flex_attention(attention: AttentionOverride) -> Iterator[None]:
    """flex_attention is recorded as the attention it computes. Only where the model has imported it."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        yield
        return

    def attend(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, options: Any, *rest: Any) -> Any:
        output = attention.attend(query, key, value, is_causal=_is_causal(block_mask))
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return output, statistics, statistics

    with replaced(module, flex_attention_hop=attend, _validate_device=lambda *operands: None):
        yield


def _is_causal(block_mask: Any) -> bool:
    """Whether the mask function lets a query see the keys before it and not those after it."""
    function = block_mask[-1] if isinstance(block_mask, (tuple, list)) else None
    if not callable(function):
        return False
    with suppress(Exception), torch._C._DisableTorchDispatch():
        zero, one = torch.tensor(0, device="cpu"), torch.tensor(1, device="cpu")
        return bool(function(zero, zero, one, zero)) and not bool(function(zero, zero, zero, one))
    return False
