"""FP8 prefill attention for Hopper, in Gluon: two consumer warpgroups of 64 queries and a producer warp.

The numerics are those of `prefill_kernel`, one maximum and one block exponent per tile of 128 keys. What is different
is the schedule. The producer fills rings of K tiles (from the cache, a TMA box per page) and of V tiles (key-major, from
the workspace of `transpose`); a stage holds a tile of V and the K of the tile after it. A consumer, per tile:

    wait for S = Q·K            the tile before it is still in the tensor cores of the other consumer
    softmax                     row maximum, exponent, codes of P; one FFMA and half an F2IP a score where P is lean
    issue P·V and P·1           P stays in registers: the workspace holds the keys in the accumulator's order
    issue the next Q·K          back to back behind them
    wait for P·V                O = O · factor + P·V in fp32, while the next Q·K runs

CTAs are persistent and take tiles of queries from the longest to the shortest, dealt there and back, so that each gets
about the same work.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LEAST_EXPONENT = gl.constexpr(-60.0)
SMALLEST_SCALE = gl.constexpr(1e-30)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a consumer: the height of a wgmma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _maximum(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _turns(m_blocks, combinations, section):
    """How often a CTA takes a tile: a whole number of rounds for each section of heads."""
    return gl.cdiv(combinations, section) * gl.cdiv(section * m_blocks, gl.num_programs(0))


@gluon.jit
def _place(turn, m_blocks, heads, combinations, section):
    """(whether there is one, query tile, head, sequence) of this CTA's turn-th tile.

    The (sequence, head) pairs are taken in sections; in each the longest tiles come first, dealt to the CTAs there and
    back, and the next section begins at the other end.
    """
    n = gl.num_programs(0)
    pid = gl.program_id(0)
    rounds = gl.cdiv(section * m_blocks, n)
    number = turn // rounds
    dealt = turn % rounds
    rank = dealt * n + gl.where((number + dealt) % 2 == 0, pid, n - 1 - pid)
    size = gl.minimum(section, combinations - number * section)
    tile_m = m_blocks - 1 - rank // size
    combination = number * section + rank % size
    return tile_m >= 0, tile_m, combination % heads, combination // heads


@gluon.jit
def _extent(
    seq, tile_m, cu_seqlens_q, lengths_k, window, PAGED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):
    """(first token, queries, first key, keys, first and end tile of keys) of a tile of queries."""
    first_row = gl.load(cu_seqlens_q + seq)
    queries = gl.load(cu_seqlens_q + seq + 1) - first_row
    if PAGED:
        first_key = gl.to_tensor(0)
        length = gl.load(lengths_k + seq)
    else:
        first_key = gl.load(lengths_k + seq)
        length = gl.load(lengths_k + seq + 1) - first_key
    row = tile_m * (2 * ROWS)
    first_position = length - queries + row
    end = length
    if CAUSAL:
        end = gl.minimum(end, first_position + gl.minimum(2 * ROWS, queries - row))
    begin = gl.to_tensor(0)
    if WINDOW:
        begin = gl.maximum(first_position - window, 0) // 128
    # At least one tile, all masked: then no loop is empty.
    end = gl.maximum((end + 127) // 128, begin + 1)
    return first_row, queries, first_key, length, begin, end


@gluon.jit
def _pages(table_row, tile, length, BLOCK: gl.constexpr, BOX: gl.constexpr):
    """The page of each box of a tile of keys; page 0 past the end, whose scores are masked."""
    pages = ()
    if BLOCK:
        for part in gl.static_range(128 // BOX):
            key = tile * 128 + part * BOX
            pages = pages + (gl.load(table_row + key // BLOCK, mask=key < length, other=0),)
    return pages


@gluon.jit
def _producer(
    q1_desc,
    q2_desc,
    k1_desc,
    k2_desc,
    vt_desc,
    q1_smem,
    q2_smem,
    k1_smem,
    k2_smem,
    v_smem,
    q_full,
    q_empty,
    full,
    empty,
    block_table,
    cu_seqlens_q,
    lengths_k,
    first_sequence,
    sequences,
    table_stride,
    heads: gl.constexpr,
    group: gl.constexpr,
    m_blocks,
    section,
    tiles,
    window,
    q_row_h: gl.constexpr,
    q_col_h: gl.constexpr,
    k_row_b: gl.constexpr,
    k_row_h: gl.constexpr,
    k_col_h: gl.constexpr,
    D2: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):
    PAGED: gl.constexpr = BLOCK > 0
    BOX: gl.constexpr = k1_desc.block_shape[0]
    D1: gl.constexpr = q1_desc.block_shape[1]
    DV: gl.constexpr = vt_desc.block_shape[0]
    kv_heads = heads // group
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    q_phase = gl.to_tensor(1)
    for turn in range(_turns(m_blocks, heads * sequences, section)):
        exists, tile_m, head, local = _place(turn, m_blocks, heads, heads * sequences, section)
        if exists:
            seq = first_sequence + local
            first_row, queries, first_key, length, begin, end = _extent(
                seq, tile_m, cu_seqlens_q, lengths_k, window, PAGED, CAUSAL, WINDOW
            )
            if tile_m * (2 * ROWS) < queries:
                kv_head = head // group
                for w in gl.static_range(2):
                    mbarrier.wait(q_empty.index(w), q_phase)
                    mbarrier.expect(q_full.index(w), ROWS * (D1 + D2))
                    row = first_row + tile_m * (2 * ROWS) + w * ROWS + head * q_row_h
                    tma_load(q1_desc, [row, head * q_col_h], q_full.index(w), q1_smem.index(w))
                    if D2:
                        tma_load(q2_desc, [row, head * q_col_h + D1], q_full.index(w), q2_smem.index(w))
                q_phase ^= 1
                table_row = block_table
                if PAGED:
                    table_row += seq.to(gl.int64) * table_stride
                pages = _pages(table_row, begin, length, BLOCK, BOX)
                for tile in range(begin, end + 1):
                    mbarrier.wait(empty.index(stage), phase)
                    mbarrier.expect(full.index(stage), 128 * (D1 + D2), pred=tile == begin)
                    mbarrier.expect(full.index(stage), 128 * (D1 + D2 + DV), pred=(tile > begin) & (tile < end))
                    mbarrier.expect(full.index(stage), 128 * DV, pred=tile == end)
                    if tile > begin:
                        v_row = ((local * tiles + tile - 1) * kv_heads + kv_head) * DV
                        tma_load(vt_desc, [v_row, 0], full.index(stage), v_smem.index(stage))
                    if tile < end:
                        for part in gl.static_range(128 // BOX):
                            key = tile * 128 + part * BOX
                            if PAGED:
                                row = pages[part] * k_row_b + key % BLOCK + kv_head * k_row_h
                            else:
                                row = first_key + key + kv_head * k_row_h
                            column = kv_head * k_col_h
                            rows_smem = k1_smem.index(stage).slice(part * BOX, BOX)
                            tma_load(k1_desc, [row, column], full.index(stage), rows_smem)
                            if D2:
                                rows_smem = k2_smem.index(stage).slice(part * BOX, BOX)
                                tma_load(k2_desc, [row, column + D1], full.index(stage), rows_smem)
                    # The next tile's pages arrive while this one's room is waited for.
                    pages = _pages(table_row, tile + 1, length, BLOCK, BOX)
                    stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _operand_order(y, P_LAYOUT: gl.constexpr):
    """y [64, 128] in the accumulator's layout as the left operand: keys 16g + 8h + 2c + e at 16g + 4c + 2h + e."""
    y = y.reshape([64, 8, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, 128])
    return gl.convert_layout(y, P_LAYOUT)


@gluon.jit
def _lean_codes(y):
    """e4m3 of code clamp(round(y), 0, 126); y does not exceed 126, a NaN gives 0. ptxas fuses it to F2IP.U8.F32."""
    codes = gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        cvt.rni.s32.f32 a, $1;
        cvt.rni.s32.f32 b, $2;
        cvt.rni.s32.f32 c, $3;
        cvt.rni.s32.f32 d, $4;
        cvt.pack.sat.u8.s32.b32 d, d, c, 0;
        cvt.pack.sat.u8.s32.b32 $0, b, a, d;
        }""",
        "=r,f,f,f,f",
        [y],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
    return codes.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _softmax(
    s, m, e, c, delta, OFFSET: gl.constexpr, LEAN: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr
):
    """(P as left operand, factor of O and L, m', e'); see `prefill_kernel`."""
    top = gl.reduce(s, 1, _maximum)
    m_after = _maximum(m, top)
    origin = gl.where(m_after == float("-inf"), 0.0, m_after)
    e_after = gl.maximum(gl.ceil(c * (top - origin)), LEAST_EXPONENT)
    e_after = gl.where(top == float("-inf"), e, e_after)
    factor = gl.exp2(gl.fma(c, m - origin, e - e_after))
    if LEAN:
        slope = 8.0 * c
        bias = gl.fma(-slope, origin, gl.to_tensor(8.0 * OFFSET + 56.0 + delta) + gl.zeros_like(c)) - 8.0 * e_after
        y = gl.fma(s, slope.expand_dims(1).broadcast_to(s.shape), bias.expand_dims(1).broadcast_to(s.shape))
        p = _lean_codes(_operand_order(y, P_LAYOUT))
    else:
        bias = gl.fma(-c, origin, gl.full_like(c, OFFSET)) - e_after
        y = gl.fma(s, c.expand_dims(1).broadcast_to(s.shape), bias.expand_dims(1).broadcast_to(s.shape))
        p = gl.exp2(_operand_order(y, P_LAYOUT)).to(gl.float8e4nv)
    return p, factor, m_after, e_after


@gluon.jit
def _mask(
    s,
    tile,
    first_position,
    rows,
    length,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    position = first_position + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
    key = tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
    seen = (key < length) & (position < first_position + rows)
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW:
        seen = seen & (key >= position - window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _issue_scores(
    q1_smem, q2_smem, k1_smem, k2_smem, stage, D2: gl.constexpr, INT8: gl.constexpr, S_LAYOUT: gl.constexpr
):
    zero = gl.zeros([ROWS, 128], gl.int32 if INT8 else gl.float32, S_LAYOUT)
    s = warpgroup_mma(q1_smem, k1_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if D2:
        s = warpgroup_mma(q2_smem, k2_smem.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _finish_scores(s_token, INT8: gl.constexpr):
    s = warpgroup_mma_wait(0, deps=(s_token,))
    if INT8:
        s = s.to(gl.float32)
    return s


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = gl.to_tensor(0)
        phase ^= 1
    return stage, phase


@gluon.jit
def _noted(bad, begin, end):
    """Not 0 if one of the tiles begin … end of a head holds a NaN; every warp looks at all of them."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [4], [0]))
    found = gl.to_tensor(0)
    for first in range(begin, end, 128):
        found |= gl.max(gl.load(bad + first + lane, mask=first + lane < end, other=0), 0)
    return found


@gluon.jit
def _accumulate(total, factor, part, ROW: gl.constexpr):
    """total · factor + part, factor per row."""
    return gl.fma(total, gl.convert_layout(factor, ROW).expand_dims(1).broadcast_to(total.shape), part)


@gluon.jit
def _consumer(
    q1_smem,
    q2_smem,
    k1_smem,
    k2_smem,
    v_smem,
    ones_smem,
    q_full,
    q_empty,
    full,
    empty,
    order,
    q_scale,
    k,
    v,
    bad,
    k_scale,
    v_scale,
    out,
    out_scale,
    lse,
    block_table,
    cu_seqlens_q,
    lengths_k,
    first_sequence,
    sequences,
    table_stride,
    heads: gl.constexpr,
    group: gl.constexpr,
    m_blocks,
    section,
    tiles,
    window,
    softmax_scale_log2,
    delta,
    q_scale_stride_t: gl.constexpr,
    q_scale_stride_h: gl.constexpr,
    k_stride_b: gl.constexpr,
    k_stride_t: gl.constexpr,
    k_stride_h: gl.constexpr,
    v_stride_b: gl.constexpr,
    v_stride_t: gl.constexpr,
    v_stride_h: gl.constexpr,
    out_stride_t: gl.constexpr,
    out_stride_h: gl.constexpr,
    lse_stride_h,
    k_scale_stride: gl.constexpr,
    v_scale_stride: gl.constexpr,
    W: gl.constexpr,
    D2: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    LEAN: gl.constexpr,
    INT8: gl.constexpr,
    OFFSET: gl.constexpr,
    LSE: gl.constexpr,
    FP8_OUT: gl.constexpr,
    STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
):
    PAGED: gl.constexpr = BLOCK > 0
    DV: gl.constexpr = v_smem.shape[1]
    D1: gl.constexpr = q1_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 32])
    L_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    PL_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, L_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    ROW_L: gl.constexpr = gl.SliceLayout(1, L_LAYOUT)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DV, DV // 8], [4, 1], [1, 0])

    q1 = q1_smem.index(W)
    q2 = q2_smem.index(W)
    ones = ones_smem.permute((1, 0))
    kv_heads = heads // group
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_phase = gl.to_tensor(0)
    turn_phase = gl.to_tensor(W)
    zero_o = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
    zero_l = gl.zeros([ROWS, 8], gl.float32, L_LAYOUT)
    for turn in range(_turns(m_blocks, heads * sequences, section)):
        exists, tile_m, head, local = _place(turn, m_blocks, heads, heads * sequences, section)
        if exists:
            seq = first_sequence + local
            first_row, queries, first_key, length, begin, end = _extent(
                seq, tile_m, cu_seqlens_q, lengths_k, window, PAGED, CAUSAL, WINDOW
            )
            if tile_m * (2 * ROWS) < queries:
                kv_head = head // group
                row0 = tile_m * (2 * ROWS) + W * ROWS
                rows = queries - row0
                first_position = length - queries + row0
                row = gl.arange(0, ROWS, layout=ROW)
                token = first_row + row0 + row
                live_row = row < rows
                c = gl.load(
                    q_scale + token.to(gl.int64) * q_scale_stride_t + head * q_scale_stride_h, mask=live_row, other=0.0
                )
                c = c * (gl.load(k_scale + kv_head * k_scale_stride) * softmax_scale_log2)
                c = gl.where(c < SMALLEST_SCALE, SMALLEST_SCALE, c)
                v_factor = gl.load(v_scale + kv_head * v_scale_stride)
                m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
                e = gl.zeros([ROWS], gl.float32, ROW)
                o = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
                total_p = gl.zeros([ROWS, 8], gl.float32, L_LAYOUT)
                # Tiles below `full_tiles` hold no key that a row doesn't see.
                full_tiles = length // 128
                if CAUSAL:
                    full_tiles = gl.minimum(full_tiles, gl.maximum(first_position + 1, 0) // 128)
                if WINDOW:
                    full_tiles = gl.to_tensor(0)

                mbarrier.wait(q_full.index(W), q_phase)
                q_phase ^= 1
                mbarrier.wait(full.index(stage), phase)
                s_token = _issue_scores(q1, q2, k1_smem, k2_smem, stage, D2, INT8, S_LAYOUT)
                for tile in range(begin, end - 1):
                    s = _finish_scores(s_token, INT8)
                    mbarrier.arrive(empty.index(stage), count=1)
                    if tile >= full_tiles:
                        s = _mask(s, tile, first_position, rows, length, window, CAUSAL, WINDOW, S_LAYOUT)
                    p, factor, m, e = _softmax(s, m, e, c, delta, OFFSET, LEAN, S_LAYOUT, P_LAYOUT)
                    stage, phase = _next(stage, phase, STAGES)
                    mbarrier.wait(full.index(stage), phase)
                    if ORDERED:
                        mbarrier.wait(order.index(W), turn_phase)
                        turn_phase ^= 1
                    pv = warpgroup_mma(p, v_smem.index(stage).permute((1, 0)), zero_o, use_acc=False, is_async=True)
                    pl = warpgroup_mma(gl.convert_layout(p, PL_LAYOUT), ones, zero_l, use_acc=False, is_async=True)
                    s_token = _issue_scores(q1, q2, k1_smem, k2_smem, stage, D2, INT8, S_LAYOUT)
                    if ORDERED:
                        mbarrier.arrive(order.index(1 - W), count=1)
                    pv, pl = warpgroup_mma_wait(2 if D2 else 1, deps=(pv, pl))
                    o = _accumulate(o, factor, pv, ROW_O)
                    total_p = _accumulate(total_p, factor, pl, ROW_L)
                s = _finish_scores(s_token, INT8)
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.arrive(q_empty.index(W), count=1)
                s = _mask(s, end - 1, first_position, rows, length, window, CAUSAL, WINDOW, S_LAYOUT)
                p, factor, m, e = _softmax(s, m, e, c, delta, OFFSET, LEAN, S_LAYOUT, P_LAYOUT)
                stage, phase = _next(stage, phase, STAGES)
                mbarrier.wait(full.index(stage), phase)
                pv = warpgroup_mma(p, v_smem.index(stage).permute((1, 0)), zero_o, use_acc=False, is_async=True)
                pl = warpgroup_mma(gl.convert_layout(p, PL_LAYOUT), ones, zero_l, use_acc=False, is_async=True)
                noted = _noted(bad + (local * kv_heads + kv_head) * tiles, begin, end)
                pv, pl = warpgroup_mma_wait(0, deps=(pv, pl))
                mbarrier.arrive(empty.index(stage), count=1)
                o = _accumulate(o, factor, pv, ROW_O)
                total_p = _accumulate(total_p, factor, pl, ROW_L)
                stage, phase = _next(stage, phase, STAGES)

                denominator = gl.convert_layout(gl.max(total_p, 1), ROW)
                inverse = 1.0 / gl.where(denominator == 0.0, 1.0, denominator)
                inverse = inverse * v_factor
                row_lse = LN2 * (gl.fma(m, c, e - OFFSET) + gl.log2(denominator))
                row_lse = gl.where(m == float("-inf"), float("-inf"), row_lse)
                o = o * gl.convert_layout(inverse, ROW_O).expand_dims(1)

                if noted != 0:
                    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, O_LAYOUT))
                    q_channel = gl.arange(0, D1, layout=gl.SliceLayout(0, S_LAYOUT))
                    position = first_position + row
                    for key in range(begin * 128, gl.minimum(end * 128, length)):
                        if PAGED:
                            page = gl.load(block_table + seq.to(gl.int64) * table_stride + key // BLOCK).to(gl.int64)
                            v_key = v + page * v_stride_b + (key % BLOCK) * v_stride_t
                            k_key = k + page * k_stride_b + (key % BLOCK) * k_stride_t
                        else:
                            v_key = v + (first_key + key).to(gl.int64) * v_stride_t
                            k_key = k + (first_key + key).to(gl.int64) * k_stride_t
                        hit = (gl.load(v_key + kv_head.to(gl.int64) * v_stride_h + channel) & 0x7F) == 0x7F
                        sees = (position >= begin * 128) & live_row
                        if CAUSAL:
                            sees = sees & (key <= position)
                        if WINDOW:
                            sees = sees & (key >= position - window)
                        sees_o = gl.convert_layout(sees, ROW_O)
                        o = gl.where(sees_o.expand_dims(1) & hit.expand_dims(0), float("nan"), o)
                        if INT8:
                            k_key += kv_head.to(gl.int64) * k_stride_h
                            spoilt = gl.max((gl.load(k_key + q_channel) == -128).to(gl.int32), 0)
                            if D2:
                                q2_channel = gl.arange(0, D2, layout=gl.SliceLayout(0, S_LAYOUT))
                                spoilt |= gl.max((gl.load(k_key + D1 + q2_channel) == -128).to(gl.int32), 0)
                            spoilt_row = sees & (spoilt != 0)
                            row_lse = gl.where(spoilt_row, float("nan"), row_lse)
                            o = gl.where(gl.convert_layout(spoilt_row, ROW_O).expand_dims(1), float("nan"), o)
                if FP8_OUT:
                    o = o / gl.load(out_scale)
                    o = gl.where(o > 448.0, 448.0, gl.where(o < -448.0, -448.0, o))
                result = gl.convert_layout(o.to(out.dtype.element_ty), STORE)
                o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
                o_channel = gl.arange(0, DV, layout=gl.SliceLayout(0, STORE))
                to = (first_row + row0 + o_row).to(gl.int64) * out_stride_t + head.to(gl.int64) * out_stride_h
                gl.store(out + to.expand_dims(1) + o_channel.expand_dims(0), result, mask=(o_row < rows).expand_dims(1))
                if LSE:
                    gl.store(lse + head.to(gl.int64) * lse_stride_h + token, row_lse, mask=live_row)


@gluon.jit(
    do_not_specialize=[
        "first_sequence",
        "sequences",
        "table_stride",
        "m_blocks",
        "section",
        "tiles",
        "window",
        "lse_stride_h",
    ],
    do_not_specialize_on_alignment=["q_scale", "bad", "lse", "block_table", "cu_seqlens_q", "lengths_k"],
)
def hopper_kernel(
    q1_desc,
    q2_desc,
    k1_desc,
    k2_desc,
    vt_desc,
    q_scale,
    k,
    v,
    bad,
    k_scale,
    v_scale,
    out,
    out_scale,
    lse,
    block_table,
    cu_seqlens_q,
    lengths_k,
    first_sequence,
    sequences,
    table_stride,
    m_blocks,
    section,
    tiles,
    window,
    softmax_scale_log2,
    delta,
    lse_stride_h,
    heads: gl.constexpr,
    group: gl.constexpr,
    q_row_h: gl.constexpr,
    q_col_h: gl.constexpr,
    k_row_b: gl.constexpr,
    k_row_h: gl.constexpr,
    k_col_h: gl.constexpr,
    q_scale_stride_t: gl.constexpr,
    q_scale_stride_h: gl.constexpr,
    k_stride_b: gl.constexpr,
    k_stride_t: gl.constexpr,
    k_stride_h: gl.constexpr,
    v_stride_b: gl.constexpr,
    v_stride_t: gl.constexpr,
    v_stride_h: gl.constexpr,
    out_stride_t: gl.constexpr,
    out_stride_h: gl.constexpr,
    k_scale_stride: gl.constexpr,
    v_scale_stride: gl.constexpr,
    D2: gl.constexpr,
    BLOCK: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    LEAN: gl.constexpr,
    INT8: gl.constexpr,
    OFFSET: gl.constexpr,
    LSE: gl.constexpr,
    FP8_OUT: gl.constexpr,
    STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Persistent CTAs over query tiles · heads · sequences; see the module.

    Descriptors: rows of Q, K and V key-major; Q and K of 192 channels as 128 (…1) and 64 (…2), else …2 equals …1.
    """
    D1: gl.constexpr = q1_desc.block_shape[1]
    D2_SHAPE: gl.constexpr = q2_desc.block_shape[1]
    DV: gl.constexpr = vt_desc.block_shape[0]
    q1_smem = gl.allocate_shared_memory(q1_desc.dtype, [2, ROWS, D1], q1_desc.layout)
    k1_smem = gl.allocate_shared_memory(k1_desc.dtype, [STAGES, 128, D1], k1_desc.layout)
    if D2:
        q2_smem = gl.allocate_shared_memory(q2_desc.dtype, [2, ROWS, D2_SHAPE], q2_desc.layout)
        k2_smem = gl.allocate_shared_memory(k2_desc.dtype, [STAGES, 128, D2_SHAPE], k2_desc.layout)
    else:
        q2_smem = q1_smem
        k2_smem = k1_smem
    v_smem = gl.allocate_shared_memory(vt_desc.dtype, [STAGES, DV, 128], vt_desc.layout)
    ONES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ones = gl.full([8, 128], 0x38, gl.uint8, gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
    ones_smem = gl.allocate_shared_memory(gl.float8e4nv, [8, 128], ONES, ones.to(gl.float8e4nv, bitcast=True))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
        mbarrier.init(order.index(w), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (
                q1_smem, q2_smem, k1_smem, k2_smem, v_smem, ones_smem,
                q_full, q_empty, full, empty, order,
                q_scale, k, v, bad, k_scale, v_scale, out, out_scale, lse, block_table, cu_seqlens_q, lengths_k,
                first_sequence, sequences, table_stride, heads, group, m_blocks, section, tiles, window,
                softmax_scale_log2, delta, q_scale_stride_t, q_scale_stride_h, k_stride_b, k_stride_t, k_stride_h,
                v_stride_b, v_stride_t, v_stride_h, out_stride_t, out_stride_h, lse_stride_h, k_scale_stride,
                v_scale_stride, gl.constexpr(0), D2, BLOCK, CAUSAL, WINDOW, LEAN, INT8, OFFSET, LSE, FP8_OUT, STAGES,
                ORDERED,
            )),
            (_consumer, (
                q1_smem, q2_smem, k1_smem, k2_smem, v_smem, ones_smem,
                q_full, q_empty, full, empty, order,
                q_scale, k, v, bad, k_scale, v_scale, out, out_scale, lse, block_table, cu_seqlens_q, lengths_k,
                first_sequence, sequences, table_stride, heads, group, m_blocks, section, tiles, window,
                softmax_scale_log2, delta, q_scale_stride_t, q_scale_stride_h, k_stride_b, k_stride_t, k_stride_h,
                v_stride_b, v_stride_t, v_stride_h, out_stride_t, out_stride_h, lse_stride_h, k_scale_stride,
                v_scale_stride, gl.constexpr(1), D2, BLOCK, CAUSAL, WINDOW, LEAN, INT8, OFFSET, LSE, FP8_OUT, STAGES,
                ORDERED,
            )),
            (_producer, (
                q1_desc, q2_desc, k1_desc, k2_desc, vt_desc, q1_smem, q2_smem, k1_smem, k2_smem, v_smem,
                q_full, q_empty, full, empty, block_table, cu_seqlens_q, lengths_k,
                first_sequence, sequences, table_stride, heads, group, m_blocks, section, tiles, window,
                q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, D2, BLOCK, CAUSAL, WINDOW, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )
    # fmt: on
