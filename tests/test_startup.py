"""What a run imports: each of these modules takes longer than all the rest of a check that does not need it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 768, "n_layer": 2, "n_head": 12}
RUN = """
import sys
from lintgpu.cli import main
try:
    main(sys.argv[1:])
finally:
    print("MODULES", *sys.modules)
"""


def imported(*arguments: str) -> set[str]:
    result = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr  # The finding of the config: the check did run.
    assert "LG101" in result.stdout
    return set(result.stdout.rpartition("MODULES ")[2].split())


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_static_check_imports_no_framework_and_no_parser_that_it_does_not_use(config: str) -> None:
    found = imported("check", "--static", "--no-cache", config)
    assert "numpy" in found  # The cost model's; the names in this test are right.
    assert not {"torch", "transformers", "libcst", "yaml", "numpy.ma", "pathspec"} & found


@pytest.mark.parametrize("tier", ["static", "trace"])
def test_a_check_answered_from_the_cache_imports_no_cost_model(config: str, tier: str) -> None:
    if tier == "trace" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs lintgpu[hf]")
    options = ["--static"] if tier == "static" else []
    imported("check", *options, config)
    found = imported("check", *options, config)
    assert not {"torch", "numpy", "lintgpu.trace.client", "lintgpu.report.sarif"} & found
