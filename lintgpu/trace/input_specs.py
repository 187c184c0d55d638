"""What the inputs of a transformers model look like: from a parameter's name, the shape its docstring states, and the config.

There is no list of models here: a parameter's name says what it holds and the config says how large it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lintgpu.workload import Workload

Shape = tuple[int, ...]

IMAGE_SIZE, CHANNELS, FRAMES, MELS, SAMPLES, AUDIO_FRAMES = 224, 3, 8, 80, 16000, 3000
GRID = 16
"""Patches a side of the images that models take as rows of patches."""


@dataclass(frozen=True)
class Spec:
    """One input tensor to make: its shape, whether it holds integers, and the value that fills it."""

    shape: Shape
    integer: bool
    fill: int = 0
    values: tuple[Any, ...] | None = None
    """Literal nested values instead of a fill, for small index tensors such as image grids."""
    boolean: bool = False

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point numbers."""
        return not self.integer and not self.boolean


class Sizes:
    """What the workload and the config say about sizes."""

    def __init__(self, config: Any, workload: Workload) -> None:
        self.config = config
        self.batch = workload.batch
        limit = self.find("max_position_embeddings", "n_positions", "max_target_positions", default=workload.sequence)
        self.sequence = min(workload.sequence, limit) if limit and limit > 8 else workload.sequence
        self.channels = self.find("num_channels", "in_channels", "in_chans", "num_input_channels", default=CHANNELS)
        size = self._raw("image_size", "img_size", "input_size", "input_resolution")
        self.height, self.width = _pair(size, IMAGE_SIZE)
        self.frames = self.find("num_frames", "frames_per_clip", "tubelet_frames", default=FRAMES)
        self.mels = self.find(
            "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_feat_size", "num_mels", default=MELS
        )
        positions = self.find("max_source_positions", default=0)
        self.audio_frames = 2 * positions if positions and positions < SAMPLES else AUDIO_FRAMES
        side, depth = self.find("patch_size", default=16), self.find("temporal_patch_size", default=1)
        self.patch = self.channels * depth * side * side
        """Values of one flattened patch."""
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


def tensor(spec: Spec) -> Any:
    """The tensor of a spec on the current default device; floating ones in the default dtype."""
    import torch

    if spec.values is not None:
        return torch.tensor(spec.values)
    if spec.boolean:
        return torch.full(spec.shape, bool(spec.fill), dtype=torch.bool)
    return torch.full(spec.shape, spec.fill, dtype=torch.long) if spec.integer else torch.zeros(spec.shape)


def first_layer_specs(model: Any, batch: int, sequence: int) -> Iterator[Spec]:
    """Floating-point inputs that the first layers of a module would take, by their own sizes."""
    layers = [layer for layer in model.modules() if type(layer).__name__ in ("Linear", "Conv1d", "Conv2d", "Conv3d")]
    for layer in layers[:2]:
        kind = type(layer).__name__
        if kind == "Linear":
            yield Spec((batch, sequence, layer.in_features), False)
            yield Spec((batch, layer.in_features), False)
        else:
            size = {"Conv1d": (sequence,), "Conv2d": (IMAGE_SIZE, IMAGE_SIZE), "Conv3d": (FRAMES, 112, 112)}[kind]
            yield Spec((batch, layer.in_channels, *size), False)


def documented_shapes(docstring: str) -> dict[str, str]:
    """Parameter name -> the first shape that its line of a docstring states, as text such as "(batch_size, 4)"."""
    shapes: dict[str, str] = {}
    for match in re.finditer(r"^\s*(\w+) ?\((.*)$", docstring, re.MULTILINE):
        shape = re.search(r"of shape `?(\([^)`]*\)|[^`]*)`?", match.group(2))
        if shape is not None:
            kind = "Long" if re.search(r"LongTensor|IntTensor|BoolTensor", match.group(2)) else ""
            shapes.setdefault(match.group(1), kind + shape.group(1))
    return shapes


def by_name(name: str, sizes: Sizes, token: int, patched: str = "") -> Iterator[Spec]:
    """The specs that a parameter's name suggests, likeliest first.

    `patched` says that images come as patches beside their grid: "rows" of all images together, or "batches" of each image's.
    """
    batch, sequence, image = sizes.batch, sizes.sequence, (sizes.channels, sizes.height, sizes.width)
    for pattern, specs in _names(sizes, token):
        if re.fullmatch(pattern, name):
            if patched and re.fullmatch(r"pixel_values(_videos)?|hidden_states|patch_embeds", name):
                rows, batches = Spec((batch * GRID * GRID, sizes.patch), False), Spec((batch, GRID * GRID, sizes.patch), False)
                yield from (rows, batches) if patched == "rows" else (batches, rows)
            yield from specs
            return
    if re.fullmatch(r"\w*(ids?|index|indices|lengths?|tokens?|codes?)", name):
        yield Spec((batch, sequence), True)
    elif name.endswith("mask"):
        yield Spec((batch, sequence), True, 1, boolean=True)
    else:
        yield Spec((batch, sequence, sizes.hidden), False)
        yield Spec((batch, *image), False)


def _names(sizes: Sizes, token: int) -> Iterator[tuple[str, tuple[Spec, ...]]]:
    batch, sequence, image = sizes.batch, sizes.sequence, (sizes.channels, sizes.height, sizes.width)
    frames, patches = sizes.audio_frames, GRID * GRID
    ones = Spec((batch, sequence), True, 1)
    features = (
        Spec((batch, sizes.mels, frames), False),
        Spec((batch, frames, sizes.mels), False),
        Spec((batch, 1, sizes.find("spec_size", default=1001), sizes.mels), False),
    )
    video = Spec((batch, sizes.frames, *image), False)
    yield r"(\w+_)?(input_ids|entity_ids)|input_tokens|tokens", (Spec((batch, sequence), True, token),)
    yield r"(\w*features|audio_mel|\w*feature_attention)_mask", (Spec((batch, frames), True, 1, boolean=True),)
    yield r"pixel_attention_mask", (Spec((batch, patches), True, 1), Spec((batch, sizes.height, sizes.width), True, 1))
    yield r"(\w+_)?attention_mask|token_mask", (ones,)
    yield r"(\w+_)?position_ids|(\w+_)?token_type_ids", (Spec((batch, sequence), True),)
    yield r"pixel_values(_images?)?|images?|sample", (Spec((batch, *image), False), video, Spec((batch, 2, *image), False))
    yield r"flattened_patches", (Spec((batch, patches, sizes.patch + 2), False),)
    yield r"(pixel_values_)?videos?", (video,)
    yield (
        r"input_values|audio(_values)?|(input_)?waveform",
        (
            Spec((batch, SAMPLES), False),
            Spec((batch, 1, SAMPLES), False),
            Spec((batch, sizes.find("max_length", default=1024), sizes.mels), False),
        ),
    )
    yield r"(audio_)?input_features|audio_features|input_mel|audio_mel|(mel_)?spectrogram", features
    yield r"bbox", (Spec((batch, sequence, 4), True),)
    yield r"(\w+_)?(inputs_embeds|hidden_states|query_embeds|latents|context|embeddings)", (Spec((batch, sequence, sizes.hidden), False),)
    yield r"(\w+_)?grid_thw", (Spec((batch, 3), True, values=((1, GRID, GRID),) * batch),)
    yield r"(\w+_)?grid_hws?|spatial_shapes|target_sizes|tgt_sizes", (Spec((batch, 2), True, values=((GRID, GRID),) * batch),)
    yield r"merge_sizes", (Spec((batch,), True, values=(2,) * batch),)


def by_document(shape: str, sizes: Sizes) -> Iterator[Spec]:
    """The spec of a shape that a docstring states, where every dim of it is known."""
    integer = shape.startswith("Long")
    text = shape.removeprefix("Long").strip("() ,")
    dims = [_dimension(part.strip(), sizes) for part in text.split(",")] if text else []
    if dims and all(dim is not None for dim in dims):
        yield Spec(tuple(dim for dim in dims if dim is not None), integer)


def _dimension(text: str, sizes: Sizes) -> int | None:
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


def ordinary_token(config: Any, sizes: Sizes) -> int:
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
