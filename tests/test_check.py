"""`lintgpu check` as a user runs it, in the static tier; traced runs are in tests/rules/test_cases.py and test_traced.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lintgpu.cli import main

GPT2 = """{
  "model_type": "gpt2",
  "architectures": ["GPT2LMHeadModel"],
  "vocab_size": 50257,
  "n_positions": 1024,
  "n_embd": 768,
  "n_layer": 12,
  "n_head": 12,
  "n_inner": null
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(GPT2)
    return tmp_path


def check(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["check", "--static", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def findings(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(check("-f", "json", *arguments).stdout)["findings"]
    return found


def test_the_odd_vocabulary_is_found_on_its_number() -> None:
    (finding,) = findings("config.json", "--batch", "16", "--seq", "1024", "--gpu", "H200")
    assert (finding["code"], finding["severity"]) == ("LG101", "error")
    assert (finding["path"], finding["line"], finding["column"], finding["end_column"]) == ("config.json", 4, 17, 22)
    assert (finding["knob"], finding["value"]) == ("vocab_size", 50257)
    assert finding["suggestion"] in (50264, 50304)
    assert 0.25 <= finding["cost"]["saving_gpu_share"] <= 0.45
    assert finding["cost"]["low"] < finding["cost"]["saving_gpu_share"] < finding["cost"]["high"]


def test_exit_codes() -> None:
    assert check("config.json").exit_code == 1
    assert check("config.json", "--ignore", "LG101").exit_code == 0
    assert check("config.json", "--select", "LG2").exit_code == 0
    assert check("missing.json").exit_code == 2


def test_compiled_the_finding_is_at_most_a_note() -> None:
    assert [f["severity"] for f in findings("config.json", "--compile", "--batch", "16")] in ([], ["note"])
    assert check("config.json", "--compile", "--batch", "16").exit_code == 0


def test_fail_on_moves_the_threshold() -> None:
    assert check("config.json", "--compile", "--fail-on", "error").exit_code == 0
    Path("pyproject.toml").write_text('[tool.lintgpu]\nignore = ["LG101"]\n')
    assert check("config.json").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("--batch", "7", "--seq", "1023"), ("--batch", "1"), ("--seq", "77"), ("--batch", "3", "--mode", "infer")]
)
def test_token_counts_are_never_misaligned(arguments: tuple[str, ...]) -> None:
    Path("config.json").write_text(GPT2.replace("50257", "50304"))
    assert [f for f in findings("config.json", *arguments) if f["code"] == "LG101"] == []


def test_bad_input_is_one_line_each_and_the_rest_is_checked() -> None:
    Path("broken.yaml").write_text("a: [1\nb: 2\n")
    Path("broken.json").write_text('{"model_type": }\n')
    Path("broken.py").write_text("def f(:\n")
    Path("latin.json").write_bytes(b'{"name": "\xe9"}')
    result = check("-f", "concise", ".", "gone.toml")
    assert result.exit_code == 2
    for start in ("broken.yaml:2:", "broken.json:1:16: ", "broken.py:1:7: ", "latin.json:1:11: ", "gone.toml: ", "config.json:4:17: "):
        assert sum(line.startswith(start) for line in result.stdout.splitlines()) == 1, (start, result.stdout)
    assert "Traceback" not in result.output


def test_equal_configs_in_two_files_are_two_models() -> None:
    Path("copy").mkdir()
    Path("copy/config.json").write_text(GPT2)
    assert [finding["path"] for finding in findings(".")] == ["config.json", "copy/config.json"]


def test_an_unknown_gpu_is_an_error_with_near_names_and_the_others_still_count() -> None:
    result = check("config.json", "--gpu", "H2000", "--gpu", "A100", "-f", "json")
    report = json.loads(result.stdout)
    assert result.exit_code == 2
    assert "H200" in report["errors"][0]["message"]
    assert {finding["gpu"] for finding in report["findings"]} == {"A100-SXM4-80GB"}


def test_bad_settings_are_named_with_file_and_position() -> None:
    Path("pyproject.toml").write_text("[tool.lintgpu]\nselct = []\n")
    result = check("-f", "concise", "config.json")
    assert result.exit_code == 2
    assert "pyproject.toml:2:1: " in result.stdout
    assert "unknown key 'selct'" in result.stdout


def test_a_folder_without_models_is_clean() -> None:
    Path("empty").mkdir()
    Path("empty/data.json").write_text('{"rows": [1, 2, 3]}')
    result = check("empty")
    assert result.exit_code == 0
    assert findings("empty") == []


def test_the_static_tier_says_that_it_did_not_trace() -> None:
    (target,) = json.loads(check("-f", "json", "config.json").stdout)["targets"]
    assert target["basis"] == "estimated"
    assert any(note.startswith("not traced: --static was given") and "lintgpu[hf]" in note for note in target["assumptions"])


def test_a_config_whose_numbers_make_no_model_was_not_estimated(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_type", "vocab_size": 50257}\n')
    result = check("config.json")
    assert "1 target could not be estimated without torch: pip install 'lintgpu[hf]', then run without --static." in result.stdout
    assert "could not be traced" not in result.stdout
    assert "not traced" not in result.stdout


def test_a_finding_tells_its_band_once() -> None:
    text = check("config.json").stdout
    assert text.count("[30 % to 45 %]") == text.count(" to 45") == 1


def test_a_comment_is_not_called_useless_where_nothing_was_traced(folder: Path) -> None:
    (folder / "config.json").write_text("// lintgpu: ignore-file[LG2, LG777]\n" + GPT2)
    assert [finding["code"] for finding in findings("config.json")] == ["LG101"]


def test_every_output_says_which_workload_was_assumed() -> None:
    for name in ("full", "concise", "json"):
        output = check("-f", name, "config.json", "--batch", "16").stdout
        assert "assumed" in output
        assert "H200-SXM-141GB" in output


def test_a_fix_that_no_trace_confirmed_is_not_written() -> None:
    result = check("config.json", "--fix", "--unsafe-fixes")
    assert "1 not confirmed by a trace" in result.stderr
    assert Path("config.json").read_text() == GPT2


def test_excluded_and_ignored_files_are_left_out_unless_named() -> None:
    Path("pyproject.toml").write_text('[tool.lintgpu]\nexclude = ["models/"]\n')
    for name in ("models", "ignored", ".hidden"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(GPT2)
    Path(".gitignore").write_text("ignored/\n")
    assert {finding["path"] for finding in findings(".")} == {"config.json"}
    assert {finding["path"] for finding in findings("models/config.json")} == {"models/config.json"}


def test_the_report_can_go_to_a_file() -> None:
    result = check("config.json", "-f", "sarif", "-o", "out.sarif")
    assert result.stdout == ""
    assert json.loads(Path("out.sarif").read_text())["version"] == "2.1.0"
    assert check("config.json", "-o", "no/such/folder.txt").exit_code != 0


def test_shapes_lists_every_gemm_with_its_cost() -> None:
    result = CliRunner().invoke(main, ["shapes", "--static", "config.json", "-f", "json", "--batch", "16"])
    assert result.exit_code == 0
    ops = [op for op in json.loads(result.stdout)["targets"][0]["ops"] if op["kind"] == "gemm"]
    assert {(op["m"], op["n"], op["k"], op["phase"]) for op in ops if op["n"] == 50257} == {(16384, 50257, 768, "forward")}
    assert all(op["us"] > 0 for op in ops)


def test_shapes_without_a_model_could_not_do_its_work() -> None:
    Path("data.json").write_text("{}")
    result = CliRunner().invoke(main, ["shapes", "--static", "data.json"])
    assert result.exit_code == 2
    assert "no model found in 1 file" in result.stderr


def test_several_misaligned_sizes_are_told_with_what_they_save_together() -> None:
    Path("config.json").write_text(GPT2.replace("50257", "32001").replace("768", "1026").replace('"n_head": 12', '"n_head": 9'))
    found = findings("config.json")
    assert {finding["knob"] for finding in found} == {"vocab_size", "n_embd"}
    assert len({finding["cost"]["saving_gpu_share"] for finding in found}) == 1
    (width,) = (finding for finding in found if finding["knob"] == "n_embd")
    assert width["suggestion"] % 9 == 0, "the heads still divide it"
    assert f"with vocab_size = {next(f['suggestion'] for f in found if f['knob'] == 'vocab_size')}" in width["message"]


@pytest.mark.parametrize("value", ["999999999999999999", "-5", "0", "null", '"50257"', "50257.5", "[50257]", "true"])
def test_numbers_that_make_no_model_are_not_judged(value: str) -> None:
    Path("config.json").write_text(GPT2.replace("50257", value))
    result = check("-f", "json", "config.json")
    report = json.loads(result.stdout)
    assert report["findings"] == []
    assert report["targets"][0]["basis"] == "failed"
    assert "Warning" not in result.stderr


def test_large_data_beside_a_config_need_not_be_valid(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"vocab": [' + "1, " * 200_000)
    (folder / "data.yaml").write_text("- {a: 1}\n" * 50_000 + "{")
    (folder / "dump.json").write_bytes(b"[" * (9 * 2**20))
    assert [finding["code"] for finding in findings(".")] == ["LG101"]
    assert check("dump.json", "tokenizer.json").exit_code == 0


def test_a_large_config_is_still_read_and_a_large_source_is_still_reported(folder: Path) -> None:
    (folder / "config.json").write_text(GPT2.replace("}", ', "id2label": {"0": "' + "x" * 300_000 + '"}}'))
    assert findings("config.json")[0]["line"] == 4
    (folder / "broken.json").write_text('{"model_type": "gpt2", "x": "' + "x" * 300_000)
    assert check("broken.json").exit_code == 2
    (folder / "big.py").write_bytes(b"#" * (9 * 2**20))
    assert check("big.py").exit_code == 2
