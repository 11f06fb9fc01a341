"""Quantisation of Q, K and V: OCP e4m3fn (largest value 448) and symmetric int8.

`stored = clamp(x / scale, ±max)` rounded to nearest even, `dequantised = stored · scale`. Clamping comes before
rounding; no cast is relied on to saturate. A NaN stays with its row:

- fp8 keeps it as the e4m3 NaN code;
- int8 has no NaN: a row of Q gets a NaN scale, and an element of K or V becomes the code -128, which clamping leaves
  unused and which `dequantize` reads as NaN.

An infinity makes a row of Q NaN (its dynamic scale would be infinite) and saturates in K and V, whose scale is static.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, overload

import torch

from zyfa_backend.config import QK_FORMATS, AttentionConfig
from zyfa_backend.rotation import CHUNK, rotate
from zyfa_backend.workspace import buffer

E4M3_MAX = 448.0
INT8_MAX = 127.0
INT8_NAN = -128
SMALLEST_NORMAL = 2.0**-126
_UNPACK_CHUNK = 1 << 18  # elements
_DTYPE = {"fp8_e4m3": torch.uint8, "int8": torch.int8}
LARGEST = {"fp8_e4m3": E4M3_MAX, "int8": INT8_MAX}
# Beyond these a value is more than half a step above the largest code: clamping changed it, not rounding.
_CLIPPED_ABOVE = {"fp8_e4m3": 464.0, "int8": 127.5}


class QuantizationError(ValueError):
    """An argument of a quantiser is not accepted; the message names it and what would be."""


@dataclass(frozen=True)
class Quantized:
    """An operand of attention.

    data: [T, H, D]; uint8 (e4m3 bytes) for "fp8_e4m3", int8 for "int8", the model's dtype for "none".
    scale: fp32; [T, H] for Q, [H] or a scalar for K and V; dequantised = data · scale. Ones for "none".
    format: "fp8_e4m3", "int8" or "none".
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: str

    def __post_init__(self) -> None:
        _check_format(self.format)
        expected = _DTYPE.get(self.format)
        if expected is not None and self.data.dtype != expected:
            raise QuantizationError(f"data of format {self.format} has dtype {self.data.dtype}; expected {expected}")
        if expected is None and not self.data.dtype.is_floating_point:
            raise QuantizationError(f"data of format none has dtype {self.data.dtype}; expected a floating dtype")

    def dequantize(self) -> torch.Tensor:
        """data · scale in fp32, same shape as data."""
        scale = self.scale
        if scale.dim() == 1:
            scale = scale[None, :, None]
        elif scale.dim() == 2:
            scale = scale[:, :, None]
        values, factor = unpack(self.data, self.format)
        return values * (scale * factor)


def quantize_q(q: torch.Tensor, config: AttentionConfig) -> Quantized:
    """Rotates and quantises Q with a dynamic scale per token and head.

    q: [T, Hq, D] in a floating dtype, after RoPE. Returns data [T, Hq, D] and scale fp32 [T, Hq] = amax/448 (fp8) or
    amax/127 (int8). A row with a NaN or an infinity gets a NaN scale; a row of zeros gets scale 1. With qk_format
    "none" the data keep q's dtype (rotated in fp32 and rounded to it, if config rotates) and the scale is 1.
    """
    if q.dim() != 3 or not q.dtype.is_floating_point:
        raise QuantizationError(f"q is [T, Hq, D] in a floating dtype; got {list(q.shape)} {q.dtype}")
    if config.qk_format == "none":
        data = q if config.rotation == "none" else rotate(q, config.rotation).to(q.dtype)
        return Quantized(data, torch.ones(q.shape[:2], dtype=torch.float32, device=q.device), "none")
    data = torch.empty(q.shape, dtype=_DTYPE[config.qk_format], device=q.device)
    scale = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for rows in _chunks(q):
        x = rotate(q[rows], config.rotation)
        amax = x.abs().amax(-1)
        part = (amax / LARGEST[config.qk_format]).clamp_min_(SMALLEST_NORMAL)
        part = torch.where(amax == 0, 1.0, part)
        scale[rows] = torch.where(torch.isfinite(amax), part, torch.nan)
        data[rows] = _encode(x, scale[rows].unsqueeze(-1), config.qk_format)
    return Quantized(data, scale, config.qk_format)


@overload
def quantize_kv(
    x: torch.Tensor,
    scale: torch.Tensor | float,
    format: str,
    rotation: str = ...,
    *,
    count_saturated: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def quantize_kv(
    x: torch.Tensor, scale: torch.Tensor | float, format: str, rotation: str = ..., *, count_saturated: Literal[True]
) -> tuple[torch.Tensor, int]: ...
def quantize_kv(
    x: torch.Tensor,
    scale: torch.Tensor | float,
    format: str,
    rotation: str = "none",
    *,
    count_saturated: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, int]:
    """Rotates (K only: pass the rotation) and quantises K or V with a static scale.

    x: [T, Hkv, D]; scale: fp32 [Hkv] or a scalar, positive and finite; format as in AttentionConfig.
    Returns data of x's shape: e4m3 bytes (uint8), int8, or x's dtype for "none" (scale unused).
    With count_saturated also the number of values that clamping changed by more than rounding would have.
    """
    _check_format(format)
    if x.dim() != 3 or not x.dtype.is_floating_point:
        raise QuantizationError(f"K or V is [T, Hkv, D] in a floating dtype; got {list(x.shape)} {x.dtype}")
    if format == "none":
        data = x if rotation == "none" else rotate(x, rotation).to(x.dtype)
        return (data, 0) if count_saturated else data
    factor = _per_head(scale, x)
    data = torch.empty(x.shape, dtype=_DTYPE[format], device=x.device)
    clipped = 0
    for rows in _chunks(x):
        y = rotate(x[rows], rotation)
        data[rows] = _encode(y, factor, format)
        if count_saturated:
            clipped += int((y.abs() > factor * _CLIPPED_ABOVE[format]).sum())
    return (data, clipped) if count_saturated else data


def count_saturated(x: torch.Tensor, scale: torch.Tensor | float, format: str, rotation: str = "none") -> int:
    """How many of x [T, Hkv, D] `quantize_kv` clips with this scale (see there)."""
    return quantize_kv(x, scale, format, rotation, count_saturated=True)[1]


def calibrate_scale(
    x: torch.Tensor, headroom: float = 1.0, *, format: str = "fp8_e4m3", rotation: str = "none"
) -> torch.Tensor:
    """A static scale per head, fp32 [Hkv]: headroom · amax / max of the format.

    x: [T, Hkv, D] as passed to `quantize_kv`, with the same rotation. Values that are not finite are left out, so that
    one bad token does not spoil a head for good; a head without a finite non-zero value gets 1.
    """
    if format not in LARGEST:
        raise QuantizationError(f"format={format!r} has no scale; choose one of {', '.join(LARGEST)}")
    if not headroom > 0:
        raise QuantizationError(f"headroom={headroom!r} is not accepted; it is positive")
    amax = torch.zeros(x.shape[1], device=x.device)
    for rows in _chunks(x):
        y = torch.nan_to_num(rotate(x[rows], rotation).abs(), nan=0.0, posinf=0.0)
        amax = torch.maximum(amax, y.amax(dim=(0, 2)))
    return torch.where(amax == 0, 1.0, (amax * (headroom / LARGEST[format])).clamp_min(SMALLEST_NORMAL))


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """e4m3fn bytes (uint8) of x: clamped to ±448, then rounded to nearest even; NaN becomes a NaN code."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(data: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of e4m3fn bytes (uint8, any shape) in dtype (fp32, fp16 and bf16 hold them exactly); NaN stays NaN."""
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    factor, _ = unpack_into(out, data, "fp8_e4m3")
    return out.mul_(factor)


def unpack(data: torch.Tensor, format: str) -> tuple[torch.Tensor, float]:
    """(values fp32, factor) with the values of `data`, before the scale, equal to values · factor."""
    out = torch.empty(data.shape, dtype=torch.float32, device=data.device)
    return out, unpack_into(out, data, format)[0]


def unpack_into(out: torch.Tensor, data: torch.Tensor, format: str) -> tuple[float, bool]:
    """Writes the values of `data`, before the scale and divided by a power of two, to `out`.

    out: floating dtype, data's shape, any strides. NaN (codes) become NaN.
    Returns (factor, finite): values are out · factor, which saves a pass where the factor can be folded into a scale;
    finite tells that all of them are (for format "none" it may also be False because their sum is not).
    """
    if format == "none":
        out.copy_(data)
        return 1.0, bool(torch.isfinite(out.sum()))
    if format == "int8":
        out.copy_(data)
        finite = data.numel() == 0 or int(data.amin()) != INT8_NAN
        if not finite:
            out.masked_fill_(data == INT8_NAN, torch.nan)
        return 1.0, finite
    if data.dim() == 0:
        out, data = out.view(1), data.view(1)
    step = max(1, _UNPACK_CHUNK // max(1, data[:1].numel()))
    finite = True
    for start in range(0, data.shape[0], step):
        finite &= _unpack_e4m3(out[start : start + step], data[start : start + step])
    if not finite:
        out.masked_fill_((data & 0x7F) == 0x7F, torch.nan)
    return 256.0, finite


def _unpack_e4m3(out: torch.Tensor, data: torch.Tensor) -> bool:
    """Value/256 of e4m3fn bytes into out, NaN codes as ±1.875; returns whether there is none."""
    out.copy_(e4m3_over_256(data, buffer("codes", data.shape, torch.int16, data.device)))
    return int(data.view(torch.int8).amax()) != 0x7F and int(data.amax()) != 0xFF


def e4m3_over_256(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """fp16 of value/256 for e4m3fn bytes, by moving bits: fp16's exponent bias is larger by 8. NaN codes read ±1.875.

    out: int16 of data's shape to work in. torch's own cast from float8_e4m3fn converts one element at a time on a CPU
    and takes 15 times as long.
    """
    signed = data.view(torch.int8)
    bits = signed.to(torch.int16) if out is None else out.copy_(signed)
    return bits.mul_(128).bitwise_and_(~0x4000).view(torch.float16)  # sign-extended: the sign is in bits 15 and 14


def _chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of tokens of x [T, H, D], each of about rotation.CHUNK elements."""
    step = max(1, CHUNK // max(1, x.shape[1] * x.shape[2]))
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def _encode(x: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    y = x / scale
    if format == "fp8_e4m3":
        return e4m3_encode(y)
    codes = y.round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(nan=INT8_NAN)
    return codes.to(torch.int8)


def _per_head(scale: torch.Tensor | float, x: torch.Tensor) -> torch.Tensor:
    """scale as a tensor that broadcasts over x [T, H, D]."""
    factor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if factor.numel() == 1:
        return factor.reshape(())
    if factor.shape != (x.shape[1],):
        raise QuantizationError(f"scale is {list(factor.shape)}; expected a scalar or [{x.shape[1]}], one per head")
    return factor[None, :, None]


def _check_format(format: str) -> None:
    if format not in QK_FORMATS:
        raise QuantizationError(f"format={format!r} is not accepted; choose one of {', '.join(QK_FORMATS)}")
