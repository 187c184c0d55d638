"""Change a knob, get the step again, compare.

Two answers, one cheap and one sure: `rank` evaluates each dim's origin at the new values inside the recorded trace
(milliseconds for many values), `confirmed` builds and traces the changed model again, so that derived dims,
tied weights and the model's own constraints are the real ones. A finding rests on `confirmed` alone.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lintgpu.finding import Confidence
from lintgpu.gpu.costs import OpCost, StepCost
from lintgpu.target.base import Knob
from lintgpu.trace.origin import evaluate, knobs
from lintgpu.trace.records import Gemm, Op, Trace, TraceFailure

Changes = Mapping[str, int]

# Kernels of one shape family err together (clock, bandwidth), so the error of a ratio is smaller than that of a time.
BAND_CORRELATION = 0.7
BAND_Z = 1.2816
"""Half width of a central 80 % interval in standard deviations."""


@dataclass(frozen=True)
class Outcome:
    """A changed model that builds and runs."""

    changes: Changes
    trace: Trace
    step: StepCost


@dataclass(frozen=True)
class Rejected:
    """A change that the model does not allow, and why, in the model's own words where it has some."""

    changes: Changes
    reason: str


@dataclass(frozen=True)
class Saving:
    """What going from one step to another saves. Shares are of the step before, 0..1; low and high an 80 % band of gpu_share."""

    gpu_us: float
    gpu_share: float
    step_share: float
    low: float
    high: float
    basis: Confidence


class WhatIf:
    """The step of one target as a function of its knobs."""

    def __init__(
        self,
        base: Trace,
        base_step: StepCost,
        knobs_by_id: Mapping[str, Knob],
        retrace: Callable[[Changes], Trace | TraceFailure],
        cost: Callable[[Trace], StepCost],
        prepare: Callable[[Sequence[Op]], object] = lambda ops: None,
    ) -> None:
        """`cost` may remember ops that `prepare` was given: costing many at once is much cheaper than one after the other."""
        self.base, self.base_step, self.knobs = base, base_step, knobs_by_id
        self._retrace, self._cost, self._prepare = retrace, cost, prepare
        self._confirmed: dict[tuple[tuple[str, int], ...], Outcome | Rejected] = {}

    def rank(self, choices: Iterable[Changes]) -> list[Outcome]:
        """The recorded trace with every dim whose origin names a changed knob evaluated anew, once for each change and costed together.

        Not checked against the model.
        """
        values = {key: knob.value for key, knob in self.knobs.items()}
        traces = [(changes, substitute(self.base, values, changes)) for changes in choices]
        self._prepare([op for _, trace in traces for op in trace.ops])
        return [Outcome(changes, trace, self._cost(trace)) for changes, trace in traces]

    def confirmed(self, changes: Changes) -> Outcome | Rejected:
        """Build and trace the changed model. Rejected where it fails or where a division over knobs loses its remainder."""
        key = tuple(sorted(changes.items()))
        if key not in self._confirmed:
            self._confirmed[key] = self._confirm(changes)
        return self._confirmed[key]

    def _confirm(self, changes: Changes) -> Outcome | Rejected:
        result = self._retrace(changes)
        if isinstance(result, TraceFailure):
            return Rejected(changes, result.reason)
        newly_inexact = [text for text in result.inexact_divisions if text not in self.base.inexact_divisions]
        if newly_inexact:
            return Rejected(changes, f"{newly_inexact[0]} would leave a remainder")
        if _structure(result) != _structure(self.base):
            return Rejected(changes, "the model gets other layers")
        return Outcome(changes, result, self._cost(result))

    def divisors(self, knob_id: str) -> tuple[int, ...]:
        """Values that the knob must stay a multiple of: what the model divides it by (heads), or by a product with it."""
        values = {key: knob.value for key, knob in self.knobs.items()}
        found = set()
        for numerator, denominator in self._divisions():
            if knob_id not in knobs(numerator):
                continue
            divisor = evaluate(denominator, values)
            whole = evaluate(numerator, values)
            # What the rest of the numerator already brings need not come from this knob.
            rest = whole // self.knobs[knob_id].value if self.knobs[knob_id].value and whole % self.knobs[knob_id].value == 0 else 1
            if divisor > 1:
                found.add(divisor // math.gcd(divisor, rest))
        return tuple(sorted(found - {1}))

    def _divisions(self) -> Iterable[tuple[str, str]]:
        for op in self.base.ops:
            origins = op.gemm.origins if op.gemm else op.attention.origins if op.attention else ()
            for _, expression in origins:
                yield from floor_divisions(expression)


def floor_divisions(expression: str) -> list[tuple[str, str]]:
    """(numerator, denominator) of every `a // b` in an origin expression."""
    names = {knob_id: f"knob_{index}" for index, knob_id in enumerate(knobs(expression))}
    text = expression
    for knob_id, name in names.items():
        text = text.replace(f"{{{knob_id}}}", name)

    def original(node: ast.expr) -> str:
        return re.sub(r"knob_\d+", lambda match: f"{{{list(names)[int(match[0][5:])]}}}", ast.unparse(node))

    divisions = (n for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv))
    return [(original(node.left), original(node.right)) for node in divisions]


def substitute(trace: Trace, values: Mapping[str, int], changes: Changes) -> Trace:
    """`trace` with each GEMM dim whose origin names a knob of `changes` evaluated at the new values.

    Bytes of memory-bound ops are left as they are. An origin that does not evaluate to the recorded dim at `values` (a dim that
    passed through something unseen) is left alone.
    """
    new_values = {**values, **changes}
    return replace(trace, ops=tuple(_substitute_op(op, values, new_values, changes) for op in trace.ops))


def _substitute_op(op: Op, values: Mapping[str, int], new_values: Mapping[str, int], changes: Changes) -> Op:
    gemm = op.gemm
    if gemm is None or not gemm.origins:
        return op
    dims: dict[str, int] = {}
    for dim, expression in gemm.origins:
        if any(key in changes for key in knobs(expression)) and _evaluate(expression, values) == getattr(gemm, dim):
            new = _evaluate(expression, new_values)
            if new is not None and new > 0:
                dims[dim] = new
    if not dims:
        return op
    changed = replace(gemm, **dims)  # type: ignore[arg-type]
    scale = _elements(changed) / max(1, _elements(gemm))
    return replace(op, gemm=changed, bytes_read=int(op.bytes_read * scale), bytes_written=int(op.bytes_written * scale))


def _evaluate(expression: str, values: Mapping[str, int]) -> int | None:
    try:
        return evaluate(expression, values)
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def _elements(gemm: Gemm) -> int:
    return gemm.m * gemm.n + gemm.n * gemm.k + gemm.m * gemm.k


def _structure(trace: Trace) -> Counter[tuple[str, str, str]]:
    """How often each module runs each kind of GEMM or attention: equal before and after a change of sizes."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for op in trace.ops:
        if op.kind in ("gemm", "attention", "conv"):
            counts[op.module, op.kind, op.phase] += op.count
    return counts


def saving(before: Outcome, after: Outcome) -> Saving:
    """What `after` saves against `before`, from the ops that differ; equal ops cancel and bring no error."""
    removed, removed_low, removed_high = _difference(before, after)
    added, added_low, added_high = _difference(after, before)
    # The optimizer's time is part of a step but no op of the trace.
    gpu_us = before.step.gpu_us - after.step.gpu_us
    total = before.step.gpu_us
    error = _ratio_error(removed_low, removed_high, added_low, added_high)
    spread_us = BAND_Z * error * max(removed, added)
    return Saving(
        gpu_us=gpu_us,
        gpu_share=gpu_us / total if total else 0.0,
        step_share=(before.step.step_us - after.step.step_us) / before.step.step_us if before.step.step_us else 0.0,
        low=(gpu_us - spread_us) / total if total else 0.0,
        high=(gpu_us + spread_us) / total if total else 0.0,
        basis=_least_certain(before, after),
    )


def _least_certain(before: Outcome, after: Outcome) -> Confidence:
    """What the figures of the ops that differ rest on, at worst."""
    names = {cost.basis for one, other in ((before, after), (after, before)) for cost, _ in _differing(one, other)}
    return max((Confidence(name) for name in names), key=list(Confidence).index, default=Confidence(before.step.basis))


def _difference(one: Outcome, other: Outcome) -> tuple[float, float, float]:
    """(us, low, high) summed over the ops of `one` that `other` does not have."""
    found = _differing(one, other)
    us, low, high = (sum(times * getattr(cost, name) for cost, times in found) for name in ("us", "low", "high"))
    return us, low, high


def _differing(one: Outcome, other: Outcome) -> list[tuple[OpCost, int]]:
    """The ops of `one` that `other` does not have, and how often."""
    rest: Counter[Op] = Counter()
    for op in other.trace.ops:
        rest[replace(op, count=1)] += op.count
    found = []
    for op, cost in zip(one.trace.ops, one.step.ops, strict=True):
        key = replace(op, count=1)
        shared = min(op.count, rest[key])
        rest[key] -= shared
        if op.count > shared:
            found.append((cost, op.count - shared))
    return found


def _ratio_error(removed_low: float, removed_high: float, added_low: float, added_high: float) -> float:
    """Standard deviation of log(removed / added) from the two bands, whose errors are correlated."""
    one, two = _log_error(removed_low, removed_high), _log_error(added_low, added_high)
    return math.sqrt(max(0.0, one * one + two * two - 2 * BAND_CORRELATION * one * two))


def _log_error(low: float, high: float) -> float:
    return math.log(high / low) / (2 * BAND_Z) if 0 < low < high else 0.0
