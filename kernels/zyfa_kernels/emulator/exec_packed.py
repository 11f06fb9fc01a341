"""Packed arithmetic (VOP3P): two fp32 in a register pair, or two 16-bit values in a register."""

from __future__ import annotations

import numpy as np

from .decode import VGPR, Instruction, Operand
from .formats import fma32
from .operands import BUILDERS, builds, constant_bits, destination_row, fetch_u32, flush

F16, F32, U16, U32, I16 = np.float16, np.float32, np.uint16, np.uint32, np.int16


def _selectors(inst: Instruction) -> tuple[list[int], list[int]]:
    """op_sel and op_sel_hi as one bit a source."""
    high = inst.mods["opsel_hi"] | inst.mods.get("opsel_hi2", 0) << 2
    low = inst.mods["opsel"]
    return [low >> k & 1 for k in range(3)], [high >> k & 1 for k in range(3)]


def _sources(inst: Instruction) -> list[Operand]:
    return [inst.operands[role] for role in ("src0", "src1", "src2") if role in inst.operands]


def _half_f32(operand: Operand, half: int, negate: bool):
    """One fp32 of a packed operand: the register or the constant that op_sel picks, negated if asked."""
    if operand.reg >= VGPR:
        row = operand.reg - VGPR + half
        return lambda g: _signed(flush(g.Vf[row]) if g.flush32 else g.Vf[row], negate)
    if operand.reg >= 0:
        reg = operand.reg + half
        return lambda g: _signed(flush(g.Sf[reg]) if g.flush32 else g.Sf[reg], negate)
    value = np.array(constant_bits(operand.value), U32).view(F32)[()]
    return lambda g: _signed(value, negate)


def _signed(x, negate: bool):
    return -x if negate else x


@builds("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")
def packed_f32(inst: Instruction):
    low, high = _selectors(inst)
    sources, row = _sources(inst), destination_row(inst)
    neg_low, neg_high = sum((o.neg << k) for k, o in enumerate(sources)), inst.mods["neg_hi"]
    function = {"v_pk_fma_f32": fma32, "v_pk_mul_f32": np.multiply, "v_pk_add_f32": np.add}[inst.mnemonic]
    first = [_half_f32(o, low[k], bool(neg_low >> k & 1)) for k, o in enumerate(sources)]
    second = [_half_f32(o, high[k], bool(neg_high >> k & 1)) for k, o in enumerate(sources)]

    def run(g):
        x = function(*[f(g) for f in first])
        y = function(*[f(g) for f in second])
        if g.flush32:
            x, y = flush(x), flush(y)
        g.write_vector(row, np.asarray(x).view(U32))
        g.write_vector(row + 1, np.asarray(y).view(U32))

    return run


@builds("v_pk_mov_b32")
def packed_move(inst: Instruction):
    low, _ = _selectors(inst)
    a, b = _sources(inst)[:2]
    row = destination_row(inst)

    def half(operand, pick):
        return fetch_u32(Operand(reg=operand.reg + pick) if operand.reg >= 0 else operand)

    x, y = half(a, low[0]), half(b, low[1])

    def run(g):
        first, second = np.array(x(g)), np.array(y(g))
        g.write_vector(row, first)
        g.write_vector(row + 1, second)

    return run


_PK16 = {
    "v_pk_add_f16": (F16, lambda a, b: a + b),
    "v_pk_mul_f16": (F16, lambda a, b: a * b),
    "v_pk_min_f16": (F16, np.fmin),
    "v_pk_max_f16": (F16, np.fmax),
    "v_pk_fma_f16": (F16, lambda a, b, c: (a.astype(np.float64) * b + c).astype(F16)),
    "v_pk_add_u16": (U16, lambda a, b: a + b),
    "v_pk_sub_u16": (U16, lambda a, b: a - b),
    "v_pk_add_i16": (I16, lambda a, b: a + b),
    "v_pk_sub_i16": (I16, lambda a, b: a - b),
    "v_pk_mul_lo_u16": (U16, lambda a, b: a * b),
    "v_pk_mad_u16": (U16, lambda a, b, c: a * b + c),
    "v_pk_mad_i16": (I16, lambda a, b, c: a * b + c),
    "v_pk_min_u16": (U16, np.minimum),
    "v_pk_max_u16": (U16, np.maximum),
    "v_pk_min_i16": (I16, np.minimum),
    "v_pk_max_i16": (I16, np.maximum),
    "v_pk_lshlrev_b16": (U16, lambda a, b: b << (a & U16(15))),
    "v_pk_lshrrev_b16": (U16, lambda a, b: b >> (a & U16(15))),
    "v_pk_ashrrev_i16": (I16, lambda a, b: b >> (a & I16(15))),
}


def _packed16(inst: Instruction):
    kind, function = _PK16[inst.mnemonic]
    low, high = _selectors(inst)
    sources, row = _sources(inst), destination_row(inst)
    neg_low, neg_high = sum((o.neg << k) for k, o in enumerate(sources)), inst.mods["neg_hi"]
    if inst.mods.get("clmp"):
        raise NotImplementedError("clamp of packed 16-bit arithmetic")
    # An inline float constant is its fp16 pattern in the low half; op_sel_hi picks the (zero) high half.
    fetch = [
        fetch_u32(o) if o.reg >= 0 or o.literal or not isinstance(o.value, float) else _constant16(o) for o in sources
    ]

    def half(g, k, select, negate):
        bits = (fetch[k](g) >> U32(16 * select) & U32(0xFFFF)).astype(U16).view(kind)
        return -bits if negate and kind is F16 else bits

    def run(g):
        n = range(len(sources))
        x = function(*[half(g, k, low[k], neg_low >> k & 1) for k in n])
        y = function(*[half(g, k, high[k], neg_high >> k & 1) for k in n])
        g.write_vector(row, x.view(U16).astype(U32) | y.view(U16).astype(U32) << U32(16))

    return run


def _constant16(operand: Operand):
    value = U32(constant_bits(operand.value, 16))
    return lambda g: value


for _name in _PK16:
    BUILDERS[_name] = _packed16
