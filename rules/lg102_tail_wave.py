"""## What it does
Finds sizes whose GEMMs leave many SMs idle in their last wave of tiles, where a size close by does the same work at least 8 % faster.

## Why is this bad?
A GEMM is cut into tiles, and the tiles run in waves of as many as the SMs hold at once. Where one tile more than a full wave is
left, a whole wave runs for it and most SMs wait. On GPUs with few tile shapes that nearly doubles the time; on the H200 cuBLAS
has a dense menu of tiles, persistent grids and split-K, so that only 3.8 % of 1,875 measured size changes of 64 to 256 gain 10 %.
A rule that assumes one tile size is therefore wrong nearly always; this one asks the cost model, which knows the menu.

## Example
```json
{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8320}
```

Use instead: the neighbour that the finding names. It changes the width of the model, so it is advice for a model that is still to be
trained, and no fix is written without `--unsafe-fixes`.

## When it stays silent
- Layers below 1 % of the step, GEMMs of many waves, gains within the error of the cost model.
- Where the number of tokens was assumed rather than read or given: waves depend on it.
- Misaligned sizes: LG101 speaks of those.

## References
- NVIDIA, Matrix Multiplication Background User's Guide (Wave Quantization)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lintgpu.finding import Change, Edit, Finding, FindingCost, Fix, Severity
from lintgpu.gpu.gemms import misaligned_dims
from lintgpu.rule import Case, Context, Rule, sites
from lintgpu.target.base import Knob
from lintgpu.trace.origin import knobs
from lintgpu.trace.records import Op
from lintgpu.whatif import Outcome, Rejected, Saving, saving
from lintgpu.workload import Source

OFFSETS = (-256, -192, -128, -64, 64, 128, 192, 256)
LEAST_GAIN = 0.08
"""Loss of efficiency (time per unit of work) against the neighbour, from which a finding is made."""
LEAST_SHARE = 0.01
"""Share of the step's GPU time that the layer must have."""
WIDTH_ROLES = frozenset({"feed-forward", "hidden", "vocabulary", "head-dim", ""})


@dataclass(frozen=True)
class Neighbour:
    """A size close by, and how much faster each unit of the flagged layers' work runs with it (0.08 = 8 %)."""

    value: int
    gain: float


class TailWave(Rule):
    """LG102."""

    code = "LG102"
    name = "tail-wave"
    summary = "A size leaves SMs idle in the last wave of tiles, and a size close by does not"
    good = (
        Case(
            "many waves",
            {"config.json": '{"model_type": "gpt2", "vocab_size": 50304, "n_layer": 2}\n'},
            ("--batch", "16", "--seq", "1024", "--gpu", "H200", "--select", "LG102"),
        ),
        Case(
            "tokens only assumed",
            {"config.json": '{"model_type": "gpt2", "vocab_size": 50304, "n_layer": 2, "n_inner": 8320}\n'},
            ("--select", "LG102"),
        ),
    )

    def check(self, context: Context) -> Iterator[Finding]:
        """At most one finding a knob."""
        if context.workload.source_of("batch") is Source.ASSUMED:
            return
        for knob_id in sorted({key for op in context.trace.ops for key in _width_knobs(context, op)}):
            finding = self._check_knob(context, context.what_if.knobs[knob_id])
            if finding is not None:
                yield finding

    def _check_knob(self, context: Context, knob: Knob) -> Finding | None:
        flagged = [i for i, op in enumerate(context.trace.ops) if op.kind == "gemm" and knob.id in _width_knobs(context, op)]
        gpu_us = sum(context.step.ops[i].us * context.trace.ops[i].count for i in flagged)
        if gpu_us < LEAST_SHARE * context.step.gpu_us:
            return None
        outcomes = context.what_if.rank([{knob.id: value} for value in _values(context, knob)])
        neighbour = max((_neighbour(context, knob, outcome, flagged) for outcome in outcomes), key=lambda n: n.gain, default=None)
        if neighbour is None or neighbour.gain < LEAST_GAIN:
            return None
        outcome = context.what_if.confirmed({knob.id: neighbour.value})
        if isinstance(outcome, Rejected):
            return None
        gain = _same_work(saving(Outcome({}, context.trace, context.step), outcome), gpu_us, neighbour.gain, context.step.gpu_us)
        return self._finding(context, knob, neighbour, gain, gpu_us, flagged) if gain.low > 0 else None

    def _finding(self, context: Context, knob: Knob, neighbour: Neighbour, gain: Saving, gpu_us: float, flagged: list[int]) -> Finding:
        return Finding(
            code=self.code,
            name=self.name,
            severity=Severity.of_share(gain.step_share),
            message=(
                f"{knob.name} = {knob.value} leaves SMs of {context.step.gpu} idle in a tail wave; {neighbour.value} does the same work "
                f"{neighbour.gain:.0%} faster in these layers, {gain.gpu_share:.1%} of the GPU time of a step"
            ),
            span=knob.span,
            target=context.target.name,
            knob=knob.name,
            value=knob.value,
            suggestion=neighbour.value,
            cost=FindingCost(
                gpu_us, gpu_us / context.step.gpu_us, gain.gpu_us, gain.gpu_share, gain.step_share, gain.low, gain.high, gain.basis
            ),
            fix=Fix(
                (Edit(knob.span, str(neighbour.value)),),
                f"set {knob.name} to {neighbour.value} (another width of the model)",
                safe=False,
                confirmed=context.trace.basis == "traced",
            ),
            related=tuple(sites(context.trace.ops[i] for i in flagged)),
            details=tuple(_details(context, flagged)),
            fingerprint_parts=(context.target.name, knob.id),
            change=Change(knobs=((knob.id, neighbour.value),), same_work=True),
        )


def _width_knobs(context: Context, op: Op) -> set[str]:
    """The knobs that set an aligned width of this GEMM and that a user may change."""
    if op.kind != "gemm" or op.gemm is None:
        return set()
    if misaligned_dims(op.gemm, op.dtype):
        return set()
    found = {key for dim, expression in op.gemm.origins if dim in ("m", "n", "k") for key in knobs(expression)}
    return {key for key in found if key in context.what_if.knobs and context.what_if.knobs[key].role in WIDTH_ROLES}


def _values(context: Context, knob: Knob) -> list[int]:
    multiple = math.lcm(*context.what_if.divisors(knob.id), 1)
    return [value for offset in OFFSETS if (value := knob.value + offset) > knob.value // 2 and value % multiple == 0]


def _neighbour(context: Context, knob: Knob, outcome: Outcome, flagged: list[int]) -> Neighbour:
    """How much faster a unit of work of the flagged GEMMs runs with the changed knob."""
    before = sum(context.step.ops[i].us * context.trace.ops[i].count for i in flagged) / _work(context.trace.ops, flagged)
    after = sum(outcome.step.ops[i].us * outcome.trace.ops[i].count for i in flagged) / _work(outcome.trace.ops, flagged)
    return Neighbour(outcome.changes[knob.id], before / after - 1)


def _work(ops: tuple[Op, ...], indices: list[int]) -> float:
    return float(sum(op.gemm.flops * op.count for op in (ops[i] for i in indices) if op.gemm is not None))


def _same_work(gain: Saving, gpu_us: float, efficiency: float, total_us: float) -> Saving:
    """The saving at equal work: a narrower layer is no gain by itself. The band keeps its width."""
    saved = gpu_us * (1 - 1 / (1 + efficiency))
    share = saved / total_us
    spread = (gain.high - gain.low) / 2
    hidden = gain.step_share / gain.gpu_share if gain.gpu_share else 1.0
    step_share = share * min(1.0, max(0.0, hidden))
    return Saving(saved, share, step_share, share - spread, share + spread, gain.basis)


def _details(context: Context, flagged: list[int]) -> Iterator[str]:
    for i in sorted(flagged, key=lambda i: -context.step.ops[i].us * context.trace.ops[i].count)[:3]:
        op, cost = context.trace.ops[i], context.step.ops[i]
        assert op.gemm is not None
        yield (
            f"{op.module} {op.phase}: M {op.gemm.m} N {op.gemm.n} K {op.gemm.k} {op.gemm.layout} {op.dtype}"
            f"{f' x {op.count}' if op.count > 1 else ''}, {cost.us:,.0f} us, {cost.waves:.2f} waves of {cost.tile[0]}x{cost.tile[1]} tiles"
        )
