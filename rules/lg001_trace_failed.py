"""## What it does
Says that a model could not be built or traced, with the reason and the way out.

## Why is this bad?
A check that did not run must never look like a clean one. What the static tier can read from the config is still reported.

## Example
```json
{"model_type": "a_type_the_installed_transformers_does_not_know"}
```

Use instead: what the finding's hint says, such as a newer model library, `--trust` for a model of the linted project, or a
larger `--time-limit`. Where a file is no model of yours, exclude it in `[tool.lintgpu]`, or ignore LG001 there.

## When it stays silent
- Without torch in the environment, where the config's numbers could be read: the output says that nothing was traced and how
  to change that.
- With `--static`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lintgpu.finding import Finding, Severity
from lintgpu.rule import Case, Expected, Rule
from lintgpu.target.base import Target
from lintgpu.trace.records import TraceFailure
from lintgpu.workload import Workload

HELP = {
    "environment": "set python in [tool.lintgpu] to the interpreter that runs the model",
    "trust": "name it in [tool.lintgpu.targets] of pyproject.toml, or give --trust",
    "config": "correct the config, or exclude the file in [tool.lintgpu] where it is no model of yours",
    "build": "correct the numbers that its constructor refuses, or exclude the file in [tool.lintgpu] where it is no model of yours",
    "inputs": "name its inputs as example_inputs of [tool.lintgpu.targets.NAME]",
    "forward": "name its inputs as example_inputs of [tool.lintgpu.targets.NAME], or give --static to judge the numbers alone",
    "backward": "give --mode infer to trace the forward alone",
    "limit": "raise time-limit or memory-limit-gb in [tool.lintgpu]",
    "crash": "run it by itself in that environment to see it end, or give --static to judge the numbers alone",
}
"""What would help at each stage where the failure itself does not know better."""


class TraceFailed(Rule):
    """LG001."""

    code = "LG001"
    name = "trace-failed"
    summary = "A model could not be built or traced"
    bad = (
        Case(
            "unknown model type",
            {"config.json": '{"model_type": "no_such_model_type",\n "vocab_size": 50257}\n'},
            (),
            (Expected("config.json", 1, 16, severity=Severity.WARNING),),
        ),
    )
    good = (Case("a model that traces", {"config.json": '{"model_type": "gpt2", "vocab_size": 50304, "n_layer": 1}\n'}, ("--batch", "1")),)

    def check_failure(self, target: Target, workload: Workload, failure: TraceFailure) -> Iterator[Finding]:
        """One warning for the target."""
        where = f" ({failure.path}:{failure.line})" if failure.path else ""
        help_ = failure.hint or HELP.get(failure.stage, "")
        yield Finding(
            code=self.code,
            name=self.name,
            severity=Severity.WARNING,
            message=f"{target.name} was not traced: {failure.reason}{where}" + (f"; {help_}" if help_ else ""),
            span=target.span,
            target=target.name,
            details=(f"stage: {failure.stage}",),
            fingerprint_parts=(target.name, failure.stage),
        )
