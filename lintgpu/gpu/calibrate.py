"""`lintgpu calibrate`: measure this machine's GPU and write a profile that `--gpu FILE` accepts.

Measuring imports torch; it also runs as `python3 -m lintgpu.gpu.calibrate` where lintgpu's other dependencies are missing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lintgpu.gpu.plan import estimate_us, groups
from lintgpu.verify.timing import Bench, Shape, Timing

FIELDS = ("group", "dtype", "op", "layout", "B", "M", "N", "K", "us", "us_min", "us_max", "kernel")
_SESSION_SECONDS = 4.0
_SESSION_LAUNCHES = 24_000
_FILE_BYTES = 14 << 20


def rounds(shape: Shape) -> int:
    """How often to launch a shape: the median of more samples where a launch is cheap."""
    us = estimate_us(shape)
    return 5 if us < 100 else 4 if us < 400 else 3


def measure(
    seconds: float, seed: int, bench: Bench, on_rows: Callable[[list[tuple[int, Timing]]], None], keep: Callable[[Shape], bool]
) -> int:
    """Measure groups of the plan until `seconds` have passed; rows go out a session at a time. Returns how many."""
    deadline = time.monotonic() + seconds
    plan = groups(seed)
    number, total = 0, 0
    while time.monotonic() < deadline:
        session = _session(plan, bench, keep, min(_SESSION_SECONDS, deadline - time.monotonic()))
        results = bench.time(session, rounds)
        rows = [(number + i, timing) for i, group in enumerate(results) for timing in group if timing is not None]
        number += len(session)
        total += len(rows)
        on_rows(rows)
    return total


def _session(plan: Iterator[list[Shape]], bench: Bench, keep: Callable[[Shape], bool], seconds: float) -> list[list[Shape]]:
    chosen: list[list[Shape]] = []
    us, launches = 0.0, 0
    while us < seconds * 1e6 and launches < _SESSION_LAUNCHES:
        group = [shape for shape in next(plan) if bench.fits(shape) and keep(shape)]
        if group:
            chosen.append(group)
            us += sum(rounds(s) * max(30.0, estimate_us(s)) for s in group)
            launches += sum(map(rounds, group))
    return chosen


class RowWriter:
    """Gzip CSV files of bounded size, one gzip member a session, so that a run cut short loses nothing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = 0

    def write(self, rows: list[tuple[int, Timing]]) -> None:
        """Append the rows of a session."""
        path = self.folder / f"gemms_{self._file}.csv.gz"
        if path.exists() and path.stat().st_size > _FILE_BYTES:
            self._file += 1
            path = self.folder / f"gemms_{self._file}.csv.gz"
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not path.exists():
            writer.writerow(FIELDS)
        for group, t in rows:
            s = t.shape
            times = (f"{t.us:.3f}", f"{t.us_min:.3f}", f"{t.us_max:.3f}")
            writer.writerow((group, s.dtype, s.op, s.layout, s.batch, s.m, s.n, s.k, *times, t.kernels[:160]))
        with path.open("ab") as file:
            file.write(gzip.compress(text.getvalue().encode(), 6))


def versions(torch: Any) -> dict[str, str]:
    """What the measurements ran on."""
    properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "date": time.strftime("%Y-%m-%d")}
    if properties is not None:
        found |= {
            "gpu": properties.name,
            "sms": str(properties.multi_processor_count),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gb": f"{properties.total_memory / 1e9:.0f}",
            "l2_mb": f"{properties.L2_cache_size / 1e6:.0f}",
            "driver": _smi("driver_version"),
        }
    return found


def _smi(query: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


@contextmanager
def clock_log(path: Path) -> Iterator[None]:
    """Note the SM clock, power and temperature once a second while the block runs, where nvidia-smi is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    query = "--query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    with path.open("w") as file:
        process = subprocess.Popen([tool, query, "--format=csv", "-lms", "1000"], stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Measure only, and write the rows: `python3 -m lintgpu.gpu.calibrate --seconds 60 --rows FOLDER`."""
    parser = argparse.ArgumentParser(prog="python3 -m lintgpu.gpu.calibrate", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=Path, required=True, help="folder for the measured rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-us", type=float, default=0.0, help="leave out shapes estimated to take less")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU's clock: exercises the code without a GPU")
    options = parser.parse_args()
    started = time.monotonic()
    bench = Bench("cpu", 1 << 24) if options.dry_run else Bench()
    writer = RowWriter(options.rows)
    (options.rows / "versions.json").write_text(json.dumps(versions(bench.torch), indent=1))

    def report(rows: list[tuple[int, Timing]]) -> None:
        writer.write(rows)
        busy = sum(t.us * rounds(t.shape) for _, t in rows) / 1e6
        print(f"{time.monotonic() - started:7.1f} s: {len(rows)} rows, {busy:.2f} s of kernels", file=sys.stderr, flush=True)

    def keep(shape: Shape) -> bool:
        if estimate_us(shape) < options.min_us:
            return False
        return not options.dry_run or (shape.batch * shape.m * shape.n * shape.k < 1e7 and shape.dtype in ("bf16", "fp32", "tf32"))

    with clock_log(options.rows / "clocks.csv"):
        total = measure(options.seconds - (time.monotonic() - started), options.seed, bench, report, keep)
    print(f"{total} rows in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
