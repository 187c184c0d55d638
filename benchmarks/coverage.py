"""Which model classes trace: every config class of the installed transformers with its default values.

    python benchmarks/coverage.py [--only TYPE ...] [--verify] [--out docs/coverage.md]

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


def trace_one(model_type: str, mode: str, verify: bool) -> dict[str, Any]:
    """The outcome for one config class."""
    from lintgpu.target.huggingface_build import build
    from lintgpu.trace.errors import TraceError
    from lintgpu.trace.record import record
    from lintgpu.workload import Mode, Workload

    result: dict[str, Any] = {"type": model_type, "mode": mode}
    started = time.perf_counter()
    workload = Workload(mode=Mode(mode), batch=BATCH, sequence=SEQUENCE, autocast=False)

    def make() -> Any:
        return build({"model_type": model_type}, workload, {})

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


def child(model_type: str, mode: str, verify: bool, out: int) -> None:
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
        result = trace_one(model_type, mode, verify)
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


def pool(types: list[str], mode: str, verify: bool, workers: int) -> Iterator[dict[str, Any]]:
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
                child(model_type, mode, verify, writing)
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
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--mode", default="train")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    import transformers
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity(50)
    types = options.only or list(CONFIG_MAPPING.keys())
    if len(types) == 1:
        print(json.dumps(trace_one(types[0], options.mode, options.verify), indent=1))
        return
    outcomes = []
    with open(options.jsonl or os.devnull, "w") as stream:
        for outcome in pool(types, options.mode, options.verify, options.workers):
            outcomes.append(outcome)
            stream.write(json.dumps(outcome) + "\n")
            stream.flush()
    print(summary(outcomes))
    if options.out:
        options.out.write_text(report(outcomes, transformers.__version__, torch.__version__, options.mode))


def summary(outcomes: list[dict[str, Any]]) -> str:
    """One line a stage."""
    stages = collections.Counter(outcome["stage"] for outcome in outcomes)
    lines = [f"{len(outcomes)} config classes: " + ", ".join(f"{stage} {count}" for stage, count in stages.most_common())]
    passed = [outcome for outcome in outcomes if outcome["stage"] == "ok"]
    if any("same" in outcome for outcome in passed):
        different = [outcome["type"] for outcome in passed if not outcome.get("same", True)]
        lines.append(f"memoised = full: {len(passed) - len(different)} of {len(passed)}; different: {different}")
    known, total = (sum(outcome["dims"][i] for outcome in passed) for i in (0, 1))
    if total:
        lines.append(f"dims of linear layers with a known origin: {known} of {total} ({100 * known / total:.1f} %)")
    return "\n".join(lines)


def report(outcomes: list[dict[str, Any]], transformers: str, torch: str, mode: str) -> str:
    """The Markdown of docs/coverage.md."""
    lines = [
        "# Which models trace",
        "",
        f"Every config class of transformers {transformers} with its default values, mode {mode}, batch {BATCH}, sequence {SEQUENCE},",
        f"torch {torch};",
        "made by `python benchmarks/coverage.py --out docs/coverage.md`.",
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
