"""Models of timm: the config.json beside its weights on the hub, and the arguments of its train.py kept as YAML or JSON.

This is the reading half; lintgpu.target.timm_build is the half that runs in the worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lintgpu.target.base import Built, CompileUse, Family, Knob, Target, WorkloadHint
from lintgpu.target.huggingface import DEFAULT_PREFIX, integers, knob_id
from lintgpu.target.roles import role_of

if TYPE_CHECKING:
    from lintgpu.settings import Settings
    from lintgpu.source import Node, SourceFile
    from lintgpu.workload import Workload

_MODEL_NAME = re.compile(r"(hf[-_]hub:)?([\w-]+/)?[a-z][a-z0-9_]*(\.[\w-]+)?")
# A config.json of the hub has `architecture` and at least one of these.
_HUB_KEYS = ("pretrained_cfg", "num_features", "global_pool", "model_args")
# Arguments of train.py that other trainers do not call by these names; three of them make a file one of timm's.
_ARGUMENTS = frozenset(
    {
        "opt", "sched", "warmup_epochs", "warmup_lr", "cooldown_epochs", "drop_path", "reprob", "remode", "recount", "aa", "aug_splits",
        "aug_repeats", "mixup", "cutmix", "mixup_prob", "crop_pct", "img_size", "input_size", "model_ema", "amp", "amp_dtype", "smoothing",
        "hflip", "jsd_loss", "bce_loss", "train_interpolation", "model_kwargs", "channels_last", "torchcompile", "clip_grad", "gp",
        "in_chans",
    }
)  # fmt: skip
_LEAST_ARGUMENTS = 3
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
# Where a file keeps numbers of the model; all others belong to its weights or to training.
_MODEL_KEYS = ("num_classes", "in_chans", "model_args", "model_kwargs")


class Timm(Family):
    """A model that timm.create_model builds by its name."""

    name = "timm"
    order = 25
    words = ('"architecture"',)

    def find(self, file: SourceFile, settings: Settings) -> Iterator[Target]:
        """At most one target: the model that a hub config or a file of train.py's arguments names."""
        if file.language == "json" and '"architecture"' in file.text and _is_hub_config(file.root.value):
            yield self._target(file, file.root.children["architecture"], (), None)
        elif file.language in ("json", "yaml") and "model" in file.text and _are_arguments(file.root.value):
            model = file.root.children["model"]
            yield self._target(file, model, tuple(_hints(file.root)), _compile_use(file.root, model))

    def _target(self, file: SourceFile, model: Node, hints: tuple[WorkloadHint, ...], use: CompileUse | None) -> Target:
        return Target(
            name=_name_of(file.path, str(model.value)),
            family=self.name,
            span=model.span,
            spec={"config": file.root.value},
            knobs=tuple(_knobs(file.root)),
            hints=hints,
            trained_vocabulary="pretrained_cfg" in file.root.children,
            files=(file.path,),
            compile=use,
        )

    def build(self, spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
        """timm.create_model with the file's arguments, on meta."""
        from lintgpu.target import timm_build

        return timm_build.build(spec["config"], workload, changes)

    def resolve(self, target: Target, knob_id: str) -> Knob | None:
        """Also sizes that the name stands for; those sit on the name, and model_args or --model-kwargs change them."""
        if not knob_id.startswith(DEFAULT_PREFIX):
            return super().resolve(target, knob_id)
        key, _, value = knob_id.removeprefix(DEFAULT_PREFIX).partition("=")
        name = key.partition(".")[0]
        return Knob(knob_id, f"{name} (of the architecture, not in the file)", int(value), target.span, role_of(name))


def _is_hub_config(data: object) -> bool:
    if not isinstance(data, dict) or "model_type" in data:
        return False
    name = data.get("architecture")
    return isinstance(name, str) and bool(_MODEL_NAME.fullmatch(name)) and any(key in data for key in _HUB_KEYS)


def _are_arguments(data: object) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get("model"), str):
        return False
    return bool(_MODEL_NAME.fullmatch(data["model"])) and len(_ARGUMENTS & set(data)) >= _LEAST_ARGUMENTS


def _knobs(root: Node) -> Iterator[Knob]:
    for path, value in integers({key: root.value[key] for key in _MODEL_KEYS if key in root.value}):
        node: Node | None = root
        for part in path:
            node = node.children.get(part) if node else None
        if node is not None:
            name = next(str(part) for part in reversed(path) if isinstance(part, str))
            yield Knob(knob_id(path), name, value, node.span, role_of(name))


def _hints(root: Node) -> Iterator[WorkloadHint]:
    def stated(key: str) -> Node | None:
        node = root.children.get(key)
        return node if node is not None and node.value is not None else None

    batch, amp, dtype, compiled = stated("batch_size"), stated("amp"), stated("amp_dtype"), stated("torchcompile")
    if batch is not None and isinstance(batch.value, int) and batch.value > 0:
        yield WorkloadHint("batch", batch.value, batch.span)
    if amp is not None and amp.value is True:
        precision = dtype if dtype is not None and dtype.value in _DTYPES else None
        yield WorkloadHint("dtype", _DTYPES[precision.value] if precision else "fp16", (precision or amp).span)
    elif amp is not None and amp.value is False:
        yield WorkloadHint("dtype", "tf32", amp.span)  # train.py switches TF32 on
    if compiled is not None and compiled.value:
        yield WorkloadHint("compile", "default", compiled.span)


def _compile_use(root: Node, model: Node) -> CompileUse:
    node = root.children.get("torchcompile")
    if node is not None and node.value:
        return CompileUse("on", node.span, "timm's train.py", "torchcompile")
    return CompileUse("absent", (node or model).span, "this run of timm's train.py (torchcompile is not set)")


def _name_of(path: str, model: str) -> str:
    stem = os.path.splitext(os.path.basename(path))[0]
    return model.rpartition("/")[2] if stem in ("config", "args", "model_config") else stem
