"""The code frame: carets stand under the span whatever the line holds, and no line is wider than asked."""

from hypothesis import given
from hypothesis import strategies as st

from lintgpu.report.frame import frame
from lintgpu.report.text import width
from lintgpu.source.positions import Positions

LINES = st.lists(st.text(alphabet=st.sampled_from("ab\té漢\x07"), max_size=90), min_size=1, max_size=4)


def shown(text, span, columns, label="", mark=lambda text: text):
    return frame(text, span, label, columns, mark)


@given(LINES, st.sampled_from([40, 80, 1000]), st.data())
def test_carets_stand_under_the_first_character_of_the_span(lines, columns, data):
    number = data.draw(st.integers(1, len(lines)))
    line = lines[number - 1]
    column = data.draw(st.integers(1, len(line) + 1))
    text = "\n".join([*lines, ""])
    positions = Positions("a.py", text)
    start = positions.offset(number, column)
    end = data.draw(st.integers(start, len(text)))
    rows = shown(positions, positions.span(start, end), columns)
    code = next(index for index, row in enumerate(rows) if row.startswith(f"{number} |"))
    offset = rows[code + 1].index("^")
    before = ""
    for character in rows[code]:
        if width(before) >= offset:
            break
        before += character
    rest = rows[code][len(before) :]
    cell = {"\t": " ", "\x07": "\\", "": ""}.get(line[column - 1 : column], line[column - 1 : column])
    assert rest.startswith(cell) or (cell == " " and not rest.strip())
    assert all(width(row) <= max(columns, 20 + 4) + 2 for row in rows)


def test_a_line_that_fits_is_whole_with_its_neighbours():
    positions = Positions("c.yaml", "a: 1\nb: 50257\nc: 3\nd: 4\n")
    assert shown(positions, positions.span(8, 13), 80, "suggested: 50304") == [
        "  |",
        "1 | a: 1",
        "2 | b: 50257",
        "  |    ^^^^^ suggested: 50304",
        "3 | c: 3",
        "  |",
    ]


def test_tabs_and_wide_characters_align():
    positions = Positions("c.py", "\t漢 = 7\n")
    assert shown(positions, positions.span(5, 6), 80)[1:3] == ["1 |     漢 = 7", "  |          ^"]


def test_a_span_over_several_lines_is_underlined_to_the_end_of_its_first():
    positions = Positions("c.py", "f(\n  1,\n)\n")
    assert shown(positions, positions.span(0, 9), 80)[1:3] == ["1 | f(", "  | ^^"]


def test_a_place_outside_the_text_has_no_frame():
    positions = Positions("c.py", "a\n")
    assert shown(positions, Positions("c.py", "a\nb\nc\n").span(2, 3), 80) == []
