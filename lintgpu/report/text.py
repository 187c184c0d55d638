"""Text for people: figures, widths, and input that may hold anything."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

BASIS = {
    "measured": "measured",
    "calibrated": "model calibrated on this GPU",
    "sibling": "model calibrated on a sibling GPU",
    "specification": "model from the GPU's specification alone",
}
"""What a cost rests on, in words."""


def printable(text: str) -> str:
    """`text` with everything a terminal could take for a command (controls, bidirectional marks) or fail on spelled as escapes."""
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def one_line(text: str) -> str:
    """`text` as one printable line, with runs of white space as one space."""
    return printable(" ".join(text.split()))


def _escape(character: str) -> str:
    code = ord(character)
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def width(text: str) -> int:
    """Columns that printable text takes on a terminal."""
    return sum(_character_width(character) for character in text)


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """`text` in at most `columns`, with an ellipsis where it was longer."""
    if width(text) <= columns:
        return text
    kept = ""
    for character in text:
        if width(kept + character) > columns - 1:
            break
        kept += character
    return kept + "…"


def duration(us: float) -> str:
    """Microseconds in the unit that reads best, to three digits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size * 0.9995:
            return f"{_three_digits(us / size)} {unit}"
    return f"{_three_digits(us)} us"


def _three_digits(value: float) -> str:
    if not math.isfinite(value) or value <= 0:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value < 1000 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share (0..1) in per cent: one decimal below 10 %."""
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def plural(count: int, noun: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def json_text(data: Any) -> str:
    """Plain data as JSON in ASCII: six digits for floats, null for NaN and infinities, no lone surrogates."""
    return json.dumps(_plain(data), indent=2, allow_nan=False) + "\n"


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {_plain(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(item) for item in data]
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode("utf-8") if not data.isascii() else str(data)
    if isinstance(data, float):
        return float(f"{data:.6g}") if math.isfinite(data) else None
    return data
