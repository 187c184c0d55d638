"""Make the inputs of a transformers model from its forward signature, its docstring and its config, and mend them by its complaints.

Runs in the worker, under the trace's modes, so tensors made here are on meta and keep the values of small integer tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lintgpu.target.base import Built
from lintgpu.trace.complaints import Specs, reshaped
from lintgpu.trace.errors import TraceError
from lintgpu.trace.input_specs import Sizes, Spec, by_document, by_name, documented_shapes, first_layer_specs, ordinary_token, tensor
from lintgpu.workload import Mode, Workload

_MAX_AMENDMENTS = 24
# What a model that starts from something else than its first parameter is fed with, in this order.
_MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values", "pixel_values_videos", "inputs_embeds")
_FURTHER_INPUTS = ("decoder_input_ids", "bbox", "attention_mask", "image_grid_thw")
_NOT_INPUTS = re.compile(
    r"(use_|output_|return_|interpolate_|kwargs|args|self|labels?$|past_key_values|cache|.*_loss|logits_to_keep|num_logits)"
)
_OTHER_LENGTHS = (512, 4096, 64, 1024, 16)


@dataclasses.dataclass(frozen=True)
class Request:
    """The inputs to try now, and what to try after them."""

    specs: Specs
    base: Specs
    """The inputs that the model has asked for by name so far; guesses go out from here."""
    waiting: tuple[Specs, ...] = ()
    """Other inputs that complaints have suggested, likeliest first."""
    tried: frozenset[frozenset[tuple[str, Spec]]] = frozenset()
    asked_for: bool = False
    """The model named the newest input."""


def for_transformers(model: Any, config: Any, workload: Workload, assumptions: Sequence[str] = ()) -> Built:
    """Inputs, loss and, through Built.extra["amend"], better inputs after a complaint, for a transformers model."""
    maker = _Maker(model, config, workload)
    first = maker.first()
    return maker.built(Request(first, first), tuple(assumptions))


class _Maker:
    def __init__(self, model: Any, config: Any, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self.config = config
        self.sizes = Sizes(config, workload)
        self.signature = inspect.signature(model.forward).parameters
        self.documented = documented_shapes(inspect.getdoc(model.forward) or "")
        self.token = ordinary_token(config, self.sizes)
        self.patched = ""
        if any(re.fullmatch(r"(image_)?grid_(thw|hws?)|tgt_sizes", name) for name in self.signature):
            self.patched = "rows"
        if any(name in self.signature for name in ("spatial_shapes", "pixel_attention_mask", "pixel_position_ids")):
            self.patched = "batches"

    def first(self) -> dict[str, Spec]:
        """The main input, whatever has no default, the decoder's tokens of an encoder-decoder, and labels in training."""
        names: list[str] = []
        main = getattr(self.model, "main_input_name", "")
        names += [name for name in (main if isinstance(main, (list, tuple)) else (main,)) if name in self.signature]
        for name, parameter in self.signature.items():
            needed = parameter.default is inspect.Parameter.empty and parameter.kind in (
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.KEYWORD_ONLY,
            )
            if needed and name not in names and not _NOT_INPUTS.match(name):
                names.append(name)
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in self.signature:
            names.append("decoder_input_ids")
        if not names:
            names = [name for name in _MAIN_INPUTS if name in self.signature][:1]
        specs = {name: self.candidates(name)[0] for name in dict.fromkeys(names)}
        labels = self._labels(specs)
        return specs if labels is None else {**specs, "labels": labels}

    def built(self, request: Request, assumptions: tuple[str, ...]) -> Built:
        """The model with the inputs of a request."""

        def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self.workload.mode is Mode.DECODE:
                return (), self._decode_inputs(request.specs)
            keywords = {name: tensor(spec) for name, spec in request.specs.items()}
            if "use_cache" in self.signature:
                keywords["use_cache"] = False
            return (), keywords

        def amend(message: str) -> Built | None:
            better = self.amended(request, message)
            return self.built(better, assumptions) if better is not None else None

        loss = _loss_of if "labels" in request.specs else None
        return Built(self.model, make, loss, (*assumptions, *self._said(request)), {"amend": amend, "by_name": request.asked_for})

    def _said(self, request: Request) -> Iterator[str]:
        missing = [name for name in _MAIN_INPUTS[1:-1] if name in self.signature and name not in request.specs]
        if "input_ids" in request.specs and missing:
            yield f"tokens alone were traced, without {' or '.join(missing)}: the parts of the model that read those are left out"
        for name, spec in request.specs.items():
            if name.endswith("input_ids") and self.workload.mode is not Mode.DECODE and spec.shape[-1] != self.workload.sequence:
                yield f"the model takes {name} of {spec.shape[-1]}, not of {self.workload.sequence} tokens"

    def candidates(self, name: str) -> list[Spec]:
        """The specs that a parameter may want, likeliest first."""
        specs = list(by_name(name, self.sizes, self.token, self.patched))
        if specs[0].floating:
            specs += first_layer_specs(self.model, self.sizes.batch, self.sizes.sequence)
        shape = self.documented.get(name)
        stated = list(by_document(shape, self.sizes)) if shape is not None else []
        distinct: dict[tuple[int, ...], Spec] = {}
        for spec in (*specs, *stated):
            distinct.setdefault(spec.shape, spec)
        return list(distinct.values())

    def amended(self, request: Request, message: str) -> Request | None:
        """Other inputs: what the message asks for, else what it or an earlier one suggests, else a guess; None with nothing left to try."""
        tried = request.tried | {frozenset(request.specs.items())}
        if len(tried) > _MAX_AMENDMENTS:
            return None
        named = tuple(self._named(request.specs, message))
        waiting = (*named, *request.waiting, *reshaped(message, request.specs, self.sizes))
        for index, specs in enumerate(waiting):
            if frozenset(specs.items()) not in tried:
                asked_for = specs in named
                return Request(specs, specs if asked_for else request.base, waiting[index + 1 :], tried, asked_for)
        for specs in self._guesses(request.base, "None" in message):
            if frozenset(specs.items()) not in tried:
                return Request(specs, request.base, (), tried)
        return None

    def _named(self, specs: Specs, message: str) -> Iterator[dict[str, Spec]]:
        """All the arguments that a call misses, else the one input that the message speaks of."""
        missing = re.search(r"missing \d+ required positional arguments?: (.*)", message)
        if missing is not None:
            names = [name for name in re.findall(r"'(\w+)'", missing.group(1)) if name in self.signature and name not in specs]
            if names:
                yield {**specs, **{name: self.candidates(name)[0] for name in names}}
        # The line of code tells what is missing only where something is None; else it names inputs that are there.
        text = message if "None" in message else message.partition("\n")[0]
        for name in self.signature:
            if name not in specs and not _NOT_INPUTS.match(name) and re.search(rf"(?<!\.)\b{re.escape(name)}\b", text):
                yield {**specs, name: self.candidates(name)[0]}

    def _guesses(self, base: Specs, something_missing: bool) -> Iterator[dict[str, Spec]]:
        if "labels" in base:
            yield {name: spec for name, spec in base.items() if name != "labels"}
        additions = [name for name in (*_MAIN_INPUTS, *_FURTHER_INPUTS) if name in self.signature and name not in base]
        added = [{**base, name: self.candidates(name)[0]} for name in additions]
        reshaped = [{**base, name: spec} for name in base if name != "labels" for spec in self.candidates(name)[:5]]
        yield from (*added, *reshaped) if something_missing else (*reshaped, *added)
        for length in _OTHER_LENGTHS:
            yield {name: _with_length(spec, self.sizes.sequence, length) for name, spec in base.items()}
        for first, second in pairwise(additions):
            yield {**base, first: self.candidates(first)[0], second: self.candidates(second)[0]}

    def _labels(self, specs: Specs) -> Spec | None:
        if self.workload.mode is not Mode.TRAIN or "labels" not in self.signature:
            return None
        shape = self.documented.get("labels", "").removeprefix("Long")
        tokens = next((name for name in ("decoder_input_ids", "input_ids") if name in specs), None)
        name = type(self.model).__name__
        if tokens and re.search(r"LM(Head)?(Model)?$|ForCausalLM|ForConditionalGeneration|ForMaskedLM|ForTokenClassification", name):
            return dataclasses.replace(specs[tokens], fill=0 if "TokenClassification" in name else specs[tokens].fill)
        if re.fullmatch(r"\(?batch_size,?\)?", shape) and "Classification" in name:
            return Spec((self.sizes.batch,), True)
        return None

    def _decode_inputs(self, specs: Specs) -> dict[str, Any]:
        """One token a sequence after a context of `sequence` tokens, with the cache that the model itself fills."""
        import torch

        keywords = {name: tensor(spec) for name, spec in specs.items()}
        last = "decoder_input_ids" if "decoder_input_ids" in keywords else "input_ids"
        cache = next((name for name in ("past_key_values", "cache") if name in self.signature), None)
        if cache is None or last not in keywords:
            raise TraceError(
                "inputs", f"{type(self.model).__name__} keeps no KV cache, so it has no decode step", "trace with --mode infer"
            )
        with torch.no_grad():
            prefill = self.model(**keywords, use_cache=True)
        keywords[cache] = prefill["past_key_values"] if "past_key_values" in prefill else prefill[cache]
        keywords[last] = tensor(Spec((self.sizes.batch, 1), True, self.token))
        if "encoder_outputs" in self.signature and "encoder_last_hidden_state" in prefill:
            keywords["encoder_outputs"] = (prefill["encoder_last_hidden_state"],)
            keywords = {name: value for name, value in keywords.items() if name not in _MAIN_INPUTS}
        return {**keywords, "use_cache": True}


def _loss_of(output: Any) -> Any | None:
    """A transformers output's loss; None, which sums the outputs, where it computed none."""
    return output.get("loss") if isinstance(output, Mapping) else output[0]


def _with_length(spec: Spec, sequence: int, length: int) -> Spec:
    return dataclasses.replace(spec, shape=tuple(length if dim == sequence and index > 0 else dim for index, dim in enumerate(spec.shape)))
