"""The measuring process of `lintgpu calibrate`: times GEMMs on this machine's GPU and writes the rows.

It alone imports torch; it also runs as `python3 -m lintgpu.gpu.calibrate` where lintgpu's other dependencies are missing.
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
from importlib import metadata
from pathlib import Path
from typing import Any

from lintgpu.gpu.plan import estimate_us, groups
from lintgpu.verify.timing import Bench, NoGpu, Shape, Timing

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
    wanted = min(0.5, seconds / 8)  # The first session tells how this GPU compares with the one that the estimates are for.
    while time.monotonic() < deadline:
        session, estimate = _session(plan, bench, keep, wanted)
        began = time.monotonic()
        results = bench.time(session, rounds)
        rows = [(number + i, timing) for i, group in enumerate(results) for timing in group if timing is not None]
        number += len(session)
        total += len(rows)
        on_rows(rows)
        pace = max(0.1, (time.monotonic() - began) / estimate)
        wanted = min(_SESSION_SECONDS, deadline - time.monotonic()) / pace
    return total


def _session(plan: Iterator[list[Shape]], bench: Bench, keep: Callable[[Shape], bool], seconds: float) -> tuple[list[list[Shape]], float]:
    """(groups that are estimated to take `seconds`, that estimate)."""
    chosen: list[list[Shape]] = []
    us, launches = 0.0, 0
    while us <= seconds * 1e6 and launches < _SESSION_LAUNCHES:
        group = [shape for shape in next(plan) if bench.fits(shape) and keep(shape)]
        if group:
            chosen.append(group)
            us += sum(rounds(s) * max(30.0, estimate_us(s)) for s in group)
            launches += sum(map(rounds, group))
    return chosen, us / 1e6


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


def versions(torch: Any, device: int) -> dict[str, str]:
    """What the measurements run on; units are in the names."""
    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "cublas": _cublas(), "date": time.strftime("%Y-%m-%d")}
    if not torch.cuda.is_available():
        return {**found, "gpu": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    clocks = _smi("driver_version,clocks.max.sm,clocks.max.mem,power.limit", device)
    driver, sm_mhz, memory_mhz, watts = (*clocks, "", "", "", "")[:4]
    sm_mhz = sm_mhz or str(getattr(properties, "clock_rate", 0) / 1e3)
    memory_mhz = memory_mhz or str(getattr(properties, "memory_clock_rate", 0) / 1e3)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    return found | {
        "gpu": properties.name,
        "sms": str(properties.multi_processor_count),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gb": f"{properties.total_memory / 1e9:.0f}",
        "l2_mb": f"{properties.L2_cache_size / 1e6:.0f}",
        "boost_mhz": sm_mhz,
        "bandwidth_gbps": f"{2 * float(memory_mhz or 0) * bus_bits / 8e3:.0f}",
        "driver": driver,
        "power_limit_w": watts,
    }


def _cublas() -> str:
    for package in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12", "nvidia-cublas-cu11"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _smi(query: str, device: int) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={device}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return [value.strip() for value in lines[0].split(",")] if done.returncode == 0 and lines else []


@contextmanager
def clock_log(path: Path, device: int) -> Iterator[None]:
    """Note the SM clock, power and temperature once a second while the block runs, where nvidia-smi is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    query = "--query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    with path.open("w") as file:
        process = subprocess.Popen([tool, query, "--format=csv", "-lms", "1000", f"--id={device}"], stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    """Measure only, and write the rows: `python3 -m lintgpu.gpu.calibrate --seconds 60 --rows FOLDER`. The exit code: 2 says why not."""
    parser = argparse.ArgumentParser(prog="python3 -m lintgpu.gpu.calibrate", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=Path, required=True, help="folder for the measured rows")
    parser.add_argument("--device", type=int, default=0, help="the GPU's number")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-us", type=float, default=0.0, help="leave out shapes estimated to take less")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU's clock: exercises the code without a GPU")
    options = parser.parse_args()
    try:
        _run(options)
    except (NoGpu, ImportError, RuntimeError, OSError) as error:  # torch's own: out of memory, a busy or lost device
        text = str(error).strip()
        print(f"lintgpu calibrate: {text.splitlines()[0] if text else type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lintgpu calibrate: interrupted; what was measured until then is kept", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> None:
    started = time.monotonic()
    bench = Bench("cpu", 1 << 24) if options.dry_run else _bench(options.device)
    writer = RowWriter(options.rows)
    (options.rows / "versions.json").write_text(json.dumps(versions(bench.torch, options.device), indent=1), encoding="utf-8")
    total = 0

    def report(rows: list[tuple[int, Timing]]) -> None:
        nonlocal total
        writer.write(rows)
        total += len(rows)
        print(f"measured {total} GEMMs in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def keep(shape: Shape) -> bool:
        if estimate_us(shape) < options.min_us:
            return False
        return not options.dry_run or (shape.batch * shape.m * shape.n * shape.k < 1e7 and shape.dtype in ("bf16", "fp32", "tf32"))

    with clock_log(options.rows / "clocks.csv", options.device):
        measure(options.seconds - (time.monotonic() - started), options.seed, bench, report, keep)


def _bench(device: int) -> Bench:
    """A bench on the GPU of that number, with buffers that a small one has room for too. Raises NoGpu."""
    import torch

    if torch.cuda.is_available():
        if device >= torch.cuda.device_count():
            raise NoGpu(f"there is no GPU {device}; this machine has {torch.cuda.device_count()}")
        torch.cuda.set_device(device)
        free, _ = torch.cuda.mem_get_info()
        # Three roles of a dtype and its neighbours share what is free.
        return Bench(pool_bytes=min(12 << 30, free // 16))
    return Bench()


if __name__ == "__main__":
    sys.exit(main())
