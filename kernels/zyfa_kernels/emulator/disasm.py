"""Assembler text of decoded instructions, in LLVM's syntax (a test compares it with llvm-objdump)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .decode import Instruction, Operand, register_name

_HWREGS = {
    1: "HW_REG_MODE",
    2: "HW_REG_STATUS",
    3: "HW_REG_TRAPSTS",
    4: "HW_REG_HW_ID",
    5: "HW_REG_GPR_ALLOC",
    6: "HW_REG_LDS_ALLOC",
    7: "HW_REG_IB_STS",
    20: "HW_REG_XCC_ID",
}
_SDWA = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")


@cache
def _twin_forms() -> frozenset[str]:
    """Mnemonics that exist both as a 32-bit encoding and as VOP3: LLVM tells those apart by a suffix."""
    from tinygrad.runtime.autogen.amd.cdna.enum import VOP1Op, VOP2Op, VOPCOp

    def names(*enums) -> set[str]:
        return {op.name.lower().removesuffix("_e32").removesuffix("_e64") for enum in enums for op in enum}

    return frozenset(names(VOP1Op, VOP2Op, VOPCOp))


def _name(inst: Instruction) -> str:
    if inst.variant:
        return f"{inst.mnemonic}_{inst.variant}"
    if inst.encoding in ("VOP1", "VOP2", "VOPC") and inst.mnemonic not in _BARE:
        return inst.mnemonic + "_e32"
    if inst.encoding == "VOP3" and inst.mnemonic in _twin_forms() and inst.mnemonic not in _BARE:
        return inst.mnemonic + "_e64"
    return inst.mnemonic


_BARE = (
    "v_nop",
    "v_accvgpr_mov_b32",
    "v_readfirstlane_b32",
    "v_fmaak_f32",
    "v_fmamk_f32",
    "v_madak_f32",
    "v_madmk_f32",
    "v_swap_b32",
)


def format_operand(operand: Operand, signed_literal: bool = False) -> str:
    if operand.reg >= 0:
        text = register_name(operand.reg, operand.count)
    elif operand.special:
        text = operand.special
    elif operand.literal:
        text = hex(int(operand.value or 0))
    elif operand.value == 0.15915494309189532:
        text = "0.15915494"
    else:
        text = str(operand.value)
    if operand.abs:
        text = f"|{text}|"
    return f"-{text}" if operand.neg else text


def _offset(value: int) -> str:
    return f" offset:{value}" if value else ""


def _flags(inst: Instruction, *names: str) -> str:
    return "".join(f" {n}" for n in names if inst.mods.get(n))


def _bits(value: int, count: int) -> str:
    return "[" + ",".join(str(value >> k & 1) for k in range(count)) + "]"


def _branch(inst: Instruction) -> str:
    return f"{inst.mnemonic} {inst.target:#x}"


def _waitcnt(inst: Instruction) -> str:
    from .exec_control import waitcnt_fields

    vm, exp, lgkm = waitcnt_fields(inst)
    parts = [f"{n}cnt({v})" for n, v, top in (("vm", vm, 63), ("exp", exp, 7), ("lgkm", lgkm, 15)) if v != top]
    return "s_waitcnt " + " ".join(parts or ["vmcnt(63) expcnt(7) lgkmcnt(15)"])


def _scalar(inst: Instruction) -> str:
    name, simm = inst.mnemonic, inst.mods.get("simm16", 0)
    parts = [format_operand(inst.operands[r]) for r in ("sdst", "src0", "src1") if r in inst.operands]
    if "setreg" in name or "getreg" in name:
        reg = _HWREGS.get(simm & 63, str(simm & 63))
        hwreg = f"hwreg({reg}, {simm >> 6 & 31}, {(simm >> 11) + 1})"
        if name == "s_setreg_imm32_b32":
            value = inst.mods["literal"]
            return f"{name} {hwreg}, {value if value <= 64 else hex(value)}"
        return f"{name} {hwreg}, {parts[0]}" if "setreg" in name else f"{name} {parts[0]}, {hwreg}"
    if inst.encoding == "SOPK":
        parts.append(hex(simm))
    return f"{name} {', '.join(parts)}"


def _vector(inst: Instruction) -> str:
    operands, mods = inst.operands, inst.mods
    sources = [r for r in ("src0", "src1", "src2") if r in operands]
    parts = []
    if "sdst" in operands and "vdst" not in operands:
        parts.append(format_operand(operands["sdst"]))
    if "vdst" in operands:
        parts.append(format_operand(operands["vdst"]))
        if "sdst" in operands:
            parts.append(format_operand(operands["sdst"]))
        elif inst.encoding == "VOP2" and "_co_" in inst.mnemonic:
            parts.append("vcc")
    packed = inst.encoding == "VOP3P"
    for role in sources:
        operand = operands[role]
        if packed and (operand.neg or operand.abs):
            operand = Operand(operand.reg, operand.count, operand.value, operand.literal, operand.special, operand.bits)
        parts.append(format_operand(operand))
    if inst.encoding == "VOP2" and inst.mnemonic in (
        "v_cndmask_b32",
        "v_addc_co_u32",
        "v_subb_co_u32",
        "v_subbrev_co_u32",
    ):
        parts.append("vcc")
    if inst.mnemonic in ("v_fmaak_f32", "v_madak_f32"):
        parts.append(hex(mods["literal"]))
    elif inst.mnemonic in ("v_fmamk_f32", "v_madmk_f32"):
        parts.insert(2, hex(mods["literal"]))
    text = f"{_name(inst)} {', '.join(parts)}" if parts else _name(inst)
    if packed:
        return text + _packed_modifiers(inst, sources)
    if inst.variant == "dpp":
        return text + _dpp(mods)
    if inst.variant == "sdwa":
        return text + _sdwa(inst, sources)
    if inst.mnemonic == "v_bitop3_b32":
        return text + f" bitop3:{mods['bitop3']:#x}"
    if mods.get("opsel"):
        text += _opsel(inst, sources)
    text += " clamp" if mods.get("clmp") else ""
    return text + {0: "", 1: " mul:2", 2: " mul:4", 3: " div:2"}[mods.get("omod", 0)]


def _opsel(inst: Instruction, sources: Sequence[str]) -> str:
    opsel, count = inst.mods["opsel"], len(sources)
    values = [opsel >> k & 1 for k in range(count)]
    return f" op_sel:[{','.join(map(str, [*values, opsel >> 3 & 1]))}]"


def _packed_modifiers(inst: Instruction, sources: Sequence[str]) -> str:
    mods, count = inst.mods, len(sources)
    high = mods["opsel_hi"] | mods.get("opsel_hi2", 0) << 2
    text = ""
    if mods["opsel"]:
        text += f" op_sel:{_bits(mods['opsel'], count)}"
    if high & (1 << count) - 1 != (1 << count) - 1:
        text += f" op_sel_hi:{_bits(high, count)}"
    neg = sum(inst.operands[r].neg << k for k, r in enumerate(sources))
    if neg:
        text += f" neg_lo:{_bits(neg, count)}"
    if mods.get("neg_hi"):
        text += f" neg_hi:{_bits(mods['neg_hi'], count)}"
    return text + (" clamp" if mods.get("clmp") else "")


def _dpp(mods: dict[str, int]) -> str:
    control = mods["dpp"]
    names = {
        0x130: "wave_shl:1",
        0x134: "wave_rol:1",
        0x138: "wave_shr:1",
        0x13C: "wave_ror:1",
        0x140: "row_mirror",
        0x141: "row_half_mirror",
        0x142: "row_bcast:15",
        0x143: "row_bcast:31",
    }
    if control < 0x100:
        text = "quad_perm:[" + ",".join(str(control >> 2 * k & 3) for k in range(4)) + "]"
    elif control in names:
        text = names[control]
    else:
        kind = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}[control & ~15]
        text = f"{kind}:{control & 15}"
    text = f" {text} row_mask:{mods['row_mask']:#x} bank_mask:{mods['bank_mask']:#x}"
    return text + (" bound_ctrl:1" if mods["bc"] else "")


def _sdwa(inst: Instruction, sources: Sequence[str]) -> str:
    mods, text = inst.mods, ""
    if "vdst" in inst.operands:
        text += f" dst_sel:{_SDWA[mods['dst_sel']]} dst_unused:{_UNUSED[mods['dst_unused']]}"
    for role in sources:
        text += f" {role}_sel:{_SDWA[mods[f'{role}_sel']]}"
    return text


def _matrix(inst: Instruction) -> str:
    operands, mods = inst.operands, inst.mods
    roles = ("vdst", "src0", "src1", "src2", "scale0", "scale1")
    text = f"{inst.mnemonic} {', '.join(format_operand(operands[r]) for r in roles if r in operands)}"
    if "scale0" in operands:
        text += f" op_sel:{_bits(mods['opsel'], 3)}" if mods["opsel"] & 3 else ""
        text += f" op_sel_hi:{_bits(mods['opsel_hi'], 3)}"
        mods = mods | {"abid": 0}  # a fixed bit of the scaled encoding
    for name in ("cbsz", "abid", "blgp"):
        if mods.get(name):
            text += f" {name}:{mods[name]}"
    return text


def _lds(inst: Instruction) -> str:
    operands, mods = inst.operands, inst.mods
    parts = [format_operand(operands[r]) for r in ("vdst", "vaddr", "data0", "data1") if r in operands]
    if "read2" in inst.mnemonic or "write2" in inst.mnemonic:
        tail = "".join(f" offset{k}:{mods[f'offset{k}']}" for k in (0, 1) if mods[f"offset{k}"])
    else:
        tail = _offset(mods["offset"])
    return f"{inst.mnemonic} {', '.join(parts)}{tail}".rstrip()


def _buffer(inst: Instruction) -> str:
    operands, mods = inst.operands, inst.mods
    data = operands.get("vdst") or operands.get("data0")
    parts = [format_operand(data)] if data else []
    parts.append(format_operand(operands["vaddr"]) if "vaddr" in operands else "off")
    parts += [format_operand(operands[r]) for r in ("srsrc", "soffset") if r in operands]
    if inst.mnemonic in ("buffer_inv", "buffer_wbl2"):
        parts = []
    text = f"{inst.mnemonic} {', '.join(parts)}{_flags(inst, 'offen', 'idxen')}{_offset(mods['offset'])}"
    return (text + _flags(inst, "sc0", "nt", "sc1", "lds")).replace("  ", " ")


def _global(inst: Instruction) -> str:
    operands, mods = inst.operands, inst.mods
    parts = [format_operand(operands[r]) for r in ("vdst", "vaddr", "data0") if r in operands]
    if inst.encoding != "FLAT":
        parts.append(format_operand(operands["saddr"]) if "saddr" in operands else "off")
    return f"{inst.mnemonic} {', '.join(parts)}{_offset(mods['offset'])}{_flags(inst, 'sc0', 'nt', 'sc1')}"


def _smem(inst: Instruction) -> str:
    operands, mods = inst.operands, inst.mods
    parts = [format_operand(operands[r]) for r in ("sdst", "saddr", "soffset") if r in operands]
    if "soffset" not in operands and "saddr" in operands:
        parts.append(hex(mods["offset"]))
        return f"{inst.mnemonic} {', '.join(parts)}{_flags(inst, 'glc')}"
    offset = f" offset:{mods['offset']:#x}" if mods.get("imm") and "soffset" in operands else ""
    return f"{inst.mnemonic} {', '.join(parts)}{offset}".rstrip()


def format_instruction(inst: Instruction) -> str:
    """LLVM's text of `inst`; branch targets are given as byte addresses instead of labels."""
    if inst.target is not None:
        return _branch(inst)
    if inst.mnemonic == "s_waitcnt":
        return _waitcnt(inst)
    if inst.encoding == "SOPP":
        return inst.mnemonic if inst.mnemonic in ("s_barrier", "s_endpgm") else f"{inst.mnemonic} {inst.mods['simm16']}"
    writers = {
        "SMEM": _smem,
        "DS": _lds,
        "MUBUF": _buffer,
        "GLOBAL": _global,
        "FLAT": _global,
        "SCRATCH": _global,
        "MFMA": _matrix,
        "SOP1": _scalar,
        "SOP2": _scalar,
        "SOPC": _scalar,
        "SOPK": _scalar,
    }
    return writers.get(inst.encoding, _vector)(inst)
