"""The arithmetic of the fp8 head-dim-128 kernels in numpy: same roundings, none of the instructions.

Independent of the reference: scores and sums in fp64, and only the steps that decide about a code of P in fp32.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from zyfa_backend.kernel_run import Problem
from zyfa_backend.quantization import e4m3_decode

F32 = np.float32
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def f64(x):
    return np.asarray(x, np.float64)


def fma(a, b, c):
    """a * b + c with one rounding to fp32 (fp64 holds the product exactly)."""
    return (f64(a) * f64(b) + f64(c)).astype(F32)


def attend(p: Problem, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(out [Tq, Hq, 128] before rounding to bf16, lse [Hq, Tq]) in fp64, with P's codes as the kernels form them."""
    q, k, v = (e4m3_decode(x.data).numpy().astype(np.float64) for x in (p.q, p.k, p.v))
    (tq, hq, _), (tk, hkv, _) = q.shape, k.shape
    lean = p.config.probabilities == "lean"
    out, lse = np.zeros((tq, hq, 128)), np.zeros((hq, tq))
    positions = np.arange(tq)[:, None] + tk - tq
    factor = F32(p.softmax_scale / math.log(2))
    for head in range(hq):
        kv = head // (hq // hkv)
        c = (p.q.scale.numpy()[:, head] * F32(p.k.scale.numpy()[kv] * factor))[:, None]
        low = (q[:, head, :64] @ k[:, kv, :64].T).astype(F32)  # a matrix instruction takes 64 dims and rounds
        scores = (low + q[:, head, 64:] @ k[:, kv, 64:].T).astype(F32)
        if p.causal:
            scores[np.arange(tk)[None] > positions] = -np.inf
        if window is not None:
            scores[np.arange(tk)[None] < positions - window] = -np.inf
        scores = np.pad(scores, ((0, 0), (0, -tk % 128)), constant_values=-np.inf)
        values = np.pad(v[:, kv], ((0, -tk % 128), (0, 0)))
        top = np.full((tq, 1), -1e30, F32)  # and no tile is left out: one without a visible key changes nothing
        numerator, total = np.zeros((tq, 128)), np.zeros((tq, 1))
        for tile in range(0, scores.shape[1], 128):
            new = np.maximum(top, scores[:, tile : tile + 128].max(1, keepdims=True))
            alpha = np.exp2(f64(c) * f64(top - new))
            numerator, total = numerator * alpha, total * alpha
            for first in (tile, tile + 64):
                x = scores[:, first : first + 64]
                minus_k = np.maximum(np.ceil(c * (x.max(1, keepdims=True) - new)), F32(-100))
                codes = _lean(x, c, new, minus_k, p.config.delta) if lean else _exact(x, c, new, minus_k)
                weights = E4M3[codes] * np.exp2(f64(minus_k) - 8)
                numerator += weights @ values[first : first + 64]
                total += weights.sum(1, keepdims=True)
            top = new
        out[:, head] = numerator / total * np.float64(p.v.scale.numpy()[kv])
        lse[head] = (math.log(2) * (f64(c) * top + np.log2(total)))[:, 0]
    return out, lse


def _lean(x, c, top, minus_k, delta) -> np.ndarray:
    slope = F32(8) * c
    bias = fma(-slope, top, F32(8 * 8 + 56 + delta)) - F32(8) * minus_k
    return np.clip(np.rint(fma(x, slope, bias)), 0, 126).astype(np.uint8)


def _exact(x, c, top, minus_k) -> np.ndarray:
    y = fma(x, c, fma(-c, top, F32(0)) - minus_k)
    p = np.clip(np.exp2(np.float64(y)).astype(F32), F32(0), F32(1))
    return (p * F32(256)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
