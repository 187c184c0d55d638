"""Predicted against measured whole steps on an H200: python3 benchmarks/whole_steps.py --data FOLDER

FOLDER holds h200/e2e_dev.csv (plain_gpt.py: mode, B, T, V, d, h, L, ff, naive, compile, amp, tf32, ms) and h200/hf_e2e_dev.csv (models of
transformers: config, B, T, kwargs, options, ms). Every row is a model and a workload that lintgpu traces and costs; a gain is the share
of one row's step that another row saves. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lintgpu import engine
from lintgpu.engine import Request
from lintgpu.gpu.costs import PYTHON

HERE = Path(__file__).resolve().parent
Row = dict[str, str]


@dataclass(frozen=True)
class Step:
    """One row: its label, what was measured and what lintgpu says."""

    label: str
    measured_ms: float
    ms: float
    low_ms: float
    high_ms: float
    gpu_ms: float
    cpu_ms: float
    bound: str
    doubling: float
    """Predicted time at twice the batch over the time."""


@dataclass(frozen=True)
class Gain:
    """What a fix saves: the labels of two rows."""

    fix: str
    before: str
    after: str


GAINS = (
    Gain("vocabulary 50257 -> 50304", "plain vocab V50257 eager", "plain vocab V50304 eager"),
    Gain("vocabulary 50257 -> 50264", "plain vocab V50257 eager", "plain vocab V50264 eager"),
    Gain("the same, compiled", "plain vocab V50257 default", "plain vocab V50304 default"),
    Gain("torch.compile", "plain vocab V50304 eager", "plain vocab V50304 default"),
    Gain("hand-written attention -> SDPA", "plain naive-attn eager", "plain vocab V50304 eager"),
    Gain("the same, compiled", "plain naive-attn default", "plain vocab V50304 default"),
    Gain("torch.compile of hand-written attention", "plain naive-attn eager", "plain naive-attn default"),
    Gain("FP32 -> TF32", "plain fp32-notf32 eager", "plain fp32-tf32 eager"),
    Gain("TF32 -> bf16 autocast", "plain fp32-tf32 eager", "plain bf16-b4 eager"),
    Gain("feed-forward 4095 -> 4096", "plain ffn ff4095 eager", "plain ffn ff4096 eager"),
    Gain("feed-forward 10922 -> 11008", "plain ffn ff10922 eager", "plain ffn ff11008 eager"),
    Gain("reduce-overhead, batch 1 x 16", "plain infer B1 T16 eager", "plain infer B1 T16 reduce-overhead"),
    Gain("reduce-overhead, batch 2 x 1024", "plain infer B2 T1024 eager", "plain infer B2 T1024 reduce-overhead"),
    Gain("reduce-overhead, batch 8 x 1024", "plain infer B8 T1024 eager", "plain infer B8 T1024 reduce-overhead"),
    Gain("torch.compile, batch 8 x 1024, inference", "plain infer B8 T1024 eager", "plain infer B8 T1024 default"),
    Gain("vocabulary 50257 -> 50304", "gpt2 50257", "gpt2 50304"),
    Gain("the same, compiled", "gpt2 50257-compiled", "gpt2 50304-compiled"),
    Gain("torch.compile", "gpt2 50304", "gpt2 50304-compiled"),
    Gain("eager attention -> SDPA", "gpt2 50304-eagerattn", "gpt2 50304"),
    Gain("vocabulary 51865 -> 51904", "whisper 51865", "whisper 51904"),
    Gain("FP32 -> TF32", "precision fp32", "precision tf32"),
    Gain("TF32 -> bf16 autocast", "precision tf32", "precision bf16"),
)
DOUBLINGS = (
    ("plain infer B1 T16 eager", "plain infer B2 T16 eager"),
    ("plain infer B1 T1024 eager", "plain infer B2 T1024 eager"),
    ("tiny eager", "tiny double-batch"),
)


def plain_label(row: Row) -> str:
    """A name for a row of e2e_dev.csv."""
    if row["mode"] == "infer":
        return f"plain infer B{row['B']} T{row['T']} {row['compile']}"
    size = {"vocab": f" V{row['V']}", "ffn": f" ff{row['ff']}"}.get(row["name"], "")
    return f"plain {row['name']}{size} {row['compile']}"


def plain_settings(row: Row) -> dict[str, Any]:
    """[tool.lintgpu] of a row of e2e_dev.csv."""
    train = row["mode"] == "train"
    dtype = "bf16" if row["amp"] != "no" else "tf32" if row["tf32"] == "1" else "fp32"
    names = {"vocabulary": "V", "width": "d", "layers": "L", "heads": "h", "inner": "ff"}
    kwargs = {name: int(row[column]) for name, column in names.items()} | {"context": 1024, "handwritten": row["naive"] == "1"}
    inputs = {name: {"shape": [int(row["B"]), int(row["T"])], "dtype": "int64"} for name in (("ids", "labels") if train else ("ids",))}
    workload = _workload(row, dtype, row["mode"], row["compile"])
    return {"workload": workload, "targets": {"step": {"model": "plain_gpt:PlainGpt", "kwargs": kwargs, "example_inputs": inputs}}}


def hf_settings(row: Row) -> dict[str, Any]:
    """[tool.lintgpu] of a row of hf_e2e_dev.csv."""
    options = ast.literal_eval(row["options"])
    dtype = "bf16" if options.get("amp", 1) else "tf32" if options.get("tf32", 1) else "fp32"
    return {"workload": _workload(row, dtype, "train", "default" if options.get("compile") else "eager")}


def _workload(row: Row, dtype: str, mode: str, compiled: str) -> dict[str, Any]:
    found = {"mode": mode, "batch": int(row["B"]), "sequence": int(row["T"]), "dtype": dtype}
    return found | {"compile": "none" if compiled == "eager" else compiled}


def hf_config(row: Row) -> dict[str, Any]:
    """config.json of a row of hf_e2e_dev.csv."""
    return {"model_type": row["config"].removesuffix("Config").lower(), "architectures": [row["model"]], **ast.literal_eval(row["kwargs"])}


def steps(data: Path) -> list[Step]:
    """Every row, predicted on the built-in H200 profile."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        rows = list(_written(data, Path(scratch)))
        for label, measured, folder in rows:
            costed, report = engine.costs(Request((str(folder),), {"gpus": ("H200",)}))
            if len(costed) != 1:
                raise ValueError(f"{label}: not traced: {report.errors or report.findings}")
            cost = costed[0].step
            times = (cost.step_us, cost.step_low, cost.step_high, cost.gpu_us, cost.cpu_us)
            found.append(Step(label, measured, *(us / 1e3 for us in times), cost.bound, cost.doubled_batch_ratio))
    return found


def _written(data: Path, scratch: Path) -> Iterator[tuple[str, float, Path]]:
    """(label, measured ms, folder of the model and its settings) of each row."""
    for i, row in enumerate(_read(data / "h200" / "e2e_dev.csv")):
        folder = _folder(scratch / f"plain{i}", plain_settings(row))
        shutil.copy(HERE / "plain_gpt.py", folder)
        yield plain_label(row), float(row["ms"]), folder
    for i, row in enumerate(_read(data / "h200" / "hf_e2e_dev.csv")):
        folder = _folder(scratch / f"hf{i}", hf_settings(row))
        (folder / "config.json").write_text(json.dumps(hf_config(row)))
        yield f"{row['group']} {row['variant']}", float(row["ms"]), folder


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _folder(path: Path, settings: dict[str, Any]) -> Path:
    path.mkdir()
    lines = ["[tool.lintgpu.workload]", *(f"{name} = {json.dumps(value)}" for name, value in settings["workload"].items())]
    for name, target in settings.get("targets", {}).items():
        lines += [f"[tool.lintgpu.targets.{name}]", *(f"{key} = {_toml(value)}" for key, value in target.items())]
    (path / "pyproject.toml").write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def report(data: Path) -> list[str]:
    """The tables, markdown."""
    by = {step.label: step for step in steps(data)}
    gains = [
        (gain, 1 - by[gain.after].measured_ms / by[gain.before].measured_ms, 1 - by[gain.after].ms / by[gain.before].ms) for gain in GAINS
    ]
    misses = [abs(measured - predicted) for _, measured, predicted in gains]
    return [
        "| step | measured ms | predicted ms | 80 % band | predicted GPU / CPU ms | bound |",
        "|---|---|---|---|---|---|",
        *(_step(s) for s in by.values()),
        "",
        f"Inside the band: {_share([s.low_ms <= s.measured_ms <= s.high_ms for s in by.values()])} of the steps;",
        f"mean absolute error {statistics.mean(abs(s.ms / s.measured_ms - 1) for s in by.values()):.0%}.",
        "",
        "| fix | of | measured share of the step | predicted | off by |",
        "|---|---|---|---|---|",
        *(f"| {g.fix} | {g.before} | {m:.1%} | {p:.1%} | {100 * (p - m):+.1f} points |" for g, m, p in gains),
        "",
        f"Within 6 points: {_share([miss <= 0.06 for miss in misses])} of the gains; mean {100 * statistics.mean(misses):.1f} points off.",
        "",
        "| twice the batch | measured | predicted | waits for Python: measured (under 10 % more), predicted |",
        "|---|---|---|---|",
        *(_doubling(by[one], by[two]) for one, two in DOUBLINGS),
    ]


def _step(s: Step) -> str:
    times = f"{s.measured_ms:.1f} | {s.ms:.1f} | {s.low_ms:.1f} to {s.high_ms:.1f} | {s.gpu_ms:.1f} / {s.cpu_ms:.1f}"
    return f"| {s.label} | {times} | {s.bound} |"


def _doubling(one: Step, two: Step) -> str:
    ratio = two.measured_ms / one.measured_ms
    return f"| {one.label} | {ratio:.2f} x | {one.doubling:.2f} x | {_yes(ratio < 1.1)}, {_yes(one.bound == PYTHON)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    print("\n".join(report(parser.parse_args().data)))


if __name__ == "__main__":
    main()
