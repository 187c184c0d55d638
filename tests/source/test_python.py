"""Python files: spans of the syntax tree in characters, and what is wrong where it does not parse."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.source import UnreadableFile
from lintgpu.source.file import decode

CONSTANTS = st.integers(0, 10**20) | st.text(alphabet=st.sampled_from("ab é漢🙂\\\"'\t#"), max_size=6) | st.none() | st.booleans()
NAMES = st.sampled_from(["d_model", "größe", "x1", "名"])


@given(
    st.lists(st.tuples(NAMES, st.lists(CONSTANTS, min_size=1, max_size=3)), max_size=4),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
)
def test_spans_hold_their_constants(lines, line_end, bom):
    text = line_end.join(f"{name} = f('漢🙂', {', '.join(map(repr, values))})  # é" for name, values in lines) + line_end
    file = decode((b"\xef\xbb\xbf" if bom else b"") + text.encode(), "a.py")
    constants = [node for node in ast.walk(file.tree) if isinstance(node, ast.Constant)]
    assert len(constants) == sum(len(values) + 1 for _, values in lines)
    assert all(ast.literal_eval(file.slice(file.span(node))) == node.value for node in constants)


def test_spans_of_nodes_over_several_lines():
    file = decode('é = dict(\n  名=1,  # c\n  b="漢",\n)\n'.encode(), "a.py")
    call = file.tree.body[0].value
    assert file.slice(file.span(call)) == 'dict(\n  名=1,  # c\n  b="漢",\n)'
    assert [file.slice(file.span(keyword)) for keyword in call.keywords] == ["名=1", 'b="漢"']
    assert file.span(call.keywords[1].value).column == 5


@given(st.text(alphabet=st.sampled_from("ab=1+()[]{}:,.'\"\\#\n\t é漢\x0c\r"), max_size=40))
def test_random_text_parses_or_is_refused_with_a_place(text):
    file = decode(text.encode(), "a.py")
    try:
        assert isinstance(file.tree, ast.Module)
    except UnreadableFile as refused:
        error = refused
    else:
        return
    assert 1 <= error.line <= file.positions.line_count + 1
    assert error.column >= 1


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("x = (1,\ny = 2\n", (1, 5), "never closed"),
        ("é漢 = = 1\n", (1, 6), "invalid syntax"),
        ("def f():\nreturn 1\n", (2, 1), "indented block"),
        ("if x:\n\ty\n        z\n", (3, 1), "tab"),
        ("print 'a'\n", (1, 1), "Missing parentheses"),
    ],
)
def test_broken_python_is_named_with_its_place(text, place, words):
    with pytest.raises(UnreadableFile) as caught:
        decode(text.encode(), "a.py").check()
    assert caught.value.line == place[0]
    assert words in caught.value.message


def test_python_of_another_encoding_is_read_as_it_declares():
    data = "# -*- coding: latin-1 -*-\nname = 'é'; width = 7\n".encode("latin-1")
    file = decode(data, "a.py")
    assert file.slice(file.span(file.tree.body[1].value)) == "7"
    assert file.encode(file.text) == data


def test_comments_are_those_of_the_tokenizer():
    file = decode(b's = "# no"  # yes\nt = """\n# no\n"""\n# end', "a.py")
    assert [file.slice(span) for span in file.comments] == ["# yes", "# end"]


def test_a_data_file_has_no_tree_and_python_no_root():
    with pytest.raises(TypeError):
        _ = decode(json.dumps({}).encode(), "a.json").tree
    with pytest.raises(TypeError):
        _ = decode(b"", "a.py").root
