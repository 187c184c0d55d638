"""Python files by `ast` and `tokenize`, both of the running interpreter. No code of the file is run."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings

from lintgpu.finding import Span
from lintgpu.source.positions import Positions
from lintgpu.source.unreadable import UnreadableFile


def tree(positions: Positions) -> ast.Module:
    """The syntax tree of the text. Raises UnreadableFile where it does not parse."""
    try:
        with warnings.catch_warnings():
            # Invalid escapes in the linted file are no business of ours.
            warnings.simplefilter("ignore")
            return ast.parse(positions.text)
    except SyntaxError as error:
        raise UnreadableFile(positions.path, error.lineno or 1, max(error.offset or 1, 1), f"not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise UnreadableFile(positions.path, 1, 1, "expressions are nested too deeply to parse") from None
    except ValueError as error:
        raise UnreadableFile(positions.path, 1, 1, f"not valid Python: {error}") from None


def comments(positions: Positions) -> tuple[Span, ...]:
    """The spans of all comments of a text that parses."""
    found: list[Span] = []
    # newline=None makes LF of CR and CRLF, as tokenize wants it; lines and columns stay.
    for token in tokenize.generate_tokens(io.StringIO(positions.text, newline=None).readline):
        if token.type == tokenize.COMMENT:
            start = positions.offset(token.start[0], token.start[1] + 1)
            found.append(positions.span(start, start + len(token.string)))
    return tuple(found)
