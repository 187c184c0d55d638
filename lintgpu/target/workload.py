"""Settle the workload of a target: defaults, what its files say, what the user gave; the later wins and each is marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from lintgpu.target.base import WorkloadHint
from lintgpu.workload import Mode, Source, Workload

MAX_SEQUENCE = "max_sequence"
"""A hint's field that only caps the assumed sequence: the longest sequence the model has positions for."""

_FIELDS = frozenset(field.name for field in fields(Workload)) - {"sources"}


def resolve_workload(hints: Iterable[WorkloadHint], given: Mapping[str, Any]) -> Workload:
    """The workload under `hints` from the files and the `given` fields of the command line or [tool.lintgpu].

    Assumed are train, batch 8, sequence min(1024, positions), bf16 by autocast. Outside training and for fp32 or tf32 there
    is no autocast unless it was given.
    """
    hints = tuple(hints)
    limits = [hint.value for hint in hints if hint.field == MAX_SEQUENCE and hint.value > 0]
    workload = Workload()
    if limits:
        workload = Workload(sequence=min(workload.sequence, *limits))
    for hint in hints:
        if hint.field in _FIELDS:
            workload = workload.with_value(Source.READ, **{hint.field: _value(hint.field, hint.value)})
    workload = workload.with_value(Source.GIVEN, **{name: _value(name, value) for name, value in given.items()})
    stated = dict(workload.sources)
    if "autocast" not in stated and (workload.mode is not Mode.TRAIN or workload.dtype in ("fp32", "tf32")):
        return replace(workload, autocast=False)
    return workload


def _value(field: str, value: Any) -> Any:
    return Mode(value) if field == "mode" else value
