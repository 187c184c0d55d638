"""## What it does
Says that a change which `--verify` carried out on the GPU does not compute the same numbers, with both values.

## Why is this bad?
A fast wrong kernel is worse than a slow right one. A padded model has to give the same outputs and gradients on the real rows, SDPA has
to give what the hand-written attention gave, a compiled model what the eager one gave, and each GEMM what float64 gives, up to the
rounding of its precision. Padded rows of a vocabulary have to be masked or initialised so that they never win a softmax or a top-k.

## Example
```python
logits = model(x)  # vocabulary padded from 50257 to 50304
token = logits.argmax(-1)  # may be 50290, which is no token
```

Use instead:
```python
logits = model(x)[..., :50257]
token = logits.argmax(-1)
```

## When it stays silent
- Without `--verify`: nothing is computed.
- Where the difference is what rounding explains: 1 % for bf16, 0.2 % for fp16 and TF32, 0.01 % for fp32, and more where both sides round.

## References
- PyTorch documentation, Numerical accuracy
"""

from __future__ import annotations

from collections.abc import Iterator

from lintgpu.finding import Finding, Severity
from lintgpu.measurement import Check
from lintgpu.rule import Case, Rule
from lintgpu.target.base import Target


class NumbersDiffer(Rule):
    """LG003."""

    code = "LG003"
    name = "numbers-differ"
    summary = "A change that was carried out on the GPU does not compute the same numbers"
    good = (Case("nothing was computed", {"config.json": '{"model_type": "gpt2", "vocab_size": 50304, "n_layer": 1}\n'}, ("--batch", "1")),)

    def check_numbers(self, target: Target, finding: Finding | None, check: Check) -> Iterator[Finding]:
        """One error for a check that failed, at the place of the finding it belongs to or else of the target."""
        if check.passed:
            return
        pair = f"; where they differ most: {check.pair[0]:.6g} as it is, {check.pair[1]:.6g} after the change" if check.pair else ""
        detail = f" ({check.detail})" if check.detail else ""
        yield Finding(
            code=self.code,
            name=self.name,
            severity=Severity.ERROR,
            message=f"{check.what}: {check.value:.3g}, and at most {check.limit:.3g} is explained by rounding{detail}{pair}",
            span=finding.span if finding is not None else target.span,
            target=target.name,
            knob=finding.knob if finding is not None else None,
            fingerprint_parts=(target.name, check.what),
        )
