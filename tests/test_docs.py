"""The documents say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def test_generated_pages_are_up_to_date() -> None:
    result = subprocess.run([sys.executable, str(TOP / "docs" / "generate.py"), "--check"], capture_output=True, text=True, check=False)
    assert result.stdout == ""
    assert result.returncode == 0


def test_ci_runs_the_readmes_own_test_command() -> None:
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- test command -->\n```sh\n(.+)\n```\n<!-- end -->", readme)
    assert block is not None
    assert "pytest" in block[1]
    assert "\n" not in block[1], "one command line"
    assert "<!-- test command -->" in (TOP / ".ci" / "run").read_text(encoding="utf-8")


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*TOP.glob("*.md"), *TOP.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(TOP)} links to {target}"
