"""What a device is to these kernels: which of them serves it, how, and with which tiles (`configs/prefill.toml`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomllib
import torch
import triton

# Beside the sources, or where an installation puts it.
FOLDERS = (Path(__file__).resolve().parents[3] / "configs", Path(sys.prefix) / "share" / "zyfa" / "configs")
DEFAULT_TILES = {"tile_m": 64, "num_warps": 4, "num_stages": 3}
# AMD's others have 64 KiB of shared memory, which 3 stages of 128 int8 channels, or of 192, overrun.
ROOMY = ("gfx950", "gfx1250")
# section_bytes: of K and V that CTAs work on at a time, so that they stay in L2.
DEFAULT_HOPPER = {
    "stages": 3,
    "consumer_registers": 240,
    "producer_registers": 24,
    "section_bytes": 32 << 20,
}


@dataclass(frozen=True)
class Target:
    """kernel: "hopper" (Gluon, sm_90) or "triton".

    half: FP8 operands are widened to fp16, for want of FP8 products in this format.
    native: the compiler converts fp32 to e4m3fn itself.
    ptx: lean codes are packed by inline PTX. device: the key of the device in the configuration.
    """

    kernel: str
    reason: str
    half: bool
    native: bool
    ptx: bool
    device: str

    def hopper(self, d: int) -> dict[str, int]:
        """Options of the Hopper kernel for head dimension d."""
        return {**DEFAULT_HOPPER, **_tiles().get(self.device, {}).get("hopper", {}).get(str(d), {})}

    def tile(self, d: int) -> dict[str, int]:
        """tile_m, num_warps and num_stages of the plain kernel for head dimension d."""
        narrow = self.device.startswith("gfx") and self.device not in ROOMY
        stages = {"num_stages": 2} if narrow and d >= 128 else {}
        return {**DEFAULT_TILES, **stages, **_tiles().get(self.device, {}).get("triton", {}).get(str(d), {})}


def target_of(device: torch.device) -> Target:
    """The target of a torch device; the CPU stands for Triton's interpreter."""
    if device.type == "cpu":
        return Target("triton", "Triton's interpreter", half=True, native=False, ptx=False, device="interpreter")
    return _gpu(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _gpu(index: int) -> Target:
    if torch.version.hip:
        return target_named("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return target_named("cuda", major * 10 + minor, torch.cuda.get_device_name(index))


def target_named(backend: str, arch: str | int, name: str = "") -> Target:
    """The target of an architecture, as Triton names it: ("cuda", 90) or ("hip", "gfx950")."""
    if backend == "hip":
        # gfx942 multiplies e4m3fnuz alone; the codes of the cache are e4m3fn.
        half = arch not in ("gfx950", "gfx1200", "gfx1201", "gfx1250")
        reason = f"plain Triton, {'fp8 codes widened to fp16' if half else 'fp8 products'} on {arch}"
        return Target("triton", reason, half=half, native=not half, ptx=False, device=str(arch))
    arch = int(arch)
    device = "h200" if "H200" in name else f"sm_{arch}"
    if arch == 90 and has_gluon():
        return Target(
            "hopper", f"warp-specialised wgmma kernel on sm_{arch}", half=False, native=True, ptx=True, device=device
        )
    half = arch < 89
    reason = f"plain Triton, {'fp8 codes widened to fp16' if half else 'fp8 products'} on sm_{arch}"
    return Target("triton", reason, half=half, native=not half, ptx=True, device=device)


def has_gluon() -> bool:
    """Whether this Triton has the Gluon that the Hopper kernel is written in."""
    return tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 6)


@cache
def _tiles() -> dict[str, Any]:
    for folder in FOLDERS:
        if (folder / "prefill.toml").exists():
            with open(folder / "prefill.toml", "rb") as stream:
                return tomllib.load(stream)
    return {}  # the defaults serve
