"""Hugging Face model configs: JSON under any file name with a `model_type` or `architectures`.

This is the reading half; lintgpu.target.huggingface_build is the half that runs in the worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lintgpu.finding import Span
from lintgpu.target.base import Built, Family, Knob, Target, WorkloadHint
from lintgpu.target.roles import role_of

if TYPE_CHECKING:
    from lintgpu.settings import Settings
    from lintgpu.source import Node, SourceFile
    from lintgpu.trace.records import Trace
    from lintgpu.workload import Workload

Path = tuple[str | int, ...]

DEFAULT_PREFIX = "default:"
"""Knob ids of values that the file leaves to the config class: "default:vocab_size=50257"."""

_CLASS_NAME = re.compile(r"[A-Z]\w*(Model|For[A-Z]\w*|Head\w*|LM)")
# Beside model_type, one of these must be there: other tools have a "model_type" too.
_COMPANION = re.compile(
    r"architectures|transformers_version|torch_dtype|dtype|auto_map|(padded_)?vocab_size|hidden_sizes?|d_model|n_embe?d|embed_dim|\w+_config"
    r"|num_(hidden_)?layers|num_attention_heads|n_layers?|(encoder|decoder)_layers|hidden_dim|image_size|initializer_range"
)
# Integers that are no dimension of the model.
_NO_KNOB = re.compile(
    r"(\w*_)?(token_)?(id|ids|idx|idxs|index|indices|seed|tokens?_id)|.*_tokens?|label2id|id2label|task_specific_params|quantization_config"
    r"|generation_config|auto_map|rope_(scaling|parameters|theta)|max_length|min_length|num_beams\w*|num_return_sequences|top_k|no_repeat\w*"
    r"|pretraining_tp|pruned_heads|transformers_version|version|revision|encoder_no_repeat_ngram_size|length_penalty|chunk_size_feed_forward"
)
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "max_target_positions",
    "seq_length",
)
_TRAINED_FILES = re.compile(
    r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?|tf_model\.h5|tokenizer(_config)?\.json|tokenizer\.model|vocab\.(json|txt)|merges\.txt"
)


class HuggingFace(Family):
    """A config of the transformers library."""

    name = "huggingface"
    order = 20
    words = ('"model_type"', '"architectures"')

    def find(self, file: SourceFile, settings: Settings) -> Iterator[Target]:
        """At most one target: the model the file describes."""
        if file.language != "json" or not any(word in file.text for word in self.words):
            return
        root = file.root
        if not describes_a_model(root.value):
            return
        data: dict[str, Any] = root.value
        yield Target(
            name=_name_of(file.path),
            family=self.name,
            span=_declaration(root),
            spec={"config": data, "path": file.path},
            knobs=tuple(_knobs(root)),
            hints=tuple(_hints(root)),
            trained_vocabulary=_is_trained(data, file.path),
            files=(file.path,),
        )

    def build(self, spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
        """The class that `architectures` names, else the natural one of `model_type`, on meta."""
        from lintgpu.target import huggingface_build

        return huggingface_build.build(spec["config"], workload, changes)

    def resolve(self, target: Target, knob_id: str) -> Knob | None:
        """Also values the file leaves to the config class; those sit on the key that names the model."""
        if not knob_id.startswith(DEFAULT_PREFIX):
            return super().resolve(target, knob_id)
        key, _, value = knob_id.removeprefix(DEFAULT_PREFIX).partition("=")
        name = key.rsplit(".", 1)[-1]
        return Knob(knob_id, f"{name} (the default, not in the file)", int(value), target.span, role_of(name))

    def with_attention(self, spec: Mapping[str, Any], implementation: str) -> Mapping[str, Any] | None:
        """The library builds either for most models."""
        config = {key: value for key, value in spec["config"].items() if key != "_attn_implementation"}
        return {**spec, "config": {**config, "attn_implementation": implementation}}

    def estimate(self, target: Target, workload: Workload, changes: Mapping[str, int]) -> Trace | None:
        """The analytic transformer of the config's numbers, where they describe one."""
        from lintgpu.target.estimate import estimate_config

        return estimate_config(target.spec["config"], {knob.id: knob.value for knob in target.knobs}, workload, changes)


def describes_a_model(data: object) -> bool:
    """Whether a JSON value is a transformers config."""
    if not isinstance(data, dict):
        return False
    named = any(_CLASS_NAME.fullmatch(name) for name in architectures_of(data))
    typed = isinstance(data.get("model_type"), str) and any(isinstance(key, str) and _COMPANION.fullmatch(key) for key in data)
    return named or typed


def architectures_of(data: Mapping[str, Any]) -> list[str]:
    """The class names under `architectures`, which some files give as one string."""
    value = data.get("architectures")
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [name for name in names if isinstance(name, str)]


def integers(data: object, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """The place and value of each integer of a config that may be a dimension of its model, in file order."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(key, str) and (not key or _NO_KNOB.fullmatch(key)):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            yield (*path, key), value
        else:
            yield from integers(value, (*path, key))


def knob_id(path: Path) -> str:
    """The key path with dots: "text_config.vocab_size"."""
    return ".".join(str(part) for part in path)


def _knobs(root: Node) -> Iterator[Knob]:
    for path, value in integers(root.value):
        node: Node | None = root
        for part in path:
            node = node.children.get(part) if node else None
        if node is not None:
            name = next(str(part) for part in reversed(path) if isinstance(part, str))
            yield Knob(knob_id(path), name, value, node.span, role_of(name))


def _hints(root: Node) -> Iterator[WorkloadHint]:
    dtype = root.get("dtype") or root.get("torch_dtype")
    # float32 says how the checkpoint is stored; training with autocast has fp32 weights too, so it decides nothing.
    if dtype is not None and dtype.value in _DTYPES:
        yield WorkloadHint("dtype", _DTYPES[dtype.value], dtype.span)
    for node in (root, root.get("text_config"), root.get("decoder")):
        for key in _POSITION_KEYS:
            limit = node.children.get(key) if node is not None else None
            if limit is not None and isinstance(limit.value, int) and limit.value > 0:
                yield WorkloadHint("max_sequence", limit.value, limit.span)
                return


def _declaration(root: Node) -> Span:
    for key in ("architectures", "model_type"):
        node = root.children.get(key)
        if node is not None:
            return node.span
    return root.span


def _name_of(path: str) -> str:
    parts = os.path.normpath(path).split(os.sep)
    stem = os.path.splitext(parts[-1])[0]
    return parts[-2] if stem == "config" and len(parts) > 1 and parts[-2] not in ("..", "") else stem


def _is_trained(data: Mapping[str, Any], path: str) -> bool:
    if data.get("transformers_version") or data.get("_name_or_path") or data.get("quantization_config"):
        return True
    try:
        beside = os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return False
    return any(_TRAINED_FILES.fullmatch(name) for name in beside)
