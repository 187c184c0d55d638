"""The GPU that measures, and what may bend its figures. Worker side; reads its state and never changes it."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from lintgpu.verify.records import Device

BUSY_PERCENT = 10
"""Utilisation by others from which nothing can be timed."""
_FIELDS = ("driver_version", "utilization.gpu", "clocks.sm", "clocks.max.sm", "temperature.gpu", "clocks_throttle_reasons.active")
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
    _refuse_busy(device, state)
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


def slowed(device: torch.device) -> str:
    """Why the card runs below its clocks, in one line; empty where it does not or does not say. Ask while it works."""
    if device.type != "cuda":
        return ""
    state = _state(device)
    try:
        active = int(state.get("clocks_throttle_reasons.active", "0"), 16)
    except ValueError:
        return ""
    reasons = list(dict.fromkeys(text for bit, text in _SLOWDOWNS.items() if active & bit))
    if not reasons:
        return ""
    clocks = f"{state.get('clocks.sm', '?')} of {state.get('clocks.max.sm', '?')}"
    return f"the GPU was slowed down by {' and '.join(reasons)} while it was measured ({clocks}): ratios hold, times are long"


def _refuse_busy(device: torch.device, state: dict[str, str]) -> None:
    try:
        percent = int(state.get("utilization.gpu", "0").split()[0])
    except (ValueError, IndexError):
        return
    if percent >= BUSY_PERCENT:
        who = _processes(device)
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
    import os

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
