"""What a config family has to provide, and the plain data that it hands on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lintgpu.finding import Span

if TYPE_CHECKING:
    from lintgpu.settings import Settings
    from lintgpu.source import SourceFile
    from lintgpu.trace.records import Trace
    from lintgpu.workload import Workload


BUILD_DEVICE: ContextVar[str] = ContextVar("BUILD_DEVICE", default="meta")
"""Where Family.build puts the model: on meta for a trace; the verifier sets the GPU that runs it."""


@dataclass(frozen=True)
class Knob:
    """An integer in a config or source that a user can change."""

    id: str
    """Unique inside a target: the key path ('text_config.vocab_size') or 'path.py:LINE:COLUMN' of a literal."""
    name: str
    """What a message calls it: the last key, the variable, the keyword or the flag."""
    value: int
    span: Span
    role: str = ""
    """vocabulary, hidden, feed-forward, heads, kv-heads, head-dim, layers, positions, experts or '' (unknown)."""


@dataclass(frozen=True)
class WorkloadHint:
    """A workload value the files state, with its place."""

    field: str
    value: Any
    span: Span


@dataclass(frozen=True)
class Target:
    """A model and how to build it, found in a file. `spec` is JSON data for Family.build in the worker."""

    name: str
    family: str
    span: Span
    """Where the target is declared; findings without a knob (LG001) sit here."""
    spec: Mapping[str, Any]
    knobs: tuple[Knob, ...] = ()
    hints: tuple[WorkloadHint, ...] = ()
    runs_project_code: bool = False
    """Building it imports code of the linted tree, which takes its owner's say-so."""
    trained_vocabulary: bool = False
    """The vocabulary belongs to trained weights or a tokenizer: never changed without --unsafe-fixes."""
    files: tuple[str, ...] = ()
    """Every file its result depends on."""
    notes: tuple[str, ...] = ()
    compile: CompileUse | None = None


@dataclass(frozen=True)
class CompileUse:
    """What the files say about torch.compile for this target."""

    state: str
    """on, off (said so) or absent (an entry builds and runs the model and never compiles it)."""
    span: Span
    entry: str
    """What was seen: a training loop, a serving loop, a config key."""
    key: str = ""
    """The config key to set, where there is one."""
    by_framework: str = ""
    """The framework that compiles anyway, where one does."""


@dataclass(frozen=True)
class Built:
    """What Family.build returns in the worker: a module and what to feed it."""

    model: Any
    """torch.nn.Module on the device of BUILD_DEVICE (meta for a trace)."""
    make_inputs: Any
    """Callable () -> (args, kwargs), called under the trace modes."""
    loss: Any = None
    """Callable (output) -> scalar tensor to run backward from; None sums the floating-point outputs."""
    assumptions: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class Family(ABC):
    """One config family. Subclasses live one a file in lintgpu/target/ and are found there; there is no list to edit.

    `find` and `estimate` run in the parent and never import torch or code of the linted tree. `build` runs in the worker.
    """

    name: str = ""
    order: int = 100
    """Families are asked in this order; a file belongs to the first that claims it."""
    words: tuple[str, ...] = ()
    """Keys as the file writes them. A data file of more than lintgpu.target.LARGE characters with none of these in front of a colon is no
    config of this family; where no family claims it, it is not even parsed."""

    @abstractmethod
    def find(self, file: SourceFile, settings: Settings) -> Iterator[Target]:
        """The targets that `file` declares; nothing where the file is not of this family."""

    def declared(self, settings: Settings) -> Iterator[Target]:
        """The targets that [tool.lintgpu.targets] or --model declare; nothing for most families."""
        return iter(())

    @abstractmethod
    def build(self, spec: Mapping[str, Any], workload: Workload, changes: Mapping[str, int]) -> Built:
        """Build the model on the device of BUILD_DEVICE (meta for a trace) with the knobs in `changes` (knob id -> value) replaced.

        Raises lintgpu.trace.errors.BuildError with a true reason where it cannot.
        """

    def resolve(self, target: Target, knob_id: str) -> Knob | None:
        """The knob behind an id that a trace names. Families whose worker finds literals in source override this."""
        return next((knob for knob in target.knobs if knob.id == knob_id), None)

    def with_attention(self, spec: Mapping[str, Any], implementation: str) -> Mapping[str, Any] | None:
        """`spec` with its attention set to "sdpa" or written by hand ("eager"); None where the family cannot choose."""
        return None

    def estimate(self, target: Target, workload: Workload, changes: Mapping[str, int]) -> Trace | None:
        """A trace from the config's numbers alone, or None where the family cannot say."""
        return None
