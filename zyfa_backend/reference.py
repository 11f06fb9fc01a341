"""Attention by the specification's numerics, in torch: the oracle of every kernel, and what serves on a CPU.

No matrix of all scores is formed: a tile of queries meets a panel of keys at a time. Query tiles, panels and key blocks
are aligned to absolute positions of the sequence, and every product has a shape that depends on the position alone
(rows that are absent are computed as zeros), so that a row's bits do not depend on chunking, caching or batching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zyfa_backend import reference_tiles
from zyfa_backend.config import BLOCK, LEAN, AttentionConfig
from zyfa_backend.products import products, stepwise_products
from zyfa_backend.quantization import Quantized, calibrate_scale, quantize_kv, quantize_q, unpack, unpack_into
from zyfa_backend.reference_checks import (
    AttentionError,
    check_operands,
    check_scalars,
    check_scales,
    sequence_bounds,
)
from zyfa_backend.reference_decode import decode, gather
from zyfa_backend.reference_fused import SMALLEST_SCALE, fused_probabilities
from zyfa_backend.reference_tiles import (
    LOG2E,
    combine,
    mask_scores,
    per_q_head,
    poison,
    rescale,
    split_poison,
)
from zyfa_backend.workspace import buffer

__all__ = ["AttentionError", "attend", "attention", "decode", "gather", "merge_states"]

Weights = Callable[
    [torch.Tensor, torch.Tensor, AttentionConfig, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
PANEL = 512  # keys per product; a multiple of every tile
_TILE_ROWS = 1024  # rows of all heads in a query tile, about
_ALIGN = 2 * BLOCK


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    window: int | None = None,
    config: AttentionConfig = LEAN,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates, quantises and attends, sequence by sequence: the executable specification, in torch on q's device.

    q: [Tq, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] after RoPE, packed; Hq a multiple of Hkv.
    cu_seqlens_q, cu_seqlens_k: [sequences + 1] integer offsets from 0 to Tq and Tk; without them one sequence. The
    queries of a sequence are the last of its keys.
    window: flash-attn's left window, a query at p sees no key before p - window; None is unlimited.
    k_scale, v_scale: fp32 [Hkv] or scalar; None takes them from the largest value per sequence and head.
    Returns out [Tq, Hq, Dv] in q's dtype and lse fp32 [Hq, Tq], natural log. Raises AttentionError.
    """
    check_operands(q, k, v)
    bounds_q = sequence_bounds(cu_seqlens_q, q.shape[0], "cu_seqlens_q")
    bounds_k = sequence_bounds(cu_seqlens_k, k.shape[0], "cu_seqlens_k")
    if len(bounds_q) != len(bounds_k):
        raise AttentionError(
            f"cu_seqlens_q has {len(bounds_q) - 1} sequences and cu_seqlens_k {len(bounds_k) - 1}; they must agree"
        )
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for i in range(len(bounds_q) - 1):
        rows, keys = slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])
        out[rows], lse[:, rows] = attend(
            quantize_q(q[rows], config),
            _quantized(k[keys], k_scale, config.qk_format, config.rotation),
            _quantized(v[keys], v_scale, config.v_format, "none"),
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            config=config,
            out_dtype=q.dtype,
        )
    return out, lse


def attend(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    *,
    softmax_scale: float,
    causal: bool,
    window: int | None = None,
    context: int | None = None,
    config: AttentionConfig,
    out_dtype: torch.dtype,
    weights: Weights = reference_tiles.weights,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence over quantised operands, Q and K rotated alike.

    q.data: [Tq, Hq, D] with scale [Tq, Hq]; k.data: [Tk, Hkv, D], v.data: [Tk, Hkv, Dv] with scale [Hkv] or scalar.
    context: query i stands at position context + i; Tk - Tq unless given.
    window: a query at position p sees no key before p - window. causal: none after p.
    weights: what makes weights of scores, `reference_tiles.weights` or a faster form of it.
    Returns out [Tq, Hq, Dv] in out_dtype and lse fp32 [Hq, Tq], natural log. A query without a live key gives 0 and
    -inf. A live key whose K is not finite makes the row NaN, one whose V is not finite the channels concerned; no other
    row is touched. Raises AttentionError.
    """
    check_operands(q.data, k.data, v.data)
    check_scalars(softmax_scale, window)
    (tq, hq, _), (tk, hkv, dv) = q.data.shape, v.data.shape
    check_scales(q.scale, k.scale, v.scale, hq, hkv, tq)
    group, device = hq // hkv, q.data.device
    context = tk - tq if context is None else context
    out = torch.empty(tq, hq, dv, dtype=out_dtype, device=device)
    lse = torch.empty(hq, tq, dtype=torch.float32, device=device)
    tile = query_tile(hq)
    padded = -(-max(tk, 1) // max(tile, _ALIGN)) * max(tile, _ALIGN)
    queries, q_factor = unpack(q.data, q.format)
    keys, k_factor, _ = _head_major(k, padded, "keys")
    values, v_factor, v_finite = _head_major(v, padded, "values")
    bad = None if v_finite else split_poison(values)
    # x = c · (q·k), in log2 units
    c = q.scale * (per_q_head(k.scale, hq, hkv) * (softmax_scale * LOG2E)) * q_factor * k_factor
    v_scale = per_q_head(v.scale, hq, hkv).view(hkv, group, 1, 1) * v_factor
    fused = config.arithmetic == "fused" and config.probabilities != "none"
    scratch, spare = buffer("scores", (2, hq * tile * PANEL), torch.float32, device).unbind()
    for first in range(context // tile * tile, context + tq, tile):
        q_tile = _rows(queries, first - context, tile, hkv)
        c_tile = _rows(c.unsqueeze(-1), first - context, tile, hkv)
        if fused:
            c_tile = torch.maximum(c_tile, torch.tensor(SMALLEST_SCALE))
        numerator = torch.zeros(hkv, group * tile, dv, device=device)
        denominator = torch.zeros(hkv, group * tile, device=device)
        m = torch.full_like(denominator, -torch.inf)
        for k0, k1 in _panels(first, tile, padded, causal, window):
            x = scratch[: hq * tile * (k1 - k0)].view(hkv, group * tile, k1 - k0)
            multiply = stepwise_products if fused else products
            for head, scores in enumerate(multiply(q_tile, keys[:, k0:k1])):
                torch.mul(scores, 1.0 if fused else c_tile[head], out=x[head])
            live = mask_scores(x.view(hkv, group, tile, k1 - k0), first, k0, tk, causal, window)
            if fused:
                p, factor, m_after, alpha = fused_probabilities(x, m, c_tile[..., 0], config, spare)
                total = p.mul_(factor.unsqueeze(-1)).sum((-2, -1))
            else:
                total, m_after = weights(x, m, config, spare)
                alpha = rescale(m, m_after)
            denominator.mul_(alpha).add_(total)
            for head, weighted in enumerate(products(x, values[:, k0:k1].transpose(1, 2))):
                torch.addcmul(weighted, numerator[head], alpha[head].unsqueeze(-1), out=numerator[head])
            if bad is not None:
                poison(numerator.view(hkv, group, tile, dv), bad[:, k0:k1], live)
            m = m_after
        if fused:
            m = m * c_tile[..., 0]
        shape = (hkv, group, tile)
        o, row_lse = combine(numerator.view(*shape, dv), denominator.view(shape), m.view(shape), v_scale)
        low, high = max(first - context, 0), min(first - context + tile, tq)
        own = slice(low - (first - context), high - (first - context))
        out[low:high] = o[:, :, own].permute(2, 0, 1, 3).reshape(high - low, hq, dv)
        lse[:, low:high] = row_lse[:, :, own].reshape(hq, high - low)
    return out, lse


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys.

    out: [T, H, Dv]; lse: fp32 [H, T], natural log, -inf where a set held no live key. Returns out in out_a's dtype and
    lse. Raises AttentionError.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != out_a.shape[1::-1]:
        raise AttentionError(
            f"out has shapes {list(out_a.shape)} and {list(out_b.shape)}, lse {list(lse_a.shape)} and "
            f"{list(lse_b.shape)}; expected [T, H, Dv] twice and [H, T] twice"
        )
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    out = torch.zeros_like(out_a, dtype=torch.float32)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse - shift).transpose(0, 1).unsqueeze(-1)
        out += torch.where(weight == 0, 0.0, part.float() * weight)
    return out.to(out_a.dtype), lse


def query_tile(hq: int) -> int:
    """Queries per tile, 32 to 128; a function of the head count alone, since a row's bits may depend on it."""
    return max(32, min(128, 1 << max(_TILE_ROWS // hq, 1).bit_length() - 1))


def _panels(first: int, tile: int, padded: int, causal: bool, window: int | None) -> Iterator[tuple[int, int]]:
    """Key ranges for the query tile at `first`: cut at multiples of PANEL, ends aligned to 128."""
    begin = 0 if window is None else max(0, first - window) // _ALIGN * _ALIGN
    end = min(padded, -(-(first + tile) // _ALIGN) * _ALIGN) if causal else padded
    while begin < end:
        stop = min(end, begin // PANEL * PANEL + PANEL)
        yield begin, stop
        begin = stop


def _head_major(x: Quantized, padded: int, name: str) -> tuple[torch.Tensor, float, bool]:
    """x's values [T, H, D] as fp32 [H, padded, D], zeros at the end; their factor; whether all are finite."""
    tokens, heads, dim = x.data.shape
    out = buffer(name, (heads, padded, dim), torch.float32, x.data.device)
    out[:, tokens:] = 0
    factor, finite = unpack_into(out[:, :tokens].transpose(0, 1), x.data, x.format)
    return out, factor, finite


def _rows(x: torch.Tensor, start: int, tile: int, hkv: int) -> torch.Tensor:
    """Rows start … start + tile of x [T, Hq, D] as [Hkv, group · tile, D]; zeros where x has none."""
    low, high = max(start, 0), min(start + tile, x.shape[0])
    rows = x[low:high]
    if high - low < tile:
        full = x.new_zeros(tile, *x.shape[1:])
        full[low - start : high - start] = rows
        rows = full
    return rows.unflatten(1, (hkv, -1)).permute(1, 2, 0, 3).reshape(hkv, -1, x.shape[2])


def _quantized(x: torch.Tensor, scale: torch.Tensor | float | None, format: str, rotation: str) -> Quantized:
    if scale is None or format == "none":
        scale = 1.0 if format == "none" else calibrate_scale(x, format=format, rotation=rotation)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return Quantized(quantize_kv(x, scale, format, rotation), scale, format)
