"""Which model classes trace: every config class of the installed transformers with its default values, or models of timm by their names.

    python benchmarks/coverage.py [--library timm] [--only TYPE ...] [--verify] [--out docs/coverage.md]

Each model gets a process of its own with a time and a memory limit, two at a time. --verify also compares the trace with block
memoisation to the full one.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SECONDS, MEMORY = 90, 12 << 30
BATCH, SEQUENCE = 2, 128
LIBRARIES = ("transformers", "timm")
TIMM_NAMES = 400
"""Names of timm that are traced: the first of each module of models, then every so many of the rest."""


def trace_one(model_type: str, mode: str, verify: bool, library: str = "transformers") -> dict[str, Any]:
    """The outcome for one config class or model name."""
    from lintgpu.trace.errors import TraceError
    from lintgpu.trace.record import record
    from lintgpu.workload import Mode, Workload

    result: dict[str, Any] = {"type": model_type, "mode": mode}
    started = time.perf_counter()
    workload = Workload(mode=Mode(mode), batch=BATCH, sequence=SEQUENCE, autocast=False)

    def make() -> Any:
        return _builder(library)({"model_type" if library == "transformers" else "model": model_type}, workload, {})

    try:
        trace = record(make, workload)
        result.update(
            stage="ok",
            model=trace.model_class,
            ops=len(trace.ops),
            gemms=sum(op.count for op in trace.ops if op.kind == "gemm"),
            assumptions=list(trace.assumptions),
            trace_seconds=round(trace.seconds, 2),
            dims=_dims(trace),
        )
        if verify:
            full = record(make, workload, memoise=False)
            # The autograd engine may visit independent branches in another order.
            result["same"] = set(full.ops) == set(trace.ops)
            result["full_seconds"] = round(full.seconds, 2)
    except TraceError as error:
        result.update(stage=error.stage, reason=error.reason, where=f"{error.path}:{error.line}", error=error.error_type)
    result["seconds"] = round(time.perf_counter() - started, 2)
    result["rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return result


def _builder(library: str) -> Any:
    from lintgpu.target import huggingface_build, timm_build

    return {"transformers": huggingface_build, "timm": timm_build}[library].build


def _dims(trace: Any) -> tuple[int, int]:
    """(weight dims of GEMMs with a known origin, all of them): n and k of each forward GEMM whose B is a weight."""
    known = total = 0
    for op in trace.ops:
        if op.gemm is None or op.phase != "forward" or op.kind != "gemm" or op.gemm.layout != "NT" or op.gemm.batch != 1:
            continue
        named = dict(op.gemm.origins)
        known += ("n" in named) + ("k" in named)
        total += 2
    return known, total


def child(model_type: str, mode: str, verify: bool, library: str, out: int) -> None:
    """Runs in the fork; never returns."""

    def expired(*_: Any) -> None:
        raise TimeoutError(f"over {SECONDS} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        result = trace_one(model_type, mode, verify, library)
    except BaseException as error:
        import traceback

        frame = traceback.extract_tb(error.__traceback__)[-1]
        result = {
            "type": model_type,
            "stage": "crash",
            "reason": f"{type(error).__name__}: {error}"[:300],
            "where": f"{frame.filename}:{frame.lineno}",
        }
    os.write(out, json.dumps(result).encode())
    os._exit(0)


def pool(types: list[str], mode: str, verify: bool, library: str, workers: int) -> Iterator[dict[str, Any]]:
    """Outcomes as they come."""
    running: dict[int, tuple[int, str, bytes, float]] = {}
    waiting = list(types)
    while waiting or running:
        while waiting and len(running) < workers:
            model_type = waiting.pop(0)
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                child(model_type, mode, verify, library, writing)
            os.close(writing)
            running[reading] = (pid, model_type, b"", time.monotonic())
        for reading in select.select(list(running), [], [], 1.0)[0]:
            pid, model_type, received, since = running[reading]
            data = os.read(reading, 1 << 16)
            if data:
                running[reading] = (pid, model_type, received + data, since)
                continue
            os.close(reading)
            del running[reading]
            status = os.waitpid(pid, 0)[1]
            yield json.loads(received) if received else {"type": model_type, "stage": "crash", "reason": f"exit status {status}"}
        for pid, _, _, since in running.values():
            if time.monotonic() - since > SECONDS + 15:
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run, write the raw outcomes as JSON lines and the summary as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=LIBRARIES, default="transformers")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--mode", default="train")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    version, names = {"transformers": transformers_types, "timm": timm_names}[options.library]()
    types = options.only or names
    if len(types) == 1:
        print(json.dumps(trace_one(types[0], options.mode, options.verify, options.library), indent=1))
        return
    outcomes = []
    with open(options.jsonl or os.devnull, "w") as stream:
        for outcome in pool(types, options.mode, options.verify, options.library, options.workers):
            outcomes.append(outcome)
            stream.write(json.dumps(outcome) + "\n")
            stream.flush()
    print(summary(outcomes))
    if options.out:
        write_section(options.out, options.library, report(outcomes, options.library, version, torch.__version__, options.mode))


def transformers_types() -> tuple[str, list[str]]:
    """The version of transformers and every type it has a config of."""
    import transformers
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity(50)
    return transformers.__version__, list(CONFIG_MAPPING.keys())


def timm_names() -> tuple[str, list[str]]:
    """The version of timm and a sample of its names over all its modules."""
    from lintgpu.target.timm_build import import_timm
    from lintgpu.trace.imports import defer_compiler

    defer_compiler()
    timm = import_timm()
    firsts = [timm.list_models(module=module)[0] for module in timm.list_modules() if timm.list_models(module=module)]
    rest = [name for name in timm.list_models() if name not in firsts]
    sample = rest[:: max(1, len(rest) // (TIMM_NAMES - len(firsts)))]
    return timm.__version__, sorted({*firsts, *sample})


def write_section(path: Path, library: str, section: str) -> None:
    """Put a library's section in the place of its last one, behind the others where there is none."""
    head, *sections = path.read_text().split("\n## ") if path.exists() else ["# Which models trace\n"]
    named = {text.partition("\n")[0]: text for text in sections} | {library: section.removeprefix("## ")}
    path.write_text("\n## ".join([head.rstrip("\n") + "\n", *named.values()]))


def summary(outcomes: list[dict[str, Any]]) -> str:
    """One line a stage."""
    stages = collections.Counter(outcome["stage"] for outcome in outcomes)
    lines = [f"{len(outcomes)} models: " + ", ".join(f"{stage} {count}" for stage, count in stages.most_common())]
    passed = [outcome for outcome in outcomes if outcome["stage"] == "ok"]
    if any("same" in outcome for outcome in passed):
        different = [outcome["type"] for outcome in passed if not outcome.get("same", True)]
        lines.append(f"memoised = full: {len(passed) - len(different)} of {len(passed)}; different: {different}")
    known, total = (sum(outcome["dims"][i] for outcome in passed) for i in (0, 1))
    if total:
        lines.append(f"dims of linear layers with a known origin: {known} of {total} ({100 * known / total:.1f} %)")
    return "\n".join(lines)


def report(outcomes: list[dict[str, Any]], library: str, version: str, torch: str, mode: str) -> str:
    """A section of docs/coverage.md."""
    what, option = {
        "transformers": (
            f"Every config class of transformers {version} with its default values, mode {mode}, batch {BATCH}, sequence {SEQUENCE},",
            "",
        ),
        "timm": (
            f"{len(outcomes)} names of timm {version}, from every module of its models, mode {mode}, batch {BATCH}, default image size,",
            " --library timm",
        ),
    }[library]
    lines = [
        f"## {library}",
        "",
        what,
        f"torch {torch};",
        f"made by `python benchmarks/coverage.py{option} --out docs/coverage.md`.",
        "",
        summary(outcomes),
        "",
        "| type | stage | reason |",
        "|---|---|---|",
    ]
    for outcome in sorted(outcomes, key=lambda outcome: (outcome["stage"], outcome["type"])):
        if outcome["stage"] != "ok":
            reason = str(outcome.get("reason", "")).replace("|", "\\|")[:160]
            lines.append(f"| {outcome['type']} | {outcome['stage']} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
