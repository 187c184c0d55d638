"""Whether the faster variant computes the same numbers. Worker side.

A GEMM alone is checked against float64; whole models are compared with equal weights, in fp32 without TF32 where the change is one of
algebra (padding, SDPA) and in the workload's own precision where it is one of kernels (compilation).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lintgpu.measurement import Check
from lintgpu.trace.records import Gemm, Op
from lintgpu.verify.models import DTYPES, Models, Step, free, precision, tensors
from lintgpu.verify.records import Item, LayersJob, Model, NumbersJob, NumbersResult, Variant, knob_name
from lintgpu.workload import Mode

LIMITS = {"bf16": 1e-2, "fp16": 2e-3, "tf32": 2e-3, "fp32": 1e-4}
"""Largest relative error, as ||x - reference|| / ||reference||, that rounding explains in each precision."""
PADDED, ATTENTION, COMPILED = "padded", "attention", "compiled"
_GRADIENT_FACTOR = 10.0
"""Gradients go through every layer twice, and sums over tokens cancel."""
_COMPILED_FACTOR = 3.0
"""Both sides round: an eager and a compiled model are each off from the truth, and differ by more than either."""
_MOST_PAIRS = 6
_SAMPLED_ROWS = 64
_TOKENS, _BATCH = 128, 2
_DEPTH = 2
_EXACT_ROLES = frozenset({"vocabulary", "feed-forward"})
"""Knobs whose padding by zeros leaves the function of a model unchanged; a wider hidden size changes every norm."""
_TOP = 5


# GEMMs alone


def gemm_checks(job: LayersJob, device: torch.device) -> list[Check]:
    """The costliest GEMMs of a job, before and after the change, against float64 on what both have in common."""
    checks = []
    for before, after in list(_pairs(job))[:_MOST_PAIRS]:
        try:
            checks.append(_gemm_check(before, after, job.tf32, device))
        except torch.OutOfMemoryError:
            free(device)
        except (RuntimeError, ValueError):
            continue  # Said where the same GEMM could not be timed.
    return checks


def _pairs(job: LayersJob) -> Iterator[tuple[Op, Op]]:
    after: dict[tuple[str, str, str], list[Op]] = defaultdict(list)
    for item in job.after:
        after[_place(item)].append(item.op)
    for item in sorted(job.before, key=lambda item: -item.us * item.op.count):
        candidates = after[_place(item)]
        if candidates and item.op.gemm is not None and item.op.conv is None and item.op.dtype in LIMITS and not item.op.gemm.weight_dtype:
            yield item.op, candidates.pop(0)


def _place(item: Item) -> tuple[str, str, str]:
    return item.op.module, item.op.phase, item.op.name


def _gemm_check(before: Op, after: Op, tf32: bool, device: torch.device) -> Check:
    """Both products hold the same operands where their sizes overlap; a longer sum is filled with zeros, wider outputs with noise."""
    one, two = before.gemm, after.gemm
    assert one is not None
    assert two is not None
    m, n, k = min(one.m, two.m), min(one.n, two.n), min(one.k, two.k)
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = DTYPES[before.dtype]
    a = torch.randn((m, k), generator=generator, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn((k, n), generator=generator, device=device, dtype=torch.float32).to(dtype)
    rows = torch.randperm(m, generator=generator, device=device)[:_SAMPLED_ROWS]
    reference = a[rows].double() @ b.double()
    products = [_product(gemm, a, b, tf32 and before.dtype == "fp32", generator)[rows][:, :n] for gemm in (one, two)]
    errors = [relative_error(product, reference) for product in products]
    limit = LIMITS["tf32" if tf32 and before.dtype == "fp32" else before.dtype]
    where = f"{before.module or before.name} {before.phase}"
    detail = f"relative error against float64: {errors[0]:.1e} as it is, {errors[1]:.1e} after the change"
    worst = next((error for error in errors if error != error), max(errors))
    return Check(f"{where}: the same numbers", worst, limit, detail, _most_different(*products))


def _product(gemm: Gemm, a: torch.Tensor, b: torch.Tensor, tf32: bool, generator: torch.Generator) -> torch.Tensor:
    """A GEMM of the record's sizes, layout and leading dims that holds `a` and `b` in its corner; the first of a batch."""
    device, dtype = a.device, a.dtype
    full_a = torch.zeros((gemm.m, gemm.k), device=device, dtype=dtype)
    full_b = torch.zeros((gemm.k, gemm.n), device=device, dtype=dtype)
    # Noise in the rows and columns that were added must not reach the others; the longer sum is zero in both operands.
    full_a[a.shape[0] :, : a.shape[1]] = torch.randn((gemm.m - a.shape[0], a.shape[1]), device=device, generator=generator).to(dtype)
    full_b[: b.shape[0], b.shape[1] :] = torch.randn((b.shape[0], gemm.n - b.shape[1]), device=device, generator=generator).to(dtype)
    full_a[: a.shape[0], : a.shape[1]], full_b[: b.shape[0], : b.shape[1]] = a, b
    operands = [_laid_out(full_a, gemm.layout[0], gemm.lda), _laid_out(full_b, gemm.layout[1], gemm.ldb)]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        if gemm.batch > 1:
            return torch.bmm(*(operand.expand(gemm.batch, *operand.shape) for operand in operands))[0]
        if gemm.bias:
            return torch.addmm(torch.zeros(gemm.n, device=device, dtype=dtype), *operands)
        return torch.mm(*operands)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _laid_out(matrix: torch.Tensor, letter: str, leading: int) -> torch.Tensor:
    rows, columns = matrix.shape
    shape = (columns, max(leading, rows)) if letter == "T" else (rows, max(leading, columns))
    memory = torch.zeros(shape, device=matrix.device, dtype=matrix.dtype)
    view = memory[:, :rows].T if letter == "T" else memory[:, :columns]
    view.copy_(matrix)
    return view


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    """||values - reference|| / ||reference|| in float64; NaN where either holds one."""
    reference = reference.double()
    norm = reference.norm()
    return float((values.double() - reference).norm() / norm) if norm else float((values.double() - reference).norm())


# Whole models


def measure(job: NumbersJob, models: Models, progress: Callable[[str], None]) -> NumbersResult:
    """Compare the variant with the base on a small batch and at most two layers, which decide about equality as well as all."""
    progress(f"comparing the numbers of {job.variant.label}")
    small = dataclasses.replace(
        job,
        model=_shallow(job.model),
        base=_small(job.base, exact=job.kind != COMPILED),
        variant=_small(job.variant, exact=job.kind != COMPILED),
    )
    compare = {PADDED: _compare_padded, ATTENTION: _compare_attention, COMPILED: _compare_compiled}[job.kind]
    models.start(small.model, (small.base, small.variant))
    models.depth = {knob: min(value, _DEPTH) for knob, value in models.layers()}
    try:
        result = compare(small, models)
    finally:
        models.clear()
    cut = ", ".join(f"{knob_name(knob)} = {new}" for knob, _, new in models.cuts())
    return dataclasses.replace(result, note=f"on a model with {cut}") if cut else result


def _shallow(model: Model) -> Model:
    """Another key, so that models of another depth are not mixed up with it."""
    return dataclasses.replace(model, key=f"{model.key} shallow")


def _small(variant: Variant, exact: bool) -> Variant:
    workload = variant.workload
    changed = dataclasses.replace(workload, batch=min(workload.batch, _BATCH), sequence=min(workload.sequence, _TOKENS), optimizer="none")
    if exact:
        changed = dataclasses.replace(changed, dtype="fp32", autocast=False, compile="none")
    return dataclasses.replace(variant, workload=changed)


def _compare_padded(job: NumbersJob, models: Models) -> NumbersResult:
    if not set(job.knobs) <= _EXACT_ROLES:
        return NumbersResult(job.kind, (), note="another width makes another model: there is nothing to compare whole")
    base, padded = _step(job.base, models), _step(job.variant, models)
    embed_weights(base.model, padded.model)
    padded.args, padded.kwargs = base.args, base.kwargs
    one, two = base.outputs(), padded.outputs()
    checks = [_outputs_check("padded model: outputs on the real rows", one, two, LIMITS["fp32"], "relative error, fp32, equal weights")]
    advice: list[str] = []
    if "vocabulary" in job.knobs:
        checks += _vocabulary_checks(one, two, advice)
    if job.base.workload.mode is Mode.TRAIN:
        checks += _gradient_checks(base, padded, "padded model: gradients of the real rows")
    return NumbersResult(job.kind, tuple(checks), tuple(advice))


def _compare_attention(job: NumbersJob, models: Models) -> NumbersResult:
    base, variant = _step(job.base, models), _step(job.variant, models)
    embed_weights(base.model, variant.model)
    variant.args, variant.kwargs = base.args, base.kwargs
    what, how = "SDPA and hand-written attention: equal outputs", "relative error, fp32, equal weights"
    checks = [_outputs_check(what, base.outputs(), variant.outputs(), LIMITS["fp32"], how)]
    if job.base.workload.mode is Mode.TRAIN:
        checks += _gradient_checks(base, variant, "SDPA and hand-written attention: equal gradients")
    return NumbersResult(job.kind, tuple(checks))


def _compare_compiled(job: NumbersJob, models: Models) -> NumbersResult:
    step = _step(job.base, models)
    limit = LIMITS.get(job.base.workload.dtype, LIMITS["fp32"]) * _COMPILED_FACTOR
    compiled = torch.compile(step.model, dynamic=False)
    how = f"relative error, {job.base.workload.dtype}"
    check = _outputs_check("compiled and eager: equal outputs", step.outputs(), step.outputs(compiled), limit, how)
    return NumbersResult(job.kind, (check,))


def _step(variant: Variant, models: Models) -> Step:
    step = Step(models.built(variant), variant.workload, models.device)
    step.model.eval()  # Dropout would differ from run to run.
    return step


def embed_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy `source`'s parameters and buffers into the leading corner of `target`'s, and zeros into the rest."""
    values = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers(remove_duplicate=False))
    others = dict(target.named_parameters(remove_duplicate=False)) | dict(target.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, other in others.items():
            value = values.get(name)
            if value is None or value.dim() != other.dim():
                continue
            corner = tuple(slice(0, min(a, b)) for a, b in zip(value.shape, other.shape, strict=True))
            kept = value[corner].to(other)
            if value.shape != other.shape:
                other.zero_()
            other[corner] = kept


def _outputs_check(what: str, one: Sequence[torch.Tensor], two: Sequence[torch.Tensor], limit: float, detail: str) -> Check:
    """The largest relative error over the outputs, each on what both have; infinite where there is nothing to compare."""
    found = [_corner_check(what, a, b, limit, detail) for a, b in zip(one, two, strict=False) if a.dim() == b.dim() and a.numel() > 1]
    return next(
        (check for check in found if not check.passed), max(found, key=lambda check: check.value, default=Check(what, float("inf"), limit))
    )


def _corner_check(what: str, a: torch.Tensor, b: torch.Tensor, limit: float, detail: str) -> Check:
    corner = tuple(slice(0, min(x, y)) for x, y in zip(a.shape, b.shape, strict=True))
    return Check(what, relative_error(b[corner], a[corner]), limit, detail, _most_different(a[corner], b[corner]))


def _most_different(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The two numbers at the place where they differ most; a NaN differs from everything."""
    one, two = a.double().flatten(), b.double().flatten()
    at = int((one - two).abs().nan_to_num(nan=float("inf")).argmax())
    return float(one[at]), float(two[at])


def _vocabulary_checks(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor], advice: list[str]) -> list[Check]:
    """What the padded rows of the logits would win, unmasked and masked."""
    logits = next(
        ((a, b) for a, b in zip(one, two, strict=False) if a.dim() == b.dim() and a.dim() > 1 and b.shape[-1] > a.shape[-1]), None
    )
    if logits is None:
        return []
    real, padded = logits[0].float(), logits[1].float()
    size = real.shape[-1]
    free_share = float(padded[..., size:].exp().sum(-1).div(padded.exp().sum(-1)).mean())
    free_wins = float((padded.argmax(-1) >= size).float().mean())
    masked = padded.clone()
    masked[..., size:] = torch.finfo(masked.dtype).min
    top = masked.topk(min(_TOP, size), -1).indices
    advice.append(
        f"mask the logits of the {padded.shape[-1] - size} padded rows: with zero weights they would take {free_share:.1%} of the "
        f"probability and win at {free_wins:.1%} of the positions of an untrained model"
    )
    return [
        Check(f"padded vocabulary: masked rows in the top {_TOP}", float((top >= size).sum()), 0.0, "count"),
        Check("padded vocabulary: probability of masked rows", float(masked.softmax(-1)[..., size:].sum()), 0.0, "sum over the positions"),
        Check(
            "padded vocabulary: probabilities of the real rows",
            relative_error(masked.softmax(-1)[..., :size], real.softmax(-1)),
            LIMITS["fp32"],
            "relative error, fp32",
        ),
    ]


def _gradient_checks(base: Step, other: Step, what: str) -> list[Check]:
    """Compare the gradients of a scalar that weighs the common outputs by fixed noise."""
    scalars = []
    shapes: list[tuple[int, ...]] = []
    for step in (base, other):
        step.model.zero_grad(set_to_none=True)
        outputs = [t for t in _differentiable(step) if t.dim() > 1]
        shapes = shapes or [tuple(t.shape) for t in outputs]
        scalars.append(_weighed(outputs, shapes))
    if any(scalar is None for scalar in scalars):
        return []
    for scalar in scalars:
        scalar.backward()
    gradients = {name: parameter.grad for name, parameter in other.model.named_parameters() if parameter.grad is not None}
    squared, total = 0.0, 0.0
    for name, parameter in base.model.named_parameters():
        if parameter.grad is None or name not in gradients:
            continue
        corner = tuple(slice(0, size) for size in parameter.grad.shape)
        squared += float((gradients[name][corner].double() - parameter.grad.double()).square().sum())
        total += float(parameter.grad.double().square().sum())
    for step in (base, other):
        step.model.zero_grad(set_to_none=True)
    if not total:
        return []
    return [Check(what, (squared / total) ** 0.5, LIMITS["fp32"] * _GRADIENT_FACTOR, "relative error over all parameters, fp32")]


def _differentiable(step: Step) -> list[Any]:
    with precision(step.workload):
        output = step.model(*step.args, **step.kwargs)
    return [tensor for tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad]


def _weighed(outputs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> Any:
    total: Any = None
    for output, shape in zip(outputs, shapes, strict=False):
        if len(shape) != output.dim():
            continue
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(shape, generator=generator).to(output)
        corner = tuple(slice(0, size) for size in shape)
        term = (output[corner] * weights).sum()
        total = term if total is None else total + term
    return total
