"""Batches of sequences for `prefill`, paged and packed, and what the reference says about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from zyfa_kernels.triton.prefill import prefill

from tests.attention_cases import inputs, operands
from zyfa_backend import reference
from zyfa_backend.config import AttentionConfig
from zyfa_backend.quantization import Quantized

CONFIG = AttentionConfig(tile=128, arithmetic="fused")
SCALE = 0.11


@dataclass
class Batch:
    """Quantised sequences of a batch; K and V share one scale per head over the batch."""

    q: list[Quantized]
    k: list[Quantized]
    v: list[Quantized]
    config: AttentionConfig

    @property
    def queries(self) -> list[int]:
        return [len(x.data) for x in self.q]

    @property
    def keys(self) -> list[int]:
        return [len(x.data) for x in self.k]


def shares_of_heads(b: Batch) -> list[tuple[slice, Batch]]:
    """What each of two ranks under tensor parallelism has of 4 query heads and 2 of keys: (query heads, its batch)."""
    shares = []
    for rank in range(2):
        q_heads, kv_heads = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        q = [Quantized(x.data[:, q_heads], x.scale[:, q_heads], x.format) for x in b.q]
        k, v = ([Quantized(x.data[:, kv_heads], x.scale[kv_heads], x.format) for x in xs] for xs in (b.k, b.v))
        shares.append((q_heads, Batch(q, k, v, b.config)))
    return shares


def batch(
    lengths: list[tuple[int, int]],
    q_heads: int = 2,
    kv_heads: int = 1,
    dim: int = 128,
    config: AttentionConfig = CONFIG,
    kind: str = "gaussian",
    seed: int = 0,
    ones: bool = False,
) -> Batch:
    """lengths: (queries, keys) of each sequence."""
    tokens = sum(keys for _, keys in lengths)
    q, k, v = inputs(tokens, q_heads, kv_heads, dim, min(dim, 128), kind, seed)
    if ones:
        v = torch.ones_like(v)
    wide = operands(q, k, v, config)
    if ones:
        one = Quantized(torch.full_like(wide[2].data, 0x38), torch.ones(kv_heads), wide[2].format)
        wide = (*wide[:2], one)
    parts: tuple[list[Quantized], ...] = ([], [], [])
    start = 0
    for queries, keys in lengths:
        for x, part, first in zip(wide, parts, (start + keys - queries, start, start), strict=True):
            scale = x.scale[first : start + keys] if x.scale.dim() == 2 else x.scale
            part.append(Quantized(x.data[first : start + keys], scale, x.format))
        start += keys
    return Batch(*parts, config)


def expected(b: Batch, causal: bool, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, Dv] and lse [Hq, T] of the reference, sequence by sequence."""
    results = [
        reference.attend(q, k, v, softmax_scale=SCALE, causal=causal, window=window, config=b.config, out_dtype=dtype)
        for q, k, v in zip(b.q, b.k, b.v, strict=True)
    ]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=1)


def paged(x: list[Quantized], other: list[Quantized], block: int, table: torch.Tensor, layout: str) -> Any:
    """Caches of x and other, [num_blocks, block, H, D], filled by `table`; what no sequence owns holds NaN codes.

    layout "kv" is one buffer [num_blocks, H, block, 2D] seen twice; "split" two plain ones.
    """
    blocks = int(table.max()) + 2
    heads, d, dv = x[0].data.shape[1], x[0].data.shape[2], other[0].data.shape[2]
    if layout == "kv":
        both = torch.full((blocks, heads, block, d + dv), 0x7F, dtype=torch.uint8).permute(0, 2, 1, 3)
        caches = both[..., :d], both[..., d:]
    else:
        caches = tuple(torch.full((blocks, block, heads, n), 0x7F, dtype=torch.uint8) for n in (d, dv))
    for cache, sequences in zip(caches, (x, other), strict=True):
        for row, sequence in zip(table, sequences, strict=True):
            position = torch.arange(len(sequence.data))
            cache[row[position // block].long(), position % block] = sequence.data.view(torch.uint8)
    return caches


def block_table(keys: list[int], block: int, seed: int = 0) -> torch.Tensor:
    """int32 [B, n]: shuffled pages, a page of its own for each block of each sequence."""
    columns = -(-max(keys) // block)
    order = torch.randperm(len(keys) * columns, generator=torch.Generator().manual_seed(seed))
    return order.view(len(keys), columns).to(torch.int32)


def run(
    b: Batch,
    block: int | None = 16,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.float16,
    layout: str = "split",
    device: str = "cpu",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prefill` of a batch; block None packs the keys. Returns out and lse on the CPU."""

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    q = torch.cat([x.data for x in b.q]).to(device)
    q_scale = torch.cat([x.scale for x in b.q]).to(device)
    keys: dict[str, Any] = {}
    if block is None:
        k, v = (torch.cat([x.data for x in xs]) for xs in (b.k, b.v))
        keys["cu_seqlens_k"] = offsets(b.keys)
        keys["block_table"] = None
    else:
        table = block_table(b.keys, block)
        k, v = paged(b.k, b.v, block, table, layout)
        keys["block_table"] = table.to(device)
        keys["seqlens_k"] = torch.tensor(b.keys, dtype=torch.int32, device=device)
    if layout == "kv":
        storage = k._base.to(device)
        k, v = (storage.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (k, v))
    if "out" not in options:
        options["out"] = torch.full((*q.shape[:2], b.v[0].data.shape[2]), torch.nan, dtype=dtype, device=device)
    out, lse = prefill(
        q,
        q_scale,
        k.to(device),
        v.to(device),
        b.k[0].scale.to(device).reshape(-1),
        b.v[0].scale.to(device).reshape(-1),
        cu_seqlens_q=offsets(b.queries),
        max_seqlen_q=max(b.queries),
        max_seqlen_k=max(b.keys),
        softmax_scale=SCALE,
        causal=causal,
        window=window,
        p=b.config.probabilities,
        qk_format=b.config.qk_format,
        offset=b.config.offset,
        delta=b.config.delta,
        lse=True,
        **keys,
        **options,
    )
    assert lse is not None
    return out.cpu(), lse.cpu()


def with_config(**changes: Any) -> AttentionConfig:
    return replace(CONFIG, **changes)
