"""Commands and options; everything else is behind them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import lintgpu
from lintgpu import report as reports
from lintgpu.cache import Cache, default_folder
from lintgpu.finding import Severity
from lintgpu.report.base import FileError, Format, Report
from lintgpu.settings import COMPILE, DEFAULT_GPU, DTYPES
from lintgpu.workload import Mode

if TYPE_CHECKING:
    from lintgpu import engine

CLEAN, FOUND, FAILED = 0, 1, 2
PROGRESS_AFTER_SECONDS = 1.0

Command = Callable[..., Any]


class _FileError(click.FileError):
    """A file that cannot be read or written: what could not be run ends with exit code 2."""

    exit_code = FAILED


class _Format(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """An output format by its name; which there are is looked up only for the help and for a wrong name."""

    name = "format"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Format:
        """The format called `value`. Raises click.BadParameter where there is none."""
        found = value if not isinstance(value, str) else reports.find(value) if value.isidentifier() else None
        if found is None:
            self.fail(f"{value!r} is not one of {', '.join(sorted(reports.formats()))}", param, ctx)
        return cast(Format, found)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """The names, as for a choice."""
        return f"[{'|'.join(sorted(reports.formats()))}]"


def _target_options(command: Command) -> Command:
    """Options that say what to trace and under which workload, shared by check and shapes."""
    options = (
        click.argument("paths", nargs=-1, type=click.Path()),
        click.option(
            "--gpu", multiple=True, metavar="NAME", help="GPU to judge for, or a calibration file; may be repeated. [default: H200]"
        ),
        click.option("--batch", type=click.IntRange(min=1), help="Sequences or images a step."),
        click.option("--seq", type=click.IntRange(min=1), help="Tokens a sequence; the context length with --mode decode."),
        click.option("--dtype", type=click.Choice(DTYPES), help="Precision of the GEMMs."),
        click.option(
            "--autocast/--no-autocast", default=None, help="bf16 or fp16 by autocast over fp32 weights, or weights of that dtype."
        ),
        click.option("--mode", type=click.Choice([mode.value for mode in Mode]), help="What a step is."),
        click.option("--compile/--no-compile", "compiled", default=None, help="The model runs under torch.compile, or does not."),
        click.option("--compile-mode", type=click.Choice(COMPILE[1:]), help="The mode of torch.compile; implies --compile."),
        click.option("--model", metavar="PKG.MOD:FACTORY", help="Build this class or function of the project; you vouch for its code."),
        click.option("--trust", is_flag=True, help="Code of the linted project may be imported to build its models."),
        click.option("--static", is_flag=True, help="Do not trace: judge from the config's numbers alone (no torch needed)."),
        click.option("--python", metavar="PATH", help="Interpreter of the environment that holds torch. [default: this one]"),
        click.option("--warm", is_flag=True, help="Keep a process with torch imported for the next command (POSIX; ends when idle)."),
        click.option("--no-cache", is_flag=True, help="Judge anew what a former run has judged."),
        click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="For one trace. [default: 300]"),
        click.option(
            "--memory-limit-gb", type=click.FloatRange(min=0, min_open=True), metavar="GB", help="For the tracing process. [default: 16]"
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


class _Seconds(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A span of time: 90, 90s or 1.5m."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds. Raises click.BadParameter for anything that is no positive time."""
        text = str(value).strip().lower()
        number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m") else (text, "s")
        try:
            seconds = float(number) * (60 if unit == "m" else 1)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} is no time such as 60s or 2m", param, ctx)
        return seconds


def _verify_options(command: Command) -> Command:
    """Options of whatever measures findings, shared by check and verify."""
    budget = "For the whole command; what does not fit is left out and said."
    command = click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Which GPU, by its number.")(command)
    return click.option("--verify-budget", type=_Seconds(), default="60s", show_default=True, help=budget)(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lintgpu.__version__, "-V", "--version", prog_name="lintgpu")
def main() -> None:
    """A linter for the GPU speed of PyTorch models."""


@main.command()
@_target_options
@click.option("--select", multiple=True, metavar="CODES", help="Codes or prefixes to report, comma-separated. [default: LG]")
@click.option("--ignore", multiple=True, metavar="CODES", help="Codes or prefixes to leave out, comma-separated.")
@click.option(
    "--fail-on", type=click.Choice([severity.value for severity in Severity]), help="Least severity for exit code 1. [default: warning]"
)
@click.option("-f", "--output-format", type=_Format(), default="full", show_default=True)
@click.option("-o", "--output-file", type=click.Path(dir_okay=False), help="Write the report there instead of to stdout.")
@click.option("--diff", is_flag=True, help="Show what --fix would change, and change nothing.")
@click.option("--fix", is_flag=True, help="Write suggested values that a second trace confirmed.")
@click.option("--unsafe-fixes", is_flag=True, help="With --fix or --diff: also where trained weights or the model's width would change.")
@click.option("--verify", is_flag=True, help="Time the findings on this machine's GPU, and check the numbers (docs/verify.md).")
@_verify_options
def check(paths: tuple[str, ...], **options: Any) -> None:
    """Find what configs and sources of models cost on a GPU.

    PATHS are files or folders; the current folder without any. Exit code 0: clean; 1: findings at or above --fail-on; 2: something could
    not be run or read.
    """
    from lintgpu import engine

    selection = {name: _codes(options.pop(name)) for name in ("select", "ignore")}
    request = _request(paths, options, {name: codes for name, codes in selection.items() if codes})
    started = time.monotonic()
    with _Progress() as progress:
        measure = _verifier(options, started, progress) if options["verify"] else None
        report = engine.check(replace(request, progress=progress), measure)
    if options["diff"] or options["fix"]:
        report = _apply_fixes(report, options["fix"], options["unsafe_fixes"])
    if not options["diff"]:
        _write(report, options["output_format"], options["output_file"])
    sys.exit(_exit_code(report, _fail_on(options["fail_on"])))


@main.command()
@click.argument("findings_file", metavar="FINDINGS.json", type=click.Path(dir_okay=False))
@click.option("--model", metavar="PKG.MOD:FACTORY", help="As given to check.")
@click.option("--trust", is_flag=True, help="As given to check: code of the linted project may be imported to build its models.")
@click.option("--python", metavar="PATH", help="Interpreter of the environment that holds torch. [default: this one]")
@_verify_options
@click.option(
    "--fail-on", type=click.Choice([severity.value for severity in Severity]), help="Least severity for exit code 1. [default: warning]"
)
@click.option("-f", "--output-format", type=_Format(), default="full", show_default=True)
@click.option("-o", "--output-file", type=click.Path(dir_okay=False), help="Write the report there instead of to stdout.")
def verify(findings_file: str, **options: Any) -> None:
    """Time findings on this machine's GPU, and check the numbers.

    FINDINGS.json is what `lintgpu check -f json` wrote; run this in the same folder. Nothing is judged anew. Exit code 0: no finding at or
    above --fail-on is left; 1: there is one; 2: something could not be measured or read.
    """
    from lintgpu import engine
    from lintgpu.report.read import BadDocument, read_findings

    started = time.monotonic()
    try:
        document = read_findings(findings_file)
    except OSError as error:
        raise _FileError(findings_file, error.strerror or str(error)) from error
    except BadDocument as error:
        click.echo(str(error), err=True)
        sys.exit(FAILED)
    overrides = {name: options[name] for name in ("model", "trust", "python") if options[name]}
    overrides |= {"gpus": document.gpus, "gpus_given": True}
    with _Progress() as progress:
        request = engine.Request(document.paths, overrides, document.workload, Cache(default_folder()), progress)
        report = engine.verify_findings(request, document.findings, _verifier(options, started, progress))
    _write(report, options["output_format"], options["output_file"])
    sys.exit(_exit_code(report, _fail_on(options["fail_on"])))


@main.command()
@_target_options
@click.option("-f", "--output-format", type=click.Choice(("table", "json", "csv")), default="table", show_default=True)
@click.option("--order", type=click.Choice(("share", "model")), default="share", show_default=True, help="Costliest first, or as they run.")
def shapes(paths: tuple[str, ...], **options: Any) -> None:
    """Print every GEMM of a step with its shape, layout, cost and bound."""
    from lintgpu import engine
    from lintgpu.report.shapes import render_shapes

    with _Progress() as progress:
        costed, report = engine.costs(replace(_request(paths, options, {}), progress=progress))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    click.echo(render_shapes(costed, options["output_format"], columns, options["order"]), nl=False)
    for finding in report.findings:
        click.echo(f"{finding.span.path}:{finding.span.line}:{finding.span.column}: {finding.message}", err=True)
    for error in report.errors:
        click.echo(_error_line(error), err=True)
    if not costed and not report.errors:
        click.echo(f"no model found in {report.checked} file{'s' if report.checked != 1 else ''}", err=True)
    sys.exit(FAILED if report.errors or report.findings or not costed else CLEAN)


@main.command()
@click.argument("code")
def explain(code: str) -> None:
    """Explain the rule CODE (or its name)."""
    from lintgpu.rule import all_rules, find_rule

    rule = find_rule(code)
    if rule is None:
        raise click.UsageError(f"no rule {code!r}; known: {', '.join(rule.code for rule in all_rules())}")
    click.echo(f"# {rule.code} {rule.name}\n\n{rule.summary}.\n\n{rule.docs}")


@main.command()
def rules() -> None:
    """List the rules."""
    from lintgpu.rule import all_rules

    for rule in all_rules():
        click.echo(f"{rule.code}  {rule.name:22}  {rule.summary}")


@main.command()
def gpus() -> None:
    """List the GPUs that --gpu accepts."""
    from lintgpu.gpu.profiles import all_profiles

    click.echo(f"{'GPU':24} {'arch':10} {'SMs':>4} {'GB':>4} {'GB/s':>6} {'bf16 TFLOP/s':>13}  basis")
    for profile in all_profiles():
        click.echo(
            f"{profile.name:24} {profile.architecture:10} {profile.sms:>4} {profile.memory_gb:>4.0f} {profile.bandwidth_gbps:>6.0f} "
            f"{profile.peak('bf16') / 1e12:>13.0f}  {profile.basis}"
        )


@main.command()
@click.argument("shapes_file", required=False, metavar="[SHAPES.csv]", type=click.Path(dir_okay=False))
@click.option("--shape", multiple=True, metavar="MxNxK", help="One GEMM instead of a file: MxNxK or BxMxNxK, then ,dtype and ,layout.")
@click.option("--gpu", default=DEFAULT_GPU, show_default=True, metavar="NAME", help="GPU, or a calibration file.")
@click.option("-o", "--output-file", type=click.Path(dir_okay=False), help="Write the rows there instead of to stdout.")
def predict(shapes_file: str | None, shape: tuple[str, ...], gpu: str, output_file: str | None) -> None:
    """Predict the time of GEMMs C[M,N] = A[M,K] @ B[K,N].

    SHAPES.csv has the columns M, N, K and optionally dtype, op, layout, B; a bare M,N,K is bf16 NT.
    """
    from lintgpu.gpu import predict as prediction
    from lintgpu.gpu.profiles import find

    if bool(shapes_file) == bool(shape):
        raise click.UsageError("give a file of shapes or --shape, one of the two")
    try:
        if shapes_file:
            shapes = prediction.read_shapes(Path(shapes_file).read_text(encoding="utf-8"), shapes_file)
        else:
            shapes = [prediction.parse_shape(text) for text in shape]
        rows = prediction.to_csv(shapes, prediction.predict(shapes, find(gpu)))
        if output_file:
            Path(output_file).write_text(rows, encoding="utf-8")
    except OSError as error:
        raise _FileError(str(error.filename or shapes_file), error.strerror or str(error)) from error
    except ValueError as error:
        click.echo(str(error), err=True)
        sys.exit(FAILED)
    if not output_file:
        click.echo(rows, nl=False)


@main.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="How long to measure.")
@click.option("-o", "--output-file", type=click.Path(dir_okay=False), help="The profile to write. [default: the GPU's name .npz]")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Which GPU, by its number.")
@click.option(
    "--python", metavar="PATH", default=sys.executable, help="Interpreter of the environment that holds torch. [default: this one]"
)
@click.option("--rows", type=click.Path(file_okay=False), help="Keep the measured rows in this folder.")
@click.option("--from-rows", type=click.Path(file_okay=False), help="Fit rows kept by an earlier run; measures nothing, needs no GPU.")
def calibrate(minutes: float, output_file: str | None, device: int, python: str, rows: str | None, from_rows: str | None) -> None:
    """Measure this machine's GPU and write a profile that --gpu accepts.

    Times GEMMs of the sizes that models have, under load; nothing of the GPU's settings is changed.
    """
    from lintgpu.gpu import measured
    from lintgpu.gpu.calibration import save_calibration
    from lintgpu.gpu.profiles import slug

    given = from_rows or rows
    folder, remove = measured.kept(Path(given) if given else None)
    try:
        if not from_rows:
            measured.measure(folder, minutes, device, python, lambda line: click.echo(line, err=True))
        found = measured.calibrated(measured.read_rows(folder), f"lintgpu calibrate --minutes {minutes:g}")
    except measured.MeasuringFailed as error:
        click.echo(str(error), err=True)
        sys.exit(FAILED)
    finally:
        remove()
    path = Path(output_file or f"{slug(found.calibration.gpu)}.npz")
    try:
        save_calibration(found.calibration, path)
    except OSError as error:
        raise _FileError(str(path), error.strerror or str(error)) from error
    click.echo(
        f"{found.calibration.gpu}: {found.rows} GEMMs; on those held back the error is {found.error:.1%} (before: {found.before:.1%}), "
        f"{found.inside:.0%} inside the 80 % band\nwrote {path}; use it with --gpu {path}"
    )


def _verifier(options: dict[str, Any], started: float, progress: _Progress) -> engine.Verify:
    """What measures a report's findings, in the budget that began at `started` (time.monotonic())."""
    from lintgpu import engine
    from lintgpu.verify import session

    def stage(target: str, text: str) -> None:
        progress(engine.Progress(0, 1, target, text))

    chosen = session.Options(str(options["device"]), started + options["verify_budget"], stage)
    return lambda report, subjects: session.verify(report, subjects, chosen)


def _request(paths: tuple[str, ...], options: dict[str, Any], overrides: dict[str, Any]) -> engine.Request:
    from lintgpu import engine

    # numpy starts a thread a core for linear algebra, of which a check has none; that takes as long as the rest of its import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in ("static", "trust", "warm"):
        if options[name]:
            overrides[name] = True
    for name in ("model", "python", "time_limit", "memory_limit_gb"):
        if options[name] is not None:
            overrides[name] = options[name]
    if os.path.dirname(overrides.get("python", "")):
        overrides["python"] = os.path.abspath(overrides["python"])  # The setting of that name is relative to its file.
    if options["gpu"]:
        overrides |= {"gpus": tuple(options["gpu"]), "gpus_given": True}
    workload = {
        "batch": options["batch"],
        "sequence": options["seq"],
        "dtype": options["dtype"],
        "autocast": options["autocast"],
        "mode": Mode(options["mode"]) if options["mode"] else None,
        "compile": options["compile_mode"] or {True: "default", False: "none", None: None}[options["compiled"]],
    }
    given = {name: value for name, value in workload.items() if value is not None}
    kept = Cache(None if options["no_cache"] else default_folder())
    return engine.Request(paths or (() if options["model"] else (".",)), overrides, given, kept)


def _codes(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(code.strip().upper() for value in values for code in value.split(",") if code.strip())


def _fail_on(option: str | None) -> Severity:
    from lintgpu.settings import SettingsError, discover

    if option is not None:
        return Severity(option)
    try:
        return discover(".").fail_on
    except SettingsError:
        return Severity.WARNING


def _exit_code(report: Report, fail_on: Severity) -> int:
    if report.errors:
        return FAILED
    return FOUND if any(finding.severity.rank >= fail_on.rank for finding in report.findings) else CLEAN


def _apply_fixes(report: Report, write: bool, unsafe: bool) -> Report:
    from lintgpu import fixes
    from lintgpu.source import edit

    try:
        plan = fixes.plan(report, unsafe)
    except edit.EditError as error:
        return replace(report, errors=(*report.errors, FileError("", 0, 0, str(error), "fix")))
    if not write:
        click.echo(fixes.diff(dict(report.files), plan.texts), nl=False)
    errors = list(report.errors)
    for path, text in plan.texts.items() if write else ():
        try:
            edit.write(report.files[path], text)
        except OSError as error:
            errors.append(FileError(path, 0, 0, f"cannot be written: {error.strerror or error}", "fix"))
    verb = "fixed" if write else "would fix"
    click.echo(f"{verb} {len(plan.fixed)} finding{'s' if len(plan.fixed) != 1 else ''}{_left_out(plan)}", err=True)
    return replace(report, findings=tuple(f for f in report.findings if f not in plan.fixed), errors=tuple(errors)) if write else report


def _left_out(plan: Any) -> str:
    parts = []
    if plan.unsafe:
        parts.append(f"{plan.unsafe} more with --unsafe-fixes: trained weights or the model's width would change")
    if plan.unconfirmed:
        parts.append(f"{plan.unconfirmed} not confirmed by a trace")
    return f" ({'; '.join(parts)})" if parts else ""


def _write(report: Report, output_format: Format, output_file: str | None) -> None:
    terminal = output_file is None and sys.stdout.isatty()
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if terminal else 0
    text = output_format.render(replace(report, color=color, width=width))
    if output_file is None:
        click.echo(text, nl=False, color=color)
        return
    try:
        Path(output_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _FileError(output_file, error.strerror or str(error)) from error


def _error_line(error: FileError) -> str:
    place = f"{error.path}:{error.line}:{error.column}" if error.line else error.path
    return f"{place}: {error.message}" if place else error.message


class _Progress:
    """A bar on a terminal once the run takes over a second; nothing on a pipe."""

    WIDTH = 24

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            click.echo("\r\033[K", nl=False, err=True)

    def __call__(self, progress: engine.Progress) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._started > PROGRESS_AFTER_SECONDS:
            self._shown = True
            filled = self.WIDTH * progress.done // max(1, progress.total)
            bar = "#" * filled + "-" * (self.WIDTH - filled)
            line = f"[{bar}] {progress.done}/{progress.total} {progress.stage} {progress.target}"
            click.echo(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", nl=False, err=True)
