"""A consumer warpgroup of the Hopper kernel: scores, softmax, P·V and the result of 64 queries."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from zyfa_kernels.triton.hopper_schedule import ROWS, advance, count_turns, extent, take

LEAST_EXPONENT = gl.constexpr(-60.0)
SMALLEST_SCALE = gl.constexpr(1e-30)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _maximum(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


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
def _spoil(
    o,
    row_lse,
    sees,
    v_key,
    k_key,
    D1: gl.constexpr,
    D2: gl.constexpr,
    INT8: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """NaN in the rows that see a key: in the channels where its V is NaN, in all where its int8 K holds -128."""
    channel = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, O_LAYOUT))
    sees_o = gl.convert_layout(sees, gl.SliceLayout(1, O_LAYOUT))
    hit = (gl.load(v_key + channel) & 0x7F) == 0x7F
    o = gl.where(sees_o.expand_dims(1) & hit.expand_dims(0), float("nan"), o)
    if INT8:
        spoilt = gl.max((gl.load(k_key + gl.arange(0, D1, layout=gl.SliceLayout(0, O_LAYOUT))) == -128).to(gl.int32), 0)
        if D2:
            more = gl.load(k_key + D1 + gl.arange(0, D2, layout=gl.SliceLayout(0, O_LAYOUT)))
            spoilt |= gl.max((more == -128).to(gl.int32), 0)
        row_lse = gl.where(sees & (spoilt != 0), float("nan"), row_lse)
        o = gl.where((sees_o & (spoilt != 0)).expand_dims(1), float("nan"), o)
    return o, row_lse


@gluon.jit
def consumer(
    rings,
    barriers,
    batch,
    work,
    tensors,
    numbers,
    W: gl.constexpr,
    heads: gl.constexpr,
    group: gl.constexpr,
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
):
    """Warpgroup W of a CTA: its 64 rows of each tile of queries."""
    q1_smem, q2_smem, k1_smem, k2_smem, v_smem, ones_smem = rings
    q_full, q_empty, full, empty = barriers
    block_table, cu_seqlens_q, lengths_k, table_stride, first_sequence, sequences = batch
    m_blocks, section, tiles, window = work
    q_scale, k, v, bad, k_scale, v_scale, out, out_scale, lse = tensors
    softmax_scale_log2, delta, lse_stride_h = numbers
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
    zero_o = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
    zero_l = gl.zeros([ROWS, 8], gl.float32, L_LAYOUT)
    for turn in range(count_turns(m_blocks, heads * sequences, section)):
        exists, tile_m, head, local = take(turn, m_blocks, heads, heads * sequences, section)
        if exists:
            seq = first_sequence + local
            first_row, queries, first_key, length, begin, end = extent(
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
                    stage, phase = advance(stage, phase, STAGES)
                    mbarrier.wait(full.index(stage), phase)
                    pv = warpgroup_mma(p, v_smem.index(stage).permute((1, 0)), zero_o, use_acc=False, is_async=True)
                    pl = warpgroup_mma(gl.convert_layout(p, PL_LAYOUT), ones, zero_l, use_acc=False, is_async=True)
                    s_token = _issue_scores(q1, q2, k1_smem, k2_smem, stage, D2, INT8, S_LAYOUT)
                    pv, pl = warpgroup_mma_wait(2 if D2 else 1, deps=(pv, pl))
                    o = _accumulate(o, factor, pv, ROW_O)
                    total_p = _accumulate(total_p, factor, pl, ROW_L)
                s = _finish_scores(s_token, INT8)
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.arrive(q_empty.index(W), count=1)
                s = _mask(s, end - 1, first_position, rows, length, window, CAUSAL, WINDOW, S_LAYOUT)
                p, factor, m, e = _softmax(s, m, e, c, delta, OFFSET, LEAN, S_LAYOUT, P_LAYOUT)
                stage, phase = advance(stage, phase, STAGES)
                mbarrier.wait(full.index(stage), phase)
                pv = warpgroup_mma(p, v_smem.index(stage).permute((1, 0)), zero_o, use_acc=False, is_async=True)
                pl = warpgroup_mma(gl.convert_layout(p, PL_LAYOUT), ones, zero_l, use_acc=False, is_async=True)
                noted = _noted(bad + (local * kv_heads + kv_head) * tiles, begin, end)
                pv, pl = warpgroup_mma_wait(0, deps=(pv, pl))
                mbarrier.arrive(empty.index(stage), count=1)
                o = _accumulate(o, factor, pv, ROW_O)
                total_p = _accumulate(total_p, factor, pl, ROW_L)
                stage, phase = advance(stage, phase, STAGES)

                denominator = gl.convert_layout(gl.max(total_p, 1), ROW)
                inverse = 1.0 / gl.where(denominator == 0.0, 1.0, denominator)
                inverse = inverse * v_factor
                row_lse = LN2 * (gl.fma(m, c, e - OFFSET) + gl.log2(denominator))
                row_lse = gl.where(m == float("-inf"), float("-inf"), row_lse)
                o = o * gl.convert_layout(inverse, ROW_O).expand_dims(1)

                if noted != 0:
                    for tile in range(begin, end):
                        if gl.load(bad + (local * kv_heads + kv_head) * tiles + tile) != 0:
                            for key in range(tile * 128, gl.minimum(tile * 128 + 128, length)):
                                if PAGED:
                                    page = gl.load(block_table + seq.to(gl.int64) * table_stride + key // BLOCK)
                                    v_key = v + page.to(gl.int64) * v_stride_b + (key % BLOCK) * v_stride_t
                                    k_key = k + page.to(gl.int64) * k_stride_b + (key % BLOCK) * k_stride_t
                                else:
                                    v_key = v + (first_key + key).to(gl.int64) * v_stride_t
                                    k_key = k + (first_key + key).to(gl.int64) * k_stride_t
                                v_key += kv_head.to(gl.int64) * v_stride_h
                                k_key += kv_head.to(gl.int64) * k_stride_h
                                sees = live_row
                                if CAUSAL:
                                    sees = sees & (key <= first_position + row)
                                if WINDOW:
                                    sees = sees & (key >= first_position + row - window)
                                o, row_lse = _spoil(o, row_lse, sees, v_key, k_key, D1, D2, INT8, O_LAYOUT)
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
