"""What attention is measured against: fp64 on the same or on unquantised inputs, and a model of the kernel to beat.

Written apart from the reference and in fp64 throughout, so that one does not inherit the other's mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from zyfa_backend.quantization import Quantized

_ROWS = 256  # queries at a time, which bounds the memory


def attention_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window: int | None = None,
    context: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence in fp64.

    q: [Tq, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv], any floating dtype; the other arguments as in `reference.attend`.
    Returns out fp64 [Tq, Hq, Dv] and lse fp64 [Hq, Tq], natural log; 0 and -inf for a query without a live key.
    """
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    for rows, head, values, scores in _scores(q, k, v, softmax_scale, causal, window, context):
        lse[head, rows] = torch.logsumexp(scores, dim=-1)
        weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)  # a row of -inf alone
        out[rows, head] = weights @ values
    return out, lse


def attend_fp64(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    *,
    softmax_scale: float,
    causal: bool,
    window: int | None = None,
    context: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_fp64` of the values that quantised operands stand for, unrounded."""
    return attention_fp64(
        *(dequantize_fp64(x) for x in (q, k, v)),
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        context=context,
    )


def attend_aiter_v3(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    *,
    softmax_scale: float,
    causal: bool,
    window: int | None = None,
    context: int | None = None,
    block: int = 64,
) -> torch.Tensor:
    """A model of AITER's v3 fp8 kernel: out fp64 [Tq, Hq, Dv].

    P = e4m3(2^(x - m)) with the running maximum m after each block of keys and no offset; the numerator takes the
    rounded P, the denominator the unrounded. All else is exact.
    """
    out = torch.zeros(q.data.shape[0], q.data.shape[1], v.data.shape[2], dtype=torch.float64)
    queries, keys, stored = dequantize_fp64(q), dequantize_fp64(k), dequantize_fp64(v)
    for rows, head, values, scores in _scores(queries, keys, stored, softmax_scale, causal, window, context):
        m = torch.full((scores.shape[0], 1), -torch.inf, dtype=torch.float64)
        numerator = torch.zeros(scores.shape[0], values.shape[1], dtype=torch.float64)
        denominator = torch.zeros_like(m)
        for k0 in range(0, scores.shape[1], block):
            x = scores[:, k0 : k0 + block] / math.log(2)
            m_after = torch.maximum(m, x.amax(-1, keepdim=True))
            origin = m_after.clamp_min(torch.finfo(torch.float64).min)
            p = torch.exp2(x - origin)
            alpha = torch.exp2(m - origin)
            numerator = numerator * alpha + round_e4m3(p) @ values[k0 : k0 + block]
            denominator = denominator * alpha + p.sum(-1, keepdim=True)
            m = m_after
        out[rows, head] = numerator / torch.where(denominator == 0, 1.0, denominator)
    return out


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x fp64, of magnitude at most 448, rounded to the nearest e4m3 value, ties to even."""
    exponent = torch.floor(torch.log2(x.abs().clamp_min(2.0**-6)))
    step = torch.exp2(exponent - 3)
    return torch.round(x / step) * step


def dequantize_fp64(x: Quantized) -> torch.Tensor:
    """The values in fp64, by torch's own conversions rather than by the bit tricks of the reference."""
    if x.format == "fp8_e4m3":
        values = x.data.view(torch.float8_e4m3fn).double()
    elif x.format == "int8":
        values = torch.where(x.data == -128, torch.nan, x.data.double())
    else:
        values = x.data.double()
    scale = x.scale.double()
    return values * (scale[..., None] if scale.dim() else scale)


def relative_rms(out: torch.Tensor, expected: torch.Tensor) -> float:
    """sqrt(mean |out - expected|²) over sqrt(mean |expected|²)."""
    expected = expected.double()
    return float((out.double() - expected).norm() / expected.norm())


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window: int | None,
    context: int | None,
) -> Iterator[tuple[slice, int, torch.Tensor, torch.Tensor]]:
    """(rows, query head, values [Tk, Dv], scores [rows, Tk] scaled and masked with -inf), in fp64."""
    context = k.shape[0] - q.shape[0] if context is None else context
    group = q.shape[1] // k.shape[1]
    key = torch.arange(k.shape[0])
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        for start in range(0, q.shape[0], _ROWS):
            rows = slice(start, min(start + _ROWS, q.shape[0]))
            scores = q[rows, head].double() @ keys.T * softmax_scale
            position = (context + torch.arange(rows.start, rows.stop))[:, None]
            if causal:
                scores.masked_fill_(key > position, -torch.inf)
            if window is not None:
                scores.masked_fill_(key < position - window, -torch.inf)
            yield rows, head, values, scores
