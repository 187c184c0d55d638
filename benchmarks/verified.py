"""Hold predictions against a real GPU and write the record: python3 benchmarks/verified.py [--write docs/verified.md] [--gpu H200]

Each case is a model whose findings, and changes that nobody advises, go through the code of `lintgpu check --verify`. Changes are
planted with the prediction that the cost model makes for them; one is planted with a prediction that is wrong, and has to be refuted.
Takes about eight minutes on an H200; --seconds bounds it, and what it leaves out is said in the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from lintgpu import engine
from lintgpu.cache import Cache
from lintgpu.finding import Change, Confidence, Finding, FindingCost, Severity
from lintgpu.measurement import Comparison, Interval, Verification
from lintgpu.report import find as find_format
from lintgpu.report.base import Report
from lintgpu.verify import session
from lintgpu.verify.jobs import Subject
from lintgpu.whatif import Outcome, saving
from lintgpu.workload import Mode, describe

PLAIN_GPT2 = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.qkv, self.proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.up, self.down = nn.Linear(config.n_embd, 4 * config.n_embd), nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss
"""
GPT2 = {"model_type": "gpt2", "vocab_size": 50257}
LLAMA = {"model_type": "llama", "num_attention_heads": 16, "tie_word_embeddings": True}
NARROW = LLAMA | {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 10922, "vocab_size": 50304}
WIDE = LLAMA | {"hidden_size": 2048, "num_hidden_layers": 4, "vocab_size": 32000}


@dataclass(frozen=True)
class Plant:
    """A change to measure that lintgpu need not advise."""

    label: str
    change: Change
    knob: str = ""
    saving_share: float | None = None
    """A wrong claim instead of the model's own prediction."""


@dataclass(frozen=True)
class Case:
    """A model, its workload, and what to measure on it."""

    name: str
    files: dict[str, str]
    workload: dict[str, Any]
    plants: tuple[Plant, ...] = ()
    questions: tuple[str, ...] = ()
    advised: bool = True
    """Whether lintgpu's own findings are measured too."""


@dataclass
class Outcomes:
    """What the cases gave, as rows of the record's tables."""

    findings: list[list[str]] = field(default_factory=list)
    ops: list[list[str]] = field(default_factory=list)
    steps: list[list[str]] = field(default_factory=list)
    checks: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    card: Verification | None = None


def to(knob: str, value: int, same_work: bool = False) -> Change:
    return Change(knobs=((knob, value),), same_work=same_work)


def cases() -> Iterator[Case]:
    """The cheap and telling ones first: what the time does not reach is left out."""
    training = {"batch": 8, "sequence": 1024}
    vocabulary = (
        Plant("vocab_size 50257 -> 50304", to("vocab_size", 50304), "vocab_size"),
        Plant("planted: vocab_size 50257 -> 50259, claimed to save 25 %", to("vocab_size", 50259), "vocab_size", 0.25),
    )
    yield Case("GPT-2 124M, Hugging Face", {"config.json": json.dumps(GPT2)}, training, vocabulary, ("batch x2", "attention", "precision"))
    plain = Plant("vocab_size 50257 -> 50304", to("vocab_size", 50304), "vocab_size")
    yield Case("GPT-2 124M, plain modules", {"model.py": PLAIN_GPT2}, {"batch": 16, "sequence": 1024}, (plain,), ("batch x2",))
    yield Case("Llama, width 1024, feed-forward 10922", {"config.json": json.dumps(NARROW)}, training, (), ("batch x2",))
    odd = GPT2 | {"vocab_size": 50304, "n_positions": 4096}
    yield Case("GPT-2, 4095 tokens", {"config.json": json.dumps(odd)}, {"batch": 1, "sequence": 4095}, (), ("batch x2",))
    for old, new, tokens in ((8320, 8192, 2048), (8512, 8448, 1024), (14400, 14336, 4096)):
        tail = Plant(f"intermediate_size {old} -> {new}, {tokens} tokens", to("intermediate_size", new, True), "intermediate_size")
        wide = {"config.json": json.dumps(WIDE | {"intermediate_size": old})}
        yield Case("Llama, width 2048, tail wave", wide, {"batch": 1, "sequence": tokens}, (tail,), (), advised=False)
    resnet = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    channels = Plant("channels_last", Change(channels_last=True))
    yield Case("ResNet-50", {"config.json": json.dumps(resnet)}, {"batch": 64}, (channels,), (), advised=False)
    short = {"batch": 1, "sequence": 64, "mode": Mode.INFER}
    yield Case(
        "GPT-2 124M, one short sequence",
        {"config.json": json.dumps(GPT2)},
        short,
        (),
        ("batch x2", "torch.compile", "reduce-overhead"),
        False,
    )
    yield Case("GPT-2 124M, Hugging Face", {"config.json": json.dumps(GPT2)}, training, (), ("torch.compile",), False)


def small(text: str) -> str:
    """A model that a dry run on a CPU gets through: the vocabulary and the feed-forward size stay."""
    if not text.startswith("{"):
        return text.replace("n_layer: int = 12", "n_layer: int = 1").replace("n_embd: int = 768", "n_embd: int = 48")
    data = json.loads(text)
    sizes = {"gpt2": {"n_layer": 1, "n_embd": 48}, "llama": {"hidden_size": 64, "num_hidden_layers": 1}}
    sizes["resnet"] = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    return json.dumps(data | sizes[data["model_type"]])


def planted(subject: Subject, plant: Plant) -> Finding:
    """A finding that advises the change, with the cost model's prediction or the claim."""
    context = subject.context
    cost = _cost(subject, plant)
    knobs = {knob.name: knob for knob in context.what_if.knobs.values()}
    knob = knobs.get(plant.knob)
    changed = tuple((knob.id, value) for _, value in plant.change.knobs) if knob is not None else ()
    return Finding(
        code="LG101",
        name="planted",
        severity=Severity.of_share(cost.saving_step_share),
        message=plant.label,
        span=knob.span if knob is not None else context.target.span,
        target=context.target.name,
        knob=plant.knob or None,
        value=knob.value if knob is not None else None,
        gpu=context.profile.name,
        workload=describe(context.workload),
        cost=cost,
        change=replace(plant.change, knobs=changed),
    )


def _cost(subject: Subject, plant: Plant) -> FindingCost:
    context = subject.context
    step = context.step
    if plant.saving_share is not None:
        share = plant.saving_share
        return FindingCost(share * step.gpu_us, share, share * step.gpu_us, share, share, 0.8 * share, 1.2 * share, Confidence.CALIBRATED)
    knobs = {knob.name: knob.id for knob in context.what_if.knobs.values()}
    if not plant.change.knobs:  # the model predicts nothing for it
        return FindingCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, Confidence(step.basis))
    ((_, value),) = plant.change.knobs
    outcome = context.what_if.confirmed({knobs[plant.knob]: value})
    if not isinstance(outcome, Outcome):
        raise SystemExit(f"{plant.label}: {outcome.reason}")
    base = Outcome({}, context.trace, step)
    gain = saving(base, outcome)
    if plant.change.same_work:
        return _cost_at_equal_work(base, outcome)
    return FindingCost(gain.gpu_us, gain.gpu_share, gain.gpu_us, gain.gpu_share, gain.step_share, gain.low, gain.high, gain.basis)


def _cost_at_equal_work(base: Outcome, after: Outcome) -> FindingCost:
    from lintgpu.verify.jobs import differing

    us, work = zip(*(_sums(differing(one, other)) for one, other in ((base, after), (after, base))), strict=True)
    saved = us[0] - us[1] * work[0] / work[1]
    share = saved / base.step.gpu_us
    return FindingCost(us[0], us[0] / base.step.gpu_us, saved, share, share, 0.5 * share, 1.5 * share, Confidence(base.step.basis))


def _sums(items: Sequence[Any]) -> tuple[float, float]:
    return sum(i.us * i.op.count for i in items), sum(i.op.gemm.flops * i.op.count for i in items if i.op.gemm is not None)


def run(case: Case, gpu: str, device: str, deadline: float) -> Report:
    """The report of one case, its planted findings measured like those of the rules."""
    options = session.Options(device, deadline, _say, job_seconds=4.0, questions=frozenset(case.questions))

    def measure(report: Report, subjects: Sequence[Subject]) -> Report:
        extra = [tuple(planted(subject, plant) for plant in case.plants) for subject in subjects]
        own = [subject.findings if case.advised else () for subject in subjects]
        asked = [replace(s, findings=(*own[i], *extra[i])) for i, s in enumerate(subjects)]
        findings = tuple(finding for subject in asked for finding in subject.findings)
        return session.verify(replace(report, findings=findings), asked, options)

    with tempfile.TemporaryDirectory(prefix="lintgpu-verified-") as folder:
        for name, text in case.files.items():
            (Path(folder) / name).write_text(small(text) if device == "cpu" else text, encoding="utf-8")
        overrides = {"gpus": (gpu,), "gpus_given": True, "trust": True}
        workload = case.workload | ({"batch": 1, "sequence": 32} if device == "cpu" else {})
        return engine.check(engine.Request((folder,), overrides, workload, Cache(None)), measure)


def _say(target: str, stage: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {target} {stage}", file=sys.stderr, flush=True)


# The record


def gather(case: Case, report: Report, found: Outcomes) -> None:
    """Add what a case gave to the rows."""
    found.card = report.verification or found.card
    found.notes += [f"{case.name}: {error.message}" for error in report.errors]
    found.notes += [
        f"{case.name}: {note}" for note in (report.verification.notes if report.verification else ()) if "no finding" not in note
    ]
    for finding in report.findings:
        _gather_finding(case, finding, found)
    for target in report.targets:
        if target.measured is not None:
            found.steps += [row for one in target.measured.comparisons for row in _comparison_rows(case, one)]
            found.notes += [f"{case.name}: {note}" for note in target.measured.notes]
            found.checks += [_check_row(case, check) for check in target.measured.checks]
    if not case.plants and case.advised and not report.findings:
        found.findings.append([case.name, "no finding to verify", "", "", "", "", ""])


def _gather_finding(case: Case, finding: Finding, found: Outcomes) -> None:
    measured, cost = finding.measured, finding.cost
    if measured is None or cost is None:
        found.findings.append([case.name, finding.message, "", "", "", "", "not measured"])
        return
    advised = finding.name != "planted"
    prediction = finding.message.partition("the prediction was: ")[2] or finding.message
    label = f"{finding.knob} {finding.value} -> {finding.suggestion} (advised)" if advised else prediction
    if not (finding.change and finding.change.knobs):  # no prediction to hold it against
        saved = f"{_percent(measured.step_share)}" if measured.step_share else ""
        ratio = f"{measured.ratio.median:.2f}x" if measured.ratio else ""
        found.findings.append([case.name, label, "none", ratio, "none", saved, "no prediction"])
    else:
        before, after = (sum(op.predicted_us * op.count for op in ops) for ops in (measured.before, measured.after))
        equal = finding.change.same_work
        predicted_ratio = cost.gpu_us / (cost.gpu_us - cost.saving_gpu_us) if equal else before / after if after else 0.0
        row = [case.name, label, f"{predicted_ratio:.2f}x", _ratio(measured.ratio)]
        row += ["", ""] if equal else [f"{cost.saving_step_share:.1%}", _percent(measured.step_share)]
        found.findings.append([*row, measured.verdict.value])
    for op_before, op_after in zip(measured.before[:4], measured.after[:4], strict=False):
        found.ops += [_op_row(op_before), _op_row(op_after)]
    found.checks += [_check_row(case, check) for check in measured.checks]
    found.notes += [f"{case.name}, {label}: {note}" for note in measured.notes]


def _ratio(interval: Interval | None) -> str:
    return f"{interval.median:.2f}x [{interval.low:.2f} to {interval.high:.2f}]" if interval is not None else ""


def _percent(interval: Interval | None) -> str:
    return f"{interval.median:.1%} [{interval.low:.1%} to {interval.high:.1%}]" if interval is not None else ""


def _op_row(op: Any) -> list[str]:
    rate = f"{op.tflops:,.0f}" if op.tflops else ""
    return [
        op.what,
        f"{op.predicted_us:,.0f}",
        f"{op.us:,.0f}" if op.us else "",
        rate,
        f"{op.of_ceiling:.0%}" if op.of_ceiling else "",
        op.kernel[:60],
    ]


def _comparison_rows(case: Case, comparison: Comparison) -> Iterator[list[str]]:
    first = comparison.steps[0]
    for step in comparison.steps:
        predicted = f"{step.predicted_ms:.2f}" if step.predicted_ms else ""
        predicted_ratio = f"{first.predicted_ms / step.predicted_ms:.2f}x" if first.predicted_ms and step.predicted_ms else ""
        ratios = ["", ""] if step is first else [predicted_ratio, f"{step.ratio.median:.2f}x"]
        yield [case.name, comparison.name, step.label, predicted, f"{step.ms.median:.2f}", *ratios, step.bound]


def _check_row(case: Case, check: Any) -> list[str]:
    return [case.name, check.what, f"{check.value:.2g}", f"{check.limit:.2g}", "passed" if check.passed else "FAILED"]


def whole_command(gpu: str, found: Outcomes) -> None:
    """One `lintgpu check --verify` of a 12-layer model as a user runs it, timed from start to end."""
    with tempfile.TemporaryDirectory(prefix="lintgpu-verified-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
        started = time.monotonic()
        command = [sys.executable, "-m", "lintgpu", "check", "config.json", "--batch", "8", "--seq", "1024", "--gpu", gpu, "--verify"]
        done = subprocess.run([*command, "-f", "json", "--no-cache"], cwd=folder, capture_output=True, text=True, check=False, timeout=180)
        seconds = time.monotonic() - started
    try:
        document = json.loads(done.stdout)
        verdicts = ", ".join(finding["measured"]["verdict"] for finding in document["findings"] if finding["measured"])
        made = [one["name"] for target in document["targets"] for one in target["measured"]["comparisons"]]
    except (ValueError, TypeError, KeyError):
        found.notes.append(f"the whole command failed: {done.stdout[-300:]} {done.stderr[-300:]}")
        return
    found.notes.append(
        f"`lintgpu check config.json --batch 8 --seq 1024 --gpu {gpu} --verify` of the 12-layer GPT-2 took {seconds:.0f} s "
        f"(exit code {done.returncode}): {verdicts}; comparisons of steps it had time for: {', '.join(made)}"
    )


def page(found: Outcomes, arguments: str, gpu: str) -> str:
    """The record, markdown."""
    card = found.card
    on = "no GPU: nothing was measured" if card is None else f"one {card.device}, driver {card.driver or 'unknown'}"
    if card is not None and card.device == "cpu":
        on = "a CPU, with tiny models: a dry run, whose figures mean nothing"
    versions = ", ".join(f"{name} {version}" for name, version in card.versions) if card is not None else ""
    parts = [
        "# Predictions held against a GPU\n",
        f"Made by `python benchmarks/verified.py {arguments}` on {date.today().isoformat()} on {on} ({versions}). Predictions are "
        f"those of the {gpu} profile. How it is measured is in [verify.md](verify.md); brackets hold 95 % confidence intervals.\n",
        "## Changes\n",
        "Ratios are time before over time after of the GEMMs, convolutions and attentions that change (at equal work for another "
        "width); savings are of the whole step.\n",
        _table(["model", "change", "ops predicted", "ops measured", "step predicted", "step measured", "verdict"], found.findings),
        "## Steps\n",
        _table(
            ["model", "comparison", "step", "ms predicted", "ms measured", "ratio predicted", "ratio measured", "bound by"], found.steps
        ),
        "## Ops\n",
        "One occurrence each, before and after the change.\n",
        _table(["op", "us predicted", "us measured", "TFLOP/s", "of the ceiling", "kernel"], found.ops),
        "## Numbers\n",
        _table(["model", "check", "found", "allowed", ""], found.checks),
        "## Notes\n",
        *(f"- {note}" for note in dict.fromkeys(found.notes)),
    ]
    return "\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    distinct = list(dict.fromkeys(map(tuple, rows)))
    lines = [head, ["---"] * len(head), *distinct]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, help="the record to write; stdout without it")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--device", default="0", help="the GPU's number, or cpu for a dry run of tiny models whose figures mean nothing")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path, help="also keep each case's whole report in this folder")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    found = Outcomes()
    if options.device != "cpu":
        whole_command(options.gpu, found)
    for number, case in enumerate(cases()):
        if deadline - time.monotonic() < 10:
            found.notes.append(f"{case.name} ({', '.join(case.questions)}): left out, the time was over")
            continue
        report = run(case, options.gpu, options.device, deadline)
        gather(case, report, found)
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            (options.json / f"case{number}.json").write_text(find_format("json").render(report), encoding="utf-8")
        if options.write is not None:
            options.write.write_text(page(found, " ".join(sys.argv[1:]), options.gpu), encoding="utf-8")
    if options.write is None:
        print(page(found, " ".join(sys.argv[1:]), options.gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
