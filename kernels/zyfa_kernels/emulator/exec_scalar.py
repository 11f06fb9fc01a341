"""Scalar ALU: SOP1, SOP2, SOPC, SOPK. Values are uint32 [W, 1] or uint64 [W, 1], one row a wave."""

from __future__ import annotations

import numpy as np

from .decode import SCC, Instruction
from .errors import Fault
from .operands import builds, fetch_u32, fetch_u64

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def _scc(g, condition) -> None:
    g.S[SCC] = condition
    g.state[SCC] = 1


def _get(inst: Instruction, role: str):
    operand = inst.operands[role]
    return fetch_u64(operand) if operand.bits == 64 else fetch_u32(operand)


def _unary(inst: Instruction, function, sets_scc: bool):
    source, dst = _get(inst, "src0"), inst.operands["sdst"]

    def run(g):
        value = function(source(g))
        g.write_scalar(dst.reg, value, dst.count)
        if sets_scc:
            _scc(g, value != 0)

    return run


def _count_bits(x):
    return np.bitwise_count(x).astype(U32)


def _find_first(x):
    low = np.bitwise_count(~x & (x - x.dtype.type(1))).astype(I32)
    return np.where(x == 0, I32(-1), low).view(U32)


def _reverse(x):
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(x.dtype).reshape(x.shape)


def _leading(x):
    """Position of the first set bit from the top, -1 if none."""
    width = x.dtype.itemsize * 8
    length = np.zeros(x.shape, I32)
    rest = x.copy()
    while rest.any():
        length += rest != 0
        rest = rest >> x.dtype.type(1)
    return np.where(x == 0, I32(-1), I32(width) - length).view(U32)


_UNARY = {
    "s_mov": (lambda x: x, False),
    "s_not": (lambda x: ~x, True),
    "s_brev": (_reverse, False),
    "s_wqm": (lambda x: x, True),
}
_TO_32 = {
    "s_ff1_i32": (_find_first, False),
    "s_flbit_i32": (_leading, False),
    "s_bcnt1_i32": (_count_bits, True),
    "s_bcnt0_i32": (lambda x: _count_bits(~x), True),
}


@builds(*[f"{n}_b{w}" for n in (*_UNARY, *_TO_32) for w in (32, 64)])
def unary(inst: Instruction):
    stem = inst.mnemonic.rsplit("_b", 1)[0]
    function, scc = (_UNARY | _TO_32)[stem]
    return _unary(inst, function, scc)


@builds("s_abs_i32")
def absolute(inst: Instruction):
    return _unary(inst, lambda x: np.where(x.view(I32) < 0, U32(0) - x, x), True)


@builds("s_sext_i32_i8")
def sext8(inst: Instruction):
    return _unary(inst, lambda x: (x & U32(0xFF)).astype(np.uint8).view(np.int8).astype(I32).view(U32), False)


@builds("s_sext_i32_i16")
def sext16(inst: Instruction):
    return _unary(inst, lambda x: (x & U32(0xFFFF)).astype(np.uint16).view(np.int16).astype(I32).view(U32), False)


@builds("s_cmov_b32", "s_cmov_b64")
def cmov(inst: Instruction):
    source, dst = _get(inst, "src0"), inst.operands["sdst"]
    old = fetch_u64(dst) if dst.bits == 64 else fetch_u32(dst)
    return lambda g: g.write_scalar(dst.reg, np.where(g.S[SCC] != 0, source(g), old(g)), dst.count)


def _add(a, b, carry):
    total = a.astype(U64) + b.astype(U64) + carry
    return total.astype(U32), (total >> U64(32)) != 0


def _sub(a, b, borrow):
    total = a.astype(I64) - b.astype(I64) - borrow
    return (total & I64(0xFFFFFFFF)).astype(U32), total < 0


def _signed_overflow(total):
    return (total > I64(2**31 - 1)) | (total < I64(-(2**31)))


def _shift_amount(b, width):
    return (b & U32(width - 1)).astype(U32 if width == 32 else U64)


def _arith(name, a, b, scc):
    """Result and new SCC (None keeps it) of a 32-bit SOP2 operation."""
    if name == "s_add_u32":
        return _add(a, b, U64(0))
    if name == "s_addc_u32":
        return _add(a, b, scc.astype(U64))
    if name == "s_sub_u32":
        return _sub(a, b, I64(0))
    if name == "s_subb_u32":
        return _sub(a, b, scc.astype(I64))
    if name in ("s_add_i32", "s_sub_i32"):
        x, y = a.view(I32).astype(I64), b.view(I32).astype(I64)
        total = x + y if name == "s_add_i32" else x - y
        return (total & I64(0xFFFFFFFF)).astype(U32), _signed_overflow(total)
    if name in ("s_min_i32", "s_max_i32", "s_min_u32", "s_max_u32"):
        kind = I32 if name.endswith("i32") else U32
        first = a.view(kind) < b.view(kind) if "min" in name else a.view(kind) > b.view(kind)
        return np.where(first, a, b), first
    if name == "s_mul_i32":
        return (a.astype(U64) * b.astype(U64)).astype(U32), None
    if name == "s_mul_hi_u32":
        return (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32), None
    if name == "s_mul_hi_i32":
        return (a.view(I32).astype(I64) * b.view(I32).astype(I64) >> I64(32)).astype(I32).view(U32), None
    if name == "s_bfm_b32":
        ones = (U64(1) << (a & U32(31)).astype(U64)) - U64(1)
        return (ones << (b & U32(31)).astype(U64)).astype(U32), None
    if name in ("s_bfe_u32", "s_bfe_i32"):
        offset, width = (b & U32(31)).astype(U64), (b >> U32(16) & U32(127)).astype(U64)
        wide = a.astype(U64) >> offset & ((U64(1) << np.minimum(width, U64(32))) - U64(1))
        if name == "s_bfe_i32":
            top = np.where(width > 0, U64(1) << np.maximum(width, U64(1)) - U64(1), U64(0))
            wide = (wide ^ top) - top
        value = (wide & U64(0xFFFFFFFF)).astype(U32)
        return value, value != 0
    if name.startswith("s_lshl") and name.endswith("_add_u32"):
        total = (a.astype(U64) << U64(int(name[6]))) + b.astype(U64)
        return total.astype(U32), (total >> U64(32)) != 0
    if name == "s_absdiff_i32":
        value = np.abs(a.view(I32).astype(I64) - b.view(I32).astype(I64)).astype(U64).astype(U32)
        return value, value != 0
    low, high = U32(0xFFFF), U32(16)
    if name == "s_pack_ll_b32_b16":
        return (a & low) | (b & low) << high, None
    if name == "s_pack_lh_b32_b16":
        return (a & low) | (b & ~low), None
    if name == "s_pack_hh_b32_b16":
        return a >> high | (b & ~low), None
    raise KeyError(name)


_ARITH = (
    "s_add_u32",
    "s_addc_u32",
    "s_sub_u32",
    "s_subb_u32",
    "s_add_i32",
    "s_sub_i32",
    "s_min_i32",
    "s_max_i32",
    "s_min_u32",
    "s_max_u32",
    "s_mul_i32",
    "s_mul_hi_u32",
    "s_mul_hi_i32",
    "s_bfm_b32",
    "s_bfe_u32",
    "s_bfe_i32",
    "s_lshl1_add_u32",
    "s_lshl2_add_u32",
    "s_lshl3_add_u32",
    "s_lshl4_add_u32",
    "s_absdiff_i32",
    "s_pack_ll_b32_b16",
    "s_pack_lh_b32_b16",
    "s_pack_hh_b32_b16",
)


def _as_rows(g, x):
    return x if getattr(x, "ndim", 0) else np.full((g.size, 1), x, np.asarray(x).dtype)


@builds(*_ARITH)
def arithmetic(inst: Instruction):
    name, a, b, dst = inst.mnemonic, _get(inst, "src0"), _get(inst, "src1"), inst.operands["sdst"]

    def run(g):
        value, scc = _arith(name, _as_rows(g, a(g)), _as_rows(g, b(g)), g.S[SCC])
        g.write_scalar(dst.reg, value)
        if scc is not None:
            _scc(g, scc)

    return run


_LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


@builds(*[f"s_{n}_b{w}" for n in _LOGIC for w in (32, 64)])
def logic(inst: Instruction):
    function, dst = _LOGIC[inst.mnemonic.split("_")[1]], inst.operands["sdst"]
    a, b = _get(inst, "src0"), _get(inst, "src1")

    def run(g):
        value = function(a(g), b(g))
        g.write_scalar(dst.reg, value, dst.count)
        _scc(g, value != 0)

    return run


@builds("s_lshl_b32", "s_lshl_b64", "s_lshr_b32", "s_lshr_b64", "s_ashr_i32", "s_ashr_i64")
def shifts(inst: Instruction):
    dst, a, b = inst.operands["sdst"], _get(inst, "src0"), fetch_u32(inst.operands["src1"])
    width = dst.bits
    left, signed = inst.mnemonic.startswith("s_lshl"), inst.mnemonic.startswith("s_ashr")

    def run(g):
        x, amount = _as_rows(g, a(g)), _shift_amount(b(g), width)
        if left:
            value = x << amount
        elif signed:
            kind = I32 if width == 32 else I64
            value = (x.view(kind) >> amount.astype(kind)).view(x.dtype)
        else:
            value = x >> amount
        g.write_scalar(dst.reg, value, dst.count)
        _scc(g, value != 0)

    return run


@builds("s_cselect_b32", "s_cselect_b64")
def cselect(inst: Instruction):
    dst, a, b = inst.operands["sdst"], _get(inst, "src0"), _get(inst, "src1")
    return lambda g: g.write_scalar(dst.reg, np.where(g.S[SCC] != 0, a(g), b(g)), dst.count)


_COMPARE = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


@builds(*[f"s_cmp_{c}_{t}" for c in _COMPARE for t in ("i32", "u32")], "s_cmp_eq_u64", "s_cmp_lg_u64")
def compare(inst: Instruction):
    _, _, condition, kind = inst.mnemonic.split("_")
    function = _COMPARE[condition]
    get = fetch_u64 if kind == "u64" else fetch_u32
    a, b = get(inst.operands["src0"]), get(inst.operands["src1"])
    view = {"i32": I32, "u32": U32, "u64": U64}[kind]
    return lambda g: _scc(g, function(a(g).view(view), b(g).view(view)))


@builds("s_bitcmp0_b32", "s_bitcmp1_b32", "s_bitcmp0_b64", "s_bitcmp1_b64")
def bitcmp(inst: Instruction):
    a, b = _get(inst, "src0"), fetch_u32(inst.operands["src1"])
    width, wanted = (64 if inst.mnemonic.endswith("64") else 32), int(inst.mnemonic[8])

    def run(g):
        x = a(g)
        bit = x >> _shift_amount(b(g), width) & x.dtype.type(1)
        _scc(g, bit == wanted)

    return run


@builds("s_bitset0_b32", "s_bitset1_b32")
def bitset(inst: Instruction):
    dst, source, one = inst.operands["sdst"].reg, _get(inst, "src0"), inst.mnemonic[8] == "1"

    def run(g):
        bit = U32(1) << (source(g) & U32(31))
        g.write_scalar(dst, g.S[dst] | bit if one else g.S[dst] & ~bit)

    return run


@builds(*[f"s_{n}_saveexec_b64" for n in _LOGIC])
def saveexec(inst: Instruction):
    function, dst, source = _LOGIC[inst.mnemonic.split("_")[1]], inst.operands["sdst"], _get(inst, "src0")
    from .decode import EXEC

    def run(g):
        old = g.S[EXEC].astype(U64) | g.S[EXEC + 1].astype(U64) << U64(32)
        value = function(source(g), old) + np.zeros_like(old)
        g.write_scalar(dst.reg, old, 2)
        g.write_scalar(EXEC, value, 2)
        g.exec_changed()
        _scc(g, value != 0)

    return run


def _simm(inst: Instruction) -> int:
    value = inst.mods["simm16"]
    return value - 0x10000 if value >= 0x8000 else value


@builds("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32")
def sopk(inst: Instruction):
    name, dst, value = inst.mnemonic, inst.operands["sdst"].reg, _simm(inst)
    bits = U32(value & 0xFFFFFFFF)

    def run(g):
        if name == "s_movk_i32":
            g.write_scalar(dst, bits)
        elif name == "s_cmovk_i32":
            g.write_scalar(dst, np.where(g.S[SCC] != 0, bits, g.S[dst]))
        elif name == "s_mulk_i32":
            g.write_scalar(dst, (g.Si[dst].astype(I64) * value & I64(0xFFFFFFFF)).astype(U32))
        else:
            total = g.Si[dst].astype(I64) + value
            g.write_scalar(dst, (total & I64(0xFFFFFFFF)).astype(U32))
            _scc(g, _signed_overflow(total))

    return run


@builds(*[f"s_cmpk_{c}_{t}" for c in _COMPARE for t in ("i32", "u32")])
def cmpk(inst: Instruction):
    _, _, condition, kind = inst.mnemonic.split("_")
    function, reg = _COMPARE[condition], inst.operands["src0"].reg
    value = I32(_simm(inst)) if kind == "i32" else U32(inst.mods["simm16"])
    view = I32 if kind == "i32" else U32
    return lambda g: _scc(g, function(g.S[reg].view(view), value))


HWREG_MODE = 1


@builds("s_setreg_imm32_b32", "s_setreg_b32")
def setreg(inst: Instruction):
    packed = inst.mods["simm16"]
    hwreg, offset, size = packed & 63, packed >> 6 & 31, (packed >> 11 & 31) + 1
    operand = inst.operands.get("src0") or inst.operands.get("sdst")
    literal = inst.mods.get("literal", 0)
    source = (
        (lambda g: np.full((g.size, 1), literal, U32)) if inst.mnemonic == "s_setreg_imm32_b32" else fetch_u32(operand)
    )

    def run(g):
        if hwreg != HWREG_MODE:
            raise Fault("register", f"s_setreg to hardware register {hwreg}; only MODE (1) is modelled", 0)
        values = np.unique(source(g))
        if values.size != 1:
            raise Fault("register", "s_setreg gives waves that run together different modes", 0)
        value, mask = int(values[0]) & (1 << size) - 1, ((1 << size) - 1) << offset
        if mask >> 4 & 3:
            current = 0 if g.flush32 else 3
            denormals = (current & ~(mask >> 4) | (value << offset) >> 4) & 3
            g.flush32 = denormals == 0
        if mask >> 23 & 1:
            g.fp16_overflow_clamps = bool((value << offset) >> 23 & 1)
        if mask & 15 and (value << offset) & 15:
            raise Fault("register", "s_setreg selects a rounding mode other than nearest even", 0)

    return run
