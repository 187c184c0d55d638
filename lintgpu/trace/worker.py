"""The process that imports torch: it builds targets on meta, traces them and answers in JSON lines.

The parent (lintgpu.trace.client) writes one JSON object a line: first the configuration, then requests. Each request is
answered by any number of {"progress": stage} lines and one {"trace": ...} or {"failure": ...} line. The protocol runs over
private copies of stdin and stdout; descriptor 1 is then pointed at stderr, so that whatever a model prints cannot mix with it.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import linecache
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from lintgpu.target.base import Built
from lintgpu.trace import sandbox
from lintgpu.trace.imports import defer_compiler
from lintgpu.trace.reads import Reads, is_cached_or_installed
from lintgpu.trace.records import Trace, TraceFailure
from lintgpu.workload import Mode, Workload

IMPORTING, BUILDING, TRACING = "importing", "building", "tracing"
_AMENDING_SECONDS = 15.0
"""How long other inputs are tried on a model that takes none of those before."""


READS = Reads()
"""What the project's code looked at in this process."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What the parent sends first."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    memory_bytes: int
    cpu_seconds: float
    project_root: str | None
    """Put on sys.path only where the project's code may run."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Configuration:
        """The inverse of dataclasses.asdict. Raises TypeError on unknown fields."""
        return cls(**{**data, "readable": tuple(data["readable"]), "writable": tuple(data["writable"])})


def main(after: Callable[[], None] = lambda: None) -> int:
    """Serve requests until stdin ends; `after` is called after each answer."""
    requests, replies = take_over_stdio()

    def send(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message, default=vars) + "\n")  # Dataclasses go as their fields, without asdict's deep copies.
        replies.flush()

    configuration = Configuration.from_json(json.loads(requests.readline()))
    confinement = sandbox.confine((*configuration.readable, *_interpreter_paths()), configuration.writable, configuration.memory_bytes)
    if configuration.project_root is not None:
        sys.path.insert(0, configuration.project_root)
        READS.watch(configuration.project_root)
    send({"hello": {"pid": os.getpid(), "python": sys.version.split()[0], **dataclasses.asdict(confinement)}})
    for line in requests:
        sandbox.allow_cpu_seconds(configuration.cpu_seconds)
        request = json.loads(line) | {"project_root": configuration.project_root}
        outcome = answer(request, lambda stage: send({"progress": stage}))
        key = "trace" if isinstance(outcome, Trace) else "failure"
        send({key: outcome})
        after()
        gc.collect()  # Modules and autograd graphs hold cycles; the next request should start small.
        gc.freeze()  # What is left are the libraries, which no later collection needs to walk.
    return 0


def answer(request: Mapping[str, Any], progress: Callable[[str], None]) -> Trace | TraceFailure:
    """Build and trace what `request` names: {"family", "spec", "workload", "changes"}. Never raises but KeyboardInterrupt."""
    progress(IMPORTING)
    missing = missing_torch()
    if missing is not None:
        return missing
    defer_compiler()
    workload = workload_from_json(request["workload"])
    complaints: list[str] = []
    told: TraceFailure | None = None
    give_up = time.monotonic() + _AMENDING_SECONDS
    while True:
        attempt = _Attempt(request, workload, tuple(complaints), progress)
        outcome = attempt.run()
        if isinstance(outcome, Trace):
            return dataclasses.replace(outcome, files=attempt.files(), variables=READS.variables)
        # The first complaint is the one to report, unless the model named an input, got it and complained anew.
        if told is None or attempt.answered_by_name:
            told = outcome
        about_inputs = outcome.stage in ("inputs", "forward")
        complaint = f"{outcome.reason}\n{linecache.getline(outcome.path, outcome.line).strip()}"
        if not about_inputs or time.monotonic() > give_up or not attempt.can_amend(complaint):
            return told
        complaints.append(complaint)


class _Attempt:
    """One build and trace; inputs are those that the family chose, amended for each of `complaints`."""

    def __init__(
        self, request: Mapping[str, Any], workload: Workload, complaints: tuple[str, ...], progress: Callable[[str], None]
    ) -> None:
        self._request = request
        self._workload = workload
        self._complaints = complaints
        self._progress = progress
        self._stage = IMPORTING
        self._built: Built | None = None

    @property
    def answered_by_name(self) -> bool:
        """Whether the last amendment was an input that the model asked for by name."""
        return self._built is not None and bool(self._built.extra.get("by_name"))

    def can_amend(self, complaint: str) -> bool:
        """Whether the family has other inputs to offer."""
        return self._built is not None and "amend" in self._built.extra and self._built.extra["amend"](complaint) is not None

    def run(self) -> Trace | TraceFailure:
        """The trace, or why there is none."""
        from lintgpu.trace.errors import TraceError
        from lintgpu.trace.record import record

        try:
            return record(self._build, self._workload)
        except KeyboardInterrupt:
            raise
        except TraceError as error:
            return out_of_memory(error.error_type, error.reason) or error.failure
        except BaseException as error:  # Model code may raise anything, SystemExit included.
            return failure_of(error, self._stage)

    def files(self) -> tuple[str, ...]:
        """What the trace was made from: sources of the model's classes, all that the project read, and the libraries' versions."""
        assert self._built is not None
        modules = {type(module).__module__ for module in self._built.model.modules()}
        root = self._request.get("project_root")
        project = {name for name, module in sys.modules.items() if root and _file_of(module).startswith(os.path.join(root, ""))}
        versions = {name for package in {name.split(".")[0] for name in modules | {"torch"}} for name in (package, f"{package}.version")}
        found = {_file_of(sys.modules[name]) for name in modules | versions if name in sys.modules}
        found |= {path for path in (_file_of(sys.modules[name]) for name in project) if not is_cached_or_installed(path)}
        libraries = {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
        return tuple(sorted((found | libraries | READS.files) - {""}))

    def _build(self) -> Built:
        from lintgpu.target import family_named

        self._enter(BUILDING)
        built = family_named(self._request["family"]).build(self._request["spec"], self._workload, self._request["changes"])
        for complaint in self._complaints:
            built = built.extra["amend"](complaint)
        self._built = built
        self._enter(TRACING)
        return built

    def _enter(self, stage: str) -> None:
        self._stage = stage
        self._progress(stage)


def failure_of(error: BaseException, stage: str) -> TraceFailure:
    """What to say about an exception nobody expected."""
    limit = out_of_memory(type(error).__name__, str(error))
    if limit is not None:
        return limit
    from lintgpu.trace.errors import TraceError

    stages = {IMPORTING: "environment", BUILDING: "build", TRACING: "forward"}
    return TraceError.from_exception(stages[stage], error).failure


def out_of_memory(error_type: str, reason: str) -> TraceFailure | None:
    """The failure to report where an error says that memory ran out, None for other errors."""
    if error_type != "MemoryError" and "can't allocate memory" not in reason:
        return None
    hint = "raise memory-limit-gb in [tool.lintgpu]"
    return TraceFailure("limit", "ran out of the memory it was allowed", hint, error_type=error_type)


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or ""


def workload_from_json(data: Mapping[str, Any]) -> Workload:
    """The inverse of dataclasses.asdict for a Workload."""
    sources = tuple((str(name), str(source)) for name, source in data["sources"])
    return Workload(**{**data, "mode": Mode(data["mode"]), "sources": sources})


def take_over_stdio() -> tuple[TextIO, TextIO]:
    """Private copies of stdin and stdout; whatever is printed from now on goes to stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process
    return requests, replies


def _interpreter_paths() -> tuple[str, ...]:
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (*sorted(prefixes), *(path for path in sys.path if path), here, os.path.join(os.path.dirname(here), "rules"))


def missing_torch() -> TraceFailure | None:
    """Import torch, or say why that cannot be done."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        reason = f"torch is not installed for {sys.executable}" if absent else f"torch cannot be imported: {error}"
        return TraceFailure("environment", reason, "pip install 'lintgpu[trace]'", error_type=type(error).__name__)
    except MemoryError as error:
        return failure_of(error, IMPORTING)
    return None


if __name__ == "__main__":
    sys.exit(main())
