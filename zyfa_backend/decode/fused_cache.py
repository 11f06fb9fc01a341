"""Decode on a CPU over an engine's cache that keeps K and V of a head side by side.

The numerics are those of `reference.decode`, which takes caches of any layout; this form reads a sequence's blocks
in one copy, converts them head-major and multiplies them dense, at about a third of the time.
"""

from __future__ import annotations

import torch

from zyfa_backend.config import AttentionConfig
from zyfa_backend.products import products
from zyfa_backend.quantization import e4m3_over_256, quantize_q, unpack
from zyfa_backend.reference_tiles import (
    LOG2E,
    block_probabilities,
    combine,
    mask_scores,
    poison,
    split_poison,
)
from zyfa_backend.workspace import buffer

_ALIGN = 128  # a multiple of every tile: reading from one on keeps a sequence's blocks aligned
_LARGEST = {"fp8_e4m3": 448 / 256, "int8": 127}


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: list[int],
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    softmax_scale: float,
    window: int | None,
    config: AttentionConfig,
    finite: bool,
) -> torch.Tensor:
    """Attention of the last token of each sequence.

    q: [B, Hq, D] in the model's dtype, after RoPE, not rotated.
    kv_cache: [num_blocks, Hkv, block_size, 2·D], K before V, bytes of config's formats or the model's dtype.
    block_table: [B, n] block numbers; seq_lens: keys of each sequence.
    k_scale, v_scale: fp32 [Hkv]. window: as in `reference.attend`. finite: no NaN and no infinity was ever written to
    this cache, which saves looking for them.
    Returns [B, Hq, D] in q's dtype.
    """
    rows, hq, dim = q.shape
    hkv = kv_cache.shape[1]
    group = hq // hkv
    quantized = quantize_q(q, config)
    queries, factor = unpack(quantized.data, quantized.format)
    queries = queries.view(rows, hkv, group, dim)
    c = quantized.scale.view(rows, hkv, group, 1) * (k_scale * (softmax_scale * LOG2E * factor)).view(hkv, 1, 1)
    scale = v_scale.view(hkv, 1, 1)
    out = torch.empty_like(q)
    for row, length in enumerate(seq_lens):
        begin = 0 if window is None else max(0, length - 1 - window) // _ALIGN * _ALIGN
        k, v, k_factor, v_factor = _read(kv_cache, block_table[row], begin, length, config, finite)
        n = length - begin
        x, spare = buffer("decode scores", (2, hkv, group, k.shape[1]), torch.float32, q.device).unbind()
        for head, scores in enumerate(products(queries[row], k)):
            torch.mul(scores, c[row, head] * k_factor, out=x[head])
        x[..., n:].fill_(-torch.inf)
        live = mask_scores(x[..., :n].unsqueeze(2), length - 1, begin, length, True, window)
        m = torch.full((hkv, group), -torch.inf)
        p, block_factor, m = block_probabilities(x, m, config, spare.view(-1))
        p.mul_(block_factor.unsqueeze(-1))
        bad = None if finite else split_poison(v)
        numerator = torch.empty(hkv, group, dim)
        for head, weighted in enumerate(products(x, v.transpose(1, 2))):
            torch.mul(weighted, v_factor, out=numerator[head])
        if bad is not None:
            poison(numerator.unsqueeze(2), bad[:, :n], live)
        out[row] = combine(numerator, x.sum(-1), m, scale)[0].view(hq, -1)
    return out


def _read(
    cache: torch.Tensor, row: torch.Tensor, begin: int, length: int, config: AttentionConfig, finite: bool
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """K and V from token `begin` on as fp32 [Hkv, n, D], n a multiple of a tile, and the factors their values lack.

    V is zero from `length` on; K holds anything there.
    """
    _, hkv, size, width = cache.shape
    skipped = begin // size
    first, stop = begin - skipped * size, length - skipped * size
    ids = row[skipped : -(-length // size)]
    stored = buffer("decode bytes", (ids.shape[0], *cache.shape[1:]), cache.dtype, cache.device)
    stored = torch.index_select(cache, 0, ids, out=stored).permute(1, 0, 2, 3)
    padded = first + -(-(stop - first) // _ALIGN) * _ALIGN
    k_data, v_data = stored.split(width // 2, dim=-1)
    if config.qk_format == "int8":
        k_data = k_data.view(torch.int8)
    k, k_factor = _dense("decode K", k_data, config.qk_format, padded, finite)
    v, v_factor = _dense("decode V", v_data, config.v_format, padded, finite)
    v[:, stop:] = 0
    return k[:, first:padded], v[:, first:padded], k_factor, v_factor


def _dense(name: str, stored: torch.Tensor, form: str, padded: int, finite: bool) -> tuple[torch.Tensor, float]:
    """Values of stored [Hkv, blocks, block size, D] as fp32 [Hkv, padded or more, D], and the factor they lack."""
    hkv, blocks, size, dim = stored.shape
    out = buffer(name, (hkv, max(padded, blocks * size), dim), torch.float32, stored.device)
    held = out[:, : blocks * size].view(stored.shape)
    if form == "fp8_e4m3":
        held.copy_(e4m3_over_256(stored, buffer("decode codes", stored.shape, torch.int16, stored.device)))
    else:
        held.copy_(stored)
    if not finite and form != "none":
        # Only a NaN code reads as more than the largest value.
        held.masked_fill_(held.abs() > _LARGEST[form], torch.nan)
    return out, 256.0 if form == "fp8_e4m3" else 1.0
