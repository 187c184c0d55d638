"""Every rule's own good and bad cases, through the command line as a user runs it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lintgpu.cli import main
from lintgpu.rule import Case, Expected, Rule, all_rules

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="cases trace models: needs lintgpu[hf]",
)
GOOD = [pytest.param(rule, case, id=f"{rule.code} {case.name}") for rule in all_rules() for case in rule.good]
BAD = [pytest.param(rule, case, id=f"{rule.code} {case.name}") for rule in all_rules() for case in rule.bad]


def findings(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    for name, text in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["check", "-f", "json", *case.options, "."])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return found


@pytest.mark.parametrize(("rule", "case"), GOOD)
def test_good_case_is_silent(rule: Rule, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f["message"] for f in findings(case, tmp_path, monkeypatch) if f["code"] == rule.code] == []


@pytest.mark.parametrize(("rule", "case"), BAD)
def test_bad_case_is_found(rule: Rule, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [f for f in findings(case, tmp_path, monkeypatch) if f["code"] == rule.code]
    assert len(found) == len(case.expect), found
    for finding, expected in zip(found, case.expect, strict=True):
        _compare(finding, expected)


def _compare(finding: dict[str, Any], expected: Expected) -> None:
    assert Path(finding["path"]).name == expected.path
    assert finding["line"] == expected.line
    assert expected.column in (0, finding["column"])
    if expected.knob is not None:
        assert finding["knob"] == expected.knob
    if expected.suggestions:
        assert finding["suggestion"] in expected.suggestions
    if expected.severity is not None:
        assert finding["severity"] == expected.severity.value
    if expected.saving is not None:
        low, high = expected.saving
        assert low <= finding["cost"]["saving_gpu_share"] <= high
