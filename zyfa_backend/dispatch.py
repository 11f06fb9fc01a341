"""Picks the implementation for a device and a shape, says which and why, and counts what ran."""

from __future__ import annotations

from dataclasses import dataclass

from zyfa_backend.config import LEAN, AttentionConfig, ConfigError
from zyfa_backend.stats import Counters

HEAD_DIMS = (64, 96, 128, 192)
# (qk_dim, v_dim) of the shapes with a name of their own.
MLA_DIMS = (192, 128)
# (qk_dim, v_dim) that the kernels for GPUs have.
GPU_DIMS = ((64, 64), (128, 128), MLA_DIMS)
PHASES = ("causal", "full", "decode")


class Unsupported(ConfigError):
    """No implementation serves this shape on this device; the message says what is missing."""


@dataclass(frozen=True)
class Shape:
    """What decides about a kernel: head dimensions, mask or phase, numerics, the model's dtype (bf16, fp16, fp32)."""

    qk_dim: int
    v_dim: int
    phase: str = "causal"
    config: AttentionConfig = LEAN
    dtype: str = "bf16"


@dataclass(frozen=True)
class KernelInfo:
    name: str
    available: bool
    reason: str


def kernel_name(shape: Shape) -> str:
    """`FORMAT-SHAPE-PHASE[-P]`, e.g. fp8-hd128-causal-lean, bf16-mla-causal, int8-hd64-decode-lean."""
    form = {"fp8_e4m3": "fp8", "int8": "int8", "none": shape.dtype}[shape.config.qk_format]
    dims = "mla" if (shape.qk_dim, shape.v_dim) == MLA_DIMS else f"hd{shape.qk_dim}"
    suffix = "" if shape.config.probabilities == "none" else f"-{shape.config.probabilities}"
    return f"{form}-{dims}-{shape.phase}{suffix}"


def select(shape: Shape, device: str = "cpu") -> str:
    """Name of the kernel with which an engine serves `shape` on `device` ("cpu", "cuda", …), `implementation/kernel`.

    Raises Unsupported with the values at fault and what would be accepted.
    """
    if shape.phase not in PHASES:
        raise Unsupported(f"phase {shape.phase!r} is not known; it is one of {', '.join(PHASES)}")
    if shape.qk_dim not in HEAD_DIMS:
        raise Unsupported(f"head dimension {shape.qk_dim} has no kernel; there are kernels for {_listed(HEAD_DIMS)}")
    if shape.qk_dim != shape.v_dim and (shape.qk_dim, shape.v_dim) != MLA_DIMS:
        raise Unsupported(f"head dimensions {shape.qk_dim}/{shape.v_dim} have no kernel; only 192/128 may differ")
    kind = device.split(":")[0]
    if kind == "cuda":  # torch's name for AMD's GPUs, too
        return _select_gpu(shape)
    if kind != "cpu":
        raise Unsupported(f"device {device!r} has no kernel; ZYFA runs on cpu and cuda")
    return f"torch/{kernel_name(shape)}"


def _select_gpu(shape: Shape) -> str:
    config = shape.config
    if (shape.qk_dim, shape.v_dim) not in GPU_DIMS:
        accepted = ", ".join(f"{qk}/{v}" for qk, v in GPU_DIMS)
        raise Unsupported(f"head dimensions {shape.qk_dim}/{shape.v_dim} have no kernel on cuda; accepted: {accepted}")
    if config.qk_format == "none" or config.v_format == "none" or config.probabilities == "none":
        raise Unsupported(
            f"qk_format={config.qk_format}, v_format={config.v_format}, probabilities={config.probabilities} has no "
            "kernel on cuda; those there quantise all three"
        )
    ignored = [f"{name}={getattr(config, name)}" for name in ("tile", "arithmetic")
               if getattr(config, name) != getattr(LEAN, name)]  # fmt: skip
    if ignored:
        raise Unsupported(
            f"{', '.join(ignored)} is the reference's; the kernels on cuda renew the maximum every 128 keys and round "
            "multiply-adds, whatever is set: leave it out"
        )
    if shape.phase == "decode" and config.qk_format == "fp8_e4m3":
        return "engine/" + kernel_name(shape).removesuffix(f"-{config.probabilities}")
    return f"triton/{kernel_name(shape)}"


def explain(shape: Shape, device: str = "cpu") -> str:
    """One line: which kernel serves `shape` on `device` in an engine and why, or why none does."""
    try:
        name = select(shape, device)
        return f"{name}: {_REASONS[name.split('/')[0]]}"
    except Unsupported as error:
        return f"none: {error}"


_REASONS = {
    "torch": "the torch reference; it runs wherever torch does, and on a CPU nothing else does the prefill",
    "triton": "ZYFA's kernels in Triton; the gfx950 assembly has not run on a GPU yet",
    "engine": "the engine's own decode over ZYFA's cache, with a rotated query",
}


def kernels(device: str | None = None) -> list[KernelInfo]:
    """Every kernel family with whether it can run on `device` ("cpu" when None) and why not otherwise."""
    kind = (device or "cpu").split(":")[0]
    found = []
    for qk_dim, v_dim in ((64, 64), (96, 96), (128, 128), MLA_DIMS):
        for config in (LEAN, AttentionConfig(probabilities="exact"), AttentionConfig(qk_format="int8")):
            shape = Shape(qk_dim, v_dim, "causal", config)
            try:
                name = select(shape, kind)
                found.append(KernelInfo(name, True, _REASONS[name.split("/")[0]]))
            except Unsupported as error:
                prefix = "triton" if kind == "cuda" else "torch"
                found.append(KernelInfo(f"{prefix}/{kernel_name(shape)}", False, str(error)))
    return found


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


counters = Counters()
