"""The flow of one run: files -> targets -> traces -> costs -> rules -> suppressions -> report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import lintgpu
from lintgpu import settings as settings_module
from lintgpu import workload as workloads
from lintgpu.cache import Cache, key_of
from lintgpu.finding import Finding
from lintgpu.report.base import FileError, Report, TargetSummary, WorkloadValue
from lintgpu.rule import BrokenFile, Context, IgnoreComment, Rule, Selection, all_rules
from lintgpu.settings import Settings, SettingsError
from lintgpu.source import SourceFile, UnreadableFile, read
from lintgpu.source.suppressions import suppressed, suppressions, unused
from lintgpu.source.walk import walk
from lintgpu.target import families, family_named, may_hold_target
from lintgpu.target.base import Knob, Target
from lintgpu.trace.records import Trace, TraceFailure
from lintgpu.workload import Workload

if TYPE_CHECKING:
    from lintgpu.gpu.costs import StepCost
    from lintgpu.gpu.profiles import Profile
    from lintgpu.trace.client import Worker
    from lintgpu.verify.jobs import Subject

_IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE")
NOT_TRACED = ("environment", "trust", "static")
"""Stages at which nothing was tried: said once in the output, and no finding where the config's numbers could be read instead."""


@dataclass(frozen=True)
class Progress:
    """How far a run is: `done` of `total` targets are judged, `target` is at `stage` (importing, building, tracing)."""

    done: int
    total: int
    target: str
    stage: str


@dataclass(frozen=True)
class Request:
    """What one run was asked to do; `overrides` are the Settings fields that the command line set."""

    paths: tuple[str, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    cache: Cache = field(default_factory=partial(Cache, None))
    progress: Callable[[Progress], None] = lambda progress: None
    """Called whenever a trace enters a stage."""


@dataclass(frozen=True)
class Traced:
    """One target under its workload, with its trace or the reason why there is none."""

    target: Target
    settings: Settings
    workload: Workload
    trace: Trace | None
    failure: TraceFailure | None


@dataclass(frozen=True)
class Costed:
    """One traced target on one GPU."""

    traced: Traced
    profile: Profile
    step: StepCost


@dataclass(frozen=True)
class Judged:
    """What there is to say about one target: kept in the cache as it is."""

    findings: tuple[Finding, ...]
    summaries: tuple[TargetSummary, ...]
    files: tuple[str, ...] = ()
    """What it was made from."""

    @property
    def all_traced(self) -> bool:
        """Whether nothing about the target is left to guess."""
        return all(summary.basis == "traced" for summary in self.summaries)


Verify = Callable[[Report, "Sequence[Subject]"], Report]
"""Annotates a report with what a GPU says about its findings."""


def check(request: Request, verify: Verify | None = None) -> Report:
    """Lint. Never raises for bad input: what could not be done is in `Report.errors` and in findings."""
    run = _Run(request)
    with ExitStack() as stack:
        judged = [(found, run.judged(stack, *found)) for found in run.in_turn()]
        report = run.report([one for _, one in judged])
        if verify is None:
            return report
        kept = set(report.findings)
        subjects = [subject for found, one in judged for subject in run.subjects(stack, *found, kept.intersection(one.findings))]
        return verify(report, subjects)


def verify_findings(request: Request, findings: Sequence[Finding], verify: Verify) -> Report:
    """Measure findings of a former run on the targets that `request` leads to; nothing is judged anew.

    A finding whose target, workload or number is no longer there is an error in the report.
    """
    run = _Run(request)
    with ExitStack() as stack:
        found = [(one, run.traced(stack, *one)) for one in run.in_turn()]
        summaries = [_summary(traced, costed) for _, traced in found for costed in run.costs(traced)]
        subjects = [subject for one, _ in found for subject in run.subjects(stack, *one, findings)]
        known = {finding for subject in subjects for finding in subject.findings}
        run.note_gone([finding for finding in findings if finding not in known and finding.change is not None])
        failures = [finding for _, traced in found for finding in run.failure_findings(traced)]
        return verify(run.report([Judged((*findings, *failures), tuple(summaries))]), subjects)


def costs(request: Request) -> tuple[list[Costed], Report]:
    """Every target's trace with its cost on each GPU, and a report of what could not be done."""
    run = _Run(request)
    with ExitStack() as stack:
        traced = [run.traced(stack, *found) for found in run.in_turn()]
    costed = [costed for one in traced for costed in run.costs(one)]
    return costed, run.report([Judged(tuple(run.failure_findings(one)), ()) for one in traced])


class _Run:
    """The files and errors of one run, and the stages over them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._began_ns = time.time_ns()
        self.files: dict[str, SourceFile] = {}
        self.errors: list[FileError] = []
        self.broken: list[BrokenFile] = []
        self._settings: dict[str, Settings | None] = {}
        self._progress = Progress(0, 0, "", "")
        self.paths = self._paths()

    def _paths(self) -> list[str]:
        found: dict[str, None] = {}
        for path in self.request.paths:
            settings = self.settings(path)
            if settings is not None:
                found |= dict.fromkeys(walk([path], settings.exclude, settings.root))
        return list(found)

    def settings(self, path: str) -> Settings | None:
        """The settings that hold for `path`; None where they are broken, which is recorded once."""
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if folder not in self._settings:
            self._settings[folder] = self._discover(path)
        return self._settings[folder]

    def _discover(self, path: str) -> Settings | None:
        try:
            found = settings_module.discover(path)
        except SettingsError as error:
            self._record(error.path, error.line, error.column, error.message)
            return None
        return replace(found, **self.request.overrides, workload={**found.workload, **self.request.workload})

    def _record(self, path: str, line: int, column: int, message: str, kind: str = "file") -> None:
        error = FileError(path, line, column, message, kind)
        if error not in self.errors:
            self.errors.append(error)
            if kind == "file":
                self.broken.append(BrokenFile(path, line, column, message))

    # Targets

    def in_turn(self) -> Iterator[tuple[Target, Settings, Workload]]:
        """Every target of this run with the settings and the workload that hold for it, one at a time."""
        distinct: dict[str, tuple[Target, Settings, Workload]] = {}
        for target, settings in self._targets():
            stated = [workloads.Stated(hint.field, hint.value) for hint in target.hints]
            workload = workloads.resolve(stated, settings.workload)
            # A model and the script that trains it both lead to one target; equal configs in two files are two.
            places = [knob.span for knob in target.knobs] or [target.span]
            distinct.setdefault(key_of(target.family, target.spec, workload, places), (target, settings, workload))
        for done, found in enumerate(distinct.values()):
            self._progress = Progress(done, len(distinct), found[0].name, "")
            yield found

    def _targets(self) -> Iterator[tuple[Target, Settings]]:
        declared_by: dict[str, Settings] = {}
        for path in self.paths:
            settings = self.settings(path)
            file = self._read(path) if settings is not None else None
            if settings is not None:
                declared_by.setdefault(settings.root, settings)
                for target in self._find(file, settings) if file is not None else ():
                    yield target, settings
        for settings in self._declaring(declared_by):
            for target in self._guarded(partial(_declared, settings)):
                if self._concerns(target, settings):
                    yield target, settings

    def _declaring(self, declared_by: Mapping[str, Settings]) -> Iterable[Settings]:
        if declared_by or not self.request.overrides.get("model"):
            return declared_by.values()
        here = self.settings(".")
        return [here] if here is not None else []

    def _concerns(self, target: Target, settings: Settings) -> bool:
        """Whether a declared target is meant by the paths of this run: its folder, its project's code, or one of its files."""
        if settings.model or not self.request.paths:
            return True
        files = {os.path.realpath(file) for file in target.files}
        root = os.path.realpath(settings.root)
        return any(
            os.path.isdir(path)
            or os.path.realpath(path) in files
            or os.path.basename(path) == "pyproject.toml"
            or (path.endswith(".py") and os.path.realpath(path).startswith(root + os.sep))
            for path in self.request.paths
        )

    def _find(self, file: SourceFile, settings: Settings) -> list[Target]:
        def first_family() -> list[Target]:
            for family in families():
                targets = list(family.find(file, settings))
                if targets:
                    return targets
            return []

        return self._guarded(first_family)

    def _guarded(self, find: Callable[[], list[Target]]) -> list[Target]:
        try:
            return find()
        except UnreadableFile as error:
            self._record(error.path, error.line, error.column, error.message)
        except SettingsError as error:
            self._record(error.path, error.line, error.column, error.message)
        return []

    def _read(self, path: str) -> SourceFile | None:
        if path in self.files:
            return self.files[path]
        try:
            file = read(path)
            if not may_hold_target(file):
                return None
            file.check()
        except UnreadableFile as error:
            if error.kind != "size" or path.endswith(".py"):  # Data of that size is no config, whatever else it is.
                self._record(error.path, error.line, error.column, error.message)
            return None
        self.files[path] = file
        return file

    # Traces

    def judged(self, stack: ExitStack, target: Target, settings: Settings, workload: Workload) -> Judged:
        """Findings and summaries of one target, from the cache where nothing they were made from has changed."""
        chosen = (settings.select, settings.ignore, settings.gpus, settings.gpus_given, settings.static)
        key = key_of("judged", target, workload, chosen, self._builder(target, settings))
        kept = self.request.cache.get(key, Judged)
        if kept is not None:
            return kept
        errors = len(self.errors)
        traced = self.traced(stack, target, settings, workload)
        costed = list(self.costs(traced))
        findings = [*self.failure_findings(traced), *(finding for one in costed for finding in self.findings(one, stack))]
        summaries = tuple(_summary(traced, one) for one in costed) or (_summary(traced, None),)
        result = Judged(tuple(findings), summaries, tuple(_files_of(target, traced.trace)))
        complete = traced.failure is None or traced.failure.stage == "static"
        if traced.trace is not None and complete and len(self.errors) == errors:
            files = [*result.files, *(gpu for gpu in settings.gpus if os.path.isfile(gpu))]
            self.request.cache.put(key, files, result, traced.trace.variables, self._began_ns)
        return result

    def traced(self, stack: ExitStack, target: Target, settings: Settings, workload: Workload) -> Traced:
        """A target with its trace, or an estimate where nothing can be traced, or the reason."""
        result = self._trace(stack, target, settings, workload, {})
        if isinstance(result, Trace):
            return Traced(target, settings, workload, result, None)
        return Traced(target, settings, workload, self._estimate(target, workload, {}), result)

    def _report_stage(self, stage: str) -> None:
        self.request.progress(replace(self._progress, stage=stage))
        # The worker is busy and this process waits: the time to import what the costs will want.
        import lintgpu.gpu.step
        import lintgpu.whatif  # noqa: F401

    def _trace(
        self, stack: ExitStack, target: Target, settings: Settings, workload: Workload, changes: Mapping[str, int]
    ) -> Trace | TraceFailure:
        if settings.static:
            return TraceFailure("static", "--static was given", "tracing needs torch: pip install 'lintgpu[hf]', then run without --static")
        key = key_of("trace", target.family, target.spec, workload, changes, self._builder(target, settings))
        kept = self.request.cache.get(key, Trace)
        if kept is not None:
            return kept
        result = self._worker(stack, settings, target).trace(target, workload, changes)
        if isinstance(result, Trace):
            self.request.cache.put(key, _files_of(target, result), result, result.variables, self._began_ns)
        return result

    def _builder(self, target: Target, settings: Settings) -> list[object]:
        """What builds a target: the interpreter, where it imports from, and the project where its code may run."""
        interpreter = settings.interpreter
        paths = [os.environ.get(name) for name in _IMPORT_VARIABLES]
        return [interpreter, os.path.realpath(interpreter), paths, settings.root if _trusted(target, settings) else None]

    def _worker(self, stack: ExitStack, settings: Settings, target: Target) -> Worker:
        from lintgpu.trace.client import Limits, Worker
        from lintgpu.trace.warm import warmth

        trust = _trusted(target, settings)
        root = settings.root if trust else None  # Without trust one worker serves every project.
        key = (settings.interpreter, root, settings.time_limit, settings.memory_limit_gb, settings.warm)
        if key not in self._workers:
            limits = Limits(settings.time_limit, int(settings.memory_limit_gb * 2**30))
            warm = warmth() if settings.warm else None
            self._workers[key] = stack.enter_context(Worker(settings.interpreter, limits, trust, root, self._report_stage, warm))
        return self._workers[key]

    @cached_property
    def _workers(self) -> dict[tuple[object, ...], Worker]:
        return {}

    def _estimate(self, target: Target, workload: Workload, changes: Mapping[str, int]) -> Trace | None:
        return family_named(target.family).estimate(target, workload, changes)

    # Costs and findings

    def costs(self, traced: Traced) -> Iterator[Costed]:
        """The step on each GPU asked for; nothing where there is no trace."""
        from lintgpu.gpu.step import cost_step

        trace = traced.trace
        for profile in self._profiles(traced.settings):  # also without a trace: a wrong --gpu is an error of its own
            if trace is not None:
                yield Costed(traced, profile, cost_step(trace, profile, traced.workload))

    def _profiles(self, settings: Settings) -> list[Profile]:
        from lintgpu.gpu.profiles import UnknownGpu, find

        found = []
        for name in settings.gpus:
            try:
                found.append(find(name))
            except (UnknownGpu, ValueError, OSError) as error:
                self._record(name, 0, 0, str(error), "gpu")
        return found

    def findings(self, costed: Costed, stack: ExitStack) -> Iterator[Finding]:
        """What the rules say about one target on one GPU."""
        context = self._context(costed, stack)
        for rule in self._rules(costed.traced.settings):
            for finding in self._run_rule(rule, context):
                yield replace(finding, gpu=costed.profile.name, workload=workloads.describe(costed.traced.workload))

    def _run_rule(self, rule: Rule, context: Context) -> list[Finding]:
        try:
            return list(rule.check(context))
        except Exception as error:  # A fault in one rule must not lose the findings of the others.
            where = context.target.span
            message = f"{rule.code} failed on {context.target.name}: {type(error).__name__}: {error}"
            self._record(where.path, where.line, where.column, message, "internal")
            return []

    def _context(self, costed: Costed, stack: ExitStack) -> Context:
        from lintgpu.gpu.cost import KnownCosts
        from lintgpu.gpu.step import cost_step
        from lintgpu.whatif import WhatIf

        traced, profile, known = costed.traced, costed.profile, KnownCosts()
        assert traced.trace is not None

        def retrace(changes: Mapping[str, int]) -> Trace | TraceFailure:
            if traced.trace is not None and traced.trace.basis == "estimated":
                changed = self._estimate(traced.target, traced.workload, changes)
                return changed or TraceFailure("build", "the config's numbers do not fit together")
            return self._trace(stack, traced.target, traced.settings, traced.workload, changes)

        what_if = WhatIf(
            traced.trace,
            costed.step,
            _knobs(traced.target, traced.trace),
            retrace,
            lambda trace: cost_step(trace, profile, traced.workload, op_coster=known),
            lambda ops: known(ops, profile, traced.workload),
        )
        return Context(traced.target, traced.workload, traced.trace, profile, costed.step, what_if)

    # Verification

    def subjects(
        self, stack: ExitStack, target: Target, settings: Settings, workload: Workload, findings: Iterable[Finding]
    ) -> Iterator[Subject]:
        """The target on each GPU with those of `findings` that are about it and that a GPU can measure; nothing where it was not traced."""
        from lintgpu.gpu.step import cost_step
        from lintgpu.verify.jobs import Subject

        traced = self.traced(stack, target, settings, workload)
        for costed in self.costs(traced):

            def predict(other: Workload, spec: Mapping[str, Any] | None, costed: Costed = costed) -> float | None:
                trace = costed.traced.trace
                if spec is not None or replace(other, compile=workload.compile) != workload:
                    result = self._trace(stack, replace(target, spec=spec or target.spec), settings, other, {})
                    trace = result if isinstance(result, Trace) else None
                return cost_step(trace, costed.profile, other).step_us if trace is not None else None

            context = self._context(costed, stack)
            own = [one for one in findings if one.change is not None and _is_about(one, context)]
            root = settings.root if _trusted(target, settings) else None
            in_order = sorted(own, key=lambda one: -(one.cost.saving_gpu_us if one.cost is not None else 0.0))
            yield Subject(context, tuple(in_order), settings.interpreter, root, predict)

    def note_gone(self, findings: Iterable[Finding]) -> None:
        """Record findings of a former run that nothing in the files fits any more."""
        for finding in findings:
            about = f"{finding.knob} = {finding.value}" if finding.knob else finding.name
            told = f"{finding.code}: no {about} in {finding.target} under {finding.workload} on {finding.gpu} any more; check again"
            self._record(finding.span.path, finding.span.line, finding.span.column, told, "verify")

    def failure_findings(self, traced: Traced) -> Iterator[Finding]:
        """LG001 where a trace was tried and failed, or where nothing at all could be said about a target."""
        failure = traced.failure
        if failure is None or (failure.stage in NOT_TRACED and traced.trace is not None) or failure.stage == "static":
            return
        for rule in self._rules(traced.settings):
            for finding in rule.check_failure(traced.target, traced.workload, failure):
                yield replace(finding, workload=workloads.describe(traced.workload))

    def _broken_findings(self) -> Iterator[Finding]:
        """LG002 for each file that could not be read."""
        for file in self.broken:
            for rule in all_rules():
                yield from rule.check_broken(file)

    def _rules(self, settings: Settings) -> Iterator[Rule]:
        selection = Selection(settings.select, settings.ignore)
        return (rule for rule in all_rules() if selection.wants(rule.code))

    # What is shown

    def report(self, judged: Sequence[Judged]) -> Report:
        """The result of the run, without what comments hide."""
        findings = _distinct([*(finding for one in judged for finding in one.findings), *self._broken_findings()])
        kept, hidden = self._keep(findings)
        kept += self._useless_ignores(findings, judged)
        return Report(
            findings=tuple(sorted(kept, key=lambda f: (f.span.path, f.span.line, f.span.column, f.code, f.gpu or ""))),
            files=self.files,
            targets=tuple(summary for one in judged for summary in one.summaries),
            errors=tuple(self.errors),
            suppressed=hidden,
            checked=len(self.paths),
            version=lintgpu.__version__,
        )

    def _keep(self, findings: Iterable[Finding]) -> tuple[list[Finding], int]:
        """The findings that no comment hides, and how many one does."""
        kept, hidden = [], 0
        for finding in findings:
            file = self.files.get(finding.span.path) or self._reread(finding.span.path)
            if file is not None and finding.span.line > 0 and suppressed(file, finding.span.line, finding.code):
                hidden += 1
            else:
                kept.append(finding)
        return kept, hidden

    def _useless_ignores(self, findings: Sequence[Finding], judged: Sequence[Judged]) -> Iterator[Finding]:
        """LG004 for comments of linted files that only models were made from of which everything is known."""
        if any(error.kind != "file" for error in self.errors):
            return  # A check that did not run might have found what they hide.
        known, doubtful = (
            {os.path.realpath(file) for one in judged if one.all_traced is whole for file in one.files} for whole in (True, False)
        )
        for path in self.paths:
            file = self.files.get(path) or self._reread(path) if os.path.realpath(path) in known - doubtful else None
            settings = self.settings(path)
            if file is not None and settings is not None:
                places = [(finding.span.line, finding.code) for finding in findings if finding.span.path == path]
                for comment in _ignore_comments(file, places, settings):
                    for rule in self._rules(settings):
                        yield from rule.check_ignore(comment)

    def _reread(self, path: str) -> SourceFile | None:
        """A file that a finding points into though it was not asked for (model source beside a config)."""
        try:
            self.files[path] = read(path)
        except UnreadableFile:
            return None
        return self.files[path]


def _ignore_comments(file: SourceFile, places: Sequence[tuple[int, str]], settings: Settings) -> Iterator[IgnoreComment]:
    """The comments of a file with what they hide of the (line, code) of `places`."""
    found = suppressions(file)
    if not found:
        return  # The rules, and numpy with them, need not be imported.
    selection = Selection(settings.select, settings.ignore)
    codes = [rule.code for rule in all_rules()]
    for item in found:
        unknown = tuple(prefix for prefix in item.codes if not any(code.startswith(prefix) for code in codes))
        useless = [prefix for prefix in unused(item, places) if prefix not in unknown]
        looked_for = tuple(prefix for prefix in useless if all(selection.wants(code) for code in codes if code.startswith(prefix)))
        yield IgnoreComment(item.span, item.line, item.codes, looked_for, unknown)


def _declared(settings: Settings) -> list[Target]:
    return [target for family in families() for target in family.declared(settings)]


def _knobs(target: Target, trace: Trace) -> dict[str, Knob]:
    """The knobs of a target, with those that only the trace names."""
    family = family_named(target.family)
    knobs = {knob.id: knob for knob in target.knobs}
    for knob_id in trace.knobs_seen:
        knob = knobs.get(knob_id) or family.resolve(target, knob_id)
        if knob is not None:
            knobs[knob_id] = knob
    return knobs


def _trusted(target: Target, settings: Settings) -> bool:
    """Whether the owner has said that code of the project may run to build this target."""
    return settings.trust or bool(settings.model) or target.name in settings.targets


def _files_of(target: Target, trace: Trace | None) -> list[str]:
    return [*target.files, *(trace.files if trace is not None else ())]


def _is_about(finding: Finding, context: Context) -> bool:
    """Whether a finding, of this run or of a former one, speaks of this target as it is now."""
    target = context.target
    if (finding.target, finding.workload, finding.gpu) != (target.name, workloads.describe(context.workload), context.profile.name):
        return False
    if isinstance(finding.value, int):
        return any(knob.span == finding.span and knob.value == finding.value for knob in context.what_if.knobs.values())
    return finding.span.path in (target.span.path, *target.files)


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Each (place, code, GPU) once: a target may be declared and found in a file too."""
    return list({(f.span, f.code, f.gpu, f.workload, f.suggestion): f for f in reversed(findings)}.values())[::-1]


def _summary(traced: Traced, costed: Costed | None) -> TargetSummary:
    trace, failure, workload = traced.trace, traced.failure, traced.workload
    notes = list(traced.target.notes) + (list(trace.assumptions) if trace else [])
    use = traced.target.compile
    if use is not None and use.by_framework:
        notes.append(f"{use.by_framework} compiles the model by itself")
    if trace is not None and trace.compile_calls:
        notes.append(f"the model compiles {', '.join(trace.compile_calls)} by itself")
    if failure is not None:
        unbuilt = trace is None and failure.stage == "static"
        what = "not estimated without torch: the file's numbers alone make no model" if unbuilt else f"not traced: {failure.reason}"
        notes.insert(0, what + (f" ({failure.hint})" if failure.hint else ""))
    gpu = costed.profile.name if costed else ", ".join(traced.settings.gpus)
    return TargetSummary(
        name=traced.target.name,
        path=traced.target.span.path,
        family=traced.target.family,
        gpu=gpu,
        basis=trace.basis if trace else "failed",
        static=traced.settings.static,
        model_class=trace.model_class if trace else "",
        workload=workloads.describe(workload),
        workload_values=(
            *(WorkloadValue(name, value, source.value) for name, value, source in workloads.values(workload)),
            WorkloadValue("gpu", gpu, "given" if traced.settings.gpus_given else "assumed"),
        ),
        step_us=costed.step.step_us if costed else None,
        gpu_us=costed.step.gpu_us if costed else None,
        bound=costed.step.bound if costed else "",
        cost_basis=costed.step.basis if costed else "",
        trace_seconds=trace.seconds if trace else 0.0,
        assumptions=tuple(notes),
    )
