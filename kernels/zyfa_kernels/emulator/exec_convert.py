"""Conversions between integers, fp32, fp16, bf16, fp8, bf8 and fp4."""

from __future__ import annotations

import numpy as np

from .decode import Instruction
from .formats import E4M3, E5M2, MX_TABLES, MX_TYPES, bf16_to_f32, to_bf16, to_e4m3, to_e5m2
from .modifiers import lane_access
from .operands import BUILDERS, builds, destination_row, fetch_f32, fetch_u32, output_f32

U32, I32, F16, F32, F64 = np.uint32, np.int32, np.float16, np.float32, np.float64


def _to_integer(x, low: float, high: float, kind):
    """fp32 to an integer, towards zero, saturating, NaN to 0."""
    wide = np.nan_to_num(np.trunc(x.astype(F64)), nan=0.0, posinf=high, neginf=low)
    return np.clip(wide, low, high).astype(np.int64).astype(kind).view(U32)


def _rounded(function):
    return lambda x: _to_integer(function(x), -(2.0**31), 2.0**31 - 1, I32)


# From fp32 to 32 bits of something else.
_FROM_F32 = {
    "v_cvt_u32_f32": lambda x: _to_integer(x, 0.0, 2.0**32 - 1, U32),
    "v_cvt_i32_f32": lambda x: _to_integer(x, -(2.0**31), 2.0**31 - 1, I32),
    "v_cvt_rpi_i32_f32": _rounded(lambda x: np.floor(x.astype(F64) + 0.5)),
    "v_cvt_flr_i32_f32": _rounded(np.floor),
    "v_cvt_f16_f32": lambda x: x.astype(F16).view(np.uint16).astype(U32),
}
# From 32 raw bits to fp32.
_TO_F32 = {
    "v_cvt_f32_u32": lambda x: x.astype(F32),
    "v_cvt_f32_i32": lambda x: x.view(I32).astype(F32),
    "v_cvt_f32_f16": lambda x: (x & U32(0xFFFF)).astype(np.uint16).view(F16).astype(F32),
    "v_cvt_f32_ubyte0": lambda x: (x & U32(0xFF)).astype(F32),
    "v_cvt_f32_ubyte1": lambda x: (x >> U32(8) & U32(0xFF)).astype(F32),
    "v_cvt_f32_ubyte2": lambda x: (x >> U32(16) & U32(0xFF)).astype(F32),
    "v_cvt_f32_ubyte3": lambda x: (x >> U32(24)).astype(F32),
    "v_cvt_f32_fp8": lambda x: E4M3[x & U32(0xFF)].astype(F32),
    "v_cvt_f32_bf8": lambda x: E5M2[x & U32(0xFF)].astype(F32),
    "v_cvt_f32_bf16": lambda x: bf16_to_f32(x & U32(0xFFFF)),
}


def _from_f32(inst: Instruction):
    function, a, row = _FROM_F32[inst.mnemonic], fetch_f32(inst.operands["src0"]), destination_row(inst)
    return lambda g: g.write_vector(row, function(np.asarray(a(g))))


def _to_f32(inst: Instruction):
    function, a, row = _TO_F32[inst.mnemonic], fetch_u32(inst.operands["src0"]), destination_row(inst)
    finish = output_f32(inst)
    byte = inst.mods.get("opsel", 0) & 3 if "8" in inst.mnemonic else 0
    shift = U32(8 * ((byte & 1) * 2 + (byte >> 1)))
    return lambda g: g.write_vector(row, finish(g, function(np.asarray(a(g) >> shift))))


for _name in _FROM_F32:
    BUILDERS[_name] = lane_access(_from_f32)
for _name in _TO_F32:
    BUILDERS[_name] = lane_access(_to_f32)


def _merge_half(inst: Instruction, role_bit: int = 3):
    """Function that writes a 16-bit result to the half of vdst that op_sel picks and keeps the other half."""
    row, high = destination_row(inst), inst.mods.get("opsel", 0) >> role_bit & 1

    def store(g, value):
        old = g.V[row]
        g.write_vector(row, old & U32(0xFFFF) | value << U32(16) if high else old & U32(0xFFFF0000) | value)

    return store


@builds("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def pack_fp8(inst: Instruction):
    a, b, store = fetch_f32(inst.operands["src0"]), fetch_f32(inst.operands["src1"]), _merge_half(inst)
    convert = to_e4m3 if "fp8" in inst.mnemonic else to_e5m2

    def run(g):
        clamp = g.fp16_overflow_clamps
        store(g, convert(np.asarray(a(g)), clamp) | convert(np.asarray(b(g)), clamp) << U32(8))

    return run


@builds("v_cvt_scalef32_pk_fp8_f32", "v_cvt_scalef32_pk_bf8_f32")
def scaled_pack_fp8(inst: Instruction):
    a, b, scale = (fetch_f32(inst.operands[role]) for role in ("src0", "src1", "src2"))
    store, convert = _merge_half(inst), to_e4m3 if "pk_fp8" in inst.mnemonic else to_e5m2

    def run(g):
        # The scale is a power of two: its exponent field divides (CDNA4 ISA, V_CVT_SCALEF32_*).
        factor = _inverse_power(scale(g))
        clamp = g.fp16_overflow_clamps
        x, y = (a(g) * factor).astype(F32), (b(g) * factor).astype(F32)
        store(g, convert(x, clamp) | convert(y, clamp) << U32(8))

    return run


def _inverse_power(scale) -> np.ndarray:
    exponent = (np.asarray(scale, F32).view(U32) >> U32(23) & U32(0xFF)).astype(np.int64) - 127
    return np.ldexp(1.0, -exponent)


def _power(scale) -> np.ndarray:
    exponent = (np.asarray(scale, F32).view(U32) >> U32(23) & U32(0xFF)).astype(np.int64) - 127
    return np.ldexp(1.0, exponent)


@builds("v_cvt_scalef32_pk_fp4_f32")
def scaled_pack_fp4(inst: Instruction):
    a, b, scale = (fetch_f32(inst.operands[role]) for role in ("src0", "src1", "src2"))
    row, byte = destination_row(inst), inst.mods.get("opsel", 0) >> 2 & 3
    shift = U32(8 * byte)

    def code(x):
        return np.clip(x, -6, 6).astype(F32).astype(MX_TYPES[4]).view(np.uint8).astype(U32) & U32(15)

    def run(g):
        factor = _inverse_power(scale(g))
        value = code(a(g) * factor) | code(b(g) * factor) << U32(4)
        g.write_vector(row, g.V[row] & ~(U32(0xFF) << shift) | value << shift)

    return run


@builds("v_cvt_scalef32_pk_f32_fp8", "v_cvt_scalef32_pk_f32_bf8", "v_cvt_scalef32_pk_f32_fp4")
def scaled_unpack(inst: Instruction):
    a, scale, row = fetch_u32(inst.operands["src0"]), fetch_f32(inst.operands["src1"]), destination_row(inst)
    opsel, kind = inst.mods.get("opsel", 0), inst.mnemonic[-3:]
    table = {"fp8": E4M3, "bf8": E5M2, "fp4": MX_TABLES[4]}[kind]
    bits, shift = (4, 8 * (opsel & 3)) if kind == "fp4" else (8, 16 * (opsel & 1))
    mask = U32((1 << bits) - 1)

    def run(g):
        word, factor = a(g) >> U32(shift), _power(scale(g))
        first = (table[word & mask] * factor).astype(F32)
        second = (table[word >> U32(bits) & mask] * factor).astype(F32)
        g.write_vector(row, first.view(U32))
        g.write_vector(row + 1, second.view(U32))

    return run


@builds("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def unpack_fp8(inst: Instruction):
    row, table = destination_row(inst), E4M3 if inst.mnemonic.endswith("fp8") else E5M2
    a = fetch_u32(inst.operands["src0"])
    # The half comes from op_sel in VOP3 and from the source selector (WORD_1 = 5) in SDWA.
    high = inst.mods.get("src0_sel", 4) == 5 if inst.variant == "sdwa" else inst.mods.get("opsel", 0) & 1
    shift = U32(16 if high else 0)

    def run(g):
        word = a(g) >> shift
        g.write_vector(row, table[word & U32(0xFF)].astype(F32).view(U32))
        g.write_vector(row + 1, table[word >> U32(8) & U32(0xFF)].astype(F32).view(U32))

    return run


@builds("v_cvt_pk_bf16_f32")
def pack_bf16(inst: Instruction):
    a, b, row = fetch_f32(inst.operands["src0"]), fetch_f32(inst.operands["src1"]), destination_row(inst)

    def bits(x):
        return to_bf16(np.ascontiguousarray(x, F32).view(U32))

    return lambda g: g.write_vector(row, bits(a(g)) | bits(b(g)) << U32(16))


@builds("v_cvt_pkrtz_f16_f32")
def pack_f16(inst: Instruction):
    a, b, row = fetch_f32(inst.operands["src0"]), fetch_f32(inst.operands["src1"]), destination_row(inst)

    def bits(x):
        half = np.asarray(x, F32).astype(F16)
        # Towards zero: step back where rounding to nearest went past the value.
        over = np.abs(half.astype(F32)) > np.abs(x)
        return np.where(over, half.view(np.uint16) - np.uint16(1), half.view(np.uint16)).astype(U32)

    return lambda g: g.write_vector(row, bits(a(g)) | bits(b(g)) << U32(16))


@builds("v_cvt_pknorm_u16_f32")
def pack_unorm(inst: Instruction):
    a, b, row = fetch_f32(inst.operands["src0"]), fetch_f32(inst.operands["src1"]), destination_row(inst)

    def bits(x):
        unit = np.clip(np.nan_to_num(np.asarray(x, F32), nan=0.0, posinf=1.0, neginf=0.0), F32(0), F32(1))
        return np.rint(unit * F32(65535)).astype(U32)

    return lambda g: g.write_vector(row, bits(a(g)) | bits(b(g)) << U32(16))


@builds("v_cvt_pk_u8_f32")
def pack_u8(inst: Instruction):
    a, byte, old = fetch_f32(inst.operands["src0"]), fetch_u32(inst.operands["src1"]), fetch_u32(inst.operands["src2"])
    row = destination_row(inst)

    def run(g):
        x = np.nan_to_num(np.rint(np.asarray(a(g), F32)), nan=0.0, posinf=255.0, neginf=0.0)
        value = np.clip(x, 0, 255).astype(U32)
        shift = U32(8) * (byte(g) & U32(3))
        g.write_vector(row, old(g) & ~(U32(0xFF) << shift) | value << shift)

    return run
