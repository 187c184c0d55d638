"""Write the pages that come from the rules: docs/rules/*.md and the rules table of the README.

Usage: python docs/generate.py [--check]   (--check changes nothing and exits with 1 where a page is out of date)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lintgpu.rule import Rule, all_rules

TOP = Path(__file__).resolve().parent.parent
START, END = "<!-- rules table -->", "<!-- end of rules table -->"


def page(rule: Rule) -> str:
    """The page of one rule, markdown."""
    return f"# {rule.code} {rule.name}\n\n{rule.summary}.\n\n{rule.docs}\n"


def table() -> str:
    """The README's table of rules, markdown."""
    rows = [f"| [{rule.code}](docs/rules/{rule.code}.md) | {rule.name} | {rule.summary} |" for rule in all_rules()]
    return "\n".join([START, "| code | name | finds |", "|---|---|---|", *rows, END])


def pages() -> dict[Path, str]:
    """Every generated file with its text."""
    readme = TOP / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    return {readme: before + table() + after} | {TOP / "docs" / "rules" / f"{rule.code}.md": page(rule) for rule in all_rules()}


def main() -> int:
    """Write what is out of date; with --check only say so."""
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"out of date: {path.relative_to(TOP)}")
    if "--check" in sys.argv[1:]:
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
