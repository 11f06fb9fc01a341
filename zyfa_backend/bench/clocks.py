"""Clocks, power and temperature of the GPU, sampled beside a measurement. Nothing is ever set."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NVIDIA_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
NAMES = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
PERIOD_S = 0.1
ROCM_PERIOD_S = 0.5
START_S = 5.0  # the most that is waited for the first sample


@dataclass(frozen=True)
class Sample:
    time: float
    values: dict[str, float]


class Sampler:
    """Samples of one GPU while the context is open, by `tool`; None where that is missing or no GPU is named.

    device: a UUID of nvidia-smi ("GPU-…") or an index of rocm-smi.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device or ""
        tool = "rocm-smi" if self.device.isdigit() else "nvidia-smi"
        self.tool = tool if device and shutil.which(tool) else None
        self.samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        if self.tool:
            target = self._read_nvidia if self.tool == "nvidia-smi" else self._read_rocm
            self._thread = threading.Thread(target=target, daemon=True)
            self._thread.start()
            deadline = time.monotonic() + START_S
            while not self.samples and self._thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def between(self, begin: float, end: float) -> dict[str, Any] | None:
        """Mean, least and largest of each value from `begin` to `end` (time.time()); None without samples."""
        inside = [sample.values for sample in self.samples if begin <= sample.time <= end]
        if not inside:
            return None
        summary: dict[str, Any] = {"samples": len(inside)}
        for name in NAMES:
            values = [sample[name] for sample in inside if name in sample]
            if values:
                summary[name] = {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}
        return summary

    def _read_nvidia(self) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"]
        command += ["-lms", str(int(PERIOD_S * 1000)), "-i", self.device]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.samples.append(Sample(time.time(), parse_nvidia(line)))

    def _read_rocm(self) -> None:
        command = ["rocm-smi", "--showclocks", "--showpower", "--showtemp", "--json", "-d", self.device]
        while not self._ended.wait(ROCM_PERIOD_S):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=5)
                self.samples.append(Sample(time.time(), parse_rocm(done.stdout, self.device)))
            except (OSError, subprocess.TimeoutExpired, ValueError):
                continue


def parse_nvidia(line: str) -> dict[str, float]:
    """Values of one line of nvidia-smi's CSV; what it does not know ("[N/A]") is left out."""
    values = {}
    for name, text in zip(NAMES, line.split(","), strict=False):
        try:
            values[name] = float(text)
        except ValueError:
            continue
    return values


def rocm_index(current: int, environment: Mapping[str, str]) -> str | None:
    """The index on the machine, as rocm-smi counts, of the GPU that a process with this environment calls `current`.

    HIP counts what HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, leaves of what ROCR_VISIBLE_DEVICES leaves. None
    where a list names the GPU otherwise than by an index, or GPU_DEVICE_ORDINAL, which hides GPUs as well, is set.
    """
    if environment.get("GPU_DEVICE_ORDINAL"):
        return None
    hip = environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES")
    index = current
    for visible in (hip, environment.get("ROCR_VISIBLE_DEVICES")):
        if not visible:
            continue
        entry = dict(enumerate(visible.split(","))).get(index, "").strip()
        if not entry.isascii() or not entry.isdigit():
            return None
        index = int(entry)
    return str(index)


def parse_rocm(text: str, index: str) -> dict[str, float]:
    """Values of a card of rocm-smi's JSON, whose keys differ between versions. Raises ValueError without that card."""
    cards = json.loads(text)
    card = cards.get(f"card{index}") if isinstance(cards, dict) else None
    if not isinstance(card, dict):
        raise ValueError(f"rocm-smi tells nothing of card{index}")
    patterns = {
        "sm_mhz": r"sclk clock speed",
        "memory_mhz": r"mclk clock speed",
        "power_w": r"(current socket|average) graphics package power",
        "temperature_c": r"temperature \(sensor (junction|edge)\)",
    }
    values = {}
    for key, shown in card.items():
        for name, pattern in patterns.items():
            number = re.search(r"\d+(\.\d+)?", str(shown))
            if name not in values and re.match(pattern, key.lower()) and number:
                values[name] = float(number[0])
    return values
