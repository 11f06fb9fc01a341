"""What a device is to the kernels that quantise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton


@dataclass(frozen=True)
class Device:
    """processors; whether it converts to OCP e4m3 itself, and saturates then; bytes of shared memory for a program."""

    processors: int
    native_e4m3: bool
    saturates: bool
    shared: int


@lru_cache(maxsize=16)
def device_of(device: torch.device) -> Device:
    if device.type == "cpu":  # Triton's interpreter
        return Device(1, False, False, 1 << 20)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        native = properties.gcnArchName.startswith(("gfx95", "gfx12"))
    else:
        native = (properties.major, properties.minor) >= (8, 9)
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    # PTX converts to e4m3 only with .satfinite.
    return Device(properties.multi_processor_count, native, native and not torch.version.hip, shared)
