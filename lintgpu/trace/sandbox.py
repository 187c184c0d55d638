"""Confine the worker process: no new privileges, resource limits, no network, a read-only file system.

Everything here is a second wall. The first is that code of the linted tree runs only on its owner's say-so. What the
platform cannot enforce is named in `Confinement.missing`, never passed over.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import resource
except ImportError:  # Windows has no resource module.
    resource = None  # type: ignore[assignment]

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000

# System call numbers. Landlock has the same ones on every architecture; socket has not.
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_IO_URING_SETUP = 425
_AUDIT_ARCH_AND_SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}

# Landlock access rights to files (linux/landlock.h).
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR

_FILE_SIZE_LIMIT = 64 << 20

SYSTEM_READABLE = (
    "/usr", "/lib", "/lib64", "/bin", "/opt", "/nix", "/proc", "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/passwd", "/etc/group",
    "/etc/nsswitch.conf", "/etc/os-release", "/etc/alternatives", "/dev/urandom", "/dev/random", "/dev/zero",
)  # fmt: skip
"""What an interpreter and its shared libraries read outside their own prefix."""


@dataclass(frozen=True)
class Confinement:
    """What could be enforced and what could not, one phrase each."""

    enforced: tuple[str, ...]
    missing: tuple[str, ...]


def confine(readable: Iterable[str], writable: Iterable[str], memory_bytes: int) -> Confinement:
    """Confine this process for good. Call it while the process has one thread; it never raises.

    `readable` and `writable` are folders or files; everything else is closed where Landlock exists. `memory_bytes`
    limits the private writable memory on Linux and the address space elsewhere.
    """
    enforced: list[str] = []
    missing: list[str] = []

    def note(what: str, problem: str | None) -> None:
        if problem is None:
            enforced.append(what)
        else:
            missing.append(f"{what} ({problem})")

    note("resource limits", _limit_resources(memory_bytes))
    if not sys.platform.startswith("linux"):
        for what in ("no new privileges", "no network", "read-only files"):
            note(what, f"not available on {platform.system() or sys.platform}")
        return Confinement(tuple(enforced), tuple(missing))
    libc = ctypes.CDLL(None, use_errno=True)
    note("no new privileges", _result(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    namespace = _leave_network(libc)
    sockets = _forbid_sockets(libc)
    note("no network", None if namespace is None or sockets is None else f"namespace: {namespace}; filter: {sockets}")
    note("read-only files", _restrict_files(libc, tuple(readable), tuple(writable)))
    return Confinement(tuple(enforced), tuple(missing))


def allow_cpu_seconds(seconds: float) -> None:
    """Let this process use `seconds` more of CPU time before the kernel stops it (SIGXCPU). No-op where that is unknown."""
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _result(code: int) -> str | None:
    return None if code == 0 else os.strerror(ctypes.get_errno())


def _limit_resources(memory_bytes: int) -> str | None:
    if resource is None:
        return "no resource module on this platform"
    # RLIMIT_DATA counts private writable memory. RLIMIT_AS would also count the gigabytes of libraries that a CUDA build maps.
    memory = resource.RLIMIT_DATA if sys.platform.startswith("linux") else resource.RLIMIT_AS
    problems = []
    for limit, value in ((memory, memory_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, _FILE_SIZE_LIMIT)):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return "; ".join(problems) or None


def _leave_network(libc: Any) -> str | None:
    """Move into user, network and IPC namespaces of our own, which hold no network device."""
    uid, gid = os.getuid(), os.getgid()
    problem = _result(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC))
    if problem is not None:
        return problem
    # Without a mapping our files would seem to belong to nobody.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:
            continue
    return None


def _forbid_sockets(libc: Any) -> str | None:
    """A seccomp filter that fails socket() with EACCES (socketpair stays) and io_uring, which could open one too."""
    known = _AUDIT_ARCH_AND_SOCKET.get(platform.machine())
    if known is None:
        return f"no filter for {platform.machine()}"
    architecture, socket = known
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, deny = 0x7FFF0000, 0x00050000 | errno.EACCES
    program = (  # (instruction, steps to skip if true, if false, operand)
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 0, 4, architecture),
        (load, 0, 0, 0),  # seccomp_data.nr
        (at_least, 2, 0, 0x40000000),  # x32 calls number socket otherwise
        (equal, 1, 0, socket),
        (equal, 0, 1, _IO_URING_SETUP),
        (answer, 0, 0, deny),
        (answer, 0, 0, allow),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return _result(libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0))


def _restrict_files(libc: Any, readable: Sequence[str], writable: Sequence[str]) -> str | None:
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version <= 0:
        return f"no Landlock: {os.strerror(ctypes.get_errno())}"
    everything = (1 << 13) - 1
    if version >= 2:
        everything |= 1 << 13
    if version >= 3:
        everything |= _TRUNCATE
    # handled_access_fs, handled_access_net (TCP bind and connect, version 4), scoped (abstract sockets and signals, version 6).
    fields = (everything, 3, 3)[: 3 if version >= 6 else 2 if version >= 4 else 1]
    attributes = ctypes.create_string_buffer(struct.pack(f"{len(fields)}Q", *fields))
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, 8 * len(fields), 0)
    if rules < 0:
        return os.strerror(ctypes.get_errno())
    try:
        grants = [(path, _READ) for path in (*SYSTEM_READABLE, *readable)]
        grants += [(path, everything) for path in writable]
        grants += [("/dev/null", _READ_FILE | _WRITE_FILE)]
        for path, access in grants:
            _grant(libc, rules, path, access)
        return _result(libc.syscall(_LANDLOCK_RESTRICT, rules, 0))
    finally:
        os.close(rules)


def _grant(libc: Any, rules: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # What does not exist needs no grant.
    try:
        if not os.path.isdir(path):
            access &= _ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("<Qi", access, descriptor))
        libc.syscall(_LANDLOCK_ADD_RULE, rules, 1, rule, 0)
    finally:
        os.close(descriptor)
