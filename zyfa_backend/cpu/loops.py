"""Loops over a paged cache of FP8 or int8 bytes, compiled by numba: quantise and write, quantise Q, decode.

Torch needs some 250 calls a layer for this, which cost more than the arithmetic. Rotation and quantisation give the
bits of `rotation` and `quantization`; decode follows `reference_tiles` step by step, up to the order of the sums over
channels and keys. All in one file: numba's machine code on disk is renewed when a function's own file changes, and not
when one does that it calls into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# OpenMP's, where torch has its threads: engines that preload torch's library let both use the same ones.
numba.config.THREADING_LAYER = "omp"
BLOCK = 64
E4M3, INT8, BF16, FP16, FP32 = range(5)  # what a cache element is
LEAN, EXACT, UNROUNDED = range(3)
_LOWEST = np.float32(np.finfo(np.float32).min)
_F32 = np.float32
_EXPONENT, _E4M3_SMALLEST_NORMAL, _SMALLEST_NORMAL = np.uint32(0x7F800000), _F32(2.0**-6), _F32(2.0**-126)


def _njit(**options: Any) -> Callable[[Callable], Callable]:
    """numba.njit that releases the GIL and keeps the machine code on disk where a folder for it can be written."""

    def wrap(function: Callable) -> Callable:
        try:
            return numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no writable folder: compiled anew in each process
            return numba.njit(nogil=True, error_model="numpy", **options)(function)

    return wrap


@intrinsic
def _half(typingctx, bits):  # type: ignore[no-untyped-def]
    """fp32 of the fp16 number with these 16 bits; numba has no fp16 on a CPU, LLVM converts whole vectors."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return (types.float32(bits), codegen) if bits.bitwidth == 16 else None


@intrinsic
def _e4m3_over_256(typingctx, code):  # type: ignore[no-untyped-def]
    """fp32 of 1/256 of the e4m3 number `code`: sign-extended and moved, it is that fp16 number. NaN reads ±1.875."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word = ir.IntType(16)
        moved = builder.shl(builder.sext(args[0], word), ir.Constant(word, 7))
        bits = builder.and_(moved, ir.Constant(word, ~0x4000))
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())

    return (types.float32(code), codegen) if code.bitwidth == 8 else None


@intrinsic
def _float(typingctx, bits):  # type: ignore[no-untyped-def]
    """fp32 with these 32 bits."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return (types.float32(bits), codegen) if bits.bitwidth == 32 else None


@_njit()
def _round_half_even(x):  # type: ignore[no-untyped-def]
    """x to an integer, |x| < 2^22."""
    return (x + _F32(12582912)) - _F32(12582912)


@_njit()
def _butterflies(x, size):  # type: ignore[no-untyped-def]
    """Walsh-Hadamard transform of each run of `size` channels of x, in the order of `rotation`."""
    half = size // 2
    while half >= 1:
        for start in range(0, x.shape[0], 2 * half):
            low, high = x[start : start + half], x[start + half : start + 2 * half]
            for i in range(half):
                a, b = low[i], high[i]
                low[i], high[i] = a + b, a - b
        half //= 2


@_njit()
def _rotate(x, rotation):  # type: ignore[no-untyped-def]
    """Rotates x [D] in place; rotation: signs [D], block sizes, and the matrix [12, 12] of a block of 96."""
    signs, sizes, paley = rotation
    for d in range(x.shape[0]):
        x[d] *= signs[d]
    start = 0
    for size in sizes:
        part = x[start : start + size]
        if size == 96:
            _butterflies(part, 8)
            runs = part.copy()
            for row in range(12):
                for lane in range(8):
                    total = runs[lane] * paley[0, row]
                    for j in range(1, 12):
                        total += runs[8 * j + lane] * paley[j, row]
                    part[8 * row + lane] = total
        else:
            _butterflies(part, size)
        share = _F32(1 / math.sqrt(size))
        for d in range(size):
            part[d] *= share
        start += size


@_njit()
def _e4m3(y):  # type: ignore[no-untyped-def]
    """Code of y clamped to ±448, to nearest even."""
    bits = _F32(min(max(y, _F32(-448)), _F32(448))).view(np.uint32)
    sign, rest = np.uint32((bits >> 24) & 0x80), np.uint32(bits & 0x7FFFFFFF)
    if y != y:
        return np.uint8(sign | 0x7F)
    if rest < 0x3C800000:  # below 2^-6 a code is a multiple of 2^-9
        return np.uint8(sign | np.uint32(_round_half_even(_float(rest) * _F32(512))))
    return np.uint8(sign | np.uint32((rest + 0x7FFFF + ((rest >> 20) & 1) - 0x3C000000) >> 20))


@_njit()
def _int8(y):  # type: ignore[no-untyped-def]
    """Code of y clamped to ±127, to nearest even, as its byte; -128 for NaN."""
    if y != y:
        return np.uint8(0x80)
    return np.uint8(np.int8(_round_half_even(min(max(y, _F32(-127)), _F32(127)))))


@_njit()
def quantize_q(q, kind, rotation, values, scale):  # type: ignore[no-untyped-def]
    """Q fp32 [B, Hq, D], rotated in place, as the values of its codes (e4m3: over 256) and fp32 scales [B, Hq]."""
    largest = _F32(448) if kind == E4M3 else _F32(127)
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            x = q[b, head]
            _rotate(x, rotation)
            amax, finite = _F32(0), True
            for d in range(x.shape[0]):
                amax = max(amax, abs(x[d]))
                finite &= abs(x[d]) <= -_LOWEST
            step = _F32(1) if amax == 0 else max(amax / largest, _SMALLEST_NORMAL)
            step = step if finite else _F32(np.nan)
            scale[b, head] = step
            for d in range(x.shape[0]):
                if kind == E4M3:
                    values[b, head, d] = _e4m3_over_256(_e4m3(x[d] / step))
                else:
                    values[b, head, d] = _F32(np.int8(_int8(x[d] / step)))


@_njit()
def _store(target, x, scale, kind):  # type: ignore[no-untyped-def]
    """Codes of x [D] to target; how many of them are cut off by more than rounding, and how many not finite."""
    cut, odd = 0, 0
    limit = scale * (_F32(464) if kind == E4M3 else _F32(127.5))
    for d in range(x.shape[0]):
        cut += abs(x[d]) > limit
        odd += not abs(x[d]) <= -_LOWEST
    if kind == E4M3:
        for d in range(x.shape[0]):
            target[d] = _e4m3(x[d] / scale)
    else:
        for d in range(x.shape[0]):
            target[d] = _int8(x[d] / scale)
    return cut, odd


@_njit()
def write(target, shape, stride, v_at, kinds, slots, k, v, k_scale, v_scale, rotation):  # type: ignore[no-untyped-def]
    """Writes tokens to their slots; k is rotated in place. Cache arguments as in `attend`, k and v fp32 [T, Hkv, D].

    Returns (tokens written, values cut off, values that are not finite); a slot of -1 is passed over. The first is -1
    where a slot lies outside the cache, and nothing is written from there on.
    """
    blocks, heads, size = shape
    tokens, cut, odd = 0, 0, 0
    for t in range(slots.shape[0]):
        if slots[t] < 0:
            continue
        if slots[t] >= blocks * size:
            return -1, cut, odd
        for head in range(heads):
            at = slots[t] // size * stride[0] + head * stride[1] + slots[t] % size * stride[2]
            _rotate(k[t, head], rotation)
            k_cut, k_odd = _store(target[at : at + k.shape[2]], k[t, head], k_scale[head], kinds[0])
            at += v_at
            v_cut, v_odd = _store(target[at : at + v.shape[2]], v[t, head], v_scale[head], kinds[1])
            cut, odd = cut + k_cut + v_cut, odd + k_odd + v_odd
        tokens += 1
    return tokens, cut, odd


@intrinsic
def _prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Asks for the cache line of array[index]; the loops know what comes next, the hardware loses it at block ends."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", (address.type,), ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        )
        builder.call(function, [address, flag(0), flag(2), flag(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


@_njit()
def _load(source, row, kind, finite):  # type: ignore[no-untyped-def]
    """One token's channels as fp32 in row; e4m3 as value/256. Unless finite, what is not a number becomes NaN."""
    dim = row.shape[0]
    if kind == E4M3:
        for d in range(dim):
            row[d] = _e4m3_over_256(np.uint8(source[d]))
    elif kind == INT8:
        for d in range(dim):
            row[d] = _F32(np.int8(source[d]))
    elif kind == BF16:
        for d in range(dim):
            row[d] = _float(np.uint32(np.uint32(source[d]) << 16))
    elif kind == FP16:
        for d in range(dim):
            row[d] = _half(np.uint16(source[d]))
    else:
        for d in range(dim):
            row[d] = _float(np.uint32(source[d]))
    if not finite:
        # Only NaN codes, and infinities of the wider types, are larger than the largest value.
        largest = _F32(448 / 256) if kind == E4M3 else _F32(127) if kind == INT8 else -_LOWEST
        for d in range(dim):
            if not abs(row[d]) <= largest:
                row[d] = _F32(np.nan)


@_njit(fastmath={"reassoc", "contract", "nsz"})
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = _F32(0)
    for d in range(a.shape[0]):
        total += a[d] * b[d]
    return total


@_njit(fastmath={"contract"})
def _add_eight(sums, p, rows):  # type: ignore[no-untyped-def]
    """sums [D] += p [8] · rows [8, D]; eight at a time spare seven of eight passes over the sums."""
    p0, p1, p2, p3, p4, p5, p6, p7 = p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]
    for d in range(sums.shape[0]):
        sums[d] += (p0 * rows[0, d] + p1 * rows[1, d] + p2 * rows[2, d] + p3 * rows[3, d] + p4 * rows[4, d]
                    + p5 * rows[5, d] + p6 * rows[6, d] + p7 * rows[7, d])


@_njit(fastmath={"reassoc", "nsz"})
def _sum(x):  # type: ignore[no-untyped-def]
    total = _F32(0)
    for j in range(x.shape[0]):
        total += x[j]
    return total


@_njit(fastmath={"nnan", "nsz", "reassoc"})
def _largest_number(x):  # type: ignore[no-untyped-def]
    top = _F32(-np.inf)
    for j in range(x.shape[0]):
        top = max(top, x[j])
    return top


@_njit()
def _larger(a, b):  # type: ignore[no-untyped-def]
    """The larger of two numbers, NaN if one is."""
    return b if b > a or b != b else a


@_njit()
def _largest(x):  # type: ignore[no-untyped-def]
    """The largest of x, NaN if there is one."""
    odd = False
    for j in range(x.shape[0]):
        odd |= x[j] != x[j]
    return _F32(np.nan) if odd else _largest_number(x)


@_njit()
def _probabilities(x, top, m, share, rule, offset, delta):  # type: ignore[no-untyped-def]
    """share · P of one block's scores x, in place; P is relative to m, the row's maximum when the block came."""
    n = x.shape[0]
    if rule == UNROUNDED:
        for j in range(n):
            x[j] = share * np.exp2(x[j] - m)
        return
    k = min(-_F32(np.ceil(top - m)), _F32(126) - offset)
    lift, factor = k + offset, share * np.exp2(-k - offset)
    if rule == LEAN:
        bias, factor = _F32(56) + delta, _F32(256) * factor
        for j in range(n):
            code = _round_half_even((x[j] - m + lift) * _F32(8) + bias)
            code = min(max(code, _F32(0)), _F32(126))
            x[j] = _half(np.uint16(np.uint16(code) << 7)) * factor
    else:
        for j in range(n):
            p = np.exp2(x[j] - m + lift)
            binade = _float(np.uint32(_F32(p).view(np.uint32) & _EXPONENT))
            magic = max(binade, _E4M3_SMALLEST_NORMAL) * _F32(1.5 * 2**20)
            x[j] = ((p + magic) - magic) * factor


@_njit(parallel=True)
def weights(x, m, rule, offset, delta, tile, total):  # type: ignore[no-untyped-def]
    """`reference_tiles.weights` of scores x [R, n] with maxima m [R], both overwritten; total [R]: their sums."""
    for r in numba.prange(x.shape[0]):
        row, blocks = x[r], x.shape[1] // BLOCK
        top, running = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        renewed = m[r]
        for start in range(0, blocks, tile // BLOCK):
            stop = min(blocks, start + tile // BLOCK)
            for i in range(start, stop):
                top[i] = _largest(row[i * BLOCK : (i + 1) * BLOCK])
                renewed = _larger(renewed, top[i])
            running[start:stop] = max(renewed, _LOWEST) if renewed == renewed else renewed
        m[r] = renewed
        for i in range(blocks):
            origin = running[blocks - 1] if rule == UNROUNDED else running[i]
            share = np.exp2(origin - running[blocks - 1])
            _probabilities(row[i * BLOCK : (i + 1) * BLOCK], top[i], origin, share, rule, offset, delta)
        total[r] = _sum(row)


@_njit()
def _locate(addresses, start, stop, table, size, stride, base, blocks):  # type: ignore[no-untyped-def]
    """Where keys start … stop of a sequence lie. False if one is in no block of the cache."""
    j = start
    while j < stop:
        at = j % size
        if not (j // size < table.shape[0] and 0 <= table[j // size] < blocks):
            return False
        address = base + table[j // size] * stride[0] + at * stride[2]
        for _ in range(min(stop - j, size - at)):
            addresses[j - start] = address
            address += stride[2]
            j += 1
    return True


@_njit()
def _attend(item, source, shape, stride, v_at, kinds, table, spans, q, c, v_factor, rule, offset, delta, tile, finite,
            out):  # type: ignore[no-untyped-def]
    """One pair of sequence and KV head of `attend`."""
    blocks, heads, size = shape
    group, dim = q.shape[1] // heads, q.shape[2]
    line = 64 // source.itemsize
    row, rows = np.empty(dim, np.float32), np.empty((tile, dim), np.float32)
    scores, top = np.empty((group, tile), np.float32), np.empty((group, tile // BLOCK), np.float32)
    m, total = np.full(group, _F32(-np.inf)), np.zeros(group, np.float32)
    here, ahead = np.empty(tile, np.int64), np.empty(tile, np.int64)  # addresses of the keys of this tile, the next
    b, head = item // heads, item % heads
    queries, factors = q[b, head * group : (head + 1) * group], c[b, head * group : (head + 1) * group]
    sums = out[b, head * group : (head + 1) * group]
    sums[:] = 0
    first, length, base = max(spans[b, 0], spans[b, 1]), spans[b, 2], head * stride[1]
    stop = min(length, spans[b, 0] + tile)
    if not _locate(ahead[first - spans[b, 0] :], first, stop, table[b], size, stride, base, blocks):
        return False
    for start in range(spans[b, 0], length, tile):
        n, hidden = min(tile, length - start), max(0, first - start)
        here[:] = ahead
        coming = max(0, min(tile, length - start - tile))
        if not _locate(ahead, start + tile, start + tile + coming, table[b], size, stride, base, blocks):
            return False
        top[:], scores[:, :hidden] = -np.inf, -np.inf
        for j in range(hidden, n):
            if j < coming:
                for i in range(0, dim, line):
                    _prefetch(source, ahead[j] + i)
                    _prefetch(source, ahead[j] + v_at + i)
            _load(source[here[j] : here[j] + dim], row, kinds[0], finite)
            for g in range(group):
                x = _dot(queries[g], row) * factors[g]
                scores[g, j] = x
                top[g, j // BLOCK] = _larger(top[g, j // BLOCK], x)
        for g in range(group):
            renewed = m[g]
            for i in range(top.shape[1]):
                renewed = _larger(renewed, top[g, i])
            origin = max(renewed, _LOWEST)
            factor = np.exp2(m[g] - origin)
            m[g] = renewed
            for d in range(dim):
                sums[g, d] *= factor
            for i in range(-(-n // BLOCK)):
                part = scores[g, i * BLOCK : min(n, (i + 1) * BLOCK)]
                _probabilities(part, top[g, i], origin, _F32(1), rule, offset, delta)
            total[g] = total[g] * factor + _sum(scores[g, :n])
        end = -(-n // 8) * 8
        scores[:, n:end], rows[n:end], rows[:hidden] = 0, 0, 0
        for j in range(hidden, n):
            at = here[j] + v_at
            _load(source[at : at + dim], rows[j], kinds[1], finite)
        for j in range(0, end, 8):
            for g in range(group):
                _add_eight(sums[g], scores[g, j : j + 8], rows[j : j + 8])
    for g in range(group):
        share = m[g] if m[g] != m[g] else v_factor[head] / total[g]
        for d in range(dim):
            sums[g, d] *= share
    return True


@_njit(parallel=True)
def attend(source, shape, stride, v_at, kinds, table, spans, q, c, v_factor, rule, offset, delta, tile, finite,
           out):  # type: ignore[no-untyped-def]
    """Attention of the last token of sequences.

    source: the cache as one line of elements; shape: its blocks, heads and tokens a block; stride: elements from one of
    each to the next; v_at: from a token's K to its V. kinds: what K and V elements are. table [B, n]: block numbers.
    spans [B, 3]: where a sequence's first tile starts, its first visible key, and its length.
    q fp32 [B, Hq, D]; c fp32 [B, Hq]: score = c · q · k in log2 units; v_factor fp32 [Hkv].
    out fp32 [B, Hq, D]: written. A row with a NaN score becomes NaN. Returns False, with out unfinished, where a
    sequence's table leads out of the cache.
    """
    items = spans.shape[0] * shape[1]
    done = np.zeros(items, np.bool_)
    for item in numba.prange(items):
        done[item] = _attend(
            item, source, shape, stride, v_at, kinds, table, spans, q, c, v_factor, rule, offset, delta, tile, finite,
            out,
        )
    return done.all()
