"""Dotted paths over the values of a file."""

from hypothesis import given
from hypothesis import strategies as st

from lintgpu.source.file import decode
from lintgpu.source.node import escape_key, split_path


@given(st.lists(st.text(alphabet="ab.\\ ", max_size=6), min_size=1, max_size=4))
def test_escaped_keys_come_back(keys):
    assert split_path(".".join(map(escape_key, keys))) == tuple(keys)


def test_get_follows_keys_and_indices():
    root = decode(b'{"text_config": {"layers": [{"size": 7}]}, "a.b": 1}', "c.json").root
    assert root.get("text_config.layers.0.size").value == 7
    assert root.get("a\\.b").value == 1
    assert root.get("text_config.layers.1.size") is None
    assert root.get("a.b") is None


def test_get_finds_keys_that_are_no_strings():
    root = decode(b"7: a\nyes: b\n2.5: c\n", "c.yaml").root
    assert [root.get(path).value for path in ("7", "True")] == ["a", "b"]


def test_every_path_of_walk_leads_to_its_node():
    root = decode(b'{"a": [1, {"b.c": {"d\\\\": 2}}], "": {"e": null}}', "c.json").root
    walked = dict(root.walk())
    assert list(walked) == ["a", "a.0", "a.1", "a.1.b\\.c", "a.1.b\\.c.d\\\\", "", ".e"]
    assert all(root.get(path) is node for path, node in walked.items())
