"""What the code of a project looked at beside its modules while its model was built: files it opened, variables it asked for.

A kept result holds only as long as these are what they were.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

_CALLERS = 6
"""Frames from a look at the environment up to the project's line: through os.getenv, Mapping.get and the like."""


class Reads:
    """Notes from `watch` on, for the rest of the process."""

    def __init__(self) -> None:
        """Nothing is noted yet."""
        self._root = ""
        self._files: set[str] = set()
        self._variables: set[str] = set()

    def watch(self, root: str) -> None:
        """Note the files below `root` that are opened for reading, and the variables that code below it asks for."""
        self._root = os.path.join(root, "")
        sys.addaudithook(self._heard)
        self._watch_environment()

    @property
    def files(self) -> frozenset[str]:
        """Absolute paths of files that are still there."""
        return frozenset(path for path in self._files if os.path.isfile(path))

    @property
    def variables(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(sorted(self._variables))

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, bytes)):
            return
        path, mode = os.path.abspath(os.fsdecode(arguments[0])), arguments[1]
        writes = any(letter in mode for letter in "wax") if isinstance(mode, str) else bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if path.startswith(self._root) and not writes and not is_cached_or_installed(path):
            self._files.add(path)

    def _watch_environment(self) -> None:
        kind: Any = type(os.environ)
        original = kind.__getitem__

        def getitem(environment: Mapping[str, str], name: str) -> str:
            if isinstance(name, str) and self._is_asked_by_project(sys._getframe(1)):
                self._variables.add(name)
            value: str = original(environment, name)
            return value

        kind.__getitem__ = getitem

    def _is_asked_by_project(self, frame: FrameType | None) -> bool:
        for _ in range(_CALLERS):
            if frame is None:
                return False
            if frame.f_code.co_filename.startswith(self._root) and not is_cached_or_installed(frame.f_code.co_filename):
                return True
            frame = frame.f_back
        return False


def is_cached_or_installed(path: str) -> bool:
    """Whether a file is bytecode, or of a library in an environment inside the project: those are known by their versions."""
    return any(part in ("__pycache__", "site-packages", "dist-packages") for part in path.split(os.sep))
