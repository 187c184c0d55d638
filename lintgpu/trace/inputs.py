"""Make the inputs of a model from its forward signature, the shapes its docstring states, and its config.

Runs in the worker, under the trace's modes, so tensors made here are on meta and keep the values of small integer tensors.
There is no list of models here: a parameter's name says what it holds, the config says how large it is, and where a model
asks for more, its own error message says what.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lintgpu.target.base import Built
from lintgpu.trace.errors import TraceError
from lintgpu.workload import Mode, Workload

Shape = tuple[int, ...]

_IMAGE_SIZE, _CHANNELS, _FRAMES, _MELS, _SAMPLES, _AUDIO_FRAMES = 224, 3, 8, 80, 16000, 3000
_MAX_AMENDMENTS = 12
# What a model that starts from something else than its first parameter is fed with, in this order.
_MAIN_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values", "pixel_values_videos", "inputs_embeds")
_NOT_INPUTS = re.compile(
    r"(use_|output_|return_|interpolate_|kwargs|args|self|labels?$|past_key_values|cache|.*_loss|logits_to_keep|num_logits)"
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One input tensor to make: its shape, whether it holds integers, and the value that fills it."""

    shape: Shape
    integer: bool
    fill: int = 0
    values: tuple[Any, ...] | None = None
    """Literal nested values instead of a fill, for small index tensors such as image grids."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The inputs chosen so far for one model; `amend` answers the model's complaints with another one."""

    names: Mapping[str, int]
    """Parameter name -> which of its candidate specs."""
    tried: frozenset[tuple[tuple[str, int], ...]] = frozenset()
    by_name: bool = False
    """The model asked for the newest input by its name."""


class Sizes:
    """What the workload and the config say about sizes."""

    def __init__(self, config: Any, workload: Workload) -> None:
        self.config = config
        self.batch = workload.batch
        limit = self.find("max_position_embeddings", "n_positions", "max_target_positions", default=workload.sequence)
        self.sequence = min(workload.sequence, limit) if limit and limit > 8 else workload.sequence
        self.encoder_sequence = self.sequence
        self.channels = self.find("num_channels", "in_channels", "in_chans", "num_input_channels", default=_CHANNELS)
        size = self._raw("image_size", "img_size", "input_size", "input_resolution")
        self.height, self.width = _pair(size, _IMAGE_SIZE)
        self.frames = self.find("num_frames", "frames_per_clip", "tubelet_frames", default=_FRAMES)
        self.mels = self.find(
            "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_feat_size", "num_mels", default=_MELS
        )
        positions = self.find("max_source_positions", default=0)
        self.audio_frames = 2 * positions if positions and positions < _SAMPLES else _AUDIO_FRAMES
        self.hidden = self.find("hidden_size", "d_model", "embed_dim", "n_embd", "dim", "encoder_hidden_size", default=768)

    def find(self, *names: str, default: int = 0) -> int:
        """The first of `names` that the config or one of its parts states as an int (the first of a list)."""
        value = self._raw(*names)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def _raw(self, *names: str) -> Any:
        for part in _parts(self.config):
            for name in names:
                value = _read(part, name)
                if value is not None and not isinstance(value, bool):
                    return value
        return None


def for_transformers(model: Any, config: Any, workload: Workload, assumptions: Sequence[str] = ()) -> Built:
    """Inputs, loss and, through Built.extra["amend"], better inputs after a complaint, for a transformers model."""
    maker = _Maker(model, config, workload)
    return maker.built(maker.first(), tuple(assumptions))


class _Maker:
    def __init__(self, model: Any, config: Any, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self.config = config
        self.sizes = Sizes(config, workload)
        self.signature = inspect.signature(model.forward).parameters
        self.documented = documented_shapes(inspect.getdoc(model.forward) or "")
        self.token = _ordinary_token(config, self.sizes)

    def first(self) -> Request:
        """The main input, whatever has no default, and the decoder's tokens of an encoder-decoder."""
        names: list[str] = []
        main = getattr(self.model, "main_input_name", "")
        if main in self.signature:
            names.append(main)
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
        return Request({name: 0 for name in dict.fromkeys(names) if self.candidates(name)})

    def built(self, request: Request, assumptions: tuple[str, ...]) -> Built:
        labels = self._labels(request)

        def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self.workload.mode is Mode.DECODE:
                return (), self._decode_inputs(request)
            keywords = {name: tensor(self.candidates(name)[index]) for name, index in request.names.items()}
            if labels is not None:
                keywords["labels"] = tensor(labels)
            if "use_cache" in self.signature:
                keywords["use_cache"] = False
            return (), keywords

        def amend(message: str) -> Built | None:
            better = self.amended(request, message)
            return self.built(better, assumptions) if better is not None else None

        loss = (lambda output: output["loss"] if isinstance(output, Mapping) else output[0]) if labels is not None else None
        return Built(self.model, make, loss, assumptions, {"amend": amend, "by_name": request.by_name})

    def candidates(self, name: str) -> list[Spec]:
        """The shapes that a parameter may want, likeliest first."""
        specs = list(_by_name(name, self.sizes, self.token))
        shape = self.documented.get(name)
        if shape is not None:
            specs += [spec for spec in _by_document(shape, self.sizes, self.config) if spec not in specs]
        return specs

    def amended(self, request: Request, message: str) -> Request | None:
        """Add an input the message names, else another shape of one, else a further main input."""
        tried = request.tried | {tuple(request.names.items())}
        if len(tried) > _MAX_AMENDMENTS:
            return None
        for by_name, ideas in ((True, self._named(request.names, message)), (False, self._guesses(request.names))):
            for names in ideas:
                if tuple(names.items()) not in tried:
                    return Request(names, tried, by_name)
        return None

    def _named(self, names: Mapping[str, int], message: str) -> Iterator[dict[str, int]]:
        for name in self.signature:
            if name not in names and re.search(rf"\b{re.escape(name)}\b", message) and self.candidates(name):
                yield {**names, name: 0}

    def _guesses(self, names: Mapping[str, int]) -> Iterator[dict[str, int]]:
        for name, index in names.items():
            if index + 1 < len(self.candidates(name)):
                yield {**names, name: index + 1}
        for name in (*_MAIN_INPUTS, "decoder_input_ids", "bbox", "attention_mask", "image_grid_thw"):
            if name in self.signature and name not in names and self.candidates(name):
                yield {**names, name: 0}

    def _labels(self, request: Request) -> Spec | None:
        if self.workload.mode is not Mode.TRAIN or "labels" not in self.signature:
            return None
        shape = self.documented.get("labels", "")
        tokens = next((name for name in ("decoder_input_ids", "input_ids") if name in request.names), None)
        name = type(self.model).__name__
        if tokens and re.search(r"LM(Head)?(Model)?$|ForCausalLM|ForConditionalGeneration|ForMaskedLM|ForTokenClassification", name):
            spec = self.candidates(tokens)[request.names[tokens]]
            return dataclasses.replace(spec, fill=0 if "TokenClassification" in name else spec.fill)
        if re.fullmatch(r"\(?batch_size,?\)?", shape) and "Classification" in name:
            return Spec((self.sizes.batch,), True)
        return None

    def _decode_inputs(self, request: Request) -> dict[str, Any]:
        """One token a sequence after a context of `sequence` tokens, with the cache that the model itself fills."""
        import torch

        keywords = {name: tensor(self.candidates(name)[index]) for name, index in request.names.items()}
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


def tensor(spec: Spec) -> Any:
    """The tensor of a spec on the current default device; floating ones in the default dtype."""
    import torch

    if spec.values is not None:
        return torch.tensor(spec.values)
    return torch.full(spec.shape, spec.fill, dtype=torch.long) if spec.integer else torch.zeros(spec.shape)


def documented_shapes(docstring: str) -> dict[str, str]:
    """Parameter name -> the first shape that its line of a docstring states, as text such as "(batch_size, 4)"."""
    shapes: dict[str, str] = {}
    for match in re.finditer(r"^\s*(\w+) ?\((.*)$", docstring, re.MULTILINE):
        shape = re.search(r"of shape `?(\([^)`]*\)|[^`]*)`?", match.group(2))
        if shape is not None:
            kind = "Long" if re.search(r"LongTensor|IntTensor|BoolTensor", match.group(2)) else ""
            shapes.setdefault(match.group(1), kind + shape.group(1))
    return shapes


def _by_name(name: str, sizes: Sizes, token: int) -> Iterator[Spec]:
    batch, sequence, image = sizes.batch, sizes.sequence, (sizes.channels, sizes.height, sizes.width)
    if re.fullmatch(r"(decoder_|encoder_|qformer_|text_|query_|question_)?(input_ids|entity_ids)|input_tokens|tokens", name):
        yield Spec((batch, sequence), True, token)
    elif re.fullmatch(r"(\w+_)?attention_mask|token_mask", name):
        yield Spec((batch, sequence), True, 1)
    elif re.fullmatch(r"(decoder_)?position_ids|token_type_ids|mm_token_type_ids", name):
        yield Spec((batch, sequence), True)
    elif re.fullmatch(r"pixel_values|pixel_values_images?|images?|flattened_patches|sample", name):
        yield Spec((batch, *image), False)
        yield Spec((batch, sizes.frames, *image), False)
    elif re.fullmatch(r"pixel_values_videos?|videos?", name):
        yield Spec((batch, sizes.frames, *image), False)
    elif re.fullmatch(r"input_values|audio_values|audio|waveform|input_waveform", name):
        yield Spec((batch, _SAMPLES), False)
        yield Spec((batch, 1, _SAMPLES), False)
        yield Spec((batch, sizes.find("max_length", default=1024), sizes.mels), False)
    elif re.fullmatch(r"(audio_)?input_features|audio_features|input_mel|audio_mel|spectrogram", name):
        yield Spec((batch, sizes.mels, sizes.audio_frames), False)
        yield Spec((batch, sizes.audio_frames, sizes.mels), False)
        yield Spec((batch, 1, sizes.find("spec_size", default=1001), sizes.mels), False)
    elif name == "bbox":
        yield Spec((batch, sequence, 4), True)
    elif re.fullmatch(r"(\w+_)?inputs_embeds|(encoder_)?hidden_states|query_embeds", name):
        yield Spec((batch, sequence, sizes.hidden), False)
    elif re.fullmatch(r"(image_|video_)?grid_thw|image_grid_hws", name):
        yield Spec((1, 3), True, values=((1, 16, 16),))


def _by_document(shape: str, sizes: Sizes, config: Any) -> Iterator[Spec]:
    integer = shape.startswith("Long")
    text = shape.removeprefix("Long").strip("() ,")
    dims = [_dimension(part.strip(), sizes, config) for part in text.split(",")] if text else []
    if dims and all(dim is not None for dim in dims):
        yield Spec(tuple(dim for dim in dims if dim is not None), integer)


def _dimension(text: str, sizes: Sizes, config: Any) -> int | None:
    if text.isdecimal():
        return int(text)
    known = {
        **dict.fromkeys(("batch_size", "batch"), sizes.batch),
        **dict.fromkeys(("sequence_length", "seq_len", "target_sequence_length", "text_sequence_length"), sizes.sequence),
        **dict.fromkeys(("height", "image_size", "frame_size"), sizes.height),
        **dict.fromkeys(("feature_dim", "feature_size"), sizes.mels),
        **dict.fromkeys(("num_images", "num_videos", "num_boxes", "num_points", "point_batch_size"), 1),
        "num_channels": sizes.channels,
        "width": sizes.width,
        "num_frames": sizes.frames,
    }
    if text in known:
        return known[text]
    value = sizes.find(text.removeprefix("config.").replace(" ", "_"))
    return value or None


def _ordinary_token(config: Any, sizes: Sizes) -> int:
    """A token id that is no special token: padding would be masked, an image token would ask for an image."""
    special: set[int] = set()
    for part in _parts(config):
        for name, value in (part if isinstance(part, Mapping) else vars(part)).items():
            if name.endswith(("_id", "_ids", "_index")):
                items = value if isinstance(value, (list, tuple)) else (value,)
                special |= {item for item in items if isinstance(item, int)}
    vocabulary = sizes.find("vocab_size", default=100)
    return next((token for token in range(3, vocabulary) if token not in special), 0)


def _parts(config: Any) -> list[Any]:
    """The config and its nested parts, outermost first."""
    found, waiting = [], [config]
    while waiting:
        part = waiting.pop(0)
        found.append(part)
        values = part.values() if isinstance(part, Mapping) else vars(part).values()
        waiting += [value for value in list(values) if hasattr(value, "to_dict") and hasattr(value, "model_type")]
    return found


def _read(part: Any, name: str) -> Any:
    try:
        return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
    except Exception:  # Properties of configs may raise anything.
        return None


def _pair(size: Any, default: int) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return size.get("height", default), size.get("width", default)
    if isinstance(size, (list, tuple)) and size:
        return size[0], size[1] if len(size) > 1 else size[0]
    return (size, size) if isinstance(size, int) and size > 0 else (default, default)


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
        kinds = list(_first_layer_specs(self.model, workload.batch, workload.sequence))
        for spec in kinds:
            yield self._with_targets(spec, workload), ""
        for length in (512, 256, 128, 64):
            if length < workload.sequence and kinds and kinds[0].integer:
                shorter = Spec((workload.batch, length), True, 1)
                yield self._with_targets(shorter, workload), f"the model takes no sequence of {workload.sequence}: {length} was traced"

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


def _first_layer_specs(model: Any, batch: int, sequence: int) -> Iterator[Spec]:
    """What the first layer takes, then what the others of the usual kinds would."""
    tokens = Spec((batch, sequence), True, 1)
    seen: list[Spec] = []
    for layer in model.modules():
        kind = type(layer).__name__
        if kind.startswith("Embedding"):
            seen.append(tokens)
        elif kind == "Linear":
            seen += [Spec((batch, sequence, layer.in_features), False), Spec((batch, layer.in_features), False)]
        elif kind in ("Conv1d", "Conv2d", "Conv3d"):
            size = {"Conv1d": (sequence,), "Conv2d": (_IMAGE_SIZE, _IMAGE_SIZE), "Conv3d": (_FRAMES, 112, 112)}[kind]
            seen.append(Spec((batch, layer.in_channels, *size), False))
        if len(seen) > 4:
            break
    yield from dict.fromkeys(spec for spec in (*seen, tokens, Spec((batch, _CHANNELS, _IMAGE_SIZE, _IMAGE_SIZE), False)))


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
