"""The warm worker's server: it imports torch and the model library once and forks a worker for whoever asks.

`main` is run by lintgpu.trace.warm with the folder of the sockets, the server's name and how long to wait for the next command. It
holds a lock for life, so that of two only one serves; its name stands for the interpreter, the environment and this lintgpu, and it
ends when a file that it has imported, or a folder that it imports from, changes. It never runs a model itself: it has one thread, or
ends. Each worker is a fork that takes the client's pipes for stdin, stdout and stderr and its environment for its own, and then does
what a cold one does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 10.0
"""How often an idle server looks whether its socket is still there."""
_MESSAGE_SECONDS = 5.0
"""How long a client may take to say what it wants."""
_MOST_BYTES = 16 << 20
_LIBRARY = re.compile(r"(lintgpu|timm|transformers)(\.\w+)*")
"""What is imported ahead after a worker has needed it."""
_USED = ("lintgpu.trace.record", "lintgpu.trace.inputs", "lintgpu.target.huggingface_build", "numpy.random", "torch.utils._device")
"""What every trace imports."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until nobody has asked for some time. Returns once a server listens: in the background, or somebody else's."""
    folder, name, idle_seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    address = folder / f"{name}.sock"
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    home = folder / f"{name}.home"  # What the libraries take for the places of temporary files and caches.
    home.mkdir(mode=0o700, exist_ok=True)
    server = _Server(listener, lock, address, home, idle_seconds)
    try:
        server.serve()
    finally:
        server.retire()
    return 0


@dataclass
class _Fork:
    """A worker at work: the client's connection and the pipe that ends with the process."""

    pid: int
    connection: socket.socket
    pipe: int
    said: bytes = b""


class _Server:
    def __init__(self, listener: socket.socket, lock: int, address: Path, home: Path, idle_seconds: float) -> None:
        self._listener = listener
        self._lock = lock
        self._address = address
        self._home = home
        self._identity = os.stat(address).st_ino
        self._idle_seconds = idle_seconds
        self._forks: dict[int, _Fork] = {}
        self._selector = selectors.DefaultSelector()
        self._needed: list[str] = []

    def serve(self) -> None:
        """Import, then answer."""
        began = time.time_ns()
        _import_libraries(["transformers", "transformers.modeling_utils"])
        stamp = _Stamp(began)
        self._selector.register(self._listener, selectors.EVENT_READ)
        last = time.monotonic()
        while _is_single_threaded():
            events = self._selector.select(min(_LOOK_SECONDS, max(0.0, last + self._idle_seconds - time.monotonic())))
            for key, _ in events:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    if not stamp.holds():
                        self.retire()  # Before the client hears of it and starts the next one.
                        connection.close()
                        return
                    self._fork(connection)
                elif key.data in self._forks:
                    self._attend(self._forks[key.data], key.fileobj)
            if events or self._forks:
                last = time.monotonic()
            elif time.monotonic() >= last + self._idle_seconds or not self._is_met():
                return
            if self._needed and not self._forks:
                _import_libraries(self._needed)
                self._needed.clear()
                if not stamp.holds():
                    return
                stamp = _Stamp(began)

    def retire(self) -> None:
        """Make room for the next server of this name."""
        if self._lock >= 0:
            if self._is_met():
                self._address.unlink()
            shutil.rmtree(self._home, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def _is_met(self) -> bool:
        """Whether the socket's name still leads here."""
        try:
            return os.stat(self._address).st_ino == self._identity
        except OSError:
            return False

    def _fork(self, connection: socket.socket) -> None:
        """A worker for the client at the other end, if it says what it wants."""
        descriptors: list[int] = []
        try:
            connection.settimeout(_MESSAGE_SECONDS)
            request, descriptors = _receive(connection)
            if _shadows_a_library(request["root"]):
                raise ValueError("a cold worker would import that")
            ends, death = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._become_worker(request, descriptors, death)
            os.close(death)
            self._forks[pid] = _Fork(pid, connection, ends)
            self._selector.register(ends, selectors.EVENT_READ, pid)
            self._selector.register(connection, selectors.EVENT_READ, pid)
            with contextlib.suppress(OSError):  # A client that has gone is seen to in _attend.
                connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _attend(self, fork: _Fork, source: Any) -> None:
        """The client has hung up, or the process has said something or ended."""
        said = b""
        if source == fork.pipe:
            said = os.read(fork.pipe, 1 << 16)
            fork.said += said
        if said:
            return
        with contextlib.suppress(OSError):
            os.killpg(fork.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(fork.pid, signal.SIGKILL)  # It may not have become the leader of its group yet.
        status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        with contextlib.suppress(OSError):
            fork.connection.sendall(json.dumps({"status": status}).encode() + b"\n")
        for registered in (fork.connection, fork.pipe):
            self._selector.unregister(registered)
        fork.connection.close()
        os.close(fork.pipe)
        del self._forks[fork.pid]
        self._needed += [name for name in fork.said.decode("ascii", "replace").split() if _LIBRARY.fullmatch(name)]

    def _become_worker(self, request: Mapping[str, Any], descriptors: list[int], death: int) -> None:
        """In the fork: take over the client's pipes and environment and serve it. Never returns."""
        status = 1
        try:
            server = os.getppid()
            os.setsid()
            _die_with(server)
            self._selector.close()
            self._listener.close()
            os.close(self._lock)
            for fork in self._forks.values():
                fork.connection.close()
                os.close(fork.pipe)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(request["scratch"])
            os.environ.clear()
            os.environ.update(request["variables"])
            tempfile.tempdir = None
            status = _work(death)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(status)


def _work(death: int) -> int:
    from lintgpu.trace import worker

    known = set(sys.modules)

    def tell() -> None:
        new = [name for name in sorted(set(sys.modules) - known) if _LIBRARY.fullmatch(name) and not _holds_tensors(sys.modules[name])]
        known.update(new)
        os.write(death, " ".join(["", *new, ""]).encode())

    return worker.main(tell)


def _holds_tensors(module: Any) -> bool:
    """A worker imports such a module on the meta device."""
    from torch import Tensor

    return any(isinstance(value, Tensor) for value in vars(module).values())


def _die_with(server: int) -> None:
    """Have the kernel end this process with the server, where it can."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)


def _import_libraries(names: list[str]) -> None:
    """Import what workers need, as they do. What is missing is theirs to report."""
    from lintgpu.trace import worker

    if worker.missing_torch() is not None:
        return
    from lintgpu.trace.autocast import autocast_ops
    from lintgpu.trace.imports import light_imports

    autocast_ops()
    for name in (*_USED, *names):
        with contextlib.suppress(Exception), light_imports():
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Collections in forks leave these pages shared.


class _Stamp:
    """The state of everything that was imported, and of the folders that imports are looked for in."""

    def __init__(self, began: int) -> None:
        """What has changed since `began` (ns) may have been imported half old, half new, and never holds."""
        files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
        self._paths = sorted({*files, *sys.path, os.path.realpath(sys.executable)} - {""})
        self._states = self._look()
        self._fresh = all(state is None or state[2] < began for path, state in zip(self._paths, self._states, strict=True) if path in files)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self._fresh and self._look() == self._states

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._paths]


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _shadows_a_library(root: str | None) -> bool:
    """Whether a project has a file or folder that is called as something imported here is: a cold worker would import that one."""
    if root is None:
        return False
    imported = {name.partition(".")[0] for name in sys.modules}
    return any(entry.name.removesuffix(".py") in imported for entry in os.scandir(root) if entry.is_dir() or entry.name.endswith(".py"))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and the three descriptors that came with it. Raises OSError or ValueError where it is none."""
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    try:
        size = int.from_bytes(header, "big")
        if len(header) != 8 or len(descriptors) != 3 or size > _MOST_BYTES:
            raise ValueError("no request")
        data = b""
        while len(data) < size:
            piece = connection.recv(size - len(data))
            if not piece:
                raise ValueError("no whole request")
            data += piece
        request: dict[str, Any] = json.loads(data.decode("utf-8", "surrogateescape"))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return request, descriptors


def _is_single_threaded() -> bool:
    """A fork of a process with threads may find locks that nobody opens."""
    import threading

    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return threading.active_count() == 1
