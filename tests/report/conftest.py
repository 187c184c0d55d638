"""Reports that the formats are tested on: an ordinary one, a hostile one, and the ends of the scale."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lintgpu.finding import Change, Confidence, Edit, Finding, FindingCost, Fix, Related, Severity, Span
from lintgpu.measurement import (
    Check,
    Comparison,
    Interval,
    MeasuredOp,
    Measurement,
    StepMeasurement,
    TimedStep,
    Verdict,
    Verification,
)
from lintgpu.report.base import FileError, Report, TargetSummary, WorkloadValue
from lintgpu.source.file import decode

GOLDEN = Path(__file__).parent / "golden"

CONFIG = """{
  "model_type": "gpt2",
  "n_embd": 768,
  "vocab_size": 50257
}
"""
TRAIN = "batch = 12\nmodel = build(config)  # never compiled\nfor step in range(steps):\n    train(model)\n"
COST = FindingCost(29_500.0, 0.41, 25_900.0, 0.36, 0.21, 0.29, 0.42, Confidence.CALIBRATED)
GEMM = "lm_head forward: M 16384 N {} K 768 NT bf16"
WORKLOAD = "train, batch 16 x 1024, bf16 autocast, eager"
VALUES = (
    WorkloadValue("mode", "train", "assumed"),
    WorkloadValue("batch", "16", "given"),
    WorkloadValue("sequence", "1024", "read"),
    WorkloadValue("dtype", "bf16", "assumed"),
    WorkloadValue("gpu", "H200", "assumed"),
)
TARGET = TargetSummary(
    name="gpt2",
    path="configs/gpt2.json",
    family="huggingface",
    gpu="H200",
    basis="traced",
    model_class="GPT2LMHeadModel",
    workload=WORKLOAD,
    workload_values=VALUES,
    step_us=72_100.0,
    gpu_us=71_900.0,
    bound="math",
    cost_basis="calibrated",
    trace_seconds=0.42,
    assumptions=("dropout is left as configured",),
)


def ordinary():
    config = decode(CONFIG.encode(), "configs/gpt2.json")
    train = decode(TRAIN.encode(), "train.py")
    vocabulary = config.root.get("vocab_size").span
    findings = (
        Finding(
            code="LG101",
            name="misaligned-dimension",
            severity=Severity.ERROR,
            message="vocab_size = 50257 keeps GEMMs off the fast kernels of H200; 50304 saves 25,900 us",
            span=vocabulary,
            target="gpt2",
            knob="vocab_size",
            value=50257,
            suggestion=50304,
            gpu="H200",
            workload=WORKLOAD,
            cost=COST,
            related=(Related(Span("train.py", 2, 9, 2, 14), "the model is built here"),),
            fix=Fix((Edit(vocabulary, "50304"),), "set vocab_size to 50304", safe=False, confirmed=True),
            details=("lm_head forward: M 16384 N 50257 K 768 NT bf16, 9,800 us on cutlass-align1 -> 1,700 us on nvjet",),
            fingerprint_parts=("gpt2", "vocab_size"),
        ),
        Finding(
            code="LG201",
            name="missing-compile",
            severity=Severity.WARNING,
            message="the model is never compiled",
            span=Span("train.py", 2, 1, 4, 17),
            target="gpt2",
            gpu="H200",
            workload=WORKLOAD,
            cost=replace(COST, saving_gpu_share=0.0, saving_gpu_us=0.0),
            fingerprint_parts=("compile",),
        ),
    )
    return Report(findings, {"configs/gpt2.json": config, "train.py": train}, (TARGET,), (), suppressed=1, checked=2, version="1.2.3")


def hostile():
    path = "a dir/né,w:\n::error::x%.yaml"
    text = 'é漢: "x\ty"\n"' + "k" * 150 + '": {big: 50257, ' + "z" * 150 + ": 1}\n"
    file = decode(text.encode(), path)
    big = file.root.get("k" * 150 + ".big").span
    nasty = "first\nsecond\r::error::third 100% \x1b[2J\u202eevil\ud800, done"
    findings = (
        Finding(
            "LG101",
            "misaligned-dimension",
            Severity.ERROR,
            nasty,
            big,
            target=nasty,
            knob=nasty,
            value=50257,
            suggestion=nasty,
            gpu="H200",
            workload=nasty,
            cost=FindingCost(float("nan"), float("inf"), 0.0, 0.0, 0.0, 0.0, 0.0, Confidence.SPECIFICATION),
            related=(Related(Span("C:\\models\\große datei.py", 3, 1, 3, 9), nasty),),
            fix=Fix((Edit(big, nasty),), nasty, safe=True),
            details=(nasty,),
        ),
        Finding("LG102", "tail-wave", Severity.NOTE, "no such line", Span(path, 99, 1, 99, 2)),
        Finding("LG102", "tail-wave", Severity.NOTE, "no file", Span("\\\\server\\share\\m.json", 0, 0, 0, 0)),
    )
    errors = (FileError(path, 3, 4, nasty), FileError("H900", 0, 0, "unknown GPU", "gpu"), FileError("m.py", 1, 1, nasty, "internal"))
    failed = replace(
        TARGET, name=nasty, path=path, basis="failed", step_us=None, gpu_us=None, bound="", cost_basis="", assumptions=(nasty,)
    )
    return Report(findings, {path: file}, (failed,), errors, suppressed=0, checked=3, version="1.2.3")


def measured():
    """The ordinary report after a verification: one finding each confirmed and refuted."""
    report = ordinary()
    change = Change(knobs=(("vocab_size", 50304),))
    steps = (
        TimedStep("as it is", Interval(72.0, 71.0, 73.0), Interval(1.0, 1.0, 1.0), 72.1, 71.0, "memory"),
        TimedStep("with the change", Interval(48.0, 47.5, 48.4), Interval(1.5, 1.48, 1.52), 46.2),
    )
    confirmed = Measurement(
        Verdict.CONFIRMED,
        "the flagged ops take 24.0 ms less a step [23.5 ms to 24.5 ms], predicted 25.9 ms less",
        saving_us=Interval(24_000.0, 23_500.0, 24_500.0),
        ratio=Interval(5.4, 5.3, 5.5),
        step_share=Interval(0.333, 0.324, 0.342),
        before=(MeasuredOp(GEMM.format(50257), 1, 9_800.0, 9_950.0, "cutlass_75", "3142x8x1", 127.0, 188.0, 0.128),),
        after=(MeasuredOp(GEMM.format(50304), 1, 1_700.0, 1_720.0, "nvjet", "", 736.0, 1085.0),),
        steps=steps,
        checks=(Check("padded model: outputs on the real rows", 2e-7, 1e-4, "relative error", (0.5, 0.500001)),),
        notes=("numbers: mask the logits of the 47 padded rows",),
    )
    refuted = Measurement(
        Verdict.REFUTED, "the step takes 0.4 % more time [-0.9 % to 0.2 %], predicted 21 %", step_share=Interval(-0.004, -0.009, 0.002)
    )
    first, second = report.findings
    findings = (
        replace(first, change=change, measured=confirmed),
        replace(second, severity=Severity.NOTE, change=Change(compile="default"), measured=refuted),
    )
    doubling = Comparison("batch x2", steps, "as it is 72.0 ms (predicted 72.1 ms); twice the batch takes 1.96x the time")
    card = Verification("NVIDIA H200", "580.1", (("torch", "2.11.0"),), 41.0, False, ("the GPU was slowed down by its power cap",))
    target = replace(TARGET, measured=StepMeasurement((doubling,), confirmed.checks, ("compile: not enough time",)))
    errors = (FileError("GPU 0", 0, 0, "interrupted: what was measured until then is shown", "verify"),)
    return replace(report, findings=findings, targets=(target,), verification=card, errors=errors)


def errors_only():
    errors = (FileError("b.json", 3, 4, "not valid JSON: expecting value, found '}'"), FileError("gone.py", 0, 0, "no such file"))
    return Report(errors=errors, checked=2, version="1.2.3")


REPORTS = {
    "ordinary": ordinary,
    "measured": measured,
    "hostile": hostile,
    "clean": lambda: Report(checked=4, targets=(TARGET,), version="1.2.3"),
    "errors": errors_only,
}


@pytest.fixture(params=sorted(REPORTS))
def case(request):
    """(name, report)"""
    return request.param, REPORTS[request.param]()


@pytest.fixture
def reports():
    return {name: make() for name, make in REPORTS.items()}


@pytest.fixture
def golden():
    """Compare a text with a golden file; LINTGPU_UPDATE_GOLDEN=1 writes it instead."""

    def check(name, text):
        path = GOLDEN / name
        if os.environ.get("LINTGPU_UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8", newline="")
        assert path.read_bytes().decode() == text

    return check
