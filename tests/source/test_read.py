"""Reading files from disk: what cannot be read is one line with the file's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lintgpu.source import UnreadableFile, read
from lintgpu.source.file import MAX_BYTES

ROOT = Path(__file__).parents[2]


def refusal(path, **options):
    with pytest.raises(UnreadableFile) as caught:
        read(str(path), **options)
    return caught.value


def test_spans_show_the_display_path(tmp_path):
    (tmp_path / "c.json").write_text('{"a": 1}')
    file = read(str(tmp_path / "c.json"), "configs/c.json")
    assert file.root.get("a").span.path == "configs/c.json"


def test_missing_file_and_folder(tmp_path):
    assert str(refusal(tmp_path / "none.json", display_path="none.json")) == "none.json: no such file"
    assert refusal(tmp_path).kind == "directory"


def test_name_with_a_null_character_is_no_traceback():
    assert "cannot be read" in refusal("a\0.json").message


def test_bytes_that_are_not_utf8_are_placed(tmp_path):
    (tmp_path / "a.yaml").write_bytes("a: é\nb: ".encode() + b"\xff")
    error = refusal(tmp_path / "a.yaml")
    assert (error.line, error.column, error.message) == (2, 4, "not UTF-8: byte 0xff")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused(tmp_path, encoding):
    (tmp_path / "a.json").write_bytes('{"a": 1}'.encode(encoding))
    assert refusal(tmp_path / "a.json").kind == "encoding"


def test_too_large_a_file_is_refused(tmp_path):
    with open(tmp_path / "a.json", "wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    assert refusal(tmp_path / "a.json").kind == "size"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.json").chmod(0)
    assert refusal(tmp_path / "a.json").kind == "permission"


def test_language_comes_from_the_name_else_from_the_content(tmp_path):
    for name, text, language in [
        ("config", '\n{"a": 1}', "json"),
        ("train", "#!/usr/bin/env python3\n", "python"),
        ("A.YML", "a: 1", "yaml"),
    ]:
        (tmp_path / name).write_text(text)
        assert read(str(tmp_path / name)).language == language
    (tmp_path / "notes.txt").write_text("hello")
    assert refusal(tmp_path / "notes.txt").kind == "language"


def test_unknown_declared_encoding_is_placed(tmp_path):
    (tmp_path / "a.py").write_text("#!/bin/env python\n# coding: klingon\n")
    error = refusal(tmp_path / "a.py")
    assert (error.line, error.kind) == (2, "encoding")


def test_importing_the_reader_imports_no_parser():
    parsers = ["yaml", "tree_sitter", "tree_sitter_json", "tree_sitter_toml", "libcst"]
    code = f"import sys, lintgpu.source, lintgpu.source.suppressions; print([name for name in {parsers!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "[]"
