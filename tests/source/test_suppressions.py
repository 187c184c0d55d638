"""Ignore comments: where they count, what they hide, and that text in strings never counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.source.file import decode
from lintgpu.source.suppressions import suppressed, suppressions, unused

PYTHON = '''# lintgpu: ignore-file[LG2] slow start is fine
a = 1  # lintgpu: ignore[LG101, lg102] padded by hand
b = "# lintgpu: ignore"
c = """
# lintgpu: ignore
"""
# lintgpu: ignore[LG1] the tokenizer's
# and more words
d = 2
e = 3  # noqa: E1 # lintgpu: ignore
f = 4  # lintgpu: ignore[LG101
g = 5  # lintgpu: ignored
'''


def hidden(name, text, codes=("LG101", "LG102", "LG201")):
    file = decode(text.encode(), name)
    return {(line, code) for line in range(1, file.positions.line_count + 1) for code in codes if suppressed(file, line, code)}


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_python(line_end):
    text = PYTHON.replace("\n", line_end)
    everywhere = {(line, "LG201") for line in range(1, 14)}
    assert hidden("a.py", text) == everywhere | {(2, "LG101"), (2, "LG102"), (9, "LG101"), (9, "LG102"), (10, "LG101"), (10, "LG102")}


def test_reasons_are_kept():
    assert [item.reason for item in suppressions(decode(PYTHON.encode(), "a.py"))] == [
        "slow start is fine",
        "padded by hand",
        "the tokenizer's",
        "",
    ]


def test_yaml():
    text = """# lintgpu: ignore[LG102]
a: 1  # lintgpu: ignore[LG101]
b: '# lintgpu: ignore'
c: |  # lintgpu: ignore[LG1]
  # lintgpu: ignore
  x
# lintgpu: ignore[LG101] above
d: &x 2#y
e: a#lintgpu:ignore
f: é漢 # lintgpu: ignore[LG101]
"""
    assert hidden("a.yaml", text) == {(2, "LG101"), (2, "LG102"), (4, "LG101"), (4, "LG102"), (8, "LG101"), (10, "LG101")}


def test_toml():
    text = '''a = 1 # lintgpu: ignore[LG101]
b = "# lintgpu: ignore"
c = """
# lintgpu: ignore
"""
d = [ # lintgpu: ignore[LG1]
 1, # lintgpu: ignore
]
'''
    assert hidden("a.toml", text, ("LG101",)) == {(1, "LG101"), (6, "LG101"), (7, "LG101")}


def test_json_with_comments():
    text = '{"a": 1, // lintgpu: ignore[LG101] why\n/* lintgpu: ignore */\n"b": "// lintgpu: ignore",\n"c": 2}'
    assert hidden("a.json", text, ("LG101",)) == {(1, "LG101"), (3, "LG101")}
    assert [item.reason for item in suppressions(decode(text.encode(), "a.json"))] == ["why", ""]


def test_a_comment_behind_code_says_nothing_of_the_next_line():
    assert hidden("a.py", "a = 1  # lintgpu: ignore\nb = 2\n", ("LG101",)) == {(1, "LG101")}


def test_a_file_that_does_not_parse_hides_nothing():
    assert hidden("a.yaml", "# lintgpu: ignore-file\na: [\n") == set()


def test_unused_comments_are_told():
    file = decode(PYTHON.encode(), "a.py")
    found = {item.span.line: unused(item, [(2, "LG101"), (9, "LG201"), (10, "LG102")]) for item in suppressions(file)}
    assert found == {1: (), 2: ("LG102",), 7: ("LG1",), 10: ()}
    assert [unused(item, []) for item in suppressions(file)] == [("LG2",), ("LG101", "LG102"), ("LG1",), ("",)]


@given(st.text(alphabet=st.sampled_from("ab: 1'\"#[]{}-|>&*\n \t,é"), max_size=40))
def test_every_yaml_comment_starts_with_its_mark_and_ends_its_line(text):
    file = decode(text.encode(), "a.yaml")
    for span in file.comments:
        assert file.slice(span).startswith("#")
        assert span.end_column == len(file.positions.line(span.line)) + 1
