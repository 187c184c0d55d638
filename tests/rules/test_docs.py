"""Every rule explains itself in the same sections and ships the cases that show it."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from lintgpu.cli import main
from lintgpu.rule import Rule, Selection, all_rules, find_rule

RULES = [pytest.param(rule, id=rule.code) for rule in all_rules()]


@pytest.mark.parametrize("rule", RULES)
def test_docs_have_the_sections(rule: Rule) -> None:
    for section in ("## What it does", "## Why is this bad?", "## Example"):
        assert section in rule.docs, f"{rule.code} lacks {section}"
    assert "Use instead" in rule.docs


@pytest.mark.parametrize("rule", RULES)
def test_code_name_and_summary(rule: Rule) -> None:
    assert re.fullmatch(r"LG\d{3}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert rule.summary
    assert not rule.summary.endswith(".")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_ships_a_case_that_must_stay_silent(rule: Rule) -> None:
    assert rule.good


def test_explain_prints_the_docs() -> None:
    result = CliRunner().invoke(main, ["explain", "lg101"])
    assert result.exit_code == 0
    assert result.output.startswith("# LG101 misaligned-dimension")
    assert "leading" in result.output


def test_explain_unknown_code_says_which_exist() -> None:
    result = CliRunner().invoke(main, ["explain", "LG999"])
    assert result.exit_code == 2
    assert "LG101" in result.output


def test_find_rule_by_name() -> None:
    rule = find_rule("tail-wave")
    assert rule is not None
    assert rule.code == "LG102"


@pytest.mark.parametrize(
    ("select", "ignore", "wanted"),
    [
        (("LG",), (), True),
        (("LG2",), (), False),
        (("LG",), ("LG1",), False),
        (("LG101",), ("LG1",), True),
        (("LG101",), ("LG101",), False),
        ((), (), False),
    ],
)
def test_longest_prefix_decides(select: tuple[str, ...], ignore: tuple[str, ...], wanted: bool) -> None:
    assert Selection(select, ignore).wants("LG101") is wanted
