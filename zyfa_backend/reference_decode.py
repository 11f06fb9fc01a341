"""Decode over a paged cache: the reference's numerics for the last tokens of each sequence.

All key blocks of a sequence are computed side by side, in the 64-key blocks of prefill, so that a token scored here and
rescored in prefill agrees up to the order of fp32 summation. Sequences are taken one by one: a result does not depend
on what else is in the batch.
"""

from __future__ import annotations

import torch

from zyfa_backend.config import BLOCK, LEAN, AttentionConfig
from zyfa_backend.quantization import is_finite, quantize_q, unpack
from zyfa_backend.reference_checks import AttentionError, check_cache, check_scalars
from zyfa_backend.reference_tiles import (
    LOG2E,
    block_probabilities,
    combine,
    mask_scores,
    per_q_head,
    poison,
    split_poison,
)


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
    """Causal attention of the last q_len tokens of each sequence over a paged cache.

    q: [B · q_len, Hq, D] in the model's dtype, after RoPE, not rotated; the rows of a sequence are adjacent.
    k_cache: [num_blocks, block_size, Hkv, D], v_cache: [num_blocks, block_size, Hkv, Dv], any strides between blocks;
    uint8 (e4m3 bytes, or int8 codes of either dtype) as config's formats say, or the model's dtype where they say
    "none". K is stored rotated.
    block_table: [B, n] block numbers; seq_lens: [B] keys of each sequence, the q_len new ones included.
    k_scale, v_scale: fp32 [Hkv] or scalar. window: a query at position p sees no key before p - window.
    Returns out [B · q_len, Hq, Dv] in q's dtype and lse fp32 [Hq, B · q_len], natural log. Raises AttentionError.
    """
    check_scalars(softmax_scale, window)
    lengths = check_cache(q, k_cache, v_cache, block_table, seq_lens, q_len, config)
    (rows, hq, dim), (hkv, dv) = q.shape, v_cache.shape[2:]
    group = hq // hkv
    quantized = quantize_q(q, config)
    queries, q_factor = unpack(quantized.data, quantized.format)
    c = quantized.scale * (per_q_head(_as_scale(k_scale, q), hq, hkv) * (softmax_scale * LOG2E)) * q_factor
    # [B, Hkv, group · q_len, …], as the products want them
    queries = queries.view(-1, q_len, hkv, group, dim).permute(0, 2, 3, 1, 4).reshape(-1, hkv, group * q_len, dim)
    c = c.view(-1, q_len, hkv, group, 1).permute(0, 2, 3, 1, 4).reshape(-1, hkv, group * q_len, 1)
    numerator = torch.empty(len(lengths), hkv, group * q_len, dv, device=q.device)
    denominator = torch.empty(len(lengths), hkv, group * q_len, device=q.device)
    m = torch.full_like(denominator, -torch.inf)
    for b, length in enumerate(lengths):
        begin = 0 if window is None else max(0, length - q_len - window) // (2 * BLOCK) * (2 * BLOCK)
        keys = _stored(k_cache, block_table[b], begin, length, config.qk_format)
        values = _stored(v_cache, block_table[b], begin, length, config.v_format)
        state = _attend_stored(queries[b], c[b], keys, values, m[b], begin, q_len, window, config)
        numerator[b], denominator[b], m[b] = state
    shape = (len(lengths), hkv, group, q_len)
    scale = per_q_head(_as_scale(v_scale, q), hq, hkv).view(hkv, group, 1, 1)
    out, lse = combine(numerator.view(*shape, dv), denominator.view(shape), m.view(shape), scale)
    out = out.permute(0, 3, 1, 2, 4).reshape(rows, hq, dv).to(q.dtype)
    return out, lse.permute(1, 2, 0, 3).reshape(hq, rows)


def gather(cache: torch.Tensor, block_table_row: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, [length, Hkv, D] as stored.

    cache: [num_blocks, block_size, Hkv, D], any strides between blocks; block_table_row: [n] block numbers.
    Raises AttentionError if the row has too few blocks.
    """
    needed = -(-length // cache.shape[1])
    if needed > block_table_row.shape[0]:
        raise AttentionError(
            f"length={length} needs {needed} blocks of {cache.shape[1]}; the row has {block_table_row.shape[0]}"
        )
    picked = cache.index_select(0, block_table_row[:needed])
    return picked.view(-1, *cache.shape[2:])[:length]


def _attend_stored(
    queries: torch.Tensor,
    c: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    m: torch.Tensor,
    begin: int,
    q_len: int,
    window: int | None,
    config: AttentionConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(numerator, denominator, m') of queries [Hkv, R, D] over stored keys [n, Hkv, D] that start at `begin`."""
    n = keys.shape[0]
    k, k_factor = unpack(keys, config.qk_format)
    v, v_factor = unpack(values, config.v_format)
    x = torch.empty(*queries.shape[:2], -(-n // config.tile) * config.tile, device=queries.device)
    torch.mul(torch.bmm(queries, k.permute(1, 2, 0)), c * k_factor, out=x[..., :n])
    x[..., n:].fill_(-torch.inf)
    live = mask_scores(x[..., :n].unflatten(1, (-1, q_len)), begin + n - q_len, begin, begin + n, True, window)
    p, factor, m_after = block_probabilities(x, m, config, torch.empty_like(x).view(-1))
    p.mul_(factor.unsqueeze(-1))
    denominator = x.sum(-1)
    v = v.transpose(0, 1)
    bad = None if is_finite(values, config.v_format) else split_poison(v)
    numerator = torch.bmm(x[..., :n], v).mul_(v_factor)
    if bad is not None:
        poison(numerator.unflatten(1, (-1, q_len)), bad, live)
    return numerator, denominator, m_after


def _stored(cache: torch.Tensor, row: torch.Tensor, begin: int, length: int, format: str) -> torch.Tensor:
    """Tokens begin … length of a sequence [length - begin, Hkv, D], as stored."""
    skipped = begin // cache.shape[1]
    offset = skipped * cache.shape[1]
    stored = gather(cache, row[skipped:], length - offset)[begin - offset :]
    return stored.view(torch.int8) if format == "int8" else stored


def _as_scale(scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(scale, dtype=torch.float32, device=like.device)
