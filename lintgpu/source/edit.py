"""Apply edits in place: comments, formatting and line endings around them stay as they are."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lintgpu.finding import Edit
from lintgpu.source.file import PYTHON, SourceFile, decode
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile

_LONE_CR = re.compile(r"\r(?!\n)")


class EditError(ValueError):
    """Edits that cannot be applied: overlapping, outside the text, or leaving a file that no longer parses."""


def apply(files: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """The new texts of the files that `edits` change, by path. The same edit given twice counts once.

    Raises EditError where an edit names a file that is not in `files`, lies outside its text or overlaps another, or
    where a changed file no longer parses.
    """
    changed = {}
    for path in sorted({edit.span.path for edit in edits}):
        if path not in files:
            raise EditError(f"{path}: cannot be edited: it was not read")
        mine = sorted({edit for edit in edits if edit.span.path == path}, key=lambda edit: edit.span)
        new = _splice(Positions(path, files[path]), mine)
        _prove(path, files[path], new, mine)
        if new != files[path]:
            changed[path] = new
    return changed


def diff(old: str, new: str, path: str) -> str:
    """The unified diff of a file's two texts, empty where they are equal; line endings are kept as they are."""
    shown = path.replace(os.sep, "/").replace("\n", " ").removeprefix("/")
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{shown}", f"b/{shown}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(file: SourceFile, text: str, path: str | None = None) -> None:
    """Write `text` in place of a file, at `path` where that is not the file's own, keeping encoding, mode and symbolic links.

    The file is replaced in one step, so that no reader sees half of it. Raises OSError where it cannot be written.
    """
    target = Path(path or file.path).resolve()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(file.encode(text))
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _lines(text: str) -> list[str]:
    """Lines as diff tools count them: ended by LF alone, so that CR and CRLF survive."""
    return [line + "\n" for line in text.split("\n")[:-1]] + ([text.split("\n")[-1]] if not text.endswith("\n") and text else [])


def _splice(positions: Positions, edits: Sequence[Edit]) -> str:
    pieces = []
    done = 0
    for edit in edits:
        try:
            start, end = positions.offsets(edit.span)
        except ValueError as error:
            raise EditError(f"{positions.path}: cannot be edited: {error}") from None
        if start < done or end < start:
            raise EditError(f"{positions.path}:{edit.span.line}:{edit.span.column}: two edits overlap")
        pieces += [positions.text[done:start], edit.text]
        done = end
    return "".join([*pieces, positions.text[done:]])


def _prove(path: str, old: str, new: str, edits: Sequence[Edit]) -> None:
    """Raise EditError unless the new text parses and, where Python integers were replaced, those alone changed."""
    try:
        file = decode(new.encode(), path)
        file.check()
    except UnreadableFile as error:
        raise EditError(f"{error} after the edit") from None
    if file.language == PYTHON:
        positions = Positions(path, old)
        literals = [edit for edit in edits if _is_integer(positions, edit)]
        if literals and len(literals) == len(edits):
            _prove_integers(positions, literals, new)


def _prove_integers(positions: Positions, edits: Sequence[Edit], new: str) -> None:
    # libcst takes a third of a second to import and only fixes of Python files want it.
    from lintgpu.source.python_literals import replace_integers

    # libcst knows no line ends of CR alone; to Python, and for this proof, they are worth LF.
    plain = Positions(positions.path, _LONE_CR.sub("\n", positions.text))
    try:
        rewritten = replace_integers(plain, edits)
    except ValueError as error:
        raise EditError(str(error)) from None
    if rewritten != _LONE_CR.sub("\n", new):
        raise EditError(f"{positions.path}: the edit would change more than the integers it names")


def _is_integer(positions: Positions, edit: Edit) -> bool:
    start, end = positions.offsets(edit.span)
    return all(re.fullmatch(r"\d[\da-fA-FxXoObB_]*", text) for text in (positions.text[start:end], edit.text))
