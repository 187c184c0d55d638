"""The GPU that measures, and what may bend its figures. Worker side; reads its state and never changes it."""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lintgpu.verify.records import Device

BUSY_PERCENT = 10
"""Utilisation by others from which nothing can be timed."""
_FIELDS = ("driver_version", "utilization.gpu")
# Bits of nvmlClocksThrottleReasons that slow a card down against its will.
_SLOWDOWNS = {0x4: "its power cap", 0x8: "a hardware slowdown", 0x20: "its temperature", 0x40: "its temperature", 0x80: "a power brake"}
_OTHERS_GB = 1.0
"""Memory in use by others that is worth a word."""


class NoDevice(RuntimeError):
    """Nothing can be measured here; the message is one line that says why."""


def choose(wanted: str) -> torch.device:
    """The device called `wanted`: a GPU's number, or cpu for a dry run. Raises NoDevice."""
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoDevice(_why_none())
    count = torch.cuda.device_count()
    index = int(wanted)
    if not 0 <= index < count:
        known = "only GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
        raise NoDevice(f"there is no GPU {index}: this machine has {known}")
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise NoDevice(f"GPU {index} cannot be used: {str(error).strip().splitlines()[0]}") from error
    return device


def _why_none() -> str:
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return f"torch {torch.__version__} is built without GPU support"
    if torch.cuda.device_count() == 0:
        return "torch sees no GPU on this machine"
    return "torch sees a GPU that it cannot use (is the driver older than torch's CUDA?)"


def describe(device: torch.device) -> Device:
    """What the driver says about `device`. Raises NoDevice where others keep it busy."""
    versions = {"torch": torch.__version__}
    if device.type == "cpu":
        return Device(name="cpu", kind="cpu", versions=tuple(versions.items()))
    properties = torch.cuda.get_device_properties(device)
    versions |= {key: value for key, value in (("cuda", torch.version.cuda), ("hip", torch.version.hip)) if value}
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        raise NoDevice(f"GPU {device.index or 0} is a MIG slice ({name}): predictions for the whole GPU do not hold for it")
    state = _state(device)
    _refuse_busy(device, state, _processes(device))
    return Device(
        name=name,
        kind="rocm" if torch.version.hip else "cuda",
        index=device.index or 0,
        sms=properties.multi_processor_count,
        memory_gb=properties.total_memory / 2**30,
        driver=state.get("driver_version", ""),
        versions=tuple(versions.items()),
        notes=tuple(_notes(device)),
    )


class Watch:
    """Notes once a second whether the card is slowed down while it works. Does nothing where there is no nvidia-smi."""

    _WATCHED = ("clocks.sm", "clocks.max.sm", "clocks_throttle_reasons.active")

    def __init__(self, device: torch.device) -> None:
        self._samples: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._child: subprocess.Popen[str] | None = None
        if device.type != "cuda":
            return
        query = f"--query-gpu={','.join(self._WATCHED)}"
        command = ["nvidia-smi", f"--id={_identity(device)}", query, "--format=csv,noheader", "-lms", "1000"]
        with contextlib.suppress(OSError):
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._child,), daemon=True).start()

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in child.stdout:
                self._samples.put(line.strip().split(", "))

    def slowed(self) -> str:
        """Why the card ran below its clocks since the last time this was asked, in one line; empty where it did not."""
        return slowdown([self._samples.get() for _ in range(self._samples.qsize())])

    def close(self) -> None:
        """Stop watching."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()


def slowdown(samples: Sequence[Sequence[str]]) -> str:
    """What samples of (SM clock, largest SM clock, throttle reasons) say in one line; empty where the card was free to run."""
    reasons: list[str] = []
    clocks: list[tuple[int, str]] = []
    for sample in samples:
        try:
            clock, most, active = int(sample[0].split()[0]), sample[1], int(sample[2], 16)
        except (ValueError, IndexError):  # a line that was cut, a card that does not tell
            continue
        found = [text for bit, text in _SLOWDOWNS.items() if active & bit]
        if found:
            reasons += found
            clocks.append((clock, most))
    if not reasons:
        return ""
    clock, most = min(clocks)
    why = " and ".join(dict.fromkeys(reasons))
    return f"the GPU was slowed down by {why} while it was measured ({clock} MHz of {most}): ratios hold, times are long"


def _refuse_busy(device: torch.device, state: dict[str, str], who: Sequence[str]) -> None:
    try:
        percent = int(state.get("utilization.gpu", "0").split()[0])
    except (ValueError, IndexError):
        return
    if percent >= BUSY_PERCENT:
        by = f" with {', '.join(who)}" if who else ""
        raise NoDevice(f"GPU {device.index or 0} is {percent} % busy{by}: nothing can be timed beside other work")


def _notes(device: torch.device) -> list[str]:
    notes = []
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    others = (total - free - own) / 2**30
    who = _processes(device)
    if who or others > _OTHERS_GB + 1:
        by = f" by {', '.join(who)}" if who else ""
        notes.append(f"{others:.1f} GiB of the GPU's memory are in use{by}: its figures may be disturbed")
    return notes


def _processes(device: torch.device) -> list[str]:
    """Name and id of the other processes on the GPU, as far as the driver tells."""
    rows = _query(device, "compute-apps", ("pid", "process_name"))
    return [
        f"{row['process_name'].rsplit('/', 1)[-1]} ({row['pid']})"
        for row in rows
        if row["pid"].isdecimal() and int(row["pid"]) != os.getpid()
    ]


def _state(device: torch.device) -> dict[str, str]:
    rows = _query(device, "gpu", _FIELDS)
    return rows[0] if rows else {}


def _query(device: torch.device, what: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Rows of nvidia-smi about this GPU; nothing where there is no nvidia-smi (ROCm) or it does not answer."""
    command = ["nvidia-smi", f"--id={_identity(device)}", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _identity(device: torch.device) -> str:
    """The GPU's UUID: torch counts GPUs otherwise than nvidia-smi where CUDA_VISIBLE_DEVICES is set."""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" if uuid else str(device.index or 0)
