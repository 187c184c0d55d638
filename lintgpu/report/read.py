"""The inverse of the JSON output, as far as findings can be measured from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lintgpu.finding import Change, Confidence, Edit, Finding, FindingCost, Fix, Related, Severity, Span
from lintgpu.report.json_ import SCHEMA_VERSION
from lintgpu.settings import workload_values

_NUMBERS = ("batch", "sequence", "tensor_parallel", "expert_parallel")
MAX_BYTES = 64 * 2**20
"""A finding takes about 2 KiB."""
_SHAPES = (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgspec.MsgspecError)
"""What data of another shape raises where it is read."""


class BadDocument(ValueError):
    """The text is no output of `lintgpu check -f json`; one line that says where and why."""


@dataclass(frozen=True)
class Document:
    """What a run found, and how to find the same targets again."""

    findings: tuple[Finding, ...]
    paths: tuple[str, ...]
    gpus: tuple[str, ...]
    workload: Mapping[str, Any]
    """Values that were given (on the command line or in the settings); the others are read or assumed again."""


def read_findings(path: str) -> Document:
    """The findings in the file at `path`. Raises BadDocument, and OSError where it cannot be read."""
    with Path(path).open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BadDocument(f"{path}: larger than {MAX_BYTES // 2**20} MiB, which no run of lintgpu check writes")
    try:
        return read_document(data.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        raise BadDocument(f"{path}: not UTF-8 at byte {error.start}") from error


def read_document(text: str, path: str) -> Document:
    """The findings in `text`. Raises BadDocument."""
    try:
        data = json.loads(text, parse_constant=_refuse, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise BadDocument(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION or not isinstance(data.get("findings"), list):
        raise BadDocument(f"{path}: this is not the output of lintgpu check -f json (schema_version {SCHEMA_VERSION})")
    findings = tuple(_finding(item, f"{path}: findings[{i}]") for i, item in enumerate(data["findings"]))
    try:
        targets = [target for target in data["targets"] if target["basis"] != "failed"]
        paths = tuple(dict.fromkeys(str(target["path"]) for target in targets))
        gpus = tuple(dict.fromkeys(str(target["gpu"]) for target in targets))
        given = [{_given(item) for item in target["workload_values"] if item["source"] == "given"} for target in targets]
    except _SHAPES as error:
        raise BadDocument(f"{path}: targets: {_reason(error)}") from error
    # What differs between targets came from the settings of their projects, and comes from there again.
    shared = dict(set.intersection(*given)) if given else {}
    return Document(findings, paths, gpus, {name: value for name, value in shared.items() if name != "gpu"})


def _finding(data: Any, where: str) -> Finding:
    try:
        finding = Finding(
            code=data["code"],
            name=data["name"],
            severity=Severity(data["severity"]),
            message=data["message"],
            span=_span(data),
            target=data["target"],
            knob=data["knob"],
            value=data["value"],
            suggestion=data["suggestion"],
            gpu=data["gpu"],
            workload=data["workload"],
            cost=_cost(data["cost"]),
            related=tuple(Related(_span(item), item["message"]) for item in data["related"]),
            fix=_fix(data["fix"]),
            details=tuple(data["details"]),
            change=_change(data.get("change")),
        )
        return msgspec.convert(msgspec.to_builtins(finding), Finding)  # Checks the type of every field.
    except _SHAPES as error:
        raise BadDocument(f"{where}: {_reason(error)}") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _integer(digits: str) -> int:
    value = int(digits)
    if abs(value) >= 2**63:
        raise ValueError(f"{digits[:20]}... is larger than any number that lintgpu writes")
    return value


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _span(data: Mapping[str, Any]) -> Span:
    places = [int(data[name]) for name in ("line", "column", "end_line", "end_column")]
    if min(places) < 0:
        raise ValueError("a line or column below 0")
    return Span(data["path"], *places)


def _cost(data: Mapping[str, Any] | None) -> FindingCost | None:
    if data is None:
        return None
    names = ("gpu_us", "gpu_share", "saving_gpu_us", "saving_gpu_share", "saving_step_share", "low", "high")
    return FindingCost(**{name: float(data[name]) for name in names}, basis=Confidence(data["basis"]))


def _fix(data: Mapping[str, Any] | None) -> Fix | None:
    if data is None:
        return None
    edits = tuple(Edit(_span(edit), edit["text"]) for edit in data["edits"])
    return Fix(edits, data["description"], bool(data["safe"]), bool(data["confirmed"]))


def _change(data: Mapping[str, Any] | None) -> Change | None:
    if data is None:
        return None
    knobs = tuple((str(knob), int(value)) for knob, value in data["knobs"].items())
    texts = {name: str(data.get(name) or "") for name in ("compile", "attention", "dtype")}
    return Change(knobs, **texts, channels_last=bool(data.get("channels_last")), same_work=bool(data.get("same_work")))


def _given(item: Mapping[str, str]) -> tuple[str, Any]:
    """One value of a workload from its text, see lintgpu.workload.values. Raises ValueError for what no setting may say."""
    name, value = item["name"], item["value"]
    if name == "gpu":
        return name, str(value)
    read: Any = int(value) if name in _NUMBERS else value == "on" if name == "autocast" else value
    return name, workload_values({name: read})[name]
