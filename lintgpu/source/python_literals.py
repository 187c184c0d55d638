"""Replace integer literals of a Python file through libcst, which keeps everything else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from lintgpu.finding import Edit
from lintgpu.source.positions import Positions


def replace_integers(positions: Positions, edits: Sequence[Edit]) -> str:
    """The text with the integer literals at the spans of `edits` replaced. Raises ValueError where that cannot be done."""
    try:
        wrapper = MetadataWrapper(libcst.parse_module(positions.text), unsafe_skip_copy=True)
        wanted = {(edit.span.line, edit.span.column - 1): edit.text for edit in edits}
        replacer = _Replacer(wrapper.resolve(PositionProvider), wanted)
        changed = wrapper.module.visit(replacer)
    except (libcst.ParserSyntaxError, libcst.CSTValidationError, RecursionError) as error:
        reason = getattr(error, "message", str(error)).splitlines()[0]
        raise ValueError(f"{positions.path}: libcst cannot rewrite it: {reason}") from None
    if replacer.wanted:
        line, column = min(replacer.wanted)
        raise ValueError(f"{positions.path}:{line}:{column + 1}: there is no integer literal to replace")
    return changed.code


class _Replacer(libcst.CSTTransformer):
    """Gives each Integer at a wanted (line, column) its new text, and strikes it off."""

    def __init__(self, places: Mapping[libcst.CSTNode, CodeRange], wanted: dict[tuple[int, int], str]) -> None:
        super().__init__()
        self.places = places
        self.wanted = wanted

    def leave_Integer(self, original_node: libcst.Integer, updated_node: libcst.Integer) -> libcst.BaseExpression:
        """Replace a literal that was asked for."""
        start = self.places[original_node].start
        text = self.wanted.pop((start.line, start.column), None)
        return updated_node if text is None else updated_node.with_changes(value=text)
