"""FINDINGS.json as a stranger, an editor or a broken pipe may leave it: one line, exit code 2, never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.cli import main
from lintgpu.report import read
from lintgpu.report.read import BadDocument, read_document

SPAN = {"path": "config.json", "line": 4, "column": 17, "end_line": 4, "end_column": 22}
COST = {
    "gpu_us": 9.0,
    "gpu_share": 0.5,
    "saving_gpu_us": 4.0,
    "saving_gpu_share": 0.2,
    "saving_step_share": 0.2,
    "low": 0.1,
    "high": 0.3,
    "basis": "calibrated",
}
FINDING: dict[str, Any] = {
    "code": "LG101",
    "name": "misaligned-dimension",
    "severity": "error",
    "message": "vocab_size = 50257 keeps GEMMs off the fast kernels",
    **SPAN,
    "target": "config",
    "knob": "vocab_size",
    "value": 50257,
    "suggestion": 50264,
    "gpu": "H200-SXM-141GB",
    "workload": "train",
    "cost": COST,
    "related": [],
    "fix": {"edits": [SPAN | {"text": "50264"}], "description": "pad", "safe": True, "confirmed": True},
    "details": [],
    "change": {"knobs": {"vocab_size": 50264}},
}
DOCUMENT: dict[str, Any] = {
    "schema_version": 1,
    "findings": [FINDING],
    "targets": [
        {
            "path": "config.json",
            "gpu": "H200-SXM-141GB",
            "basis": "traced",
            "workload_values": [{"name": "batch", "value": "16", "source": "given"}],
        }
    ],
}


def written(change: Callable[[dict[str, Any]], object]) -> str:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return json.dumps(document)


def test_a_whole_file_is_read() -> None:
    document = read_document(json.dumps(DOCUMENT), "f.json")
    assert [finding.suggestion for finding in document.findings] == [50264]
    assert (document.paths, document.gpus, document.workload) == (("config.json",), ("H200-SXM-141GB",), {"batch": 16})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["findings"][0].update(path=None),
        lambda d: d["findings"][0].update(path=["config.json"]),
        lambda d: d["findings"][0].update(message=None),
        lambda d: d["findings"][0].update(code=101),
        lambda d: d["findings"][0].update(value={}),
        lambda d: d["findings"][0].update(line=10**30),
        lambda d: d["findings"][0].update(line=-5),
        lambda d: d["findings"][0].update(line=float("inf")),
        lambda d: d["findings"][0].update(suggestion=10**400),
        lambda d: d["findings"][0]["cost"].update(saving_gpu_us=float("nan")),
        lambda d: d["findings"][0]["cost"].update(basis="hearsay"),
        lambda d: d["findings"][0]["change"].update(knobs=[1]),
        lambda d: d["findings"][0].update(related=3),
        lambda d: d["findings"][0].update(fix="pad it"),
        lambda d: d["findings"][0].pop("severity"),
        lambda d: d.update(findings=[None]),
        lambda d: d.pop("targets"),
        lambda d: d.update(targets=[7]),
        lambda d: d["targets"][0]["workload_values"][0].update(value="0"),
        lambda d: d["targets"][0]["workload_values"][0].update(value="many"),
        lambda d: d["targets"][0]["workload_values"][0].update(name="dtype", value="fp99"),
        lambda d: d["targets"][0]["workload_values"][0].update(name="colour", value="red"),
    ],
)
def test_data_of_another_shape_is_one_line(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(BadDocument) as error:
        read_document(written(change), "f.json")
    assert str(error.value).startswith("f.json: ")
    assert "\n" not in str(error.value)


def _places(data: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place, *(found for key, value in items for found in _places(value, (*place, key)))]


@given(
    st.sampled_from(_places(DOCUMENT)[1:]),
    st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just({})),
)
def test_any_value_in_any_place_is_read_or_refused_in_one_line(place: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(DOCUMENT)
    holder: Any = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    try:
        found = read_document(json.dumps(document), "f.json").findings
        said = ""
    except BadDocument as error:
        found, said = (), str(error)
    assert "\n" not in said
    assert all(isinstance(finding.message, str) and hash(finding) for finding in found)


@given(st.integers(0, len(json.dumps(DOCUMENT)) - 1))
def test_a_file_cut_off_anywhere_is_one_line_with_its_place(length: int) -> None:
    with pytest.raises(BadDocument, match=r"^f\.json:1:\d+: not valid JSON"):
        read_document(json.dumps(DOCUMENT)[:length], "f.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "f.json:1:1: not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "f.json: not UTF-8 at byte 0"),
        (b'{"schema_version": 1, "findings": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "f.json: not valid JSON"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "f.json: not valid JSON"),
    ],
)
def test_the_command_ends_with_one_line(content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.json").write_bytes(content)
    result = CliRunner().invoke(main, ["verify", "f.json"])
    assert result.exit_code == 2
    assert result.stderr.startswith(said)
    assert len(result.stderr.splitlines()) == 1


def test_a_mark_of_byte_order_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(DOCUMENT).encode())
    assert len(read.read_findings(str(path)).findings) == 1


def test_a_huge_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    with path.open("wb") as stream:
        stream.truncate(read.MAX_BYTES + 1)
    with pytest.raises(BadDocument, match="larger than 64 MiB"):
        read.read_findings(str(path))
