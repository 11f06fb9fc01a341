"""Attention by the specification's numerics, in torch: the oracle of every kernel, and what serves on a CPU.

No matrix of all scores is formed: a tile of queries meets a panel of keys at a time. Query tiles, panels and key blocks
are aligned to absolute positions of the sequence and every product has a shape that depends on the position alone
(rows that are absent are computed as zeros), so that a row's bits do not depend on chunking, caching or batching.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zyfa_backend.config import BLOCK, LEAN, AttentionConfig
from zyfa_backend.quantization import (
    Quantized,
    calibrate_scale,
    codes_to_float,
    e4m3_decode_scaled,
    has_nan_code,
    quantize_kv,
    quantize_q,
)
from zyfa_backend.reference_tiles import LOG2E, block_probabilities, combine, rescale

PANEL = 512  # keys per product; a multiple of every tile
_TILE_ROWS = 1024  # rows of all heads in a query tile, about


class AttentionError(ValueError):
    """An argument of an attention call is not accepted; the message names it, its value and what would be."""


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
    """Rotates, quantises and attends, sequence by sequence.

    q: [Tq, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] after RoPE, packed; Hq a multiple of Hkv.
    cu_seqlens_q, cu_seqlens_k: [sequences + 1] integer offsets from 0 to Tq and Tk; without them one sequence. The
    queries of a sequence are the last of its keys.
    window: flash-attn's left window, a query at p sees keys from p - window on; None is unlimited.
    k_scale, v_scale: fp32 [Hkv] or scalar; None takes the largest value per sequence and head.
    Returns out [Tq, Hq, Dv] in q's dtype and lse fp32 [Hq, Tq], natural log. Raises AttentionError.
    """
    _check_operands(q, k, v)
    bounds_q = _bounds(cu_seqlens_q, q.shape[0], "cu_seqlens_q")
    bounds_k = _bounds(cu_seqlens_k, k.shape[0], "cu_seqlens_k")
    if len(bounds_q) != len(bounds_k):
        raise AttentionError(
            f"cu_seqlens_q has {len(bounds_q) - 1} sequences and cu_seqlens_k {len(bounds_k) - 1}; they must agree"
        )
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    for (q0, q1), (k0, k1) in zip(_spans(bounds_q), _spans(bounds_k), strict=True):
        out[q0:q1], lse[:, q0:q1] = attend(
            quantize_q(q[q0:q1], config),
            _quantize(k[k0:k1], k_scale, config.qk_format, config.rotation),
            _quantize(v[k0:k1], v_scale, config.v_format, "none"),
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence over quantised operands, rotated alike.

    q.data: [Tq, Hq, D] with scale [Tq, Hq]; k.data: [Tk, Hkv, D], v.data: [Tk, Hkv, Dv] with scale [Hkv] or scalar.
    context: query i stands at position context + i; Tk - Tq unless given.
    window: a query at position p sees no key before p - window. causal: none after p.
    Returns out [Tq, Hq, Dv] in out_dtype and lse fp32 [Hq, Tq], natural log. A query without a live key gives 0 and
    -inf. A live key whose K or V is not finite makes the row NaN (in the channels concerned for V), no other row.
    Raises AttentionError.
    """
    _check_operands(q.data, k.data, v.data)
    _check_scalars(softmax_scale, window)
    (tq, hq, dim), (tk, hkv, dv) = q.data.shape, v.data.shape
    group = hq // hkv
    context = tk - tq if context is None else context
    out = torch.empty(tq, hq, dv, dtype=out_dtype, device=q.data.device)
    lse = torch.empty(hq, tq, dtype=torch.float32, device=q.data.device)
    if tq == 0:
        return out, lse
    tile = _query_tile(hq)
    tile_start = context // tile * tile
    padded = -(-max(tk, 1) // max(tile, 2 * BLOCK)) * max(tile, 2 * BLOCK)
    keys = _head_major(codes_to_float(k.data, k.format), padded)
    values = _head_major(codes_to_float(v.data, v.format), padded)
    poisoned = _split_poison(values)
    queries = codes_to_float(q.data, q.format)
    # x = c · (q·k) in log2 units
    c = q.scale * (_per_q_head(k.scale, hq, hkv) * (softmax_scale * LOG2E))
    v_scale = _per_q_head(v.scale, hq, hkv).view(hkv, group, 1, 1)
    scratch = torch.empty(hkv * group * tile * PANEL, dtype=torch.float32, device=q.data.device)
    for first in range(tile_start, context + tq, tile):
        low, high = max(first - context, 0), min(first - context + tile, tq)
        q_tile = _tile_rows(queries, first - context, tile, hkv)
        c_tile = _tile_rows(c.unsqueeze(-1), first - context, tile, hkv)
        numerator = torch.zeros(hkv, group * tile, dv, dtype=torch.float32, device=q.data.device)
        denominator = torch.zeros(hkv, group * tile, dtype=torch.float32, device=q.data.device)
        m = torch.full_like(denominator, -torch.inf)
        for k0, k1 in _panels(first, tile, padded, causal, window):
            x = scratch[: hkv * group * tile * (k1 - k0)].view(hkv, group * tile, k1 - k0)
            torch.bmm(q_tile, keys[:, k0:k1].transpose(1, 2), out=x)
            x.mul_(c_tile)
            live = _live(first, tile, k0, k1, tk, causal, window, x.device)
            if live is not None:
                x.view(hkv, group, tile, k1 - k0).masked_fill_(~live, -torch.inf)
            p, factor, m_after = block_probabilities(x, m, config)
            p.mul_(factor.unsqueeze(-1))
            alpha = rescale(m, m_after)
            denominator.mul_(alpha).add_(x.sum(-1))
            numerator.mul_(alpha.unsqueeze(-1)).baddbmm_(x, values[:, k0:k1])
            if poisoned is not None:
                _poison(numerator.view(hkv, group, tile, dv), poisoned[:, k0:k1], live)
            m = m_after
        rows, row_lse = combine(
            numerator.view(hkv, group, tile, dv),
            denominator.view(hkv, group, tile),
            m.view(hkv, group, tile),
            v_scale,
        )
        inside = slice(low - (first - context), high - (first - context))
        out[low:high] = rows[:, :, inside].permute(2, 0, 1, 3).reshape(high - low, hq, dv)
        lse[:, low:high] = row_lse[:, :, inside].reshape(hq, high - low)
    return out, lse


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
    softmax_scale: float,
    window: int | None = None,
    config: AttentionConfig = LEAN,
    q_len: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last q_len tokens of each sequence over a paged cache, causal, in the blocks of `attend`.

    q: [B · q_len, Hq, D] in the model's dtype, not rotated; the rows of a sequence are adjacent.
    k_cache: [num_blocks, block_size, Hkv, D], v_cache: [num_blocks, block_size, Hkv, Dv], any strides; bytes (uint8, or
    int8 for int8 K) of config's formats, or the model's dtype where the format is "none". K is stored rotated.
    block_table: [B, n] block numbers; seq_lens: [B] keys of each sequence, the q_len new ones included.
    k_scale, v_scale: fp32 [Hkv] or scalar. window: as in `attend`.
    Returns out [B · q_len, Hq, Dv] in q's dtype and lse fp32 [Hq, B · q_len]. Raises AttentionError.
    """
    lengths = _check_cache(q, k_cache, v_cache, block_table, seq_lens, q_len, config)
    _check_scalars(softmax_scale, window)
    hq, (block_size, hkv, dv) = q.shape[1], v_cache.shape[1:]
    group = hq // hkv
    quantized = quantize_q(q, config)
    queries = codes_to_float(quantized.data, quantized.format)
    c = quantized.scale * (_per_q_head(_as_scale(k_scale, q), hq, hkv) * (softmax_scale * LOG2E))
    v_factor = _per_q_head(_as_scale(v_scale, q), hq, hkv).view(hkv, group, 1, 1)
    out = q.new_empty(q.shape[0], hq, dv)
    lse = torch.empty(hq, q.shape[0], dtype=torch.float32, device=q.device)
    for b, length in enumerate(lengths):
        rows = slice(b * q_len, (b + 1) * q_len)
        first = length - q_len
        begin = 0 if window is None else max(0, first - window) // (2 * BLOCK) * (2 * BLOCK)
        padded = begin + -(-max(length - begin, 1) // config.tile) * config.tile
        keys = _paged(k_cache, block_table[b], begin, length, padded, config.qk_format)
        values = _paged(v_cache, block_table[b], begin, length, padded, config.v_format)
        q_rows = _tile_rows(queries[rows], 0, q_len, hkv)
        x = torch.bmm(q_rows, keys.permute(1, 2, 0)).mul_(_tile_rows(c[rows].unsqueeze(-1), 0, q_len, hkv))
        live = _live(first, q_len, begin, padded, length, True, window, q.device)
        if live is not None:
            x.view(hkv, group, q_len, -1).masked_fill_(~live, -torch.inf)
        m = torch.full(x.shape[:2], -torch.inf, device=q.device)
        p, factor, m = block_probabilities(x, m, config)
        p.mul_(factor.unsqueeze(-1))
        values = values.permute(1, 0, 2)
        poisoned = _split_poison(values)
        numerator = torch.bmm(x, values).view(hkv, group, q_len, dv)
        if poisoned is not None:
            _poison(numerator, poisoned, live)
        o, row_lse = combine(
            numerator, x.sum(-1).view(hkv, group, q_len), m.view(hkv, group, q_len), v_factor
        )
        out[rows] = o.permute(2, 0, 1, 3).reshape(q_len, hq, dv)
        lse[:, rows] = row_lse.reshape(hq, q_len)
    return out, lse


def gather(cache: torch.Tensor, block_table_row: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens [length, Hkv, D] of a sequence, as stored, from a cache [num_blocks, block_size, Hkv, D]."""
    blocks = -(-length // cache.shape[1])
    if blocks > block_table_row.numel():
        raise AttentionError(
            f"length {length} needs {blocks} blocks of {cache.shape[1]}; the block table has {block_table_row.numel()}"
        )
    picked = cache[block_table_row[:blocks].long()]
    return picked.reshape(-1, *cache.shape[2:])[:length]


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys.

    out: [T, H, Dv], lse: fp32 [H, T], natural log, -inf where a set held no live key. Returns (out in out_a's dtype, lse).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    weight_a = torch.exp(lse_a - shift).transpose(0, 1).unsqueeze(-1)
    weight_b = torch.exp(lse_b - shift).transpose(0, 1).unsqueeze(-1)
    out = torch.where(weight_a == 0, 0.0, out_a.float() * weight_a)
    return (out + torch.where(weight_b == 0, 0.0, out_b.float() * weight_b)).to(out_a.dtype), lse


def _query_tile(hq: int) -> int:
    """Queries per tile; a function of the head count alone, since a row's bits depend on it."""
    return max(32, min(128, 1 << (_TILE_ROWS // hq).bit_length() - 1)) if hq <= _TILE_ROWS else 32


def _panels(first: int, tile: int, padded: int, causal: bool, window: int | None) -> Iterator[tuple[int, int]]:
    """Key ranges for the query tile at `first`: cut at multiples of PANEL, ends aligned to 128."""
    step = 2 * BLOCK
    begin = 0 if window is None else max(0, first - window) // step * step
    end = min(padded, -(-(first + tile) // step) * step) if causal else padded
    while begin < end:
        stop = min(end, begin // PANEL * PANEL + PANEL)
        yield begin, stop
        begin = stop


def _live(
    first: int, rows: int, k0: int, k1: int, tk: int, causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """bool [rows, k1 - k0], true where query first + r sees key k0 + j; None if all do."""
    cut_above = causal and k1 - 1 > first
    cut_below = window is not None and k0 < first + rows - 1 - window
    if not (cut_above or cut_below or k1 > tk):
        return None
    key = torch.arange(k0, k1, device=device)
    query = torch.arange(first, first + rows, device=device).unsqueeze(1)
    live = (key < tk).expand(rows, -1)
    if cut_above:
        live = live & (key <= query)
    if cut_below:
        live = live & (key >= query - window)
    return live


def _head_major(x: torch.Tensor, padded: int) -> torch.Tensor:
    """x [T, H, D] as [H, padded, D], zeros at the end."""
    out = x.new_zeros(x.shape[1], padded, x.shape[2])
    out[:, : x.shape[0]] = x.transpose(0, 1)
    return out


def _tile_rows(x: torch.Tensor, start: int, tile: int, hkv: int) -> torch.Tensor:
    """Rows start … start + tile of x [T, Hq, D] as [Hkv, group · tile, D]; zeros where x has none."""
    low, high = max(start, 0), min(start + tile, x.shape[0])
    rows = x[low:high]
    if high - low < tile:
        full = x.new_zeros(tile, *x.shape[1:])
        full[low - start : high - start] = rows
        rows = full
    hq, dim = x.shape[1:]
    return rows.view(tile, hkv, hq // hkv, dim).permute(1, 2, 0, 3).reshape(hkv, hq // hkv * tile, dim)


def _split_poison(values: torch.Tensor) -> torch.Tensor | None:
    """Replaces what is not finite in values [H, T, D] by 0 and returns where it was (fp32 0/1), or None if nowhere."""
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return None
    values.masked_fill_(bad, 0)
    return bad.float()


def _poison(numerator: torch.Tensor, bad: torch.Tensor, live: torch.Tensor | None) -> None:
    """NaN in numerator [H, G, R, Dv] where a live key has a bad value; bad: [H, n, Dv], live: [R, n] or None."""
    if live is None:
        touched = bad.any(dim=1, keepdim=True)
    else:
        touched = torch.matmul(live.float(), bad) > 0
    numerator.masked_fill_(touched.unsqueeze(1), torch.nan)


def _paged(
    cache: torch.Tensor, row: torch.Tensor, begin: int, length: int, padded: int, format: str
) -> torch.Tensor:
    """Tokens begin … length of a sequence as fp32 [padded - begin, Hkv, D], zeros from length on."""
    block_size = cache.shape[1]
    skipped = begin // block_size
    stored = gather(cache, row[skipped:], length - skipped * block_size)[begin - skipped * block_size :]
    if format == "int8":
        stored = stored.view(torch.int8)
    out = torch.empty(padded - begin, *cache.shape[2:], dtype=torch.float32, device=cache.device)
    out[: length - begin] = codes_to_float(stored, format)
    out[length - begin :] = 0
    return out


def _per_q_head(scale: torch.Tensor, hq: int, hkv: int) -> torch.Tensor:
    """scale (scalar or [Hkv]) as fp32 [Hq]."""
    scale = scale.float()
    return scale.reshape(1).expand(hq) if scale.numel() == 1 else scale.repeat_interleave(hq // hkv)


def _as_scale(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(scale, dtype=torch.float32, device=like.device)


def _quantize(x: torch.Tensor, scale: torch.Tensor | float | None, format: str, rotation: str) -> Quantized:
    if format == "none":
        scale = 1.0
    elif scale is None:
        scale = calibrate_scale(x, format=format, rotation=rotation)
    scale = _as_scale(scale, x)
    return Quantized(quantize_kv(x, scale, format, rotation), scale, format)


def _bounds(cu_seqlens: torch.Tensor | None, total: int, name: str) -> list[int]:
    if cu_seqlens is None:
        return [0, total]
    bounds = [int(b) for b in cu_seqlens]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or sorted(bounds) != bounds:
        raise AttentionError(f"{name} is {bounds}; expected offsets that rise from 0 to {total}")
    return bounds


def _spans(bounds: list[int]) -> list[tuple[int, int]]:
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise AttentionError(f"{name} has shape {list(x.shape)}; expected [tokens, heads, channels]")
    if k.shape[:2] != v.shape[:2]:
        raise AttentionError(f"k has shape {list(k.shape)} and v {list(v.shape)}; tokens and heads must agree")
    if q.shape[2] != k.shape[2]:
        raise AttentionError(f"q has {q.shape[2]} channels and k {k.shape[2]}; they must agree")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise AttentionError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key-value heads")


def _check_scalars(softmax_scale: float, window: int | None) -> None:
    if not 0 < softmax_scale < float("inf"):
        raise AttentionError(f"softmax_scale={softmax_scale!r} is not accepted; it is positive and finite")
    if window is not None and (not isinstance(window, int) or window < 0):
        raise AttentionError(f"window={window!r} is not accepted; None or the number of earlier keys a query sees, >= 0")


def _check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len: int,
    config: AttentionConfig,
) -> list[int]:
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise AttentionError(
            f"k_cache is {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; expected [blocks, block_size, Hkv, D] alike"
        )
    _check_operands(q, k_cache[0], v_cache[0])
    for name, cache, format in (("k_cache", k_cache, config.qk_format), ("v_cache", v_cache, config.v_format)):
        accepted = {"fp8_e4m3": (torch.uint8,), "int8": (torch.uint8, torch.int8)}.get(format)
        if accepted is not None and cache.dtype not in accepted:
            raise AttentionError(f"{name} has dtype {cache.dtype}; format {format} is stored as {accepted[0]}")
        if accepted is None and not cache.dtype.is_floating_point:
            raise AttentionError(f"{name} has dtype {cache.dtype}; format none is stored in a floating dtype")
    lengths = [int(n) for n in seq_lens]
    if block_table.dim() != 2 or block_table.shape[0] != len(lengths) or q.shape[0] != len(lengths) * q_len:
        raise AttentionError(
            f"q has {q.shape[0]} rows, block_table {list(block_table.shape)}, seq_lens {len(lengths)}, q_len {q_len}; "
            "expected B·q_len rows, [B, n] and B"
        )
    for length in lengths:
        if length < q_len:
            raise AttentionError(f"seq_lens holds {length}; every sequence has at least its q_len = {q_len} new tokens")
    return lengths
