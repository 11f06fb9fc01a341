"""Vector ALU beyond plain 32-bit arithmetic: 64-bit operations, carries, selects, comparisons, AccVGPR moves."""

from __future__ import annotations

import numpy as np

from .decode import Instruction
from .modifiers import lane_access
from .operands import BUILDERS, builds, destination_row, fetch_f32, fetch_i32, fetch_u32, fetch_u64, plain_sources

U32, U64, I32, I64, F32 = np.uint32, np.uint64, np.int32, np.int64, np.float32


def _frexp_exponent(x):
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(I32)


@builds("v_mov_b64")
def mov64(inst: Instruction):
    row, source = destination_row(inst), fetch_u64(inst.operands["src0"])

    def run(g):
        value = np.asarray(source(g))
        g.write_vector(row, value.astype(U32))
        g.write_vector(row + 1, (value >> U64(32)).astype(U32))

    return run


def _cndmask(inst: Instruction):
    row = destination_row(inst)
    if inst.encoding == "VOP3":
        # neg and abs act on the bits as on floats, so a select can negate.
        a, b = (_float_bits(inst.operands[role]) for role in ("src0", "src1"))
        mask = inst.operands["src2"].reg
    else:
        a, b = plain_sources(inst, fetch_u32)[:2]
        mask = 106
    return lambda g: g.write_vector(row, np.where(g.lane_mask(mask), b(g), a(g)))


def _float_bits(operand):
    base, neg, absolute = fetch_u32(operand), operand.neg, operand.abs
    if not (neg or absolute):
        return base

    def fetch(g):
        x = base(g)
        if absolute:
            x = x & U32(0x7FFFFFFF)
        return x ^ U32(0x80000000) if neg else x

    return fetch


BUILDERS["v_cndmask_b32"] = lane_access(_cndmask)


def _carry(inst: Instruction):
    name, row = inst.mnemonic, destination_row(inst)
    a, b = plain_sources(inst, fetch_u32)[:2]
    carry_out = inst.operands["sdst"].reg if "sdst" in inst.operands else 106
    carry_in = None
    if name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"):
        carry_in = inst.operands["src2"].reg if "src2" in inst.operands else 106
    subtract, swap = "sub" in name, "rev" in name

    def run(g):
        x, y = a(g).astype(I64), b(g).astype(I64)
        if swap:
            x, y = y, x
        extra = g.lane_mask(carry_in).astype(I64) if carry_in is not None else I64(0)
        total = x - y - extra if subtract else x + y + extra
        total = np.broadcast_to(total, (g.size, 64))
        out = total < 0 if subtract else total > 0xFFFFFFFF
        g.write_vector(row, (total & I64(0xFFFFFFFF)).astype(U32))
        g.write_lane_mask(carry_out, out & g.exec)

    return run


for _name in ("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"):
    BUILDERS[_name] = _carry


@builds("v_mad_u64_u32")
def mad64(inst: Instruction):
    a, b = fetch_u32(inst.operands["src0"]), fetch_u32(inst.operands["src1"])
    c, row, sdst = fetch_u64(inst.operands["src2"]), destination_row(inst), inst.operands["sdst"].reg

    def run(g):
        product = a(g).astype(U64) * b(g).astype(U64)
        addend = c(g)
        total = np.broadcast_to(product + addend, (g.size, 64))
        g.write_vector(row, total.astype(U32))
        g.write_vector(row + 1, (total >> U64(32)).astype(U32))
        g.write_lane_mask(sdst, (total < addend) & g.exec)

    return run


@builds("v_lshlrev_b64", "v_lshrrev_b64", "v_ashrrev_i64", "v_lshl_add_u64")
def wide_shift(inst: Instruction):
    row, name = destination_row(inst), inst.mnemonic
    if name == "v_lshl_add_u64":
        a, n, c = fetch_u64(inst.operands["src0"]), fetch_u32(inst.operands["src1"]), fetch_u64(inst.operands["src2"])

        def value(g):
            return (a(g) << (n(g) & U32(7)).astype(U64)) + c(g)
    else:
        n, a = fetch_u32(inst.operands["src0"]), fetch_u64(inst.operands["src1"])

        def value(g):
            amount = (n(g) & U32(63)).astype(U64)
            if name == "v_lshlrev_b64":
                return a(g) << amount
            if name == "v_lshrrev_b64":
                return a(g) >> amount
            return (np.asarray(a(g)).view(I64) >> amount.astype(I64)).view(U64)

    def run(g):
        total = np.asarray(value(g))
        g.write_vector(row, total.astype(U32))
        g.write_vector(row + 1, (total >> U64(32)).astype(U32))

    return run


_CONDITIONS = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b)), bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "ne": np.not_equal,
    "tru": lambda a, b: np.ones(np.broadcast_shapes(np.shape(a), np.shape(b)), bool),
    "t": lambda a, b: np.ones(np.broadcast_shapes(np.shape(a), np.shape(b)), bool),
}


def _compare(inst: Instruction):
    prefix, condition, kind = inst.mnemonic[2:].split("_")
    function, dst = _CONDITIONS[condition], inst.operands["sdst"].reg
    fetch = {"f32": fetch_f32, "i32": fetch_i32, "u32": fetch_u32, "u64": fetch_u64, "i64": fetch_u64}[kind]
    a, b = fetch(inst.operands["src0"]), fetch(inst.operands["src1"])
    view = I64 if kind == "i64" else None

    def run(g):
        x, y = a(g), b(g)
        if view is not None:
            x, y = x.view(view), y.view(view)
        lanes = np.broadcast_to(function(x, y), (g.size, 64)) & g.exec
        g.write_lane_mask(dst, lanes)
        if prefix == "cmpx":
            g.write_lane_mask(126, lanes)

    return run


for _condition in _CONDITIONS:
    for _kind in ("f32", "i32", "u32", "i64", "u64"):
        for _prefix in ("cmp", "cmpx"):
            BUILDERS[f"v_{_prefix}_{_condition}_{_kind}"] = lane_access(_compare)


@builds("v_cmp_class_f32", "v_cmpx_class_f32")
def compare_class(inst: Instruction):
    a, b, dst = _float_bits(inst.operands["src0"]), fetch_u32(inst.operands["src1"]), inst.operands["sdst"].reg

    def run(g):
        x, mask = np.broadcast_to(a(g), (g.size, 64)), b(g)
        sign, size = x >> U32(31) != 0, x & U32(0x7FFFFFFF)
        nan = size > 0x7F800000
        kind = np.select(
            [nan & (size & U32(0x400000) == 0), nan, size == 0x7F800000, size >= 0x800000, size > 0],
            [
                U32(0),
                U32(1),
                np.where(sign, U32(2), U32(9)),
                np.where(sign, U32(3), U32(8)),
                np.where(sign, U32(4), U32(7)),
            ],
            np.where(sign, U32(5), U32(6)),
        )
        lanes = (mask >> kind & U32(1) != 0) & g.exec
        g.write_lane_mask(dst, lanes)
        if "cmpx" in inst.mnemonic:
            g.write_lane_mask(126, lanes)

    return run


@builds("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32")
def accvgpr(inst: Instruction):
    row, source = destination_row(inst), fetch_u32(inst.operands["src0"])
    return lambda g: g.write_vector(row, source(g))


@builds("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def mbcnt(inst: Instruction):
    a, b, row = fetch_u32(inst.operands["src0"]), fetch_u32(inst.operands["src1"]), destination_row(inst)
    lanes = np.arange(64, dtype=np.uint64)
    below = (np.uint64(1) << lanes) - np.uint64(1)
    mask = (below >> U64(32) if "hi" in inst.mnemonic else below & U64(0xFFFFFFFF)).astype(U32)
    return lambda g: g.write_vector(row, np.bitwise_count(a(g) & mask).astype(U32) + b(g))


@builds("v_frexp_exp_i32_f32", "v_frexp_mant_f32")
def frexp(inst: Instruction):
    a, row = fetch_f32(inst.operands["src0"]), destination_row(inst)
    if inst.mnemonic == "v_frexp_exp_i32_f32":
        return lambda g: g.write_vector(row, _frexp_exponent(a(g)).view(U32))
    return lambda g: g.write_vector(row, np.where(np.isfinite(a(g)), np.frexp(a(g))[0], a(g)).astype(F32).view(U32))
