"""The house rules of CONTRIBUTING.md, held by tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
MODULES = sorted([*TOP.glob("lintgpu/**/*.py"), *TOP.glob("rules/*.py")])
HEAVY = {"torch", "transformers", "timm", "diffusers"}


def run(code: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(TOP)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd, env=env)


def test_the_parent_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TOP / "examples" / "gpt2" / "config.json").read_text())
    result = run(
        "import sys\nfrom click.testing import CliRunner\nfrom lintgpu.cli import main\n"
        "result = CliRunner().invoke(main, ['check', '--static', 'config.json'])\n"
        "print(result.exit_code, sorted({'torch', 'transformers', 'numba', 'sklearn'} & set(sys.modules)))",
        tmp_path,
    )
    assert result.stdout.strip() == "1 []", result.stderr


def test_a_run_without_models_imports_no_numpy_and_no_parser(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    result = run(
        "import sys\nfrom click.testing import CliRunner\nfrom lintgpu.cli import main\n"
        "result = CliRunner().invoke(main, ['check', '.'])\n"
        "print(result.exit_code, sorted({'torch', 'numpy', 'libcst', 'yaml', 'tree_sitter'} & set(sys.modules)))",
        tmp_path,
    )
    assert result.stdout.strip() == "0 []", result.stderr


def test_rules_are_flat_files_with_one_rule_each() -> None:
    assert [path for path in (TOP / "rules").iterdir() if path.is_dir() and path.name != "__pycache__"] == []
    for path in TOP.glob("rules/lg*.py"):
        classes = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        rules = [name for name in classes if f"class {name}(Rule)" in path.read_text()]
        assert len(rules) == 1, path.name


def test_a_new_rule_file_is_found_without_editing_a_list(tmp_path: Path) -> None:
    rule = tmp_path / "lg999_example.py"
    rule.write_text(
        '"""Docs."""\nfrom lintgpu.rule import Rule\n\n\nclass Example(Rule):\n    """LG999."""\n\n'
        '    code = "LG999"\n    name = "example"\n'
    )
    result = run(
        f"import lintgpu.rules\nlintgpu.rules.__path__.append({str(tmp_path)!r})\nfrom lintgpu.rule import all_rules\n"
        "print([rule.code for rule in all_rules()][-1])"
    )
    assert result.stdout.strip() == "LG999", result.stderr


def test_a_new_format_and_a_new_family_are_found_without_editing_a_list(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text('NAME = "loud"\n\n\ndef render(report):\n    return "LOUD"\n')
    (tmp_path / "odd.py").write_text(
        "from lintgpu.target.base import Family\n\n\nclass Odd(Family):\n    name = 'odd'\n\n"
        "    def find(self, file, settings):\n        return iter(())\n\n"
        "    def build(self, spec, workload, changes):\n        raise KeyError\n"
    )
    result = run(
        f"import lintgpu.report, lintgpu.target\nfor package in (lintgpu.report, lintgpu.target):\n"
        f"    package.__path__.append({str(tmp_path)!r})\n"
        "print('loud' in lintgpu.report.formats(), 'odd' in [family.name for family in lintgpu.target.families()])"
    )
    assert result.stdout.strip() == "True True", result.stderr


def test_no_module_of_the_parent_imports_a_model_library_at_its_top() -> None:
    checked = 0
    for path in MODULES:
        name = ".".join(path.relative_to(TOP).with_suffix("").parts).replace("rules.", "lintgpu.rules.")
        if name in _parent_modules():
            checked += 1
            assert not _imports(path) & HEAVY, path
    assert checked > 20


def _imports(path: Path) -> set[str]:
    """Top-level packages that a module imports when it is loaded."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@cache
def _parent_modules() -> frozenset[str]:
    result = run(
        "import sys\nimport lintgpu.cli, lintgpu.engine\nfrom lintgpu.rule import all_rules\nfrom lintgpu.target import families\n"
        "from lintgpu.report import formats\nall_rules(); families(); formats()\n"
        "print(' '.join(m for m in sys.modules if m.startswith('lintgpu')))"
    )
    assert result.returncode == 0, result.stderr
    return frozenset(result.stdout.split())
