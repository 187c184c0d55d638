"""Make the inputs of a module of anybody's: its owner's example, else tensors of the kind that its first layer takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lintgpu.target.base import Built
from lintgpu.trace.errors import TraceError
from lintgpu.trace.input_specs import CHANNELS, IMAGE_SIZE, Spec, first_layer_specs, tensor
from lintgpu.workload import Mode, Workload


def for_module(model: Any, workload: Workload, example: Any = None, loss: Any = None) -> Built:
    """Inputs for a module of anybody's: its owner's example, else tensors of the kind its first layer takes.

    `example` is a function, a table {name: {"shape": [...], "dtype": ...}} or the inputs themselves.
    """
    if workload.mode is Mode.DECODE:
        raise TraceError("inputs", "decode mode needs a KV cache, and how this module keeps one is not known", "trace with --mode infer")
    finder = loss or _scalar_loss
    if example is not None:
        return Built(model, lambda: _example(example, workload), finder)
    return _Guess(model, workload, finder).built(0)


class _Guess:
    """Input sets for a module, likeliest first."""

    def __init__(self, model: Any, workload: Workload, loss: Any) -> None:
        self.model = model
        self.loss = loss
        self.signature = inspect.signature(model.forward).parameters
        self.choices = list(self._choices(workload))

    def built(self, index: int) -> Built:
        specs, said = self.choices[index]

        def amend(complaint: str) -> Built | None:
            return self.built(index + 1) if index + 1 < len(self.choices) else None

        return Built(
            self.model,
            lambda: ((), {name: tensor(spec) for name, spec in specs.items()}),
            self.loss,
            (said,) if said else (),
            {"amend": amend},
        )

    def _choices(self, workload: Workload) -> Iterator[tuple[dict[str, Spec], str]]:
        first, *others = _likely_specs(self.model, workload)
        yield self._with_targets(first, workload), ""
        for length in (512, 256, 128, 64):
            if length < workload.sequence and first.integer:
                shorter = Spec((workload.batch, length), True, 1)
                yield self._with_targets(shorter, workload), f"the model takes no sequence of {workload.sequence}: {length} was traced"
        for spec in others:
            yield self._with_targets(spec, workload), ""

    def _with_targets(self, main: Spec, workload: Workload) -> dict[str, Spec]:
        specs: dict[str, Spec] = {}
        for name, parameter in self.signature.items():
            required = parameter.default is inspect.Parameter.empty
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            if re.fullmatch(r"(targets?|labels?|y|tgt_ids)", name):
                if main.integer and (required or workload.mode is Mode.TRAIN):
                    specs[name] = Spec(main.shape, True, 1)
            elif not specs:
                specs[name] = main
            elif required:
                specs[name] = Spec(main.shape, True, 1) if re.search("mask|ids|pos", name) else main
        return specs


def _likely_specs(model: Any, workload: Workload) -> Iterator[Spec]:
    """What the first layer takes, then what the others of the usual kinds would."""
    tokens = Spec((workload.batch, workload.sequence), True, 1)
    floating = list(first_layer_specs(model, workload.batch, workload.sequence))
    first = next((layer for layer in model.modules() if type(layer).__name__.startswith(("Embedding", "Linear", "Conv"))), None)
    starts_with_tokens = first is None or type(first).__name__.startswith("Embedding")
    image = Spec((workload.batch, CHANNELS, IMAGE_SIZE, IMAGE_SIZE), False)
    yield from dict.fromkeys([tokens, *floating, image] if starts_with_tokens else [*floating, tokens, image])


def _example(example: Any, workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if callable(example):
        accepted = inspect.signature(example).parameters
        sizes = {"batch": workload.batch, "batch_size": workload.batch, "sequence": workload.sequence, "seq_len": workload.sequence}
        example = example(**{name: size for name, size in sizes.items() if name in accepted})
    elif isinstance(example, Mapping) and all(isinstance(entry, Mapping) for entry in example.values()):
        example = {name: _tabled(entry, workload) for name, entry in example.items()}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    return (example,), {}


def _tabled(entry: Mapping[str, Any], workload: Workload) -> Any:
    import torch

    sizes = {"batch": workload.batch, "sequence": workload.sequence}
    shape = tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in entry["shape"])
    dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else torch.get_default_dtype()
    return torch.full(shape, entry.get("value", 0), dtype=dtype)


def _scalar_loss(output: Any) -> Any | None:
    """The scalar of an output that a training loop would call backward on; None lets backward start from the outputs."""
    return next((item for item in _floating(output) if item.dim() == 0 and item.requires_grad), None)


def _floating(output: Any) -> Iterator[Any]:
    if hasattr(output, "is_floating_point"):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floating(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _floating(value)
