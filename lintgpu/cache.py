"""Results kept by content: a hit needs equal questions and unchanged files, whatever their dates say.

An entry is one file named after the hash of its question (the target with its spans, workload, GPUs, interpreter, this version of lintgpu).
It holds the hash of every file that the answer was made from (model source, project modules, library versions) and the value of every
variable that the project asked for, and is used only while each of them still is what it was. Writing is atomic, so that parallel
runs and killed ones leave whole entries or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import lintgpu

T = TypeVar("T")

FOLDER_VARIABLE = "LINTGPU_CACHE_DIR"
MOST_ENTRIES_A_SHARD = 64
"""Of 256 shards; the oldest entries go first."""
_INSTALLED = (".dist-info", ".egg-info", ".egg-link", ".pth")
"""What tells of the name and version of an installed library."""
_CLOCK_STEP_NS = 20_000_000
"""File times come from a coarser clock than time.time_ns."""
STALE_SECONDS = 24 * 3600
"""Age from which a half-written file is a killed run's."""


class _Entry(msgspec.Struct):
    files: list[tuple[str, str]]
    """(path, SHA-256) of every file the value was made from."""
    variables: list[tuple[str, str | None]]
    """(name, value) of the variables of the environment that it was made from."""
    value: msgspec.Raw


class Cache:
    """A folder of entries; None keeps nothing. No method raises for a folder that cannot be read or written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value kept under `key`, where every file it was made from is unchanged."""
        if self._folder is None:
            return None
        try:
            path = self._path(key)
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
            if any(os.environ.get(name) != known for name, known in entry.variables):
                return None
            if any(file_hash(name) != known for name, known in entry.files):
                return None
            value = msgspec.json.decode(entry.value, type=kind)
            os.utime(path)
        except (OSError, msgspec.MsgspecError):
            return None
        return value

    def put(self, key: str, files: Iterable[str], value: Any, variables: Iterable[str] = (), began_ns: int | None = None) -> None:
        """Keep `value` (frozen dataclasses) under `key`, made from `files` and `variables`.

        Nothing is kept where a file is gone by now or has changed since `began_ns` (of time.time_ns), when the work on the value
        began: nobody knows whether it was read before or after.
        """
        if self._folder is None:
            return
        hashes = [(name, file_hash(name)) for name in sorted(set(files))]
        if any(not known for _, known in hashes) or (began_ns is not None and any(_changed_since(name, began_ns) for name, _ in hashes)):
            return
        values = [(name, os.environ.get(name)) for name in variables]
        entry = _Entry(hashes, values, msgspec.Raw(msgspec.json.encode(value)))
        with contextlib.suppress(OSError):
            self._write(self._path(key), msgspec.json.encode(entry))

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key[2:]}.json"

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        _prune(path.parent)


def _prune(shard: Path) -> None:
    """Drop what killed runs left, and the entries longest unused beyond the limit."""
    entries = sorted(shard.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    stale = [path for path in shard.glob("*.tmp") if time.time() - path.stat().st_mtime > STALE_SECONDS]
    for path in entries[MOST_ENTRIES_A_SHARD:] + stale:
        with contextlib.suppress(OSError):
            path.unlink()


def default_folder() -> Path:
    """$LINTGPU_CACHE_DIR, else the platform's cache folder of this user."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("lintgpu", appauthor=False))


def key_of(*parts: Any) -> str:
    """A hash of `parts` (JSON-like values and dataclasses) together with this version and state of lintgpu's own code."""
    plain = [asdict(part) if is_dataclass(part) and not isinstance(part, type) else part for part in parts]
    return hashlib.sha256(msgspec.json.encode([code_stamp(), *plain], order="sorted")).hexdigest()


def file_hash(path: str) -> str:
    """SHA-256 of a file's content, of a folder of libraries the versions of those; empty where it cannot be read."""
    try:
        if os.path.isdir(path):
            installed = sorted(name for name in os.listdir(path) if name.endswith(_INSTALLED))
            return hashlib.sha256("\0".join(installed).encode("utf-8", "surrogateescape")).hexdigest()
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _changed_since(path: str, moment_ns: int) -> bool:
    """Whether a file was written or put in place since; False for folders, whose times tell of other things."""
    try:
        status = os.stat(path)
    except OSError:
        return True
    return not os.path.isdir(path) and max(status.st_mtime_ns, status.st_ctime_ns) > moment_ns - _CLOCK_STEP_NS


@cache
def code_stamp() -> list[Any]:
    """This lintgpu: its version, and the sizes and dates of its files, since an editable install changes under one version."""
    package = Path(lintgpu.__file__).resolve().parent
    rules = package / "rules" if (package / "rules").is_dir() else package.parent / "rules"
    files = sorted(path for folder in (package, rules) for path in folder.rglob("*") if path.suffix in (".py", ".csv", ".npz"))
    return [lintgpu.__version__, [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]]
