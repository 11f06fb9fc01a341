"""Decode over a paged cache: the reference's numerics for the last tokens of each sequence.

All key blocks of a sequence are computed side by side, in the 64-key blocks of prefill, so that a token scored here and
rescored in prefill agrees up to the order of fp32 summation. Sequences are taken one by one: a result does not depend
on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zyfa_backend.config import BLOCK, LEAN, AttentionConfig
from zyfa_backend.quantization import quantize_q, unpack, unpack_into
from zyfa_backend.reference_checks import AttentionError, check_cache, check_scalars, check_stored_scale
from zyfa_backend.reference_tiles import (
    LOG2E,
    combine,
    mask_scores,
    per_q_head,
    poison,
    split_poison,
    weights,
)
from zyfa_backend.workspace import buffer

_PANEL_ELEMENTS = 1 << 19  # of K or V dequantised at a time


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
    k_factor, v_factor = _stored_scale("k", k_scale, q, hkv), _stored_scale("v", v_scale, q, hkv)
    c = quantized.scale * (per_q_head(k_factor, hq, hkv) * (softmax_scale * LOG2E)) * q_factor
    # [B, Hkv, group · q_len, …], as the products want them
    queries = queries.view(-1, q_len, hkv, group, dim).permute(0, 2, 3, 1, 4).reshape(-1, hkv, group * q_len, dim)
    c = c.view(-1, q_len, hkv, group, 1).permute(0, 2, 3, 1, 4).reshape(-1, hkv, group * q_len, 1)
    numerator = torch.empty(len(lengths), hkv, group * q_len, dv, device=q.device)
    denominator = torch.empty(len(lengths), hkv, group * q_len, device=q.device)
    m = torch.full_like(denominator, -torch.inf)
    for b, length in enumerate(lengths):
        begin = 0 if window is None else max(0, length - q_len - window) // (2 * BLOCK) * (2 * BLOCK)
        k_stored, v_stored = (_Stored(cache, block_table[b], begin, length) for cache in (k_cache, v_cache))
        state = _attend_stored(queries[b], c[b], k_stored, v_stored, m[b], q_len, window, config)
        numerator[b], denominator[b], m[b] = state
    shape = (len(lengths), hkv, group, q_len)
    scale = per_q_head(v_factor, hq, hkv).view(hkv, group, 1, 1)
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


@dataclass(frozen=True)
class _Stored:
    """Tokens begin … end of a sequence in a cache."""

    cache: torch.Tensor
    row: torch.Tensor
    begin: int
    end: int

    def panels(self, format: str, name: str) -> Iterator[tuple[slice, torch.Tensor, float, bool]]:
        """(positions from `begin` on, values fp32 [n, Hkv, D], factor, finite) piece by piece, each in one buffer."""
        block_size, hkv, dim = self.cache.shape[1:]
        step = max(1, _PANEL_ELEMENTS // (block_size * hkv * dim))
        for first in range(self.begin // block_size, -(-self.end // block_size), step):
            ids = self.row[first : min(first + step, -(-self.end // block_size))]
            stored = buffer("stored", (ids.shape[0], *self.cache.shape[1:]), self.cache.dtype, self.cache.device)
            torch.index_select(self.cache, 0, ids, out=stored)
            start, stop = max(first * block_size, self.begin), min((first + step) * block_size, self.end)
            tokens = stored.view(-1, hkv, dim)[start - first * block_size : stop - first * block_size]
            values = buffer(name, tokens.shape, torch.float32, tokens.device)
            factor, finite = unpack_into(values, tokens.view(torch.int8) if format == "int8" else tokens, format)
            yield slice(start - self.begin, stop - self.begin), values, factor, finite


def _attend_stored(
    queries: torch.Tensor,
    c: torch.Tensor,
    k_stored: _Stored,
    v_stored: _Stored,
    m: torch.Tensor,
    q_len: int,
    window: int | None,
    config: AttentionConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(numerator, denominator, m') of queries [Hkv, R, D] over the stored keys; c: [Hkv, R, 1]."""
    begin, end = k_stored.begin, k_stored.end
    n = end - begin
    x, spare = buffer(
        "decode scores", (2, *queries.shape[:2], -(-n // config.tile) * config.tile), torch.float32, queries.device
    ).unbind()
    for span, keys, factor, _ in k_stored.panels(config.qk_format, "decode keys"):
        torch.mul(torch.bmm(queries, keys.permute(1, 2, 0)), c * factor, out=x[..., span])
    x[..., n:].fill_(-torch.inf)
    live = mask_scores(x[..., :n].unflatten(1, (-1, q_len)), end - q_len, begin, end, True, window)
    denominator, m_after = weights(x, m, config, spare.view(-1))
    numerator = torch.zeros(*queries.shape[:2], v_stored.cache.shape[3], device=queries.device)
    for span, values, factor, finite in v_stored.panels(config.v_format, "decode values"):
        by_head = values.transpose(0, 1)
        bad = None if finite else split_poison(by_head)
        numerator.add_(torch.bmm(x[..., span], by_head), alpha=factor)
        if bad is not None:
            poison(numerator.unflatten(1, (-1, q_len)), bad, None if live is None else live[:, span])
    return numerator, denominator, m_after


def _stored_scale(name: str, scale: torch.Tensor | float, like: torch.Tensor, hkv: int) -> torch.Tensor:
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=like.device)
    check_stored_scale(name, tensor, hkv)
    return tensor
