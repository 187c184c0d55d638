"""JSON, YAML and TOML: the value is the format's own, and every span holds exactly the text its value comes from."""

import json
import math
import sys

import pytest
import yaml as pyyaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lintgpu.source import UnreadableFile
from lintgpu.source.file import decode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINE_ENDS = st.sampled_from(["\n", "\r\n"])
BOMS = st.sampled_from([b"", b"\xef\xbb\xbf"])
NAMES = st.text(alphabet=st.sampled_from("abz_-. #:{}[]\"'\\é漢🙂"), max_size=6)
# YAML 1.1 breaks lines at NEL, LS and PS too and its writer folds them, so they are left to the random texts.
TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0\x85\u2028\u2029"), max_size=8)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def attempt(data, name, parse=True):
    """The file and no error, or no file and the error that refused it."""
    try:
        file = decode(data, name)
        if parse:
            file.check()
    except UnreadableFile as error:
        return None, error
    return file, None


def leaves(node):
    return [child for _, child in node.walk() if not isinstance(child.value, dict | list)]


@given(DOCUMENTS, st.sampled_from([None, 0, 2]), st.booleans(), LINE_ENDS, BOMS)
def test_json_spans_hold_their_values(data, indent, ascii_only, line_end, bom):
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only).replace("\n", line_end)
    file = decode(bom + text.encode(), "a.json")
    assert file.root.value == data
    assert all(json.loads(file.slice(node.span)) == node.value for _, node in file.root.walk())
    keys = [(path, node) for path, node in file.root.walk() if node.key_span]
    assert all(file.root.get(path).key_span == node.key_span for path, node in keys)
    assert file.encode(file.text) == bom + text.encode()


@given(DOCUMENTS, st.booleans(), LINE_ENDS, BOMS)
def test_yaml_spans_hold_their_values(data, flow, line_end, bom):
    text = pyyaml.safe_dump(data, default_flow_style=flow, allow_unicode=True)
    text = text.replace("\n", line_end)
    file = decode(bom + text.encode(), "a.yaml")
    assert file.root.value == data
    for node in leaves(file.root):
        piece = file.slice(node.span)
        # A scalar alone is indented differently, which only matters to those of several lines.
        if "\n" not in piece and "\r" not in piece:
            assert decode(piece.encode(), "b.yaml").root.value == node.value


def toml_string(text):
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, list):
        return "[" + ", # é\n ".join(map(toml_value, value)) + "\n]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_string(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


TOML_SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
TOML_VALUES = st.recursive(
    TOML_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, TOML_VALUES, max_size=3), max_size=3), LINE_ENDS, BOMS)
def test_toml_spans_hold_their_values(data, line_end, bom):
    lines = []
    for table, values in data.items():
        lines += [f"[{toml_string(table)}] # é漢", *(f"{toml_string(key)} = {toml_value(value)}" for key, value in values.items())]
    text = "\n".join([*lines, ""]).replace("\n", line_end)
    file = decode(bom + text.encode(), "a.toml")
    assert file.root.value == tomllib.loads(text)
    assert all(tomllib.loads(f"x = {file.slice(node.span)}")["x"] == node.value for node in leaves(file.root))


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.toml", "a.py"])
@given(text=st.text(max_size=80) | st.text(alphabet=st.sampled_from("a1 \t\n\r:-[]{}\"'#&*!|>%@`=,.\\?\ufeff"), max_size=40))
@settings(max_examples=250)
def test_random_text_reads_or_is_refused_with_a_place(name, text):
    file, error = attempt(text.encode("utf-8", "replace"), name)
    if error is None:
        assert all(file.slice(span) for span in file.comments)
    else:
        assert error.line >= 1
        assert error.column >= 1
        assert "\n" not in str(error)
        assert str(error).startswith(name)


@given(st.binary(max_size=60))
def test_random_bytes_read_or_are_refused(data):
    file, error = attempt(data, "a.json", parse=False)
    assert error.kind == "encoding" if error else file.encode(file.text) == data


# JSON


def test_json_takes_comments_trailing_commas_and_nonfinite_numbers():
    text = '{ // "a": 0,\n "a": [1, 2, /* , */ ], "b": [NaN, -Infinity, Infinity,],\n}\n'
    root = decode(text.encode(), "a.json").root
    assert root.value["a"] == [1, 2]
    assert math.isnan(root.value["b"][0])
    assert root.value["b"][1:] == [-math.inf, math.inf]
    assert (root.get("a.1").span.line, root.get("a.1").span.column) == (2, 11)


def test_json_leaves_strings_that_look_like_comments_alone():
    text = '{"url": "https://x.y/z", "c": "/* NaN */", "d": ",]"}'
    assert decode(text.encode(), "a.json").root.value == json.loads(text)


def test_a_repeated_json_key_keeps_the_last_value_and_its_place():
    root = decode(b'{"a": 1,\n "a": 2}', "a.json").root
    assert root.value == {"a": 2}
    assert root.get("a").span.line == 2


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('{"a": 1 "b": 2}', (1, 9), "expecting ',' delimiter, found '\"b\":'"),
        ('{"é": 1,\n "b": }', (2, 7), "expecting value, found '}'"),
        ("{'a': 1}", (1, 2), "double quotes"),
        ('{"a": [1,,2]}', (1, 10), "found ',2]}'"),
        ('{"a": 1', (1, 8), "end of the file"),
        ("", (1, 1), "end of the file"),
        ('{"a": tru}', (1, 7), "found 'tru}'"),
        ('{"a": 01}', (1, 8), "found '1}'"),
        ('{"a": "x\ny"}', (1, 9), "control character"),
        ('{"a": 1} {"b": 2}', (1, 10), "extra data"),
        ('{"a": NaN.5}', (1, 10), "found '.5}'"),
        ('{"a": "\\q"}', (1, 8), "escape"),
    ],
)
def test_broken_json_is_named_with_its_place(text, place, words):
    with pytest.raises(UnreadableFile) as caught:
        decode(text.encode(), "a.json").check()
    assert (caught.value.line, caught.value.column) == place
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "[" * 100_000), ("a.json", "[" * 900 + "]" * 900), ("a.yaml", "[" * 5000), ("a.toml", "a = " + "[" * 5000)],
)
def test_deep_nesting_is_refused_or_read_but_never_a_traceback(name, text):
    _, error = attempt(text.encode(), name)
    assert error.line == 1 if error else text.endswith("]")


# YAML


def yaml(text):
    return decode(text.encode(), "a.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4e-4", 4e-4), ("1e5", 1e5), ("1E+5", 1e5), ("3.5", 3.5), (".5", 0.5), ("-.inf", -math.inf),
        ("1_000", 1000), ("0x1F", 31), ("017", 15), ("1:30", 90), ("-7", -7),
        ("yes", True), ("off", False), ("on", True), ("y", "y"), ("N", "N"), ("~", None), ("null", None), ("", None),
        ("5e", "5e"), ("1.2.3", "1.2.3"), ("2020-01-01", "2020-01-01"), ("n/a", "n/a"), ("=", "="),
        ("'4e-4'", "4e-4"), ("!!str 12", "12"), ("!!int '12'", 12), ("!!float 3", 3.0),
    ],
)  # fmt: skip
def test_yaml_scalars_mean_what_pyyaml_users_expect(text, value):
    found = yaml(f"a: {text}\n").root.value["a"]
    assert found == value
    assert type(found) is type(value)


def test_yaml_anchors_aliases_and_merges_keep_the_place_of_the_text():
    file = yaml("base: &base\n  d_model: 512 # c\n  heads: &h 8\nbig:\n  <<: *base\n  d_model: 1024\n  kv: *h\n")
    big = file.root.get("big")
    assert big.value == {"d_model": 1024, "heads": 8, "kv": 8}
    assert (big.get("d_model").span.line, big.get("heads").span.line, big.get("kv").span.line) == (6, 3, 3)
    assert file.slice(big.get("kv").span) == "8"
    assert file.slice(big.get("kv").key_span) == "kv"
    assert file.slice(file.root.get("base").span) == "d_model: 512 # c\n  heads: &h 8"


def test_a_yaml_block_ends_with_its_last_value_and_an_empty_value_stands_behind_its_key():
    file = yaml("a:\n  b:\n    c: 1\n    d:\n\n  # c\n\n# c\ne:\n  - - 2\n\nf: 3\n")
    assert file.slice(file.root.get("a").span) == "b:\n    c: 1\n    d:"
    assert file.slice(file.root.get("e").span) == "- - 2"
    assert (file.root.get("a.b.d").span.line, file.root.get("a.b.d").value) == (4, None)


def test_yaml_merge_of_several_takes_the_first():
    root = yaml("a: &a {x: 1}\nb: &b {x: 2, y: 3}\nc:\n  <<: [*a, *b]\n").root
    assert root.value["c"] == {"x": 1, "y": 3}


def test_yaml_application_tags_keep_their_node():
    root = yaml("model: !new:pkg.Net\n  size: 512\n  act: !name:torch.relu\nt: !!python/tuple [1, 2]\n").root
    assert root.get("model").tag == "!new:pkg.Net"
    assert root.get("model.size").value == 512
    assert root.get("t").tag == "!!python/tuple"
    assert root.get("t").value == [1, 2]


def test_yaml_of_several_documents_puts_the_first_in_front():
    file = yaml("---\na: 1\n---\nb: 2\n...\n")
    assert file.root.value == {"a": 1}
    assert [document.value for document in file.documents] == [{"a": 1}, {"b": 2}]
    assert file.documents[1].get("b").span.line == 4


def test_yaml_takes_json_with_dashes_comments_and_trailing_commas():
    root = yaml('{\n  # c\n  "pipe-parallel-size": 1,\n  "optimizer": {"params": {"lr": 6e-4,}},\n}\n').root
    assert root.get("pipe-parallel-size").value == 1
    assert root.get("optimizer.params.lr").value == 6e-4


def test_a_repeated_yaml_key_keeps_the_last_value():
    root = yaml("a: 1\nb: 2\na: 3\n").root
    assert root.value == {"a": 3, "b": 2}
    assert root.get("a").span.line == 3


def test_yaml_columns_count_characters_behind_wide_ones():
    root = yaml('é漢🙂: {"k": 50257}\r\nb: 1\r\n').root
    assert (root.get("é漢🙂.k").span.column, root.get("é漢🙂.k").span.end_column) == (12, 17)
    assert root.get("b").span.line == 2


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a:\n\tb: 1\n", (2, 1), "tab"),
        ("a:\n  b: 1\n c: 2\n", (3, 2), "block"),
        ("a: [1, 2\nb: 3\n", (2, 2), "expected"),
        ("a: b: c\n", (1, 5), "mapping values"),
        ("a: *missing\n", (1, 4), "alias"),
        ("{{ name }}: 1\n", (1, 1), "placeholder"),
        ("a: &x [*x]\n", (1, 4), "alias inside"),
        ("a: !!int foo\n", (1, 4), "not a int"),
        ("a: 'x\n", (2, 1), "quoted scalar"),
        ("a: 1\n\x07b: 2\n", (2, 1), "characters are not allowed"),
        ("a: {<<: 3}\n", (1, 9), "<<"),
        ("a: @b\n", (1, 4), "'@'"),
    ],
)
def test_broken_yaml_is_named_with_its_place(text, place, words):
    with pytest.raises(UnreadableFile) as caught:
        yaml(text).check()
    assert (caught.value.line, caught.value.column) == place
    assert words in caught.value.message


def test_aliases_that_explode_are_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(UnreadableFile, match="aliases expand"):
        yaml("\n".join(lines)).check()


def test_comments_only_is_an_empty_document():
    file = yaml("# nothing\n")
    assert file.root.value is None
    assert len(file.comments) == 1


# TOML


def test_toml_tables_arrays_and_dotted_keys_have_places():
    text = 'a.b.c = 1\n[t."x y"] # c\nq = [1,\n 2]\n[[z]]\nn = {m = 3}\n[[z]]\n[z.k]\nv = """x\ny"""\nd = 1979-05-27\n'
    file = decode(text.encode(), "a.toml")
    assert file.root.value == {
        "a": {"b": {"c": 1}},
        "t": {"x y": {"q": [1, 2]}},
        "z": [{"n": {"m": 3}}, {"k": {"v": "x\ny", "d": "1979-05-27"}}],
    }
    lines = {path: file.root.get(path).span.line for path in ("a.b.c", "t.x y.q.1", "z.0.n.m", "z.1.k.v", "z.1.k.d")}
    assert list(lines.values()) == [1, 4, 6, 9, 11]
    assert file.slice(file.root.get("t.x y").key_span) == '"x y"'


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a = \nb = 1\n", (1, 5), "invalid value"),
        ("é = 1\n", (1, 1), "invalid"),
        ("a = [1\n", (2, 1), "end of the file"),
        ("a = 1\na = 2\n", (2, 6), "overwrite"),
    ],
)
def test_broken_toml_is_named_with_its_place(text, place, words):
    with pytest.raises(UnreadableFile) as caught:
        decode(text.encode(), "a.toml").check()
    assert (caught.value.line, caught.value.column) == place
    assert words in caught.value.message
