"""`python -m lintgpu`, which also works in a checkout that is not installed."""

from lintgpu.cli import main

if __name__ == "__main__":
    main(prog_name="lintgpu")
