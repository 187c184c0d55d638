"""The parent's side of the worker process: one worker serves many requests; a death or a limit is an answer too."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import lintgpu
from lintgpu.target.base import Target
from lintgpu.trace.records import Trace, TraceFailure, trace_from_json
from lintgpu.workload import Workload

if TYPE_CHECKING:
    from lintgpu.trace.warm import Borrowed, Warmth

# `python -c BOOTSTRAP FOLDER MODULE ARGUMENTS` runs MODULE.main() with those arguments. Loads lintgpu from its own folder without
# putting the site-packages it may live in on the path of another interpreter.
BOOTSTRAP = """
import sys
if sys.version_info < (3, 10): sys.exit("lintgpu needs Python 3.10 or newer to trace, not " + sys.version.split()[0])
sys.path[:] = [p for p in sys.path if p]
import importlib.util
folder, name = sys.argv[1:3]
del sys.argv[1:3]
spec = importlib.util.spec_from_file_location("lintgpu", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["lintgpu"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import importlib
sys.exit(importlib.import_module(name).main())
"""


def bootstrap(module: str) -> list[str]:
    """An interpreter's arguments to run main() of a module of this lintgpu."""
    return ["-c", BOOTSTRAP, str(Path(lintgpu.__file__).resolve().parent), module]


# What an interpreter needs of the environment to start and to find its libraries; nothing else (no tokens) reaches an untrusted build.
_KEPT_VARIABLES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE"),
        *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "APPDATA", "LOCALAPPDATA", "USERPROFILE"),
        *("NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE"),
    }
)
# A launcher's leftovers would make a model believe that it runs on several GPUs.
_LAUNCHER_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"})
_FIXED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONIOENCODING": "utf-8",
}
_SCRATCH_VARIABLES = (
    "TMPDIR",
    "TEMP",
    "TMP",
    "HF_HOME",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "MPLCONFIGDIR",
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may use."""

    seconds: float = 300.0
    """Wall clock; CPU time is limited to the same."""
    memory_bytes: int = 16 << 30


class Worker:
    """A worker process, started at the first request and again after one that killed it. Use it as a context manager.

    `python` is the interpreter of the environment that holds torch. Only with `trust` are targets built that run code of
    the linted tree, and only then is `project_root` importable. `progress` is called with importing, building and tracing.
    With `warmth` the process is borrowed from a server that has torch imported already, if one can be had.
    """

    def __init__(
        self,
        python: str = sys.executable,
        limits: Limits | None = None,
        trust: bool = False,
        project_root: str | None = None,
        progress: Callable[[str], None] | None = None,
        warmth: Warmth | None = None,
    ) -> None:
        # The worker starts in a folder of its own, so a relative path has to be settled here.
        self._python = os.path.abspath(os.path.join(project_root or "", python)) if os.path.dirname(python) else python
        self._limits = limits or Limits()
        self._trust = trust
        self._project_root = os.path.abspath(project_root) if project_root is not None else None
        self._progress = progress or (lambda stage: None)
        self._warmth = warmth
        self._process: _Process | None = None
        self.hello: Mapping[str, Any] = {}
        """The worker's process id and python version, what of its confinement is enforced and missing; empty before the first request."""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def trace(self, target: Target, workload: Workload, changes: Mapping[str, int] | None = None) -> Trace | TraceFailure:
        """The ops of one step of `target`, or why there are none."""
        if target.runs_project_code and not self._trust:
            return TraceFailure(
                "trust",
                "building it would run code of this project, and nobody has said that this code may run",
                "name it in [tool.lintgpu.targets] of pyproject.toml, or give --trust",
            )
        request = {
            "family": target.family,
            "spec": target.spec,
            "workload": dataclasses.asdict(workload),
            "changes": dict(changes or {}),
        }
        return self._ask(request)

    def _ask(self, request: Mapping[str, Any]) -> Trace | TraceFailure:
        deadline = time.monotonic() + self._limits.seconds
        try:
            if self._process is None:
                self._process = _Process(self._python, self._limits, self._project_root, self._trust, self._warmth)
            process = self._process
            if not process.greeted:
                self.hello = process.receive(deadline)["hello"]
                process.greeted = True
            process.send(request)
            while True:
                message = process.receive(deadline)
                if "progress" in message:
                    self._progress(str(message["progress"]))
                elif "trace" in message:
                    return trace_from_json(message["trace"])
                else:
                    return TraceFailure(**message["failure"])
        except _Ended as ended:
            self.close()
            if self._warmth is not None and ended.failure.stage != "limit":
                self._warmth = None  # Whatever ended it, the server's end among it: a worker of our own has the last word.
                return self._ask(request)
            return ended.failure
        except BaseException:
            self.close()  # After an interrupt the worker would answer the wrong question.
            raise


class _Ended(Exception):
    """The process is gone or has to go."""

    def __init__(self, failure: TraceFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class _Process:
    """The running subprocess with its pipes, its scratch folder and the thread that reads its answers."""

    def __init__(self, python: str, limits: Limits, root: str | None, trust: bool, warmth: Warmth | None) -> None:
        project_root = root if trust else None
        self.greeted = False
        self._limits = limits
        self._scratch = tempfile.mkdtemp(prefix="lintgpu-")
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._errors = open(os.path.join(self._scratch, "stderr"), "w+b")  # noqa: SIM115 - closed in close()
        variables = environment(os.environ, self._scratch, project_root, [root] if root else [])
        try:
            self._child = self._borrowed(warmth, python, variables, project_root) or subprocess.Popen(
                [python, *bootstrap("lintgpu.trace.worker")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._scratch,
                env=variables,
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._discard()
            raise _Ended(
                TraceFailure("environment", f"cannot start {python}: {error.strerror or error}", "set python in [tool.lintgpu]")
            ) from error
        threading.Thread(target=self._read, daemon=True).start()
        self.send(
            {
                "readable": [project_root] if project_root else [],
                "writable": [self._scratch],
                "memory_bytes": limits.memory_bytes,
                "cpu_seconds": limits.seconds,
                "project_root": project_root,
            }
        )

    def _borrowed(self, warmth: Warmth | None, python: str, variables: Mapping[str, str], root: str | None) -> Borrowed | None:
        if warmth is None:
            return None
        from lintgpu.trace.warm import borrow

        return borrow(warmth, python, variables, self._scratch, root, self._errors.fileno())

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise _Ended(self._failure_of_death()) from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises _Ended at the deadline and at the end of the process."""
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            reason = f"took longer than the {self._limits.seconds:g} s it was allowed"
            raise _Ended(TraceFailure("limit", reason, "raise time-limit in [tool.lintgpu]")) from None
        if line is None or not line.endswith("\n"):  # It may have been ended in the middle of a message.
            raise _Ended(self._failure_of_death())
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._discard()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._child.stdout:
                self._answers.put(line)
        self._answers.put(None)

    def _kill(self) -> None:
        if not isinstance(self._child, subprocess.Popen):
            self._child.kill()
            return
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._child.kill()
        self._child.wait()

    def _discard(self) -> None:
        self._errors.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _failure_of_death(self) -> TraceFailure:
        try:
            code = self._child.wait(timeout=5)
        except OSError as error:  # The server that it was borrowed from has ended.
            return TraceFailure("crash", str(error))
        except subprocess.TimeoutExpired:
            return TraceFailure("crash", "the worker closed its answers and ran on")
        last = self._last_words()
        if not self.greeted:
            return TraceFailure("environment", f"the worker did not start: {last or _died(code)}", "set python in [tool.lintgpu]")
        if any(word in last for word in ("bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory")):
            allowed = f"{self._limits.memory_bytes / 2**30:g} GiB"
            return TraceFailure("limit", f"ran out of the {allowed} of memory it was allowed", "raise memory-limit-gb in [tool.lintgpu]")
        if os.name == "posix" and code == -signal.SIGXCPU:
            reason = f"used more than the {self._limits.seconds:g} s of CPU time it was allowed"
            return TraceFailure("limit", reason, "raise time-limit in [tool.lintgpu]")
        return TraceFailure("crash", f"the worker {_died(code)}" + (f": {last}" if last else ""))

    def _last_words(self) -> str:
        """The last line that the worker wrote to stderr."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def _died(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def environment(current: Mapping[str, str], scratch: str, project_root: str | None, foreign: Sequence[str] = ()) -> dict[str, str]:
    """The worker's environment: the owner's own where the project's code may run (`project_root` given), else the least that works.

    Without the owner's say-so nothing below the working directory or the `foreign` folders stays on PYTHONPATH: a file called
    transformers.py in the linted tree would run.
    """
    if project_root is not None:
        kept = {name: value for name, value in current.items() if name not in _LAUNCHER_VARIABLES}
    else:
        kept = {name: value for name, value in current.items() if name.upper() in _KEPT_VARIABLES}
        folders = [os.getcwd(), *foreign]
        paths = [path for path in kept.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path) and not _inside(path, folders)]
        if paths:
            kept["PYTHONPATH"] = os.pathsep.join(paths)
    return kept | _FIXED_VARIABLES | dict.fromkeys(_SCRATCH_VARIABLES, scratch)


def _inside(path: str, folders: Sequence[str]) -> bool:
    real = Path(path).resolve()
    return any(Path(folder).resolve() in (real, *real.parents) for folder in folders)
