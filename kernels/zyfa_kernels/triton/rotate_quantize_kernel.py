"""The kernel of `rotate_quantize`: rows of Q, K and V are rotated, quantised and stored, all in one launch.

A row is one head of one token. Programs take tiles of ROWS rows in turn, through Q, then K, then V.

How rows are rotated (ROTATE): "dot" multiplies them with a matrix of ±1 on the matrix unit, which stays on chip from
tile to tile; "butterfly" adds in fp32 in the order of the reference. 1/sqrt(order) follows in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
INT8_NAN = tl.constexpr(-128)
E4M3_CLIPPED = tl.constexpr(464.0)  # more than half a step above the largest code: clamping changed it, not rounding
INT8_CLIPPED = tl.constexpr(127.5)
ABS_BITS = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
ROUND_TO_INT = tl.constexpr(12582912.0)  # 1.5 · 2^23: a sum with it ends in the nearest integer's bits
HALF_OF_E4M3 = tl.constexpr(0x7FFFF)
E4M3_BIAS = tl.constexpr((127 - 7) << 3)
SUBNORMAL_SUM = tl.constexpr(16384.0)  # a sum with it is a multiple of 2^-9, the step of e4m3's subnormals
SUBNORMAL_BITS = tl.constexpr(0x46800000)
SMALLEST_E4M3_NORMAL = tl.constexpr(0x3C800000)  # 2^-6
E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def _tokens(tile, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The token of each row of a tile."""
    row = tl.arange(0, ROWS)
    if ROWS % HEADS == 0:
        return tile * (ROWS // HEADS) + row // HEADS
    else:
        return (tile * ROWS + row) // HEADS


@triton.jit
def _heads(tile, HEADS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    if ROWS % HEADS == 0:
        return row % HEADS
    else:
        return (tile * ROWS + row) % HEADS


@triton.jit
def _rows(base, tile, token_stride, head_stride, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """(pointer, offsets int64 [ROWS]) where rows of a tile begin; the same offsets for all tiles where that is so."""
    row = tl.arange(0, ROWS)
    if ROWS % HEADS == 0:
        first = tl.cast(tile * (ROWS // HEADS), tl.int64) * token_stride
        return base + first, (row // HEADS).to(tl.int64) * token_stride + (row % HEADS).to(tl.int64) * head_stride
    elif HEADS % ROWS == 0:
        each: tl.constexpr = HEADS // ROWS
        first = tl.cast(tile // each, tl.int64) * token_stride + tl.cast(tile % each * ROWS, tl.int64) * head_stride
        return base + first, row.to(tl.int64) * head_stride
    else:
        at = tile * ROWS + row
        return base, (at // HEADS).to(tl.int64) * token_stride + (at % HEADS).to(tl.int64) * head_stride


@triton.jit
def _slots(slots, tile, live, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Where each row of a tile is written, negative: nowhere. Without blocks tokens keep their places."""
    token = _tokens(tile, HEADS, ROWS)
    if BLOCK:
        return tl.load(slots + token, mask=live, other=-1).to(tl.int32)
    else:
        return tl.where(live, token, -1)


@triton.jit
def _load(base, start, live, stride, FIRST: tl.constexpr, ORDER: tl.constexpr, WIDTH: tl.constexpr):
    """Channels FIRST … FIRST + ORDER of rows that begin at base + start; zeros beyond and in rows that don't live."""
    channel = tl.arange(0, WIDTH)
    at = base + start[:, None] + (FIRST + channel).to(tl.int64)[None, :] * stride
    if ORDER == WIDTH:
        return tl.load(at, mask=live[:, None], other=0.0)
    else:
        return tl.load(at, mask=live[:, None] & (channel < ORDER)[None, :], other=0.0)


@triton.jit
def _store(base, start, live, stride, codes, FIRST: tl.constexpr, ORDER: tl.constexpr, WIDTH: tl.constexpr):
    channel = tl.arange(0, WIDTH)
    at = base + start[:, None] + (FIRST + channel).to(tl.int64)[None, :] * stride
    if ORDER == WIDTH:
        tl.store(at, codes, mask=live[:, None])
    else:
        tl.store(at, codes, mask=live[:, None] & (channel < ORDER)[None, :])


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """One stage: channels that are HALF apart become their sum and their difference."""
    pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def _matrix(table, ROTATE: tl.constexpr, WIDTH: tl.constexpr):
    """What rotates [ROWS, WIDTH]: the matrix [WIDTH, WIDTH] for "dot", signs [1, WIDTH] for "butterfly"."""
    channel = tl.arange(0, WIDTH)
    if ROTATE == "dot":
        return tl.load(table + channel[:, None] * WIDTH + channel[None, :])
    elif ROTATE == "butterfly":
        return tl.load(table + channel)[None, :]
    else:
        return 0.0


@triton.jit
def _rotated(
    base, start, live, stride, matrix, FIRST: tl.constexpr, ORDER: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Channels FIRST … FIRST + ORDER of some rows, fp32 [ROWS, WIDTH], in the form that `_codes` takes.

    For "dot" the rotated ones over NORM, else minus the rotated ones. matrix: what `_matrix` gives.
    """
    x = _load(base, start, live, stride, FIRST, ORDER, WIDTH)
    if ROTATE == "dot":
        return tl.dot(x.to(matrix.dtype), matrix, input_precision="ieee")
    else:
        y = x.to(tl.float32)
        if ROTATE == "butterfly":
            y = y * matrix
            if WIDTH >= 128:
                y = _butterfly(y, ROWS, WIDTH, 64)
            y = _butterfly(y, ROWS, WIDTH, 32)
            y = _butterfly(y, ROWS, WIDTH, 16)
            y = _butterfly(y, ROWS, WIDTH, 8)
            y = _butterfly(y, ROWS, WIDTH, 4)
            y = _butterfly(y, ROWS, WIDTH, 2)
            y = _butterfly(y, ROWS, WIDTH, 1)
        return y * -NORM


@triton.jit
def _first_tile(before):
    """This program's first tile of a part, when `before` tiles of other parts were dealt to the programs in turn."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - before % programs) % programs


@triton.jit
def _largest_bits(y, NORM: tl.constexpr, ROTATE: tl.constexpr):
    """Bits of the largest magnitude of each row; a NaN's are larger than all others."""
    bits = tl.max(y.to(tl.int32, bitcast=True) & ABS_BITS, 1)
    if ROTATE == "dot":
        bits = (bits.to(tl.float32, bitcast=True) * NORM).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _over(x, DIVISOR: tl.constexpr):
    """x / DIVISOR correctly rounded, as in `_codes`."""
    quotient = x * (1 / DIVISOR)
    return tl.fma(tl.fma(quotient, -DIVISOR, x), 1 / DIVISOR, quotient)


@triton.jit
def _e4m3_bits(y):
    """e4m3fn codes of y within ±448, rounded to nearest even, without the hardware's conversion."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & ABS_BITS
    normal = ((magnitude + HALF_OF_E4M3 + ((magnitude >> 20) & 1)) >> 20) - E4M3_BIAS
    small = (magnitude.to(tl.float32, bitcast=True) + SUBNORMAL_SUM).to(tl.int32, bitcast=True) - SUBNORMAL_BITS
    code = tl.where(magnitude < SMALLEST_E4M3_NORMAL, small, normal)
    code = tl.where(magnitude > INF_BITS, E4M3_NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _codes(
    minus_y, scale, NORM: tl.constexpr, ROTATE: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr,
    SATURATES: tl.constexpr,
):  # fmt: skip
    """Codes (uint8) of y / scale, where |y| / scale is at most the format's largest value up to rounding.

    Where the conversion saturates (SATURATES) it may be anything.

    The quotient is the correctly rounded one: a product with the rounded reciprocal, then Markstein's correction by
    the exact remainder, three instructions instead of a division for each element. -0 keeps its sign.
    """
    if ROTATE == "dot":
        quotient = minus_y * tl.div_rn(NORM, scale)[:, None]
    else:
        minus_reciprocal = tl.div_rn(-1.0, scale)[:, None]
        quotient = minus_y * minus_reciprocal
        if SATURATES:  # an infinite quotient has no remainder; beyond 448 any value does, and NaN comes back with y
            quotient = tl.clamp(quotient, -512.0, 512.0)
        remainder = tl.fma(quotient, scale[:, None], minus_y)
        quotient = tl.fma(remainder, minus_reciprocal, quotient)
    if INT8:
        code = (quotient + ROUND_TO_INT).to(tl.int32, bitcast=True)
        return tl.where(quotient == quotient, code, INT8_NAN).to(tl.uint8)
    elif NATIVE:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _e4m3_bits(quotient)


@triton.jit
def _scaled(scale, CODE: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr):
    """scale · CODE of each row, in the units of `_rotated`."""
    return scale * (CODE / NORM if ROTATE == "dot" else CODE)


@triton.jit
def _clamped(
    y, scale, LARGEST: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, SATURATES: tl.constexpr
):  # fmt: skip
    """`_rotated`'s y within ±scale · LARGEST, NaN kept; y itself where the conversion saturates."""
    if SATURATES:
        return y
    else:
        bound = _scaled(scale, LARGEST, NORM, ROTATE)[:, None]
        return tl.clamp(y, -bound, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bounds(scale, written, CLIPPED: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr):
    """Beyond which `_rotated`'s values of each row are clipped: infinity for rows that are not written."""
    return tl.where(written, _scaled(scale, CLIPPED, NORM, ROTATE), float("inf"))


@triton.jit
def _count(
    x, slots, scales, scale_stride, saturated, m0, m1, before, count, x_token, x_head, x_channel,
    HEADS: tl.constexpr, D0: tl.constexpr, W0: tl.constexpr, N0: tl.constexpr, D1: tl.constexpr, W1: tl.constexpr,
    N1: tl.constexpr, ROTATE: tl.constexpr, CLIPPED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds to `saturated` how many values of this program's tiles are clipped, as one number."""
    beyond = tl.full((ROWS,), 0, tl.int32)  # of one row in each of the tiles
    for tile in tl.range(_first_tile(before), tl.cdiv(count, ROWS), tl.num_programs(0), num_stages=1):
        live = tl.arange(0, ROWS) < count - tile * ROWS
        scale = tl.load(scales + _heads(tile, HEADS, ROWS) * scale_stride, mask=live, other=1.0)
        written = _slots(slots, tile, live, HEADS, BLOCK, ROWS) >= 0
        base, start = _rows(x, tile, x_token, x_head, HEADS, ROWS)
        y = _rotated(base, start, live, x_channel, m0, 0, D0, W0, N0, ROTATE, ROWS)
        beyond += tl.sum((tl.abs(y) > _bounds(scale, written, CLIPPED, N0, ROTATE)[:, None]).to(tl.int32), 1)
        if D1:
            y = _rotated(base, start, live, x_channel, m1, D0, D1, W1, N1, ROTATE, ROWS)
            beyond += tl.sum((tl.abs(y) > _bounds(scale, written, CLIPPED, N1, ROTATE)[:, None]).to(tl.int32), 1)
    tl.atomic_add(saturated, tl.sum(beyond.to(tl.int64), 0))


@triton.jit
def _quantize_q(
    x, out, scales, m0, m1, count, x_token, x_head, x_channel, out_token, out_head, out_channel,
    scale_token, scale_head, HEADS: tl.constexpr, D0: tl.constexpr, W0: tl.constexpr, N0: tl.constexpr,
    D1: tl.constexpr, W1: tl.constexpr, N1: tl.constexpr, ROTATE: tl.constexpr, INT8: tl.constexpr,
    NATIVE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0), num_stages=STAGES):
        live = tl.arange(0, ROWS) < count - tile * ROWS
        base, start = _rows(x, tile, x_token, x_head, HEADS, ROWS)
        y0 = _rotated(base, start, live, x_channel, m0, 0, D0, W0, N0, ROTATE, ROWS)
        bits = _largest_bits(y0, N0, ROTATE)
        if D1:
            y1 = _rotated(base, start, live, x_channel, m1, D0, D1, W1, N1, ROTATE, ROWS)
            bits = tl.maximum(bits, _largest_bits(y1, N1, ROTATE))
        largest = bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(_over(largest, INT8_MAX if INT8 else E4M3_MAX), SMALLEST_NORMAL)
        scale = tl.where(bits == 0, 1.0, tl.where(bits < INF_BITS, scale, float("nan")))
        base, start = _rows(scales, tile, scale_token, scale_head, HEADS, ROWS)
        tl.store(base + start, scale, mask=live)
        base, start = _rows(out, tile, out_token, out_head, HEADS, ROWS)
        _store(base, start, live, out_channel, _codes(y0, scale, N0, ROTATE, INT8, NATIVE, False), 0, D0, W0)
        if D1:
            _store(base, start, live, out_channel, _codes(y1, scale, N1, ROTATE, INT8, NATIVE, False), D0, D1, W1)


@triton.jit
def _write(
    x, cache, slots, scales, scale_stride, saturated, m0, m1, before, count, x_token, x_head, x_channel,
    cache_block, cache_slot, cache_head, cache_channel, HEADS: tl.constexpr, D0: tl.constexpr, W0: tl.constexpr,
    N0: tl.constexpr, D1: tl.constexpr, W1: tl.constexpr, N1: tl.constexpr, ROTATE: tl.constexpr,
    INT8: tl.constexpr, NATIVE: tl.constexpr, SATURATES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    largest: tl.constexpr = INT8_MAX if INT8 else E4M3_MAX
    clipped: tl.constexpr = INT8_CLIPPED if INT8 else E4M3_CLIPPED
    some = tl.full((ROWS,), False, tl.int1)  # whether a value is clipped, of one row in each of a program's tiles
    for tile in tl.range(_first_tile(before), tl.cdiv(count, ROWS), tl.num_programs(0), num_stages=STAGES):
        live = tl.arange(0, ROWS) < count - tile * ROWS
        head = _heads(tile, HEADS, ROWS)
        slot = _slots(slots, tile, live, HEADS, BLOCK, ROWS)
        scale = tl.load(scales + head * scale_stride, mask=live, other=1.0)
        base, start = _rows(x, tile, x_token, x_head, HEADS, ROWS)
        if BLOCK:
            target = (slot // BLOCK).to(tl.int64) * cache_block + (slot % BLOCK).to(tl.int64) * cache_slot
        else:
            target = slot.to(tl.int64) * cache_slot
        target += head.to(tl.int64) * cache_head
        written = slot >= 0
        y = _rotated(base, start, live, x_channel, m0, 0, D0, W0, N0, ROTATE, ROWS)
        if COUNT:
            some |= tl.max(tl.abs(y), 1) > _bounds(scale, written, clipped, N0, ROTATE)
        y = _clamped(y, scale, largest, N0, ROTATE, SATURATES)
        codes = _codes(y, scale, N0, ROTATE, INT8, NATIVE, SATURATES)
        _store(cache, target, written, cache_channel, codes, 0, D0, W0)
        if D1:
            y = _rotated(base, start, live, x_channel, m1, D0, D1, W1, N1, ROTATE, ROWS)
            if COUNT:
                some |= tl.max(tl.abs(y), 1) > _bounds(scale, written, clipped, N1, ROTATE)
            y = _clamped(y, scale, largest, N1, ROTATE, SATURATES)
            codes = _codes(y, scale, N1, ROTATE, INT8, NATIVE, SATURATES)
            _store(cache, target, written, cache_channel, codes, D0, D1, W1)
    if COUNT:
        # Counting as the values are written takes 18% longer, and most often there is nothing to count.
        if tl.max(some.to(tl.int32), 0) > 0:
            _count(
                x, slots, scales, scale_stride, saturated, m0, m1, before, count, x_token, x_head, x_channel, HEADS,
                D0, W0, N0, D1, W1, N1, ROTATE, clipped, BLOCK, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["q_tokens", "kv_tokens"])
def rotate_quantize(
    q, q_out, q_scale, k, v, k_cache, v_cache, slots, k_scale, v_scale, saturated, table0, table1, q_tokens,
    kv_tokens, q_token, q_head, q_channel, out_token, out_head, out_channel, qs_token, qs_head, k_token,
    k_head, k_channel, v_token, v_head, v_channel, kc_block, kc_slot, kc_head, kc_channel, vc_block, vc_slot, vc_head,
    vc_channel, k_scale_stride, v_scale_stride, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D0: tl.constexpr,
    W0: tl.constexpr, N0: tl.constexpr, D1: tl.constexpr, W1: tl.constexpr, N1: tl.constexpr, DV: tl.constexpr,
    WV: tl.constexpr, ROTATE: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr, SATURATES: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Q [q_tokens, Q_HEADS, D] to codes and scales, K and V [kv_tokens, KV_HEADS, …] to the cache; no heads: left out.

    D = D0 + D1 are the blocks of the rotation, W0 and W1 their widths as powers of two, N0 and N1 their factors. BLOCK
    is 0 where K and V keep their places and no slots are read.
    """
    before = 0
    m0 = _matrix(table0, ROTATE, W0)  # once for Q and K
    m1 = 0.0
    if D1:
        m1 = _matrix(table1, ROTATE, W1)
    if Q_HEADS:
        _quantize_q(
            q, q_out, q_scale, m0, m1, q_tokens * Q_HEADS, q_token, q_head, q_channel, out_token, out_head,
            out_channel, qs_token, qs_head, Q_HEADS, D0, W0, N0, D1, W1, N1, ROTATE, INT8, NATIVE, ROWS, STAGES,
        )  # fmt: skip
        before = tl.cdiv(q_tokens * Q_HEADS, ROWS)
    if KV_HEADS:
        count = kv_tokens * KV_HEADS
        _write(
            k, k_cache, slots, k_scale, k_scale_stride, saturated, m0, m1, before, count, k_token, k_head,
            k_channel, kc_block, kc_slot, kc_head, kc_channel, KV_HEADS, D0, W0, N0, D1, W1, N1, ROTATE,
            INT8, NATIVE, SATURATES and not INT8, COUNT, BLOCK, ROWS, STAGES,
        )  # fmt: skip
        before += tl.cdiv(count, ROWS)
        _write(
            v, v_cache, slots, v_scale, v_scale_stride, saturated + 1, 0.0, 0.0, before, count, v_token, v_head,
            v_channel, vc_block, vc_slot, vc_head, vc_channel, KV_HEADS, DV, WV, 1.0, 0, 1, 1.0, "none", False,
            NATIVE, SATURATES, COUNT, BLOCK, ROWS, STAGES,
        )  # fmt: skip
