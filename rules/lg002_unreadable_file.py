"""## What it does
Says that a file could not be read: missing, not UTF-8, or with a syntax error, at the position of the error.

## Why is this bad?
Whatever the file declares was not checked. The exit code is 2; all other files are still checked.

## Example
```json
{"model_type": "gpt2", "vocab_size": }
```

Use instead: a file that parses, or exclude it in `[tool.lintgpu]` where it is a template.
"""

from __future__ import annotations

from collections.abc import Iterator

from lintgpu.finding import Finding, Severity, Span
from lintgpu.rule import BrokenFile, Case, Expected, Rule


class UnreadableFile(Rule):
    """LG002."""

    code = "LG002"
    name = "unreadable-file"
    summary = "A file could not be read or parsed"
    bad = (
        Case(
            "value missing",
            {"config.json": '{"model_type": "gpt2",\n "vocab_size": }\n'},
            (),
            (Expected("config.json", 2, 0, severity=Severity.ERROR),),
        ),
    )
    good = (Case("no model at all", {"data.json": '{"name": "a", "list": [1, 2]}\n'}),)

    def check_broken(self, file: BrokenFile) -> Iterator[Finding]:
        """One error at the position of the fault."""
        yield Finding(
            code=self.code,
            name=self.name,
            severity=Severity.ERROR,
            message=file.message,
            span=Span(file.path, file.line, file.column, file.line, file.column + 1),
            fingerprint_parts=(file.path,),
        )
