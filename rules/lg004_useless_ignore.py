"""## What it does
Says that an ignore comment hides no finding, or names a code that no rule has.

## Why is this bad?
A comment that outlives its finding hides the next one at that place, which nobody has looked at.

## Example
```yaml
# lintgpu: ignore[LG101] the tokenizer's
vocab_size: 50304
```

Use instead:
```yaml
vocab_size: 50304
```
A comment that is wanted for another GPU or workload than this run's may name LG004 too: `ignore[LG101, LG004]`.

## When it stays silent
- In files of no traced model: the static tier, a failed trace, or a file that no model is made from, cannot tell what a comment would hide.
- Where a code that the comment names was not looked for (`--select`, `--ignore`).
"""

from __future__ import annotations

from collections.abc import Iterator

from lintgpu.finding import Finding, Severity
from lintgpu.rule import Case, Expected, IgnoreComment, Rule

_COMMENT = "// lintgpu: ignore-file[LG101] the tokenizer's\n"


class UselessIgnore(Rule):
    """LG004."""

    code = "LG004"
    name = "useless-ignore"
    summary = "An ignore comment hides nothing"
    bad = (
        Case(
            "the vocabulary was padded since",
            {"config.json": _COMMENT + '{"model_type": "gpt2", "vocab_size": 50304, "n_layer": 1}\n'},
            (),
            (Expected("config.json", 1, 1, severity=Severity.NOTE),),
        ),
    )
    good = (
        Case("the vocabulary is still odd", {"config.json": _COMMENT + '{"model_type": "gpt2", "vocab_size": 50257, "n_layer": 1}\n'}),
        Case("nothing was traced", {"config.json": _COMMENT + '{"model_type": "gpt2", "vocab_size": 50304}\n'}, ("--static",)),
    )

    def check_ignore(self, comment: IgnoreComment) -> Iterator[Finding]:
        """One note on the comment for all of its codes that hide nothing."""
        if self.code in comment.codes or not (comment.unused or comment.unknown):
            return
        parts = []
        if comment.unused:
            where = f"on line {comment.line}" if comment.line else "in this file"
            parts.append(f"hides no finding{_of(comment)} {where}")
        if comment.unknown:
            parts.append(f"names {', '.join(comment.unknown)}, which no rule is called")
        yield Finding(
            code=self.code,
            name=self.name,
            severity=Severity.NOTE,
            message=f"this comment {' and '.join(parts)}; remove it, or the codes",
            span=comment.span,
            fingerprint_parts=(*comment.unused, *comment.unknown),
        )


def _of(comment: IgnoreComment) -> str:
    named = [code for code in comment.unused if code]
    return f" of {', '.join(named)}" if named else ""
