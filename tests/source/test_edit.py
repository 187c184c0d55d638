"""Edits change their spans and nothing else."""

import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.finding import Edit, Span
from lintgpu.source import read
from lintgpu.source.edit import EditError, apply, diff, write
from lintgpu.source.file import decode

SOURCES = {
    "a.json": '{{\n  "é": {0}, // c\n  "b": [{1}, {2}],\n}}\n',
    "a.yaml": "é: {0}  # c\nb:\n  - {1}\n  - &x {2}\n",
    "a.toml": "'é' = {0} # c\nb = [{1},\n {2}]\n",
}


@pytest.mark.parametrize("name", SOURCES)
@given(
    old=st.tuples(*[st.integers(0, 10**6)] * 3),
    new=st.dictionaries(st.sampled_from(["é", "b.0", "b.1"]), st.integers(0, 10**6)),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
def test_data_edits_change_only_their_values(name, old, new, line_end):
    text = SOURCES[name].format(*old).replace("\n", line_end)
    root = decode(text.encode(), name).root
    edits = [Edit(root.get(path).span, str(value)) for path, value in new.items()]
    wanted = [new.get(path, value) for path, value in zip(["é", "b.0", "b.1"], old, strict=True)]
    assert apply({name: text}, edits).get(name, text) == SOURCES[name].format(*wanted).replace("\n", line_end)


@given(
    st.lists(st.integers(0, 10**6), min_size=3, max_size=3),
    st.lists(st.integers(0, 10**6), min_size=3, max_size=3),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_python_edits_change_only_their_literals(old, new, line_end):
    source = "é = f('漢', {0},  # c\n\tx=-{1})\n\ny = 0x_FF if {2} else {2}\n"
    text = source.format(*old).replace("\n", line_end)
    tree = decode(text.encode(), "a.py").tree
    file = decode(text.encode(), "a.py")
    call = tree.body[0].value
    places = [call.args[1], call.keywords[0].value.operand, tree.body[1].value.test, tree.body[1].value.orelse]
    edits = [Edit(file.span(node), str(value)) for node, value in zip(places, [*new, new[2]], strict=True)]
    assert apply({"a.py": text}, edits).get("a.py", text) == source.format(*new).replace("\n", line_end)


def test_other_python_edits_are_taken_where_the_file_still_parses():
    assert apply({"a.py": "m = f(x)\n"}, [Edit(Span("a.py", 1, 5, 1, 9), "compile(f(x))")]) == {"a.py": "m = compile(f(x))\n"}


def test_the_same_edit_twice_counts_once():
    edit = Edit(Span("a.json", 1, 7, 1, 8), "8")
    assert apply({"a.json": '{"a": 1}'}, [edit, edit]) == {"a.json": '{"a": 8}'}


def test_files_that_do_not_change_are_left_out():
    assert apply({"a.json": '{"a": 1}', "b.json": "{}"}, [Edit(Span("a.json", 1, 7, 1, 8), "1")]) == {}


@pytest.mark.parametrize(
    ("path", "text", "edits", "words"),
    [
        ("a.json", '{"a": 123}', [((1, 7, 1, 9), "1"), ((1, 8, 1, 10), "2")], "a.json:1:8: two edits overlap"),
        ("a.json", '{"a": 123}', [((1, 7, 1, 10), "1"), ((1, 7, 1, 10), "2")], "overlap"),
        ("a.json", '{"a": 123}', [((2, 1, 2, 2), "1")], "outside"),
        ("a.json", '{"a": 123}', [((1, 7, 1, 10), "")], "a.json:1:7: not valid JSON"),
        ("a.py", "x = 1\n", [((1, 1, 1, 2), "1")], "not valid Python"),
        ("a.py", "x = 'a 1 b'\n", [((1, 8, 1, 9), "2")], "a.py:1:8: there is no integer literal"),
        ("a.py", "x = 123\n", [((1, 5, 1, 7), "9")], "more than the integers"),
        ("other.py", "x = 1\n", [((1, 5, 1, 6), "2")], None),
    ],
)
def test_edits_that_cannot_be_applied_are_refused(path, text, edits, words):
    wanted = [Edit(Span(path, *place), new) for place, new in edits]
    with pytest.raises(EditError, match=words or "was not read"):
        apply({path: text} if words else {}, wanted)


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@pytest.mark.parametrize(
    ("old", "new"), [("a\nb\nc\n", "a\nB\nc\n"), ("a\r\nb\r\n", "a\r\nB\r\n"), ("a\nb", "a\nc"), ("a\n", "a\nb"), ("x\x0cy\n", "x\x0cz\n")]
)
def test_patch_takes_the_diff(tmp_path, old, new):
    (tmp_path / "f.txt").write_bytes(old.encode())
    subprocess.run(["patch", "--binary", "-p1", "-s"], cwd=tmp_path, input=diff(old, new, "f.txt").encode(), check=True)
    assert (tmp_path / "f.txt").read_bytes() == new.encode()


def test_no_change_has_no_diff():
    assert diff("a\n", "a\n", "f") == ""


def test_write_keeps_mark_mode_and_link(tmp_path):
    real = tmp_path / "real.json"
    real.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    real.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    file = read(str(link))
    write(file, file.text.replace("1", "2"))
    assert real.read_bytes() == b'\xef\xbb\xbf{"a": 2}\r\n'
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.json", "real.json"]


def test_a_failed_write_leaves_the_file_alone(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    file = read(str(path))
    with pytest.raises(UnicodeEncodeError):
        write(file, file.text.replace("é", "漢"))
    assert path.read_bytes() == file.text.encode("latin-1")
    assert os.listdir(tmp_path) == ["a.py"]
