"""The parent's side of the measuring process: one process for all jobs; it never imports torch itself."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import lintgpu
from lintgpu.trace.client import BOOTSTRAP, environment
from lintgpu.verify.records import Device, Failure, Job, Result, from_json, to_json

START_SECONDS = 300.0
"""Importing torch from a cold network disk takes its time."""
GRACE_SECONDS = 120.0
"""A job may outlast what it was given by so much (a compiler at work) before it is taken for hung."""
# What the trace worker's environment withholds and a GPU needs: which GPUs, drivers, compilers and their caches.
_GPU_PREFIXES = ("CUDA", "NVIDIA", "HIP", "ROCR", "ROCM", "HSA", "GPU_", "TRITON", "TORCHINDUCTOR", "PYTORCH", "CC", "CXX")
_DISK_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class NoVerification(Exception):
    """Nothing can be measured; the message is one line that says why."""


class Verifier:
    """The measuring process, started when it is entered. `device` is a GPU's number, or cpu for a dry run.

    Entering raises NoVerification where there is no GPU that can measure. `project_root` is importable there; give it only where the
    project's code may run. `progress` is called with what is being done.
    """

    def __init__(
        self,
        device: str = "0",
        python: str = sys.executable,
        project_root: str | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._wanted, self._python, self._progress = device, python, progress
        self._project_root = os.path.abspath(project_root) if project_root is not None else None
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self.slowed = ""
        """Why the GPU ran below its clocks in the last jobs; empty where it did not."""

    def __enter__(self) -> Verifier:
        self._scratch = tempfile.mkdtemp(prefix="lintgpu-")
        self._errors = open(os.path.join(self._scratch, "stderr"), "w+b")
        try:
            self._start()
            hello = from_json(self._receive(START_SECONDS)["hello"])
        except BaseException:
            self.close()
            raise
        if isinstance(hello, Failure):
            self.close()
            raise NoVerification(hello.reason)
        assert isinstance(hello, Device)
        self.device = hello
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, job: Job, seconds: float, grace: float = GRACE_SECONDS) -> Result:
        """The result of `job`, which is asked to end within `seconds` and ended `grace` seconds later.

        A process that dies or takes too long is a Failure, and the next job starts another.
        """
        try:
            if self._child is None:
                self._start()
                self._receive(START_SECONDS)
            self._send({"job": to_json(job), "seconds": max(0.0, seconds)})
            answer = self._receive(max(0.0, seconds) + grace)
        except NoVerification as error:
            self._end()
            return Failure(str(error))
        except BaseException:
            self._end()  # After an interrupt the process would answer the wrong question.
            raise
        self.slowed = str(answer["slowed"]) or self.slowed
        result: Result = from_json(answer["result"])
        return result

    def close(self) -> None:
        """End the process, which frees the GPU's memory."""
        self._end()
        self._errors.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self) -> None:
        package = str(Path(lintgpu.__file__).resolve().parent)
        try:
            self._child = subprocess.Popen(
                [self._python, "-c", BOOTSTRAP, package, "lintgpu.verify.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._scratch,
                env=gpu_environment(os.environ, self._scratch, self._project_root),
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise NoVerification(f"cannot start {self._python}: {error.strerror or error}") from error
        self._answers = queue.Queue()
        threading.Thread(target=_read, args=(self._child, self._answers), daemon=True).start()
        self._send({"device": self._wanted, "project_root": self._project_root})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise NoVerification(self._last_words()) from error

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next answer that is no progress. Raises NoVerification at the end of the time or of the process."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NoVerification(f"the measuring process gave no answer for {seconds:.0f} s") from None
            if line is None:
                raise NoVerification(self._last_words())
            message: dict[str, Any] = json.loads(line)
            if "progress" not in message:
                return message
            self._progress(str(message["progress"]))

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        """How the process ended, with the last line that it wrote to stderr."""
        code: int | None = None
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(timeout=5)
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        said = f": {lines[-1].strip()[:300]}" if lines else ""
        return f"the measuring process ended with status {code}{said}"


def _read(child: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for line in child.stdout:
            answers.put(line)
    answers.put(None)


def gpu_environment(current: Mapping[str, str], scratch: str, project_root: str | None) -> dict[str, str]:
    """The trace worker's environment with GPUs, all CPU threads, and compiler caches that outlive the run."""
    found = environment(current, scratch, project_root)
    hidden = ("CUDA_VISIBLE_DEVICES", *_DISK_CACHES, *_ONE_THREAD)
    kept = {name: value for name, value in found.items() if name not in hidden}
    return kept | {name: value for name, value in current.items() if name.startswith(_GPU_PREFIXES) or name in _ONE_THREAD}
