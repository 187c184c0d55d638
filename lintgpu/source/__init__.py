"""Read files as text with spans: one reader a language, suppressions, edits."""

from __future__ import annotations

from lintgpu.source.file import SourceFile, read
from lintgpu.source.node import Node
from lintgpu.source.unreadable import UnreadableFile

__all__ = ["Node", "SourceFile", "UnreadableFile", "read"]
