"""Number formats: small floats as tables, bf16 and fp32 rounding, exact fused multiply-add."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Value of every code, in the order of the f8f6f4 format selector (cbsz/blgp): fp8 e4m3, bf8 e5m2, fp6 e2m3, bf6 e3m2,
# fp4 e2m1. OCP MX v1.0 defines all five.
MX_TYPES = (
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float6_e2m3fn,
    ml_dtypes.float6_e3m2fn,
    ml_dtypes.float4_e2m1fn,
)
MX_BITS = (8, 8, 6, 6, 4)
MX_TABLES = tuple(
    np.arange(1 << bits, dtype=np.uint8).view(kind).astype(np.float64)
    for kind, bits in zip(MX_TYPES, MX_BITS, strict=True)
)
E4M3, E5M2 = MX_TABLES[0], MX_TABLES[1]
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def to_e4m3(x: np.ndarray, saturate: bool) -> np.ndarray:
    """fp32 to e4m3 codes (uint32), nearest even. Above 448: NaN, or 448 if `saturate`; NaN stays NaN."""
    if saturate:
        x = np.clip(x, np.float32(-E4M3_MAX), np.float32(E4M3_MAX))
    return x.astype(np.float32).astype(MX_TYPES[0]).view(np.uint8).astype(np.uint32)


def to_e5m2(x: np.ndarray, saturate: bool) -> np.ndarray:
    """fp32 to e5m2 codes (uint32), nearest even. Above 57344: infinity, or 57344 if `saturate`; NaN stays NaN."""
    if saturate:
        x = np.where(np.isinf(x), x, np.clip(x, np.float32(-E5M2_MAX), np.float32(E5M2_MAX)))
    return x.astype(np.float32).astype(MX_TYPES[1]).view(np.uint8).astype(np.uint32)


def to_bf16(bits: np.ndarray) -> np.ndarray:
    """fp32 bits (uint32) to bf16 bits in the low half (uint32), nearest even; NaN is kept and made quiet."""
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, bits >> np.uint32(16) | np.uint32(0x40), rounded) if nan.any() else rounded


def bf16_to_f32(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fma32(a, b, c) -> np.ndarray:
    """a·b + c in fp32, rounded once.

    The product is exact in fp64, so only a second rounding could be wrong: it is where the fp64 sum lies on a tie of
    fp32 or in fp32's denormal range. There the fp64 sum is first rounded to odd, which makes the second rounding exact.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = np.asarray(total).view(np.uint64)
    risky = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    risky |= np.abs(total) < 1.1754943508222875e-38
    if risky.any():
        total = _round_to_odd(product, np.broadcast_to(np.asarray(c, np.float64), product.shape), total)
    return total.astype(np.float32)


def _round_to_odd(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    back = total - a
    error = (a - (total - back)) + (b - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    # One unit towards the true sum: away from zero where the error has the sign of the total.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64)


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Little-endian packed codes of `bits` each from uint32 [..., n]: uint8 [..., n·32 / bits]."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    spread = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, bits)
    return (spread << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
