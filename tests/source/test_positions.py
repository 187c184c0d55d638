"""Offsets, lines and columns agree with each other on any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintgpu.source.positions import Positions

TEXTS = st.text(alphabet=st.sampled_from("ab \té漢🙂\r\n\x0b\x0c\u2028"), max_size=60)


@given(TEXTS, st.data())
def test_line_and_column_lead_back_to_the_offset(text, data):
    positions = Positions("a.py", text)
    offset = data.draw(st.integers(0, len(text)))
    line, column = positions.line_column(offset)
    assert positions.offset(line, column) == offset


@given(TEXTS)
def test_lines_end_at_lf_crlf_and_cr_only(text):
    positions = Positions("a.py", text)
    expected = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert positions.line_count == len(expected)
    assert [positions.line(number) for number in range(1, len(expected) + 1)] == expected


@given(TEXTS, st.data())
def test_bytes_lead_to_characters(text, data):
    positions = Positions("a.py", text)
    offset = data.draw(st.integers(0, len(text)))
    assert positions.from_byte(len(text[:offset].encode())) == offset
    line, column = positions.line_column(offset)
    assert positions.from_line_byte(line, len(positions.line(line)[: column - 1].encode())) <= offset


def test_columns_count_characters():
    positions = Positions("a.py", "é = '漢' + x\n")
    assert positions.line_column(positions.from_line_byte(1, len("é = '漢' + ".encode()))) == (1, 11)


@pytest.mark.parametrize(("line", "column"), [(0, 1), (4, 1), (1, 0), (1, 4), (3, 2)])
def test_a_place_outside_the_text_is_refused(line, column):
    with pytest.raises(ValueError, match="outside"):
        Positions("a.py", "ab\ncd\n").offset(line, column)
