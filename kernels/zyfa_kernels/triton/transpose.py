"""V key-major: what the products with P want, made once per prefill in a workspace.

FP8 matrix products read both operands along the summed dimension, which for P·V is the keys; a cache keeps the channels
of a token together. `transpose` copies the V of each sequence, a tile of 128 keys and a head at a time, to
`[slot, Hkv, Dv, 128]`, slot = sequence · tiles + tile. On the way it

- turns NaN codes into 0 and notes the tile in `bad` (bit 0), since a product would carry 0 · NaN of a masked key into
  rows that do not see it; the attention kernel looks at noted tiles again. Of int8 K it notes the code -128 (bit 1);
- zeroes keys past the end of the sequence, which of one without keys is its whole first tile: Hopper's kernel takes
  at least that, masked, and 0 · NaN of what the workspace held before would be NaN;
- optionally orders the keys of each 16 as (2c, 2c+1, 2c+8, 2c+9) for c = 0 … 3, which is how the accumulator of
  Hopper's wgmma holds them: P then becomes the operand of the second product without moving between lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 128


@triton.jit
def _row_pointers(base, keys, block_table, seq, table_stride, first_key, stride_b, stride_t, live, BLOCK: tl.constexpr):
    """Pointers to the rows of `keys` of one sequence; BLOCK is 0 where the keys are not paged."""
    if BLOCK:
        page = tl.load(block_table + seq.to(tl.int64) * table_stride + keys // BLOCK, mask=live, other=0)
        return base + page.to(tl.int64) * stride_b + (keys % BLOCK) * stride_t
    else:
        return base + (first_key + keys).to(tl.int64) * stride_t


@triton.jit(
    do_not_specialize=["first_sequence", "table_stride", "window"],
    do_not_specialize_on_alignment=["bad", "block_table", "cu_seqlens_q", "lengths_k"],
)
def transpose_kernel(
    k,
    v,
    vt,
    bad,
    block_table,
    cu_seqlens_q,
    lengths_k,
    first_sequence,
    table_stride,
    window,
    k_stride_b: tl.constexpr,
    k_stride_t: tl.constexpr,
    k_stride_h: tl.constexpr,
    v_stride_b: tl.constexpr,
    v_stride_t: tl.constexpr,
    v_stride_h: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    WGMMA_ORDER: tl.constexpr,
    CHECK_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of keys of one head: grid [tiles, Hkv, sequences]. k, v, vt: int32 pointers, strides in int32 words."""
    tile, head, local = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles, heads = tl.num_programs(0), tl.num_programs(1)
    seq = first_sequence + local
    if BLOCK:
        first_key = 0
        length = tl.load(lengths_k + seq)
    else:
        first_key = tl.load(lengths_k + seq)
        length = tl.load(lengths_k + seq + 1) - first_key
    n0 = tile * TILE
    seen = n0 < tl.maximum(length, 1)
    if WINDOW:
        queries = tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq)
        seen = seen & (n0 + TILE > length - queries - window)
    if seen:
        quad = tl.arange(0, TILE // 4)
        word = tl.arange(0, DV // 4)
        if WGMMA_ORDER:
            first = n0 + quad // 4 * 16 + quad % 4 * 2
            far: tl.constexpr = 8
        else:
            first = n0 + quad * 4
            far: tl.constexpr = 2  # type: ignore[no-redef]
        v += head.to(tl.int64) * v_stride_h
        r0 = _load_words(
            v, first, word, length, block_table, seq, table_stride, first_key, v_stride_b, v_stride_t, BLOCK
        )
        r1 = _load_words(
            v, first + 1, word, length, block_table, seq, table_stride, first_key, v_stride_b, v_stride_t, BLOCK
        )
        r2 = _load_words(
            v, first + far, word, length, block_table, seq, table_stride, first_key, v_stride_b, v_stride_t, BLOCK
        )
        r3 = _load_words(
            v, first + far + 1, word, length, block_table, seq, table_stride, first_key, v_stride_b, v_stride_t, BLOCK
        )
        n_0, n_1, n_2, n_3 = _nan_bytes(r0), _nan_bytes(r1), _nan_bytes(r2), _nan_bytes(r3)
        noted = tl.max(tl.max(((n_0 | n_1 | n_2 | n_3) != 0).to(tl.int32), 1), 0)
        r0, r1, r2, r3 = r0 & ~n_0, r1 & ~n_1, r2 & ~n_2, r3 & ~n_3
        slot = (local * tiles + tile).to(tl.int64) * heads + head
        to = vt + slot * (DV * TILE // 4) + word[None, :] * TILE + quad[:, None]
        for i in tl.static_range(4):
            column = (
                ((r0 >> (8 * i)) & 255)
                | (((r1 >> (8 * i)) & 255) << 8)
                | (((r2 >> (8 * i)) & 255) << 16)
                | ((r3 >> (8 * i)) << 24)
            )
            tl.store(tl.trans(to + i * (TILE // 4)), tl.trans(column))
        if CHECK_K:
            noted |= _bad_keys(
                k + head.to(tl.int64) * k_stride_h,
                n0,
                length,
                block_table,
                seq,
                table_stride,
                first_key,
                k_stride_b,
                k_stride_t,
                D,
                BLOCK,
                TILE,
            )
        tl.store(bad + (local * heads + head).to(tl.int64) * tiles + tile, noted)


@triton.jit
def _load_words(
    base, keys, word, length, block_table, seq, table_stride, first_key, stride_b, stride_t, BLOCK: tl.constexpr
):
    """int32 [keys, words] of rows, 0 past the end."""
    live = keys < length
    rows = _row_pointers(base, keys, block_table, seq, table_stride, first_key, stride_b, stride_t, live, BLOCK)
    return tl.load(rows[:, None] + word[None, :], mask=live[:, None], other=0)


@triton.jit
def _nan_bytes(x):
    """255 in each byte of x that is an e4m3 NaN (0x7F or 0xFF), else 0."""
    return ((((x & 0x7F7F7F7F) + 0x01010101) >> 7) & 0x01010101) * 255


@triton.jit
def _bad_keys(
    k,
    n0,
    length,
    block_table,
    seq,
    table_stride,
    first_key,
    stride_b,
    stride_t,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """2 if one of the tile's int8 keys holds -128, else 0."""
    keys = n0 + tl.arange(0, TILE)
    found = tl.zeros([TILE, 16], tl.int32)
    for d in tl.static_range(0, D // 4, 16):
        word = d + tl.arange(0, 16)
        x = _load_words(k, keys, word, length, block_table, seq, table_stride, first_key, stride_b, stride_t, BLOCK)
        x = x ^ -0x7F7F7F80
        found |= (x - 0x01010101) & ~x & -0x7F7F7F80
    return tl.max(tl.max((found != 0).to(tl.int32), 1), 0) * 2
