"""Paged decode in Triton: one new query a sequence, its keys cut into splits that work side by side.

The numerics are those of `prefill_kernel`, tile by tile of TILE keys aligned to position 0. A code of P depends on the
running maximum at the time of its tile, and so on all keys before it; so that a token gets the codes here that prefill
would give it, a split must start from the maximum of the splits before it:

1. `maxima_kernel` writes the largest product of each tile, of all splits but the last;
2. `attend_kernel` starts each split from the maximum of those and goes on as prefill does;
3. `combine_kernel` adds the splits up in their order.

What is read twice is K, beyond the first split's length. Splits follow from a row's own length alone. Codes of FP8 are
widened to fp16, in which products are exact: decode waits for memory, not for them. The queries of a key-value head are
the narrow side of each product, so that warps share the keys, then the channels of V, between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zyfa_kernels.triton.prefill_kernel import LN2, SMALLEST_SCALE, _half, _maximum, _softmax
from zyfa_kernels.triton.transpose import _row_pointers

NAN_INT8 = tl.constexpr(-128)  # the code of an int8 key that is not finite


@triton.jit
def _values(codes, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """Codes as a product takes them: int8, fp16, or, where the compiler has no e4m3, fp16 of value/256."""
    if INT8:
        return codes
    elif NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return _half(codes)


@triton.jit
def _splits(length, window, WINDOW: tl.constexpr, MOST: tl.constexpr, LEAST_TILES: tl.constexpr, TILE: tl.constexpr):
    """(position of the first tile, tiles of a split, splits) of a sequence."""
    begin = tl.maximum(length - 1 - window, 0) // TILE * TILE if WINDOW else 0
    tiles = tl.cdiv(length - begin, TILE)
    per_split = tl.maximum(tl.cdiv(tiles, MOST), LEAST_TILES)
    return begin, per_split, tl.cdiv(tiles, per_split)


@triton.jit
def _queries(
    q,
    seq,
    kv_head,
    part,
    q_stride_t: tl.constexpr,
    q_stride_h: tl.constexpr,
    GROUP: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    INT8: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """(heads [M], which of them exist, channels below and from D1 on) of a part of a group."""
    member = part * TILE_M + tl.arange(0, TILE_M)
    live = member < GROUP
    head = kv_head * GROUP + member
    rows = q + seq.to(tl.int64) * q_stride_t + head * q_stride_h
    q1 = tl.load(rows[:, None] + tl.arange(0, D1)[None, :], mask=live[:, None], other=0)
    q1 = _values(q1, INT8, NATIVE)
    q2 = q1
    if D2:
        q2 = tl.load(rows[:, None] + (D1 + tl.arange(0, D2))[None, :], mask=live[:, None], other=0)
        q2 = _values(q2, INT8, NATIVE)
    return head, live, q1, q2


@triton.jit
def _products(
    q1,
    q2,
    k_head,
    key,
    live,
    block_table,
    seq,
    table_stride,
    k_stride_b: tl.constexpr,
    k_stride_t: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK: tl.constexpr,
    INT8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """fp32 q·k [M, TILE]; -inf where a key is not live, NaN where it is not finite."""
    rows = _row_pointers(k_head, key, block_table, seq, table_stride, 0, k_stride_b, k_stride_t, live, BLOCK)
    k1 = tl.load(rows[:, None] + tl.arange(0, D1)[None, :], mask=live[:, None], other=0)
    s = tl.dot(_values(k1, INT8, NATIVE), tl.trans(q1))
    if INT8:
        bad = tl.max((k1 == NAN_INT8).to(tl.int32), 1)
    if D2:
        k2 = tl.load(rows[:, None] + (D1 + tl.arange(0, D2))[None, :], mask=live[:, None], other=0)
        s += tl.dot(_values(k2, INT8, NATIVE), tl.trans(q2))
        if INT8:
            bad |= tl.max((k2 == NAN_INT8).to(tl.int32), 1)
    s = s.to(tl.float32)
    if INT8:
        s = tl.where(bad[:, None] != 0, float("nan"), s)
    elif not NATIVE:
        s = s * 65536.0
    return tl.trans(tl.where(live[:, None], s, float("-inf")))


@triton.jit(
    do_not_specialize=["first_sequence", "longest", "window", "table_stride", "tiles"],
    do_not_specialize_on_alignment=["maxima", "block_table", "seqlens_k"],
)
def maxima_kernel(
    q,
    k,
    maxima,
    block_table,
    seqlens_k,
    first_sequence,
    longest,
    window,
    table_stride,
    tiles,
    q_stride_t: tl.constexpr,
    q_stride_h: tl.constexpr,
    k_stride_b: tl.constexpr,
    k_stride_t: tl.constexpr,
    k_stride_h: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    NATIVE: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """maxima[sequence, head, tile] of all splits but the last: grid [programs a head, Hkv · PARTS, sequences]."""
    kv_head, part, local = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS, tl.program_id(2)
    seq = first_sequence + local
    length = tl.minimum(tl.load(seqlens_k + seq), longest)
    begin, per_split, splits = _splits(length, window, WINDOW, MOST, LEAST_TILES, TILE)
    if tl.program_id(0) < splits - 1:
        head, live_row, q1, q2 = _queries(
            q, seq, kv_head, part, q_stride_t, q_stride_h, GROUP, D1, D2, INT8, NATIVE, TILE_M
        )
        heads = tl.num_programs(1) // PARTS * GROUP
        to = maxima + (local.to(tl.int64) * heads + head) * tiles
        k_head = k + kv_head.to(tl.int64) * k_stride_h
        for split in tl.range(tl.program_id(0), splits - 1, tl.num_programs(0)):
            for tile in tl.range(split * per_split, split * per_split + per_split):
                key = begin + tile * TILE + tl.arange(0, TILE)
                live = key < length
                if WINDOW:
                    live = live & (key >= length - 1 - window)
                s = _products(
                    q1,
                    q2,
                    k_head,
                    key,
                    live,
                    block_table,
                    seq,
                    table_stride,
                    k_stride_b,
                    k_stride_t,
                    D1,
                    D2,
                    BLOCK,
                    INT8,
                    NATIVE,
                )
                tl.store(to + tile, tl.reduce(s, 1, _maximum), mask=live_row)


@triton.jit(
    do_not_specialize=["first_sequence", "longest", "window", "table_stride", "tiles", "room"],
    do_not_specialize_on_alignment=["q_scale", "k_scale", "maxima", "state", "block_table", "seqlens_k"],
)
def attend_kernel(
    q,
    q_scale,
    k,
    v,
    k_scale,
    maxima,
    partial,
    state,
    block_table,
    seqlens_k,
    first_sequence,
    longest,
    window,
    table_stride,
    tiles,
    room,
    softmax_scale_log2,
    delta,
    q_stride_t: tl.constexpr,
    q_stride_h: tl.constexpr,
    q_scale_stride_t: tl.constexpr,
    q_scale_stride_h: tl.constexpr,
    k_stride_b: tl.constexpr,
    k_stride_t: tl.constexpr,
    k_stride_h: tl.constexpr,
    v_stride_b: tl.constexpr,
    v_stride_t: tl.constexpr,
    v_stride_h: tl.constexpr,
    k_scale_stride: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAN: tl.constexpr,
    INT8: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    OFFSET: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """Numerators partial[sequence, head, split, DV] and state[…, 3] = m, e, sum of P: grid as `maxima_kernel`."""
    kv_head, part, local = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS, tl.program_id(2)
    seq = first_sequence + local
    length = tl.minimum(tl.load(seqlens_k + seq), longest)
    begin, per_split, splits = _splits(length, window, WINDOW, MOST, LEAST_TILES, TILE)
    if tl.program_id(0) < splits:
        head, live_row, q1, q2 = _queries(
            q, seq, kv_head, part, q_stride_t, q_stride_h, GROUP, D1, D2, INT8, NATIVE, TILE_M
        )
        q_scale_row = q_scale + seq.to(tl.int64) * q_scale_stride_t + head * q_scale_stride_h
        c = tl.load(q_scale_row, mask=live_row, other=0.0) * (
            tl.load(k_scale + kv_head * k_scale_stride) * softmax_scale_log2
        )
        c = tl.where(c < SMALLEST_SCALE, SMALLEST_SCALE, c)
        heads = tl.num_programs(1) // PARTS * GROUP
        row = local.to(tl.int64) * heads + head
        k_head, v_head = k + kv_head.to(tl.int64) * k_stride_h, v + kv_head.to(tl.int64) * v_stride_h
        d_v, column = tl.arange(0, DV), tl.arange(0, 32)
        for split in tl.range(tl.program_id(0), splits, tl.num_programs(0)):
            first = split * per_split
            m = tl.full([TILE_M], float("-inf"), tl.float32)
            for before in tl.range(0, first, 32):
                known = (before + column < first)[None, :] & live_row[:, None]
                found = maxima + (row * tiles + before)[:, None] + column[None, :]
                m = _maximum(m, tl.reduce(tl.load(found, mask=known, other=-float("inf")), 1, _maximum))
            e = tl.zeros([TILE_M], tl.float32)
            o = tl.zeros([DV, TILE_M], tl.float32)
            total = tl.zeros([TILE_M], tl.float32)
            last = tl.minimum(first + per_split, tl.cdiv(length - begin, TILE))
            for tile in tl.range(first, last):
                key = begin + tile * TILE + tl.arange(0, TILE)
                live = key < length
                if WINDOW:
                    live = live & (key >= length - 1 - window)
                s = _products(
                    q1,
                    q2,
                    k_head,
                    key,
                    live,
                    block_table,
                    seq,
                    table_stride,
                    k_stride_b,
                    k_stride_t,
                    D1,
                    D2,
                    BLOCK,
                    INT8,
                    NATIVE,
                )
                # A value that no query sees is 0, for 0 · NaN would be NaN.
                rows = _row_pointers(
                    v_head, key, block_table, seq, table_stride, 0, v_stride_b, v_stride_t, live, BLOCK
                )
                values = tl.load(rows[:, None] + d_v[None, :], mask=live[:, None], other=0)
                p, factor, m, e = _softmax(s, m, e, c, delta, OFFSET, LEAN, not NATIVE, NATIVE, PTX)
                # By the hardware: of bits moved by hand Triton 3.6 made other values in each run on sm_90, and NaN.
                p = p.to(tl.float16)
                o = tl.fma(o, factor[None, :], tl.dot(tl.trans(_values(values, False, NATIVE)), tl.trans(p)))
                total = tl.fma(total, factor, tl.sum(p.to(tl.float32), 1))
            place = row * room + split
            tl.store(partial + (place * DV)[None, :] + d_v[:, None], o, mask=live_row[None, :])
            tl.store(state + place * 3, m, mask=live_row)
            tl.store(state + place * 3 + 1, e, mask=live_row)
            tl.store(state + place * 3 + 2, total, mask=live_row)


@triton.jit(
    do_not_specialize=["first_sequence", "longest", "window", "room", "lse_stride_h"],
    do_not_specialize_on_alignment=["q_scale", "k_scale", "v_scale", "state", "out", "lse", "seqlens_k"],
)
def combine_kernel(
    q_scale,
    k_scale,
    v_scale,
    partial,
    state,
    out,
    lse,
    seqlens_k,
    first_sequence,
    longest,
    window,
    room,
    lse_stride_h,
    softmax_scale_log2,
    q_scale_stride_t: tl.constexpr,
    q_scale_stride_h: tl.constexpr,
    k_scale_stride: tl.constexpr,
    v_scale_stride: tl.constexpr,
    out_stride_t: tl.constexpr,
    out_stride_h: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    NATIVE: tl.constexpr,
    OFFSET: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One head of one sequence: grid [Hq, sequences]."""
    head, local = tl.program_id(0), tl.program_id(1)
    seq = first_sequence + local
    length = tl.minimum(tl.load(seqlens_k + seq), longest)
    _, _, splits = _splits(length, window, WINDOW, MOST, LEAST_TILES, TILE)
    d_v, column = tl.arange(0, DV), tl.arange(0, AT_ONCE)
    place = (local.to(tl.int64) * tl.num_programs(0) + head) * room
    kv_head = head // GROUP
    c = tl.load(q_scale + seq.to(tl.int64) * q_scale_stride_t + head * q_scale_stride_h) * (
        tl.load(k_scale + kv_head * k_scale_stride) * softmax_scale_log2
    )
    c = tl.where(c < SMALLEST_SCALE, SMALLEST_SCALE, c)
    # Each split starts from the maximum of those before, so the last one's is the row's.
    m = tl.load(state + (place + splits - 1) * 3, mask=splits > 0, other=0.0)
    numerator, denominator = tl.zeros([DV], tl.float32), 0.0
    for first in tl.range(0, splits, AT_ONCE):
        split = first + column
        live = split < splits
        m_split = tl.load(state + (place + split) * 3, mask=live, other=-float("inf"))
        e_split = tl.load(state + (place + split) * 3 + 1, mask=live, other=0.0)
        total = tl.load(state + (place + split) * 3 + 2, mask=live, other=0.0)
        o = tl.load(partial + ((place + split) * DV)[:, None] + d_v[None, :], mask=live[:, None], other=0.0)
        weight = tl.exp2(tl.fma(c, m_split - m, e_split))
        numerator += tl.sum(o * weight[:, None], 0)
        denominator += tl.sum(total * weight, 0)
    result = numerator * (1.0 / tl.where(denominator == 0.0, 1.0, denominator))
    if not NATIVE:  # and so was V
        result = result * 256.0
    result = result * tl.load(v_scale + kv_head * v_scale_stride)
    row_lse = LN2 * (tl.fma(m, c, -OFFSET) + tl.log2(denominator))
    if not NATIVE:
        row_lse += LN2 * 8.0  # P was taken as 1/256 of its value
    row_lse = tl.where(splits == 0, float("-inf"), row_lse)
    to = out + seq.to(tl.int64) * out_stride_t + head * out_stride_h
    tl.store(to + d_v, result.to(out.dtype.element_ty))
    tl.store(lse + head.to(tl.int64) * lse_stride_h + seq, row_lse)
