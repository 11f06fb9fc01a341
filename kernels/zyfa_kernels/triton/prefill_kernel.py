"""FP8 prefill attention in plain Triton: what serves wherever `prefill_hopper` doesn't.

Numerics: the project's specification with one running maximum and one block exponent per tile of TILE keys, tiles
aligned to position 0. In units of the product s = q·k, with c = q_scale · k_scale · softmax_scale · log2(e):

    m' = max(m, max_j s_j)                     exact row maximum
    e  = max(ceil(c · (max_j s_j - m')), -60)  minus the block exponent k
    lean P:  code = clamp(round(fma(s, 8c, fma(-8c, m', 8B + 56 + delta) - 8e)), 0, 126)
    exact P: e4m3(exp2(fma(s, c, fma(-c, m', B) - e)))
    O  = fma(O, 2^(c · (m - m') + e_before - e), P · V),   L likewise with the row sums of the same P

O and L are kept in the power of two of the last tile, so that the scaling 2^(-k-B) costs no more than the usual
rescale; each P·V starts from zero and is added in fp32, which is the second-level accumulator that Hopper needs. A
tile in which a row sees no key leaves it untouched bit by bit. Fused multiply-adds are explicit, so that every copy of
the loop rounds alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zyfa_kernels.triton.transpose import _row_pointers

LEAST_EXPONENT = tl.constexpr(-60.0)  # a tile that far below the maximum is lost in fp32 anyway
SMALLEST_SCALE = tl.constexpr(1e-30)  # of c: keeps -inf · c at -inf
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _half(codes):
    """fp16 of value/256 from e4m3 bytes, by moving bits; a NaN code becomes NaN."""
    bits = codes.to(tl.int16)
    value = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _e4m3_codes(x, NATIVE: tl.constexpr):
    """uint8 e4m3 of x, which is NaN or at most 448 in size, nearest even."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # Adding and subtracting 1.5 · 2^20 times x's power of two, 2^-6 at least, leaves the leading 1 and three bits.
        bits = x.to(tl.int32, bitcast=True)
        large = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), 0.015625) * 1572864.0
        rounded = (tl.abs(x) + large) - large
        codes = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True) >> 7
        return tl.where(x != x, 0x7F, codes | ((bits >> 24) & 0x80).to(tl.int16)).to(tl.uint8)


@triton.jit
def _lean_codes(y, PTX: tl.constexpr):
    """uint8 clamp(round(y), 0, 126); y does not exceed 126, a NaN gives 0."""
    if PTX:
        # Four cvt and two packs, which ptxas fuses to two F2IP.U8.F32.
        codes = tl.inline_asm_elementwise(
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
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
        return codes.to(tl.uint8, bitcast=True)
    else:
        # Adding 1.5 · 2^23 rounds to nearest even and leaves the integer in the low bits.
        y = tl.minimum(tl.maximum(y, 0.0), 126.0) + 12582912.0
        return (y.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def _operand(codes, HALF: tl.constexpr, INT8: tl.constexpr):
    """Codes as a product takes them: int8, e4m3, or (HALF) fp16 of value/256."""
    if INT8:
        return codes
    elif HALF:
        return _half(codes)
    else:
        return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scores(q1, q2, k1, k2, HALF: tl.constexpr, INT8: tl.constexpr, SPLIT: tl.constexpr):
    """fp32 products [M, TILE] of operands q1, q2 [M, D] with codes k1, k2 [TILE, D]."""
    s = tl.dot(q1, tl.trans(_operand(k1, HALF, INT8)))
    if SPLIT:
        s += tl.dot(q2, tl.trans(_operand(k2, HALF, INT8)))
    s = s.to(tl.float32)
    if HALF and not INT8:
        s = s * 65536.0
    return s


@triton.jit
def _softmax(
    s,
    m,
    e,
    c,
    delta,
    OFFSET: tl.constexpr,
    LEAN: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
):
    """(P as the operand of the product with V, factor of O and L, m', e')."""
    top = tl.reduce(s, 1, _maximum)
    m_after = _maximum(m, top)
    origin = tl.where(m_after == float("-inf"), 0.0, m_after)
    e_after = tl.maximum(tl.ceil(c * (top - origin)), LEAST_EXPONENT)
    e_after = tl.where(top == float("-inf"), e, e_after)
    factor = tl.exp2(tl.fma(c, m - origin, e - e_after))
    if LEAN:
        slope = 8.0 * c
        bias = tl.fma(-slope, origin, 8.0 * OFFSET + 56.0 + delta) - 8.0 * e_after
        codes = _lean_codes(tl.fma(s, slope[:, None], bias[:, None]), PTX)
    else:
        bias = tl.fma(-c, origin, OFFSET) - e_after
        codes = _e4m3_codes(tl.exp2(tl.fma(s, c[:, None], bias[:, None])), NATIVE)
    p = _operand(codes, HALF, False)
    return p, factor, m_after, e_after


@triton.jit
def prefill_kernel(
    q,
    q_scale,
    k,
    v,
    vt,
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
    table_stride,
    q_stride_t,
    q_stride_h,
    q_scale_stride_t,
    q_scale_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_h,
    k_scale_stride,
    v_scale_stride,
    group,
    tiles,
    softmax_scale_log2,
    delta,
    window,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAN: tl.constexpr,
    INT8: tl.constexpr,
    HALF: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    OFFSET: tl.constexpr,
    LSE: tl.constexpr,
    FP8_OUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of queries of one head: grid [query tiles, Hq, sequences].

    q, k: uint8 (e4m3) or int8; v: uint8; vt, bad: see `transpose`; block_table None where BLOCK is 0, then lengths_k
    are cu_seqlens_k.
    """
    head, local = tl.program_id(1), tl.program_id(2)
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = first_sequence + local
    kv_head = head // group
    first_row = tl.load(cu_seqlens_q + seq)
    queries = tl.load(cu_seqlens_q + seq + 1) - first_row
    if BLOCK:
        first_key = 0
        length = tl.load(lengths_k + seq)
    else:
        first_key = tl.load(lengths_k + seq)
        length = tl.load(lengths_k + seq + 1) - first_key
    if tile_m * TILE_M < queries:
        row = tile_m * TILE_M + tl.arange(0, TILE_M)
        live_row = row < queries
        position = length - queries + row
        token = (first_row + row).to(tl.int64)
        d1 = tl.arange(0, D1)
        q_rows = q + token * q_stride_t + head.to(tl.int64) * q_stride_h
        q1 = tl.load(q_rows[:, None] + d1[None, :], mask=live_row[:, None], other=0)
        d2 = tl.arange(0, D2 if D2 else 16)
        if D2:
            q2 = tl.load(q_rows[:, None] + (D1 + d2)[None, :], mask=live_row[:, None], other=0)
        q1 = _operand(q1, HALF, INT8)
        q2 = _operand(q2, HALF, INT8) if D2 else q1
        c = tl.load(q_scale + token * q_scale_stride_t + head * q_scale_stride_h, mask=live_row, other=0.0) * (
            tl.load(k_scale + kv_head * k_scale_stride) * softmax_scale_log2
        )
        c = tl.where(c < SMALLEST_SCALE, SMALLEST_SCALE, c)
        m = tl.full([TILE_M], float("-inf"), tl.float32)
        e = tl.zeros([TILE_M], tl.float32)
        o = tl.zeros([TILE_M, DV], tl.float32)
        total = tl.zeros([TILE_M, 16], tl.float32)
        ones = _operand(tl.full([TILE, 16], 0x38, tl.uint8), HALF, False)

        first_position = length - queries + tile_m * TILE_M
        last_position = first_position + tl.minimum(TILE_M, queries - tile_m * TILE_M) - 1
        end = length
        full = length // TILE * TILE
        if CAUSAL:
            end = tl.minimum(end, last_position + 1)
            full = tl.minimum(full, tl.maximum(first_position + 1, 0) // TILE * TILE)
        begin = 0
        if WINDOW:
            begin = tl.maximum(first_position - window, 0) // TILE * TILE
            full = begin
        column = tl.arange(0, TILE)
        d_v = tl.arange(0, DV)
        k_head = k + kv_head.to(tl.int64) * k_stride_h
        heads = tl.num_programs(1) // group
        vt_head = vt + (local * tiles).to(tl.int64) * heads * (DV * TILE) + kv_head * (DV * TILE)
        vt_head = vt_head + (d_v[None, :] * TILE + column[:, None])

        for n0 in tl.range(begin, full, TILE):
            rows = _row_pointers(
                k_head,
                n0 + column,
                block_table,
                seq,
                table_stride,
                first_key,
                k_stride_b,
                k_stride_t,
                column >= 0,
                BLOCK,
            )
            k1 = tl.load(rows[:, None] + d1[None, :])
            if D2:
                k2 = tl.load(rows[:, None] + (D1 + d2)[None, :])
            else:
                k2 = k1
            values = tl.load(vt_head + tl.cast(n0 // TILE, tl.int64) * heads * (DV * TILE))
            s = _scores(q1, q2, k1, k2, HALF, INT8, D2 > 0)
            p, factor, m, e = _softmax(s, m, e, c, delta, OFFSET, LEAN, HALF, NATIVE, PTX)
            o = tl.fma(o, factor[:, None], tl.dot(p, _operand(values, HALF, False)))
            total = tl.fma(total, factor[:, None], tl.dot(p, ones))
        for n0 in tl.range(full, end, TILE):
            key = n0 + column
            live_key = key < length
            rows = _row_pointers(
                k_head, key, block_table, seq, table_stride, first_key, k_stride_b, k_stride_t, live_key, BLOCK
            )
            k1 = tl.load(rows[:, None] + d1[None, :], mask=live_key[:, None], other=0)
            if D2:
                k2 = tl.load(rows[:, None] + (D1 + d2)[None, :], mask=live_key[:, None], other=0)
            else:
                k2 = k1
            values = tl.load(vt_head + tl.cast(n0 // TILE, tl.int64) * heads * (DV * TILE))
            s = _scores(q1, q2, k1, k2, HALF, INT8, D2 > 0)
            seen = (key < length)[None, :] & (row < queries)[:, None]
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (key[None, :] >= position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            p, factor, m, e = _softmax(s, m, e, c, delta, OFFSET, LEAN, HALF, NATIVE, PTX)
            o = tl.fma(o, factor[:, None], tl.dot(p, _operand(values, HALF, False)))
            total = tl.fma(total, factor[:, None], tl.dot(p, ones))

        denominator = tl.max(total, 1)
        inverse = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
        v_factor = tl.load(v_scale + kv_head * v_scale_stride)
        o = o * inverse[:, None] * v_factor
        row_lse = LN2 * (tl.fma(m, c, e - OFFSET) + tl.log2(denominator))
        if HALF:  # P and V, and the ones, were taken as 1/256 of their value
            row_lse += LN2 * 16.0
        row_lse = tl.where(m == float("-inf"), float("-inf"), row_lse)

        noted = 0
        noted_of = bad + (local * heads + kv_head).to(tl.int64) * tiles
        for first in tl.range(begin // TILE, tl.cdiv(end, TILE), TILE):
            noted |= tl.max(tl.load(noted_of + first + column, mask=first + column < tl.cdiv(end, TILE), other=0), 0)
        if noted != 0:
            for tile in tl.range(begin // TILE, tl.cdiv(end, TILE)):
                if tl.load(noted_of + tile) != 0:
                    for key in tl.range(tile * TILE, tl.minimum(tile * TILE + TILE, length)):
                        row_key = _row_pointers(
                            v + kv_head.to(tl.int64) * v_stride_h,
                            key,
                            block_table,
                            seq,
                            table_stride,
                            first_key,
                            v_stride_b,
                            v_stride_t,
                            key >= 0,
                            BLOCK,
                        )
                        hit = (tl.load(row_key + d_v) & 0x7F) == 0x7F
                        sees = live_row
                        if CAUSAL:
                            sees = sees & (key <= position)
                        if WINDOW:
                            sees = sees & (key >= position - window)
                        o = tl.where(sees[:, None] & hit[None, :], float("nan"), o)
                        if INT8:
                            row_key = _row_pointers(
                                k_head,
                                key,
                                block_table,
                                seq,
                                table_stride,
                                first_key,
                                k_stride_b,
                                k_stride_t,
                                key >= 0,
                                BLOCK,
                            )
                            spoilt = tl.max((tl.load(row_key + d1) == -128).to(tl.int32), 0)
                            if D2:
                                spoilt |= tl.max((tl.load(row_key + D1 + d2) == -128).to(tl.int32), 0)
                            spoilt_row = sees & (spoilt != 0)
                            o = tl.where(spoilt_row[:, None], float("nan"), o)
                            row_lse = tl.where(spoilt_row, float("nan"), row_lse)

        if FP8_OUT:
            o = o / tl.load(out_scale)
            o = tl.clamp(o, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        to = out + token * out_stride_t + head.to(tl.int64) * out_stride_h
        if FP8_OUT:
            result = _e4m3_codes(o, NATIVE)
        else:
            result = o.to(out.dtype.element_ty)
        tl.store(to[:, None] + d_v[None, :], result, mask=live_row[:, None])
        if LSE:
            tl.store(lse + head.to(tl.int64) * lse_stride_h + token, row_lse, mask=live_row)
