"""The exceptions of building and tracing, and their plain form TraceFailure."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from lintgpu.trace.records import TraceFailure

_OWN = str(Path(__file__).resolve().parent.parent)


class TraceError(Exception):
    """A target could not be traced: the stage, a true reason and a way out.

    The fields are those of `lintgpu.trace.records.TraceFailure`.
    """

    def __init__(self, stage: str, reason: str, hint: str = "", path: str = "", line: int = 0, error_type: str = "") -> None:
        """`stage` is one of those listed at `TraceFailure.stage`; `line` counts from 1, 0 where unknown."""
        super().__init__(stage, reason, hint, path, line, error_type)
        self.stage = stage
        self.reason = reason
        self.hint = hint
        self.path = path
        self.line = line
        self.error_type = error_type

    def __str__(self) -> str:
        """The stage and the reason on one line."""
        return f"{self.stage}: {self.reason}"

    @property
    def failure(self) -> TraceFailure:
        """The plain form that travels to the parent process."""
        return TraceFailure(self.stage, self.reason, self.hint, self.path, self.line, self.error_type)

    @classmethod
    def from_failure(cls, failure: TraceFailure) -> TraceError:
        """The exception for a failure that came from a worker."""
        return cls(failure.stage, failure.reason, failure.hint, failure.path, failure.line, failure.error_type)

    @classmethod
    def from_exception(cls, stage: str, error: BaseException, hint: str = "") -> TraceError:
        """Wrap any exception; it points at the innermost frame outside torch, this package and the standard library's import system.

        A TraceError is handed back as it is.
        """
        if isinstance(error, TraceError):
            return error
        path, line = _innermost(error)
        return cls(stage, _reason(error)[:400], hint, path, line, type(error).__name__)


class BuildError(TraceError):
    """The model of a target could not be built."""

    def __init__(self, reason: str, hint: str = "", path: str = "", line: int = 0, error_type: str = "", stage: str = "build") -> None:
        """As TraceError, with `build` for the stage unless said otherwise (config, environment, trust)."""
        super().__init__(stage, reason, hint, path, line, error_type)


def _reason(error: BaseException) -> str:
    """The telling line of an error's message: the first, with the next where it announces it, without a module's printed tree."""
    text = re.sub(r"(\w+)\(\n(?:.*\n)*?\)", r"\1", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _innermost(error: BaseException) -> tuple[str, int]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    outside = [frame for frame in frames if not _is_machinery(frame.filename)]
    if not outside:
        return "", 0
    return outside[-1].filename, outside[-1].lineno or 0


def _is_machinery(filename: str) -> bool:
    return filename.startswith(_OWN) or "/site-packages/torch/" in filename.replace("\\", "/")
