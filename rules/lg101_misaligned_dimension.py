"""## What it does
Finds config numbers and literals that make the leading dimension of a GEMM operand miss the alignment the GPU's fast kernels
need, where another value close by makes the whole step faster.

## Why is this bad?
Tensor-core kernels load operands in aligned vectors (16 bytes; TMA on Hopper and newer). Only the *leading* (contiguous)
dimension of each operand counts: `in_features` and `out_features` of a linear layer, never the number of tokens. When one misses
it, cuBLAS falls back to an older and much slower kernel. Measured on one H200 (bf16, 4096 cubed): 172 us with leading dims that
are multiples of 8 elements, 490-530 us with multiples of 2 or 4 only, 890-1310 us with odd ones.

"Round it up to 64" is no safe advice: it is right for 59 % of the measured layers and makes 10 % of them slower. Here each candidate is
put through the cost model over the whole step, all misaligned dims of a GEMM together, and the smallest change within 1 % of the
best is built and traced again before it is reported.

## Example
```json
{"model_type": "gpt2", "vocab_size": 50257}
```

Use instead:
```json
{"model_type": "gpt2", "vocab_size": 50304}
```
Mask the padded rows' logits, or leave them untrained and never emit them. A vocabulary that belongs to trained weights needs its
embedding resized with it, so `--fix` leaves it alone without `--unsafe-fixes`.

## When it stays silent
- Token counts (batch, sequence): they are no leading dimension of a linear layer or of SDPA.
- Tiny layers (gates, routers, classifiers, LoRA ranks), whose share of the step is below what the fix could pay.
- Where the model pads the size itself, or a value that the model cannot take (heads no longer divide).
- Under torch.compile the severity is at most a note: Inductor pads GEMMs itself where it judges it worth it.

## References
- NVIDIA, Matrix Multiplication Background User's Guide (Tensor Core requirements)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lintgpu.finding import Change, Edit, Finding, FindingCost, Fix, Related, Severity
from lintgpu.gpu.gemms import misaligned_dims
from lintgpu.rule import Case, Context, Expected, Rule, sites
from lintgpu.target.base import Knob
from lintgpu.trace.origin import knobs
from lintgpu.trace.records import Op
from lintgpu.whatif import Outcome, Rejected, Saving, saving

STEPS = (8, 16, 32, 64, 128, 256)
"""Multiples that candidates are rounded up to, in elements."""
WITHIN = 0.01
"""The smallest change whose step is within this share of the best one wins."""
LEAST_SAVING = 0.005
"""Low end of the band of the saving, as a share of the step's GPU time, below which nothing is reported."""
LARGEST_GROWTH = 1.25
FIXED_ROLES = frozenset({"layers", "heads", "kv-heads", "experts", "positions"})
"""Counts, not widths: changing them changes what the model is."""
ATTEMPTS = 6
"""Changed models built before giving up."""


class MisalignedDimension(Rule):
    """LG101."""

    code = "LG101"
    name = "misaligned-dimension"
    summary = "A size makes GEMMs miss the alignment of the fast kernels, and a value close by pays"
    bad = (
        Case(
            "odd vocabulary",
            {"config.json": '{"model_type": "gpt2", "n_layer": 12,\n "vocab_size": 50257}\n'},
            ("--batch", "16", "--seq", "1024", "--gpu", "H200"),
            (Expected("config.json", 2, 16, "vocab_size", (50264, 50304), Severity.ERROR, (0.20, 0.45)),),
        ),
        Case(
            "feed-forward of two thirds of 4 d",
            {
                "config.json": '{"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 8,\n'
                ' "intermediate_size": 10922, "vocab_size": 50304, "tie_word_embeddings": true}\n'
            },
            ("--batch", "8", "--seq", "1024", "--gpu", "H200"),
            (Expected("config.json", 2, 23, "intermediate_size", (10928, 10944, 10976, 11008, 11136, 11264), Severity.ERROR),),
        ),
    )
    good = (
        Case("aligned vocabulary", {"config.json": '{"model_type": "gpt2", "vocab_size": 50304}\n'}, ("--batch", "16", "--gpu", "H200")),
        Case(
            "odd token count with SDPA",
            {"config.json": '{"model_type": "gpt2", "vocab_size": 50304}\n'},
            ("--batch", "7", "--seq", "1023", "--gpu", "H200"),
        ),
    )

    def check(self, context: Context) -> Iterator[Finding]:
        """Findings, one for each knob of each group of knobs that meet in a misaligned GEMM."""
        for group in _groups(_suspects(context)):
            yield from self._check_group(context, group)

    def _check_group(self, context: Context, group: tuple[str, ...]) -> Iterator[Finding]:
        base = Outcome({}, context.trace, context.step)
        chosen = _confirmed_change(context, group)
        if chosen is None:
            return
        for knob_id in chosen.changes:
            others = {key: value for key, value in chosen.changes.items() if key != knob_id}
            without = context.what_if.confirmed(others) if others else base
            before = base if isinstance(without, Rejected) else without
            # What leaving this one alone would cost decides; what is told is what all of them save together.
            own = saving(before, chosen)
            if own.low >= LEAST_SAVING:
                lost = (before.step.step_us - chosen.step.step_us) / context.step.step_us
                yield self._finding(context, context.what_if.knobs[knob_id], chosen, saving(base, chosen), Severity.of_share(lost))

    def _finding(self, context: Context, knob: Knob, chosen: Outcome, gain: Saving, severity: Severity) -> Finding:
        suggestion = chosen.changes[knob.id]
        flagged = _flagged(context, knob.id)
        gpu_us = sum(cost * op.count for op, cost in flagged)
        if context.workload.compiled:
            severity = Severity.NOTE
        together = [context.what_if.knobs[key] for key in chosen.changes if key != knob.id]
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity,
            message=_message(context, knob, suggestion, gain, together, chosen),
            span=knob.span,
            target=context.target.name,
            knob=knob.name,
            value=knob.value,
            suggestion=suggestion,
            cost=FindingCost(
                gpu_us=gpu_us,
                gpu_share=gpu_us / context.step.gpu_us,
                saving_gpu_us=gain.gpu_us,
                saving_gpu_share=gain.gpu_share,
                saving_step_share=gain.step_share,
                low=gain.low,
                high=gain.high,
                basis=gain.basis,
            ),
            related=(*_related(together, chosen), *sites(op for op, _ in flagged)),
            fix=_fix(context, knob, suggestion),
            details=tuple(_details(context, flagged, chosen)),
            fingerprint_parts=(context.target.name, knob.id),
            change=Change(knobs=tuple(sorted(chosen.changes.items()))),
        )


def _suspects(context: Context) -> list[frozenset[str]]:
    """For each misaligned GEMM the knobs that set its misaligned leading dims."""
    found = []
    for op in context.trace.ops:
        if op.gemm is None or op.kind != "gemm":
            continue
        misaligned = {key for dim in misaligned_dims(op.gemm, op.dtype) for key in _knobs_of(op, dim)}
        usable = frozenset(key for key in misaligned if _may_change(context, key))
        if usable:
            found.append(usable)
    return found


def _knobs_of(op: Op, dim: str) -> tuple[str, ...]:
    assert op.gemm is not None
    expression = dict(op.gemm.origins).get(dim)
    return knobs(expression) if expression else ()


def _may_change(context: Context, knob_id: str) -> bool:
    knob = context.what_if.knobs.get(knob_id)
    return knob is not None and knob.role not in FIXED_ROLES and knob.value > 1


def _groups(suspects: list[frozenset[str]]) -> list[tuple[str, ...]]:
    """Knobs that meet in a misaligned GEMM, joined transitively: padding one of two odd dims gains little."""
    groups: list[set[str]] = []
    for knob_ids in suspects:
        joined = set(knob_ids).union(*(group for group in groups if group & knob_ids))
        groups = [group for group in groups if not group & knob_ids] + [joined]
    return [tuple(sorted(group)) for group in groups]


def candidates(context: Context, knob_id: str) -> list[int]:
    """The value itself and the next multiples of 8 ... 256 above it that the model's divisions allow, smallest first."""
    value = context.what_if.knobs[knob_id].value
    divisors = context.what_if.divisors(knob_id)
    largest = max(value * LARGEST_GROWTH, value + STEPS[0])
    rounded = {_round_up(value, math.lcm(step, *divisors)) for step in STEPS}
    return [value, *sorted(new for new in rounded if value < new <= largest)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _confirmed_change(context: Context, group: tuple[str, ...]) -> Outcome | None:
    """The smallest change of the group within 1 % of the best that the model accepts; None where nothing pays."""
    options = {key: candidates(context, key) for key in group}
    base = Outcome({}, context.trace, context.step)
    for _ in range(ATTEMPTS):
        changes = _smallest_good_change(context, options)
        if not changes:
            return None
        outcome = context.what_if.confirmed(changes)
        if isinstance(outcome, Outcome):
            return outcome if saving(base, outcome).low >= LEAST_SAVING else None
        # The model refused: take the values just tried out of the race, and look again.
        options = {key: [v for v in values if v != changes.get(key)] for key, values in options.items()}
    return None


def _smallest_good_change(context: Context, options: Mapping[str, list[int]]) -> dict[str, int]:
    """Values of the knobs that change, by the cheap what-if: the best joint rounding, then each knob made as small as 1 % allows."""
    values = {key: context.what_if.knobs[key].value for key in options}

    def gpu_us(choices: list[dict[str, int]]) -> list[float]:
        changes = [{key: value for key, value in choice.items() if value != values[key]} for choice in choices]
        return [outcome.step.gpu_us for outcome in context.what_if.rank(changes)]

    joint = [
        {key: min((v for v in values_ if v >= _round_up(values[key], step)), default=values_[-1]) for key, values_ in options.items()}
        for step in STEPS
    ]
    best_us, best = min(zip(gpu_us(joint), joint, strict=True), key=lambda pair: pair[0])
    limit = best_us * (1 + WITHIN)
    if limit >= context.step.gpu_us:
        return {}
    for key in sorted(options, key=lambda k: values[k]):
        smaller = [{**best, key: value} for value in options[key] if value < best[key]]
        best = next((trial for us, trial in zip(gpu_us(smaller), smaller, strict=True) if us <= limit), best)
    return {key: value for key, value in best.items() if value != values[key]}


def _flagged(context: Context, knob_id: str) -> list[tuple[Op, float]]:
    """(op, us of one occurrence) of the GEMMs that the knob misaligns, the costliest first."""
    flagged = [
        (op, cost.us)
        for op, cost in zip(context.trace.ops, context.step.ops, strict=True)
        if op.kind == "gemm" and op.gemm is not None and any(knob_id in _knobs_of(op, dim) for dim in misaligned_dims(op.gemm, op.dtype))
    ]
    return sorted(flagged, key=lambda pair: -pair[1] * pair[0].count)


def _message(context: Context, knob: Knob, suggestion: int, gain: Saving, together: list[Knob], chosen: Outcome) -> str:
    also = f" with {_names(together, chosen)}" if together else ""
    text = (
        f"{knob.name} = {knob.value} keeps GEMMs off the fast kernels of {context.step.gpu}; {suggestion}{also} saves "
        f"{gain.gpu_us:,.0f} us, {gain.gpu_share:.0%} of the GPU time of a step ({max(0.0, gain.step_share):.0%} of the step)"
    )
    if context.workload.compiled:
        return text + "; torch.compile already pads these GEMMs"
    if gain.step_share < gain.gpu_share / 2:
        return text + ", hidden until Python launches kernels faster"
    return text


def _names(others: list[Knob], chosen: Outcome) -> str:
    return ", ".join(f"{knob.name} = {chosen.changes[knob.id]}" for knob in others)


def _related(together: list[Knob], chosen: Outcome) -> Iterator[Related]:
    for knob in together:
        yield Related(knob.span, f"change {knob.name} = {knob.value} to {chosen.changes[knob.id]} with it")


def _details(context: Context, flagged: list[tuple[Op, float]], chosen: Outcome) -> Iterator[str]:
    after = {(op.module, op.phase, op.name): cost for op, cost in zip(chosen.trace.ops, chosen.step.ops, strict=True)}
    before = dict(zip(context.trace.ops, context.step.ops, strict=True))
    for op, us in flagged[:3]:
        gemm = op.gemm
        assert gemm is not None
        new = after.get((op.module, op.phase, op.name))
        now = f" -> {new.us:,.0f} us on {new.kernel}" if new else ""
        yield (
            f"{op.module or 'GEMM'} {op.phase}: M {gemm.m} N {gemm.n} K {gemm.k} {gemm.layout} {op.dtype}"
            f"{f' x {op.count}' if op.count > 1 else ''}, {us:,.0f} us on {before[op].kernel}{now}"
        )
    if len(flagged) > 3:
        yield f"and {len(flagged) - 3} more GEMMs"


def _fix(context: Context, knob: Knob, suggestion: int) -> Fix:
    trained = context.target.trained_vocabulary
    description = f"set {knob.name} to {suggestion}"
    if knob.role == "vocabulary":
        description += "; resize the embedding and mask the padded rows"
    return Fix((Edit(knob.span, str(suggestion)),), description, safe=not trained, confirmed=context.trace.basis == "traced")
