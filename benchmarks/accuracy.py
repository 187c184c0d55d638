"""How good the cost model is on measured GEMMs: `python benchmarks/accuracy.py --data FOLDER [--write docs/accuracy.md]`.

FOLDER holds h200/pairs_dev.csv.gz (GEMMs of real model shapes and their candidate fixes, measured round-robin inside a group),
h200/gemm_calib.csv.gz (single GEMMs of many dtypes, measured at higher clocks than a training step's) and public/*.csv.gz (other
GPUs). What was fitted to which rows is in the page's own words. The whole steps are those of benchmarks/whole_steps.py, which needs torch
and transformers.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import whole_steps

from lintgpu.gpu.costs import OpCost
from lintgpu.gpu.fit import parts
from lintgpu.gpu.gemms import Gemms, columns
from lintgpu.gpu.kernels import SPLIT_K, named
from lintgpu.gpu.predict import Shape, predict
from lintgpu.gpu.profiles import SIBLING, SPECIFICATION, Profile, find

Row = dict[str, str]
PUBLIC = (("bf16", "gemm_bf16_nt_other_gpus.csv.gz"), ("fp16", "gemm_fp16_a100_a40_h100.csv.gz"))
PUBLIC_GPUS = {
    "a100": "A100-SXM4-80GB",
    "a100_sxm": "A100-SXM4-80GB",
    "a40": "A40",
    "h100": "H100-SXM5-80GB",
    "h100_sxm": "H100-SXM5-80GB",
    "h200_sxm": "H200-SXM-141GB",
    "b200_sxm": "B200-SXM-180GB",
    "b300_sxm": "B300-SXM-288GB",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell",
}
STAND_INS = {
    "A40": "A100-SXM4-80GB",
    "B200-SXM-180GB": "GB200",
    "B300-SXM-288GB": "B200-SXM-180GB",
    "GB200": "B200-SXM-180GB",
    "GB300": "GB200",
    "H100-SXM5-80GB": "H200-SXM-141GB",
    "H200-SXM-141GB": "H100-SXM5-80GB",
}
"""Whose calibration would serve a GPU as its sibling's, were it not measured itself."""


@dataclass(frozen=True)
class PublicRow:
    """A published time of torch's F.linear (NT, no bias), in microseconds."""

    dtype: str
    m: int
    n: int
    k: int
    us: float


@dataclass(frozen=True)
class Counts:
    """A yes-or-no prediction against what was measured."""

    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def text(self) -> str:
        """precision / recall"""
        found = self.true_positives + self.false_positives
        there = self.true_positives + self.false_negatives
        return f"{self.true_positives / max(1, found):.3f} / {self.true_positives / max(1, there):.3f}"


@dataclass(frozen=True)
class Group:
    """A layer at a token count: (measured, predicted) us of each variant's three GEMMs, and the work of a variant over the base's."""

    base: tuple[float, float]
    paddings: tuple[tuple[float, float], ...]
    neighbours: tuple[tuple[float, float, float], ...]


def read(path: Path) -> list[Row]:
    """The rows of a gzipped CSV file."""
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def costs_of(rows: Sequence[Row], profile: Profile) -> list[OpCost]:
    """The model's answer for each row."""
    return predict([Shape(r["dtype"], r["op"], r["layout"], *(int(r[name]) for name in "BMNK")) for r in rows], profile)


def groups_of(rows: Sequence[Row], costs: Sequence[OpCost]) -> list[Group]:
    """The groups of a pairs file; a variant counts only with all the GEMMs that its base has."""
    layers: dict[tuple[str, str], dict[str, dict[str, tuple[float, float]]]] = defaultdict(lambda: defaultdict(dict))
    for row, cost in zip(rows, costs, strict=True):
        layers[row["weight"], row["tokens"]][row["variant"]][row["layout"]] = (float(row["us"]), cost.us)
    found = []
    for (weight, _), variants in layers.items():
        base = variants.get("base")
        if not base:
            continue
        whole = {name: _sums(gemms.values()) for name, gemms in variants.items() if gemms.keys() == base.keys() and name[0] in "OI"}
        shifts = {name: pair for name, pair in whole.items() if "+" in name or "-" in name}
        paddings = tuple(pair for name, pair in whole.items() if name not in shifts)
        neighbours = tuple((*pair, _work(weight, name)) for name, pair in shifts.items())
        found.append(Group(_sums(base.values()), paddings, neighbours))
    return found


def _sums(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    measured, predicted = zip(*pairs, strict=True)
    return sum(measured), sum(predicted)


def _work(weight: str, variant: str) -> float:
    size = dict(zip("OI", map(int, weight.split("x")), strict=True))[variant[0]]
    return (size + int(variant[1:])) / size


def paddings(groups: Sequence[Group], least: float) -> Counts:
    """Whether a padding gains at least `least` (1.05 = 5 %)."""
    pairs = [(g.base[0] / t, g.base[1] / p) for g in groups for t, p in g.paddings]
    return _counts([(t >= least, p >= least) for t, p in pairs])


def seen(groups: Sequence[Group]) -> float:
    """Share of the gains of 20 % and more that are predicted to be worth advice (5 %)."""
    predicted = [g.base[1] / p for g in groups for t, p in g.paddings if g.base[0] / t >= 1.20]
    return statistics.mean(gain >= 1.05 for gain in predicted)


def clocked(rows: Sequence[Row], costs: Sequence[OpCost]) -> float:
    """Mean absolute error where all GEMMs that were measured together may be off by one factor."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, cost in zip(rows, costs, strict=True):
        ratios[row["weight"], row["tokens"]].append(cost.us / float(row["us"]))
    return statistics.mean(abs(r / statistics.median(group) - 1) for group in ratios.values() for r in group)


def kernel_families(data: Path, profile: Profile) -> list[str]:
    """How often the family that lintgpu names is the one of the kernel that ran."""
    rows = [row for row in read(data / "h200" / "gemm_calib.csv.gz") if row["layout"][0] in "NT" and named(row["kernel"])]
    hits: dict[str, list[bool]] = defaultdict(list)
    for row, cost in zip(rows, costs_of(rows, profile), strict=True):
        hits[row["dtype"]].append(cost.kernel.removesuffix(f" {SPLIT_K}") == named(row["kernel"]))
    return [f"| {dtype} | {len(right)} | {statistics.mean(right):.1%} |" for dtype, right in sorted(hits.items())]


def tail_waves(groups: Sequence[Group], least: float) -> Counts:
    """Whether some size within 256 does the same work at least `least` times as fast."""
    best = [
        (max(g.base[0] / t * w for t, _, w in g.neighbours) >= least, max(g.base[1] / p * w for _, p, w in g.neighbours) >= least)
        for g in groups
        if g.neighbours
    ]
    return _counts(best)


def _counts(pairs: Sequence[tuple[bool, bool]]) -> Counts:
    return Counts(sum(t and p for t, p in pairs), sum(p and not t for t, p in pairs), sum(t and not p for t, p in pairs))


def regret(groups: Sequence[Group]) -> float:
    """Mean loss of following the advice (the padding predicted best, where it gains 2 %) against the best choice, as a share."""
    losses = []
    for group in groups:
        if group.paddings:
            gains = [(group.base[1] / p, group.base[0] / t) for t, p in group.paddings]
            predicted, got = max(gains, key=lambda pair: pair[0])
            losses.append(max(1.0, *(true for _, true in gains)) / (got if predicted > 1.02 else 1.0) - 1)
    return statistics.mean(losses)


def errors(measured: Sequence[float], costs: Sequence[OpCost]) -> tuple[float, float, float]:
    """(mean absolute error, the same after one scale factor, share inside the 80 % band)."""
    ratios = [cost.us / us for us, cost in zip(measured, costs, strict=True)]
    middle = statistics.median(ratios)
    inside = sum(cost.low <= us <= cost.high for us, cost in zip(measured, costs, strict=True)) / len(ratios)
    return statistics.mean(abs(r - 1) for r in ratios), statistics.mean(abs(r / middle - 1) for r in ratios), inside


def advice(data: Path, profile: Profile) -> list[str]:
    """The table of what the advice is worth."""
    rows = read(data / "h200" / "pairs_dev.csv.gz")
    costs = costs_of(rows, profile)
    everything = groups_of(rows, costs)
    large = [group for group in everything if group.base[0] >= 20]
    mean, _, inside = errors([float(r["us"]) for r in rows], costs)
    return [
        f"| padding gains 5 % or more, layers of 20 us and more: precision / recall ({len(large)} layers) | {paddings(large, 1.05).text} |",
        f"| the same, all sizes ({len(everything)} layers) | {paddings(everything, 1.05).text} |",
        f"| a gain of 20 % or more, all sizes | {paddings(everything, 1.20).text} |",
        f"| such gains that are predicted to be 5 % or more, 20 us and more / all sizes | {seen(large):.3f} / {seen(everything):.3f} |",
        f"| mean regret of the advice, 20 us and more / all sizes | {regret(large):.1%} / {regret(everything):.1%} |",
        f"| tail wave of 8 % or more, all sizes: precision / recall | {tail_waves(everything, 1.08).text} |",
        f"| time of a GEMM, mean absolute error ({len(rows)} GEMMs) | {mean:.1%} |",
        f"| the same after one factor for the clock of each layer's measurement | {clocked(rows, costs):.1%} |",
        f"| measured times inside the 80 % band | {inside:.0%} |",
    ]


def single_gemms(data: Path, profile: Profile) -> list[str]:
    """Errors by dtype and by alignment class."""
    rows = read(data / "h200" / "gemm_calib.csv.gz")
    rows = [row for row in rows if row["layout"][0] in "NT" and float(row["us"]) > 0]
    costs = costs_of(rows, profile)
    by: dict[str, list[int]] = defaultdict(list)
    for index, (row, cost) in enumerate(zip(rows, costs, strict=True)):
        by[f"{row['dtype']}, {'aligned' if cost.alignment >= 16 else f'{cost.alignment} B'}"].append(index)
    return [_line(name, [float(rows[i]["us"]) for i in at], [costs[i] for i in at]) for name, at in sorted(by.items()) if len(at) >= 50]


def public_rows(data: Path, dtype: str = "") -> dict[str, list[PublicRow]]:
    """GPU -> its published rows, of the first dtype it has rows of unless one is named."""
    found: dict[tuple[str, str], list[PublicRow]] = defaultdict(list)
    for name, file in PUBLIC:
        for row in read(data / "public" / file):
            found[PUBLIC_GPUS[row["gpu"]], name].append(PublicRow(name, int(row["m"]), int(row["n"]), int(row["k"]), float(row["us"])))
    chosen: dict[str, list[PublicRow]] = {}
    for (gpu, name), rows in sorted(found.items()):
        if name == (dtype or name):
            chosen.setdefault(gpu, rows)
    return chosen


def gemms_of(rows: Sequence[PublicRow]) -> Gemms:
    """The rows as columns."""
    return columns(
        dtypes=[row.dtype for row in rows],
        batch=[1] * len(rows),
        m=[row.m for row in rows],
        n=[row.n for row in rows],
        k=[row.k for row in rows],
        layout=["NT"] * len(rows),
    )


def judging(rows: Sequence[PublicRow]) -> list[PublicRow]:
    """The rows that a fit by benchmarks/fit_public.py neither fits nor takes a band from."""
    return [row for row, part in zip(rows, parts(np.arange(len(rows))), strict=True) if part == "judge"]


def other_gpus(data: Path) -> list[str]:
    """Errors of the built-in profiles on published rows that no fit saw."""
    lines = []
    for dtype, _ in PUBLIC:
        for gpu, rows in public_rows(data, dtype).items():
            lines.append(_published(f"{gpu}, {dtype} ({find(gpu).basis})", judging(rows), find(gpu)))
    return lines


def left_out(data: Path) -> list[str]:
    """Errors on GPUs as if nobody had measured them: by the calibration of a sibling, and by the specification alone."""
    lines = []
    for gpu, rows in public_rows(data).items():
        bare = replace(find(gpu), calibration=None, basis=SPECIFICATION)
        if gpu in STAND_INS:
            sibling = replace(bare, calibration=find(STAND_INS[gpu]).calibration, basis=SIBLING)
            lines.append(_published(f"{gpu} (sibling {STAND_INS[gpu]})", judging(rows), sibling))
        lines.append(_published(f"{gpu} (specification)", judging(rows), bare))
    return lines


def _published(name: str, rows: Sequence[PublicRow], profile: Profile) -> str:
    shapes = [Shape(row.dtype, "mm", "NT", 1, row.m, row.n, row.k) for row in rows]
    return _line(name, [row.us for row in rows], predict(shapes, profile))


def _line(name: str, measured: Sequence[float], costs: Sequence[OpCost]) -> str:
    mean, scaled, inside = errors(measured, costs)
    if math.isnan(mean):
        raise ValueError(f"{name}: no error")
    return f"| {name} | {len(measured)} | {mean:.1%} | {scaled:.1%} | {inside:.0%} |"


def page(data: Path) -> str:
    """The whole report, markdown."""
    h200 = find("H200")
    assert h200.calibration is not None
    versions = ", ".join(f"{name} {value}" for name, value in h200.calibration.versions if name in ("driver", "torch", "cuda", "date"))
    head = ["| | GEMMs | mean absolute error | after one scale factor | inside the 80 % band |", "|---|---|---|---|---|"]
    return "\n".join(
        [
            "# Accuracy of the cost model",
            "",
            f"Made by `python benchmarks/accuracy.py --data FOLDER --write docs/accuracy.md` on {date.today()}. The built-in H200 profile",
            f"was measured on one NVIDIA H200 ({versions}) and fitted by",
            "`benchmarks/fit_gemm.py`. No bf16 row below was trained on; eleven coefficients for sustained load were fitted to the rows of",
            "the first table, and the bands to those of the first two (for bf16 by cross-validation over layers). The other dtypes were",
            "fitted to rows of the second table by `benchmarks/fit_dtypes.py`; by its cross-validation over sizes their error on rows not",
            "seen is 8.5 % (fp16), 9.4 % (tf32), 13.3 % (fp32), 6.3 % (fp8) and 12.4 % (int8), the clock apart.",
            "",
            "## Advice on the H200: sizes of real layers and their candidate fixes, measured round-robin, bf16",
            "",
            "| figure | value |",
            "|---|---|",
            *advice(data, h200),
            "",
            "Where it is weak: layers of a few microseconds, whose kernels are chosen by rules of their own.",
            "",
            "## Single GEMMs on the H200, by dtype and alignment class",
            "",
            "Measured apart and at higher clocks than a training step's, which the model aims at: look at the column after one scale",
            "factor.",
            "",
            *head,
            *single_gemms(data, h200),
            "",
            "## Kernel families on the H200",
            "",
            "| dtype | GEMMs | family named as the one that ran |",
            "|---|---|---|",
            *kernel_families(data, h200),
            "",
            "## Other GPUs, aligned NT",
            "",
            "Fitted to published times by `benchmarks/fit_public.py`, or for the H200 by its own measurements, which aim at the clocks of",
            "sustained load; the rows below were held back from the fits. The fp16 rows of the A100 and the H100 come from another",
            "publication than those their profiles were fitted to, and were measured another way.",
            "",
            *head,
            *other_gpus(data),
            "",
            "The same GPUs as if nobody had measured them, by a sibling's calibration or the datasheet alone:",
            "",
            *head,
            *left_out(data),
            "",
            "## Whole steps on the H200",
            "",
            "bf16 means autocast; eager, default and reduce-overhead are modes of torch.compile. The CPU's times are those of the hosts",
            "that lintgpu assumes, and waits for Python depend on them. The figures for compiled code, attention with dropout and the",
            "host were fitted to these rows, the rest was not.",
            "",
            *whole_steps.report(data),
            "",
        ]
    )


def main() -> None:
    """Print the report, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = page(options.data)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
