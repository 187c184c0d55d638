"""The top-level rules/ is lintgpu.rules in a wheel, in both kinds of editable install, and in a checkout that is not installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RULES = sorted(path.stem.split("_")[0].upper() for path in (ROOT / "rules").glob("lg*.py"))

pytest.importorskip("build")
pytest.importorskip("setuptools")


def run(*command, cwd, **environment):
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a clone holds, so that builds leave nothing in this one."""
    folder = tmp_path_factory.mktemp("checkout") / "lintgpu"
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    for name in ("lintgpu", "rules", "docs", "examples"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """The sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture
def python(tmp_path):
    """The interpreter of an empty environment that sees this one's dependencies behind its own packages."""
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=tmp_path)
    scheme = "nt" if os.name == "nt" else "posix_prefix"
    site_packages = Path(sysconfig.get_path("purelib", scheme, vars={"base": str(home), "platbase": str(home)}))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(python, *what, cwd):
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=cwd)


def assert_works(python, folder, cwd, **environment):
    """lintgpu comes from below `folder`, finds its rules and its data, and lists the rules."""
    code = "import lintgpu, lintgpu.rules, lintgpu.report, lintgpu.gpu.profiles as p; print(lintgpu.__file__); print(len(p.all_profiles()))"
    place, profiles = run(python, "-c", code, cwd=cwd, **environment).splitlines()
    assert folder.resolve() in Path(place).resolve().parents
    assert int(profiles) > 0
    assert [line.split()[0] for line in run(python, "-m", "lintgpu", "rules", cwd=cwd, **environment).splitlines()] == RULES


def files(folder, prefix):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {f"{prefix}/{path.relative_to(folder).as_posix()}" for path in found}


def test_wheel_holds_the_packages_the_rules_and_the_data(built, checkout):
    with zipfile.ZipFile(built[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert held == files(checkout / "lintgpu", "lintgpu") | files(checkout / "rules", "lintgpu/rules")


def test_sdist_holds_what_the_wheel_is_built_from(built, checkout):
    with tarfile.open(built[0]) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert files(checkout / "lintgpu", "lintgpu") | files(checkout / "rules", "rules") | {"pyproject.toml", "LICENSE"} <= held


def test_installed_wheel(built, python, tmp_path):
    install(python, built[1], cwd=tmp_path)
    assert_works(python, tmp_path / "venv", tmp_path)
    assert run(python.with_name("lintgpu"), "--version", cwd=tmp_path).startswith("lintgpu")


@pytest.mark.parametrize("options", [(), ("--config-settings", "editable_mode=strict")], ids=["lenient", "strict"])
def test_editable(checkout, python, tmp_path, options):
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy)
    install(python, *options, "-e", copy, cwd=tmp_path)
    assert_works(python, copy, tmp_path)


def test_checkout_that_is_not_installed(checkout, tmp_path):
    assert_works(sys.executable, checkout, tmp_path, PYTHONPATH=str(checkout))
    assert_works(sys.executable, checkout, checkout)
