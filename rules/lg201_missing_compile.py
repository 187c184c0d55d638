"""## What it does
Finds training and serving entries that build a model and never compile it, where torch.compile would pay.

## Why is this bad?
In eager mode each small op (norm, activation, residual, loss) reads and writes its tensors in memory of its own, and Python
launches every kernel by hand. torch.compile fuses the small ops and launches fewer kernels; `mode="reduce-overhead"` replays CUDA
graphs and launches nearly none. Measured on one H200 (GPT-2 124M, bf16 autocast): 45.9 ms a training step of batch 16 x 1024 in
eager mode, 41.2 compiled; the Hugging Face model at batch 8 x 1024 47.1 against 26.2; one forward pass of a single short sequence
2.3 ms in eager mode, 0.52 with reduce-overhead.

## Example
```python
model = GPT(config)
for x, y in loader:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
```

Use instead:
```python
model = torch.compile(GPT(config))
```

## When it stays silent
- A config alone (a Hugging Face config.json): nothing in it builds or runs the model.
- Where the file or its framework compiles the model anyway, or the command line says `--compile`.
- Where the step model sees no gain of at least 3 %.

## References
- PyTorch documentation, torch.compile
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lintgpu.finding import Change, Confidence, Edit, Finding, FindingCost, Fix, Severity
from lintgpu.gpu.costs import PYTHON, StepCost
from lintgpu.gpu.step import cost_step
from lintgpu.rule import Case, Context, Expected, Rule
from lintgpu.target.base import CompileUse
from lintgpu.workload import Source

LEAST_SAVING = 0.03
"""Share of the step below which compiling is not worth its start-up time."""
BAND = 0.5
"""The saving of compiling is known to about this share of itself: fusion depends on the model (see docs/accuracy.md)."""
BETTER_MODE = 0.9
"""reduce-overhead is advised where its step takes less than this share of the default mode's."""


_TRAIN = """\
import torch

from model import GPT, GPTConfig

batch_size = 8
block_size = 1024
compile = False


def main(loader):
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss = model(x, y)
        loss.backward()
        optimizer.step()
"""
_MODEL = """\
from dataclasses import dataclass

import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.wte(idx))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss
"""


class MissingCompile(Rule):
    """LG201."""

    code = "LG201"
    name = "missing-compile"
    summary = "An entry builds and runs a model and never compiles it, and torch.compile would pay"
    bad = (
        Case(
            "compile switched off by its key",
            {"train.py": _TRAIN, "model.py": _MODEL},
            ("--gpu", "H200"),
            (Expected("train.py", 7, 11, "compile", ("True",)),),
        ),
    )
    good = (Case("a config alone", {"config.json": '{"model_type": "gpt2", "vocab_size": 50304}\n'}),)

    def check(self, context: Context) -> Iterator[Finding]:
        """At most one finding a target."""
        use = context.target.compile
        if use is None or use.state == "on" or use.by_framework or context.trace.compile_calls:
            return
        if context.workload.compiled and context.workload.source_of("compile") is Source.GIVEN:
            return
        eager = replace(context.workload, compile="none")
        before = cost_step(context.trace, context.profile, eager)
        options = {mode: cost_step(context.trace, context.profile, replace(eager, compile=mode)) for mode in ("default", "reduce-overhead")}
        mode = "reduce-overhead" if options["reduce-overhead"].step_us < BETTER_MODE * options["default"].step_us else "default"
        saved = 1 - options[mode].step_us / before.step_us
        if saved * (1 - BAND) >= LEAST_SAVING / 2 and saved >= LEAST_SAVING:
            yield self._finding(context, use, mode, before, options[mode])

    def _finding(self, context: Context, use: CompileUse, mode: str, before: StepCost, after: StepCost) -> Finding:
        step_share = 1 - after.step_us / before.step_us
        gpu_share = max(0.0, 1 - after.gpu_us / before.gpu_us)
        call = "torch.compile(model)" if mode == "default" else 'torch.compile(model, mode="reduce-overhead")'
        wait = {PYTHON: "Python launching kernels", "memory": "memory", "math": "math"}[before.bound]
        off = f"{use.key} is off" if use.key else f"{use.entry} never compiles the model"
        return Finding(
            code=self.code,
            name=self.name,
            severity=Severity.of_share(step_share),
            message=(
                f"{off}; {call} saves about {step_share:.0%} of a step on {before.gpu} "
                f"({before.step_us / 1000:,.1f} ms -> {after.step_us / 1000:,.1f} ms, bound by {wait})"
            ),
            span=use.span,
            target=context.target.name,
            knob=use.key or None,
            value="off" if use.key else None,
            suggestion="True" if use.key else call,
            cost=FindingCost(
                gpu_us=before.gpu_us,
                gpu_share=1.0,
                saving_gpu_us=before.gpu_us - after.gpu_us,
                saving_gpu_share=gpu_share,
                saving_step_share=step_share,
                low=gpu_share * (1 - BAND),
                high=min(1.0, gpu_share * (1 + BAND)),
                basis=Confidence(before.basis),
            ),
            fix=_fix(use),
            details=(
                f"eager: GPU {before.gpu_us / 1000:,.1f} ms (math {before.math_us / before.gpu_us:.0%}, "
                f"memory {before.memory_us / before.gpu_us:.0%}), launches {before.cpu_us / 1000:,.1f} ms on the CPU beside it",
                f"compiled: GPU {after.gpu_us / 1000:,.1f} ms, launches {after.cpu_us / 1000:,.1f} ms",
            ),
            fingerprint_parts=(context.target.name, use.key or use.entry),
            change=Change(compile=mode),
        )


def _fix(use: CompileUse) -> Fix | None:
    """Switch the key on where there is one; wrapping a model is left to its author. No trace runs compiled, so none confirms it."""
    if not use.key:
        return None
    on = "True" if use.span.path.endswith(".py") else "true"
    return Fix((Edit(use.span, on),), f"set {use.key} to {on}", safe=True)
