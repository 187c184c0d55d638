"""The client's side of the warm worker: find or start the server of this environment and borrow a process forked from it.

POSIX only. The server (lintgpu.trace.server) holds torch and the model library imported; a borrowed process speaks the worker's
protocol over pipes of ours, under limits and a confinement of its own. Whatever goes wrong here means a cold worker instead.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lintgpu.cache import FOLDER_VARIABLE, code_stamp, default_folder

IDLE_SECONDS = 900.0
"""How long a server waits for the next command."""
POSIX = os.name == "posix"
_ANSWER_SECONDS = 120.0
"""How long a server may take from its start to its first process: an import of torch on a busy machine."""
_RACE_SECONDS = 2.0
"""How long another client's server, which holds the lock, may take to listen."""
_LONGEST_ADDRESS = 100
"""Bytes of a socket's path, of which systems take 104 to 108."""
_PASSING = frozenset({FOLDER_VARIABLE, "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "WINDOWID", "PYTEST_CURRENT_TEST"})
"""Variables that change from one command to the next and that no library looks at while it is imported."""


@dataclass(frozen=True)
class Warmth:
    """Where servers are met, a folder of the user alone, and how long they wait."""

    folder: Path
    idle_seconds: float = IDLE_SECONDS


def warmth() -> Warmth | None:
    """Below $LINTGPU_CACHE_DIR, else the runtime folder, else the cache folder of this user; None where there are no such sockets."""
    if not POSIX:
        return None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and not os.environ.get(FOLDER_VARIABLE) and os.path.isdir(runtime):
        return Warmth(Path(runtime) / "lintgpu")
    return Warmth(default_folder() / "warm")


class ServerLost(OSError):
    """The server went away while a process of its was at work."""


class Borrowed:
    """A process forked from the server: the part of subprocess.Popen that a client of the worker uses."""

    def __init__(self, connection: socket.socket, stdin: IO[str], stdout: IO[str]) -> None:
        self._connection = connection
        self.stdin, self.stdout = stdin, stdout
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. Raises subprocess.TimeoutExpired, and ServerLost where nobody is left to tell."""
        if self._status is None:
            self._connection.settimeout(timeout)
            try:
                message = _read_line(self._connection)
            except TimeoutError:
                raise subprocess.TimeoutExpired("the borrowed worker", timeout or 0.0) from None
            except OSError as error:
                raise ServerLost(str(error)) from error
            if "status" not in message:
                raise ServerLost("the warm worker's server ended")
            self._status = int(message["status"])
        return self._status

    def kill(self) -> None:
        """End the process and what it started: the server does so when the connection closes."""
        self._connection.close()


def borrow(warmth: Warmth, python: str, variables: Mapping[str, str], scratch: str, root: str | None, errors: int) -> Borrowed | None:
    """A process of the server for `python` under the environment `variables`, started in `scratch`; None where there is none to be had.

    `variables` name `scratch` for temporary files. The process may run code below `root`. `errors` is the descriptor of its stderr.
    """
    try:
        _own_folder(warmth.folder)
        found = shutil.which(python, path=variables.get("PATH"))
        name = server_name(found, variables, scratch) if found else ""
        if not name or len(os.fsencode(warmth.folder / f"{name}.sock")) > _LONGEST_ADDRESS:
            return None
        # A server that finds itself out of date hangs up and ends; then a new one is asked.
        there = _connect(str(warmth.folder / f"{name}.sock"))
        borrowed = _ask(there, variables, scratch, root, errors) if there is not None else None
        if borrowed is not None:
            return borrowed
        new = _connect_to_new(warmth, name, found or python, variables, scratch)
        return _ask(new, variables, scratch, root, errors) if new is not None else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _own_folder(folder: Path) -> None:
    """Make the folder, for this user alone. Raises OSError where it is anybody else's or open to others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is no folder of this user")
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def server_name(python: str, variables: Mapping[str, str], scratch: str) -> str:
    """What a server is called: equal names, equal answers. The server itself watches the libraries that it has imported."""
    real = os.path.realpath(python)
    kept = {name: value for name, value in variables.items() if name not in _PASSING and value != scratch}
    binary = os.stat(real)
    parts = [code_stamp(), real, os.path.abspath(python), binary.st_ino, binary.st_size, binary.st_mtime_ns, sorted(kept.items())]
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _connect_to_new(warmth: Warmth, name: str, python: str, variables: Mapping[str, str], scratch: str) -> socket.socket | None:
    """A connection to a server that was just started, by us or by another client at the same time."""
    _start(warmth, name, python, variables, scratch)
    give_up = time.monotonic() + _RACE_SECONDS
    while (connection := _connect(str(warmth.folder / f"{name}.sock"))) is None and time.monotonic() < give_up:
        time.sleep(0.02)
    return connection


def _connect(address: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_SECONDS)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def _start(warmth: Warmth, name: str, python: str, variables: Mapping[str, str], scratch: str) -> None:
    """Start a server; when this returns it listens, unless another one does or it cannot."""
    from lintgpu.trace.client import bootstrap

    home = str(warmth.folder / f"{name}.home")
    own = {key: home if value == scratch else value for key, value in variables.items() if key not in _PASSING}
    arguments = [str(warmth.folder), name, str(warmth.idle_seconds)]
    subprocess.run(
        [python, *bootstrap("lintgpu.trace.server"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=warmth.folder,
        env=own,
        start_new_session=True,
        check=False,
        timeout=_ANSWER_SECONDS,
    )


def _ask(connection: socket.socket, variables: Mapping[str, str], scratch: str, root: str | None, errors: int) -> Borrowed | None:
    """Have the server at the other end fork a process on pipes of ours; None where it hangs up."""
    requests, to_process = os.pipe()
    from_process, replies = os.pipe()
    stdin, stdout = os.fdopen(to_process, "w", encoding="utf-8"), os.fdopen(from_process, encoding="utf-8")
    try:
        asked = json.dumps({"variables": dict(variables), "scratch": scratch, "root": root}).encode("utf-8", "surrogateescape")
        descriptors = array.array("i", [requests, replies, errors])
        connection.sendmsg([len(asked).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        connection.sendall(asked)
        if "pid" in _read_line(connection):
            return Borrowed(connection, stdin, stdout)
    except OSError:
        pass
    finally:
        os.close(requests)
        os.close(replies)
    for end in (stdin, stdout, connection):
        end.close()
    return None


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """The next message, a JSON object on a line; empty where the other end hung up. Raises OSError, TimeoutError among them."""
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return {}
        data += piece
    message: dict[str, Any] = json.loads(data)
    return message
