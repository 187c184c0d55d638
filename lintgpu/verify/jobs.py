"""From a finding, or a target alone, to what the GPU is asked to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lintgpu.finding import Change, Finding
from lintgpu.rule import Context
from lintgpu.target import family_named
from lintgpu.trace.records import FORWARD, Op
from lintgpu.verify.records import Item, LayersJob, Model, NumbersJob, StepsJob, Variant
from lintgpu.whatif import Outcome, Rejected
from lintgpu.workload import Mode, Workload

PADDED, ATTENTION, COMPILED = "padded", "attention", "compiled"
MOST_OPS = 24
"""Ops timed for one finding, the costliest: layers of many shapes would take the whole budget."""


@dataclass(frozen=True)
class Subject:
    """One target under one workload on one GPU, what was found about it, and what may build it."""

    context: Context
    findings: tuple[Finding, ...]
    python: str
    project_root: str | None
    """None where the project's code may not run."""
    predict: Callable[[Workload, Mapping[str, Any] | None], float | None]
    """Microseconds of a step under another workload and, where given, another spec; None where it cannot be traced."""


@dataclass(frozen=True)
class Asked:
    """The jobs of one finding; those that make no sense for it are None. `notes` say what is left out."""

    layers: LayersJob | None = None
    steps: StepsJob | None = None
    numbers: NumbersJob | None = None
    work: tuple[float, float] = (1.0, 1.0)
    """FLOP of the timed ops before and after, where the saving is meant at equal work."""
    notes: tuple[str, ...] = ()


def model_of(subject: Subject) -> Model:
    """How the measuring process builds the target."""
    context = subject.context
    knobs = context.what_if.knobs.values()
    forward = (op.bytes_written * op.count for op in context.trace.ops if op.phase == FORWARD)
    return Model(
        key=f"{context.target.name} {context.target.span.path} {context.workload!r}",
        family=context.target.family,
        spec=context.target.spec,
        layers=tuple((knob.id, knob.value) for knob in knobs if knob.role == "layers"),
        parameter_elements=context.trace.parameters.elements,
        activation_bytes=sum(forward) if context.workload.mode is Mode.TRAIN else 0,
    )


def for_finding(subject: Subject, finding: Finding) -> Asked | str:
    """What to measure about `finding`, or in one line why nothing can be."""
    change = finding.change
    if change is None:
        return "there is no change to measure"
    if subject.context.trace.basis != "traced":
        return "the model was not traced, so it cannot be built here"
    after = _after(subject, change) if change.knobs else None
    if isinstance(after, str):
        return after
    changed = _variant(subject, change, after)
    if changed is None:
        return "this model cannot be built with the change"
    base = _base(subject)
    job = StepsJob(model_of(subject), (base, changed))
    numbers = _numbers(subject, change, base, changed)
    if after is None and not change.channels_last:
        return Asked(steps=job, numbers=numbers)
    layers, notes = _layers(subject, after)
    if not layers.before:
        return "the change leaves every GEMM as it is"
    work = _work(layers)
    if change.same_work:
        return Asked(layers, work=work, notes=(*notes, "another width makes another model, so whole steps are not compared"))
    return Asked(layers, job, numbers, notes=notes)


def _after(subject: Subject, change: Change) -> Outcome | str:
    context = subject.context
    unknown = [knob for knob, _ in change.knobs if knob not in context.what_if.knobs]
    if unknown:
        return f"{context.target.name} has no {unknown[0]}"
    outcome = context.what_if.confirmed(dict(change.knobs))
    return f"the model refuses the change: {outcome.reason}" if isinstance(outcome, Rejected) else outcome


def _base(subject: Subject) -> Variant:
    return Variant("as it is", subject.context.workload, predicted_us=subject.context.step.step_us)


def _variant(subject: Subject, change: Change, after: Outcome | None) -> Variant | None:
    """The changed model; None where its family cannot build it."""
    context = subject.context
    workload = context.workload
    if change.compile:
        workload = replace(workload, compile=change.compile)
    if change.dtype:
        workload = replace(workload, dtype=change.dtype, autocast=change.dtype in ("bf16", "fp16") and workload.mode is Mode.TRAIN)
    spec = None
    if change.attention:
        spec = family_named(context.target.family).with_attention(context.target.spec, change.attention)
        if spec is None:
            return None
    predicted = after.step.step_us if after is not None else subject.predict(workload, spec)
    return Variant("with the change", workload, change.knobs, spec, change.channels_last, predicted)


def _numbers(subject: Subject, change: Change, base: Variant, changed: Variant) -> NumbersJob | None:
    model = model_of(subject)
    if change.knobs:
        roles = tuple(dict.fromkeys(subject.context.what_if.knobs[knob].role for knob, _ in change.knobs))
        return NumbersJob(model, PADDED, base, changed, roles)
    if change.attention:
        return NumbersJob(model, ATTENTION, base, changed)
    return NumbersJob(model, COMPILED, base, changed) if change.compile else None


def _layers(subject: Subject, after: Outcome | None) -> tuple[LayersJob, tuple[str, ...]]:
    context = subject.context
    base = Outcome({}, context.trace, context.step)
    if after is None:
        before = tuple(Item(op, cost.us) for op, cost in zip(context.trace.ops, context.step.ops, strict=True) if op.conv is not None)
        changed = tuple(replace(item, op=_channels_last(item.op)) for item in before)
    else:
        before, changed = differing(base, after), differing(after, base)
    kept = {_place(item.op) for item in sorted(before, key=lambda item: -item.us * item.op.count)[:MOST_OPS]}
    left = len({_place(item.op) for item in before} - kept)
    job = LayersJob(
        tuple(item for item in before if _place(item.op) in kept),
        tuple(item for item in changed if _place(item.op) in kept),
        tf32=context.workload.dtype == "tf32",
    )
    return job, ((f"the {MOST_OPS} costliest of the flagged ops were timed, {left} more were not",) if left else ())


def differing(one: Outcome, other: Outcome) -> tuple[Item, ...]:
    """The GEMMs, convolutions and attentions of `one` that `other` does not have."""
    rest: Counter[Op] = Counter()
    for op in other.trace.ops:
        rest[replace(op, count=1)] += op.count
    found = []
    for op, cost in zip(one.trace.ops, one.step.ops, strict=True):
        key = replace(op, count=1)
        shared = min(op.count, rest[key])
        rest[key] -= shared
        if op.count > shared and (op.gemm is not None or op.attention is not None):
            found.append(Item(replace(op, count=op.count - shared), cost.us))
    return tuple(found)


def _channels_last(op: Op) -> Op:
    assert op.conv is not None
    return replace(op, conv=replace(op.conv, channels_last=True))


def _place(op: Op) -> tuple[str, str, str]:
    return op.module, op.phase, op.name


def _work(job: LayersJob) -> tuple[float, float]:
    before, after = (
        sum(item.op.gemm.flops * item.op.count for item in items if item.op.gemm is not None) for items in (job.before, job.after)
    )
    return float(before), float(after)


# A target's own step


@dataclass(frozen=True)
class Question:
    """A comparison of whole steps that is asked of every target."""

    name: str
    job: StepsJob
    compiles: bool = False
    numbers: NumbersJob | None = None


def questions(subject: Subject) -> Iterator[Question]:
    """The doubling test first, then attention, precision and compilation as far as they apply to the target."""
    context = subject.context
    if context.trace.basis != "traced":
        return
    yield _doubling(subject)
    attention = _attention(subject)
    if attention is not None:
        yield attention
    yield _precision(subject)
    if not context.workload.compiled and not context.trace.compile_calls:
        yield _compilation(subject, "default")
        yield _compilation(subject, "reduce-overhead")


def _doubling(subject: Subject) -> Question:
    workload = subject.context.workload
    step = subject.context.step
    twice = Variant("batch x2", replace(workload, batch=2 * workload.batch), predicted_us=step.step_us * step.doubled_batch_ratio or None)
    return Question("batch x2", StepsJob(model_of(subject), (_base(subject), twice), profile=True), workload.compiled)


def _attention(subject: Subject) -> Question | None:
    context = subject.context
    family = family_named(context.target.family)
    specs = {name: family.with_attention(context.target.spec, name) for name in ("eager", "sdpa")}
    if not any(op.attention is not None or op.kind == "softmax" for op in context.trace.ops) or None in specs.values():
        return None
    labels = {"eager": "hand-written attention", "sdpa": "SDPA"}
    workload = context.workload
    hand, sdpa = (Variant(labels[name], workload, spec=spec, predicted_us=subject.predict(workload, spec)) for name, spec in specs.items())
    model = model_of(subject)
    return Question("attention", StepsJob(model, (hand, sdpa)), workload.compiled, NumbersJob(model, ATTENTION, hand, sdpa))


def _precision(subject: Subject) -> Question:
    workload = subject.context.workload
    training = workload.mode is Mode.TRAIN
    choices = [replace(workload, dtype="fp32", autocast=False), replace(workload, dtype="tf32", autocast=False)]
    choices.append(replace(workload, dtype="bf16", autocast=training))
    variants = tuple(Variant(_precision_name(one), one, predicted_us=subject.predict(one, None)) for one in choices)
    return Question("precision", StepsJob(model_of(subject), variants), workload.compiled)


def _precision_name(workload: Workload) -> str:
    return f"{workload.dtype} autocast" if workload.autocast else workload.dtype


def _compilation(subject: Subject, mode: str) -> Question:
    workload = subject.context.workload
    compiled = replace(workload, compile=mode)
    eager = Variant("eager", workload, predicted_us=subject.context.step.step_us)
    name = "torch.compile" if mode == "default" else mode
    variant = Variant(name, compiled, predicted_us=subject.predict(compiled, None))
    model = model_of(subject)
    numbers = NumbersJob(model, COMPILED, eager, variant) if mode == "default" else None
    return Question(name, StepsJob(model, (eager, variant)), compiles=True, numbers=numbers)
