"""Which files a run looks at: those named, and in folders those that may hold a model or its workload."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from lintgpu.source.file import LANGUAGES

if TYPE_CHECKING:
    import pathspec

SKIPPED_FOLDERS = frozenset({"node_modules", "site-packages", "__pycache__", "build", "dist", "venv", "env", ".venv"})


def walk(paths: Sequence[str], exclude: Sequence[str], root: str) -> Iterator[str]:
    """The files under `paths`, each once, in a stable order.

    A file named outright is always taken. Folders are searched for Python, YAML, JSON and TOML; hidden folders, environments, what a
    .gitignore names and what `exclude` matches (gitignore patterns, relative to `root`) are left out.
    """
    excluded = _patterns(exclude) if any(os.path.isdir(path) for path in paths) else None
    seen: set[str] = set()
    for path in paths:
        for file in _files_of(path, excluded, root):
            key = os.path.realpath(file)
            if key not in seen:
                seen.add(key)
                yield file


def _files_of(path: str, excluded: pathspec.GitIgnoreSpec | None, root: str) -> Iterator[str]:
    if excluded is None or not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            name
            for name in folders
            if _wanted_folder(os.path.join(folder, name)) and not _left_out(os.path.join(folder, name) + "/", excluded, root)
        )
        for name in sorted(names):
            file = os.path.normpath(os.path.join(folder, name))
            if Path(name).suffix.lower() in LANGUAGES and not _left_out(file, excluded, root):
                yield file


def _wanted_folder(folder: str) -> bool:
    name = os.path.basename(folder)
    return not name.startswith(".") and name not in SKIPPED_FOLDERS and not os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _left_out(path: str, excluded: pathspec.GitIgnoreSpec, root: str) -> bool:
    tail = "/" if path.endswith("/") else ""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute, root)
    if not relative.startswith("..") and excluded.match_file(Path(relative).as_posix() + tail):
        return True
    return any(
        spec.match_file(Path(os.path.relpath(absolute, folder)).as_posix() + tail)
        for folder, spec in _gitignores(os.path.dirname(absolute))
    )


@lru_cache(maxsize=4096)
def _gitignores(folder: str) -> tuple[tuple[str, pathspec.GitIgnoreSpec], ...]:
    """The .gitignore files that hold for `folder`, up to the repository's top."""
    here = os.path.join(folder, ".gitignore")
    own = ((folder, _read_gitignore(here)),) if os.path.isfile(here) else ()
    parent = os.path.dirname(folder)
    if os.path.exists(os.path.join(folder, ".git")) or parent == folder:
        return own
    return own + _gitignores(parent)


def _read_gitignore(path: str) -> pathspec.GitIgnoreSpec:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return _patterns(stream)


def _patterns(lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    # Files named outright need no patterns, and the import takes as long as checking one of them.
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(lines)
