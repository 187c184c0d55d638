from __future__ import annotations

from pathlib import Path

import pytest

from lintgpu.finding import Severity
from lintgpu.settings import SettingsError, discover, load
from lintgpu.workload import Mode


def write(folder: Path, text: str) -> str:
    (folder / "pyproject.toml").write_text(text)
    return str(folder / "pyproject.toml")


def test_every_key_is_read(tmp_path: Path) -> None:
    settings = load(
        write(
            tmp_path,
            """
[tool.lintgpu]
select = ["LG1"]
ignore = "LG102"
exclude = ["data/"]
gpu = ["A100", "H100"]
fail-on = "error"
time-limit = 60
memory-limit-gb = 8.5
python = "/usr/bin/python3"

[tool.lintgpu.workload]
mode = "infer"
batch = 4
seq = 2048
dtype = "fp16"
compile = true

[tool.lintgpu.targets.small]
model = "pkg.mod:Net"
""",
        )
    )
    assert settings.select == ("LG1",)
    assert settings.ignore == ("LG102",)
    assert settings.exclude == ("data/",)
    assert settings.gpus == ("A100", "H100")
    assert settings.fail_on is Severity.ERROR
    assert (settings.time_limit, settings.memory_limit_gb, settings.python) == (60.0, 8.5, "/usr/bin/python3")
    assert settings.workload == {"mode": Mode.INFER, "batch": 4, "sequence": 2048, "dtype": "fp16", "compile": "default"}
    assert settings.targets == {"small": {"model": "pkg.mod:Net"}}
    assert settings.root == str(tmp_path)


@pytest.mark.parametrize(
    ("body", "line", "column", "words"),
    [
        ('selct = ["LG"]', 2, 1, "unknown key 'selct'"),
        ('fail-on = "bad"', 2, 1, "error, warning, note"),
        ("gpu = []", 2, 1, "at least one GPU"),
        ("exclude = [1]", 2, 1, "list of strings"),
        ("time-limit = -1", 2, 1, "positive number"),
        ("workload = {batch = 0}", 2, 1, "whole number from 1"),
        ("workload = {rows = 3}", 2, 1, "unknown workload field 'rows'"),
        ("workload = {batch = true}", 2, 1, "whole number from 1"),
        ('targets = "x"', 2, 1, "must be tables"),
        ("select = [", 2, 10, ""),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path: Path, body: str, line: int, column: int, words: str) -> None:
    path = write(tmp_path, f"[tool.lintgpu]\n{body}\n")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert words in caught.value.message
    assert caught.value.line >= line
    if words:
        assert (caught.value.line, caught.value.column) == (line, column)


def test_the_nearest_project_that_speaks_of_lintgpu_wins(tmp_path: Path) -> None:
    outer, middle, inner = tmp_path, tmp_path / "a", tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(outer, '[tool.lintgpu]\ngpu = "A100"\n')
    write(middle, '[project]\nname = "x"\n')
    (inner / "config.json").write_text("{}")
    assert discover(str(inner / "config.json")).gpus == ("A100",)
    nearer = inner / "c"
    nearer.mkdir()
    write(nearer, '[tool.lintgpu]\ngpu = "L40S"\n')
    assert discover(str(nearer)).gpus == ("L40S",)


def test_without_a_project_the_defaults_hold(tmp_path: Path) -> None:
    settings = discover(str(tmp_path))
    assert settings.file is None
    assert settings.fail_on is Severity.WARNING
    assert not settings.trust
