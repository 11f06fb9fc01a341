"""Vector ALU: arithmetic, comparisons, selects, bit operations. One entry of a table for each operation."""

from __future__ import annotations

import numpy as np

from .decode import Instruction
from .formats import fma32
from .modifiers import lane_access
from .operands import BUILDERS, builds, destination_row, fetch_f32, fetch_u32, flush, output_f32, plain_sources

U8, U16, U32, U64, I16, I32, I64, F32, F64 = (
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.int16,
    np.int32,
    np.int64,
    np.float32,
    np.float64,
)


def _med3(a, b, c):
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.maximum(low, np.minimum(high, c))


def _exp2(x):
    return np.exp2(x.astype(F64)).astype(F32)


def _log2(x):
    return np.log2(x.astype(F64)).astype(F32)


def _ldexp(a, b):
    with np.errstate(over="ignore"):
        return np.ldexp(a.astype(F64), np.clip(np.asarray(b).view(I32), -400, 400)).astype(F32)


F32_OPS = {
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_min_f32": np.fmin,
    "v_max_f32": np.fmax,
    "v_mul_legacy_f32": lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b),
    "v_fma_f32": fma32,
    "v_max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "v_min3_f32": lambda a, b, c: np.fmin(np.fmin(a, b), c),
    "v_med3_f32": _med3,
    "v_rndne_f32": np.rint,
    "v_floor_f32": np.floor,
    "v_ceil_f32": np.ceil,
    "v_trunc_f32": np.trunc,
    "v_fract_f32": lambda x: np.minimum(x - np.floor(x), F32(0.99999994)),
    "v_ldexp_f32": _ldexp,
    "v_minimum3_f32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_maximum3_f32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
}
TRANS_OPS = {
    "v_exp_f32": _exp2,
    "v_log_f32": _log2,
    "v_rcp_f32": lambda x: (1.0 / x.astype(F64)).astype(F32),
    "v_rcp_iflag_f32": lambda x: (1.0 / x.astype(F64)).astype(F32),
    "v_rsq_f32": lambda x: (1.0 / np.sqrt(x.astype(F64))).astype(F32),
    "v_sqrt_f32": lambda x: np.sqrt(x.astype(F64)).astype(F32),
    "v_sin_f32": lambda x: np.sin(x.astype(F64) * 2 * np.pi).astype(F32),
    "v_cos_f32": lambda x: np.cos(x.astype(F64) * 2 * np.pi).astype(F32),
}


def _sext24(x):
    return (x << U32(8)).view(I32) >> I32(8)


def _mask24(x):
    return x & U32(0xFFFFFF)


def _bfe_u(a, b, c):
    width = c & U32(31)
    return a >> (b & U32(31)) & ((U32(1) << width) - U32(1))


def _bfe_i(a, b, c):
    width = c & U32(31)
    field = a >> (b & U32(31)) & ((U32(1) << width) - U32(1))
    top = np.where(width > 0, U32(1) << (np.maximum(width, U32(1)) - U32(1)), U32(0))
    return (field ^ top) - top


def _perm(a, b, c):
    """v_perm_b32: bytes of {a, b} picked by the selectors in c."""
    joined = a.astype(U64) << U64(32) | b.astype(U64)
    shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))
    out = np.zeros(shape, U32)
    for byte in range(4):
        pick = np.broadcast_to(c >> U32(8 * byte) & U32(0xFF), shape)
        plain = (joined >> (np.minimum(pick, U32(7)).astype(U64) * U64(8)) & U64(0xFF)).astype(U32)
        sign_bit = {8: 15, 9: 31, 10: 47, 11: 63}
        value = np.where(pick >= 13, U32(0xFF), np.where(pick == 12, U32(0), plain))
        for code, bit in sign_bit.items():
            sign = (joined >> U64(bit) & U64(1)).astype(U32) * U32(0xFF)
            value = np.where(pick == code, sign, value)
        out |= value << U32(8 * byte)
    return out


def _mulhi_u(a, b):
    return (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32)


def _mulhi_i(a, b):
    return (a.view(I32).astype(I64) * b.view(I32).astype(I64) >> I64(32)).astype(I32).view(U32)


def _signed(function):
    return lambda *args: function(*[np.asarray(x).view(I32) for x in args]).view(U32)


def _alignbit(a, b, c):
    return ((a.astype(U64) << U64(32) | b.astype(U64)) >> (c & U32(31)).astype(U64)).astype(U32)


def _lshl(a, b):
    return a << (b & U32(31))


def _lshr(a, b):
    return a >> (b & U32(31))


def _ashr(a, b):
    return (np.asarray(a).view(I32) >> (b & U32(31)).astype(I32)).view(U32)


# Integer operations on the raw 32 bits.
U32_OPS = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: _lshl(b, a),
    "v_lshrrev_b32": lambda a, b: _lshr(b, a),
    "v_ashrrev_i32": lambda a, b: _ashr(b, a),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": _signed(np.minimum),
    "v_max_i32": _signed(np.maximum),
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_min3_i32": _signed(lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": _signed(lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": _med3,
    "v_med3_i32": _signed(_med3),
    "v_mul_u32_u24": lambda a, b: _mask24(a) * _mask24(b),
    "v_mul_i32_i24": lambda a, b: (_sext24(a) * _sext24(b)).view(U32),
    "v_mul_hi_u32_u24": lambda a, b: _mulhi_u(_mask24(a), _mask24(b)),
    "v_mad_u32_u24": lambda a, b, c: _mask24(a) * _mask24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: (_sext24(a) * _sext24(b)).view(U32) + c,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": _mulhi_u,
    "v_mul_hi_i32": _mulhi_i,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: _lshl(a, b) + c,
    "v_add_lshl_u32": lambda a, b, c: _lshl(a + b, c),
    "v_lshl_or_b32": lambda a, b, c: _lshl(a, b) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32": _bfe_u,
    "v_bfe_i32": _bfe_i,
    "v_bfm_b32": lambda a, b: (U32(1) << (a & U32(31))) - U32(1) << (b & U32(31)),
    "v_alignbit_b32": _alignbit,
    "v_alignbyte_b32": lambda a, b, c: _alignbit(a, b, (c & U32(3)) * U32(8)),
    "v_perm_b32": _perm,
    "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
    "v_sad_u32": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
}


def _reverse(x):
    x = (x & U32(0x55555555)) << U32(1) | x >> U32(1) & U32(0x55555555)
    x = (x & U32(0x33333333)) << U32(2) | x >> U32(2) & U32(0x33333333)
    x = (x & U32(0x0F0F0F0F)) << U32(4) | x >> U32(4) & U32(0x0F0F0F0F)
    return np.asarray(x).byteswap()


def _highest(x):
    exponent = np.frexp(x.astype(F64))[1]
    return np.where(x == 0, I32(-1), 32 - exponent).astype(I32).view(U32)


U32_OPS["v_bfrev_b32"] = _reverse
U32_OPS["v_ffbh_u32"] = _highest
U32_OPS["v_ffbl_b32"] = lambda x: np.where(x == 0, U32(0xFFFFFFFF), np.bitwise_count(~x & (x - U32(1))).astype(U32))


def _build_f32(inst: Instruction):
    name = inst.mnemonic
    function = F32_OPS.get(name) or TRANS_OPS.get(name)
    trans = name in TRANS_OPS
    finish, row = output_f32(inst), destination_row(inst)
    if name == "v_ldexp_f32":
        a, b = fetch_f32(inst.operands["src0"]), fetch_u32(inst.operands["src1"])
        return lambda g: g.write_vector(row, finish(g, _ldexp(a(g), b(g))))
    sources = plain_sources(inst, fetch_f32)
    if trans:
        a = sources[0]
        # The transcendental unit takes and gives denormals as zero in every mode (LLVM's lowering scales around it).
        return lambda g: g.write_vector(row, finish(g, flush(function(flush(np.asarray(a(g)))))))
    if len(sources) == 1:
        a = sources[0]
        return lambda g: g.write_vector(row, finish(g, function(a(g))))
    if len(sources) == 2:
        a, b = sources
        return lambda g: g.write_vector(row, finish(g, function(a(g), b(g))))
    a, b, c = sources
    return lambda g: g.write_vector(row, finish(g, function(a(g), b(g), c(g))))


def _build_u32(inst: Instruction):
    function, row = U32_OPS[inst.mnemonic], destination_row(inst)
    sources = plain_sources(inst, fetch_u32)
    if inst.mods.get("clmp"):
        raise NotImplementedError("integer clamp")
    if len(sources) == 1:
        a = sources[0]
        return lambda g: g.write_vector(row, function(a(g)))
    if len(sources) == 2:
        a, b = sources
        return lambda g: g.write_vector(row, function(a(g), b(g)))
    a, b, c = sources
    return lambda g: g.write_vector(row, function(a(g), b(g), c(g)))


for _name in (*F32_OPS, *TRANS_OPS):
    BUILDERS[_name] = lane_access(_build_f32)
for _name in U32_OPS:
    BUILDERS[_name] = lane_access(_build_u32)


@builds("v_bitop3_b32")
def bitop3(inst: Instruction):
    a, b, c = plain_sources(inst, fetch_u32)
    row, table = destination_row(inst), inst.mods["bitop3"]

    def run(g):
        x, y, z = a(g), b(g), c(g)
        out = np.zeros((g.size, 64), U32)
        for code in range(8):
            if table >> code & 1:
                out |= (x if code & 4 else ~x) & (y if code & 2 else ~y) & (z if code & 1 else ~z)
        g.write_vector(row, out)

    return run


def _fmac(inst: Instruction):
    row, finish = destination_row(inst), output_f32(inst)
    a, b = plain_sources(inst, fetch_f32)[:2]

    def run(g):
        old = g.Vf[row]
        g.write_vector(row, finish(g, fma32(a(g), b(g), flush(old) if g.flush32 else old)))

    return run


BUILDERS["v_fmac_f32"] = lane_access(_fmac)


@builds("v_fmaak_f32", "v_fmamk_f32", "v_madak_f32", "v_madmk_f32")
def fma_literal(inst: Instruction):
    a, b = plain_sources(inst, fetch_f32)[:2]
    literal = np.array(inst.mods["literal"], U32).view(F32)[()]
    finish, row = output_f32(inst), destination_row(inst)
    if inst.mnemonic.endswith("ak_f32"):
        return lambda g: g.write_vector(row, finish(g, fma32(a(g), b(g), literal)))
    return lambda g: g.write_vector(row, finish(g, fma32(a(g), literal, b(g))))
