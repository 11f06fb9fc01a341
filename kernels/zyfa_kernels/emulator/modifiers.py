"""DPP and SDWA: operand permutation across lanes, and byte or half-word selection, around any plain instruction."""

from __future__ import annotations

import dataclasses

import numpy as np

from .decode import END, VGPR, Instruction, Operand
from .state import FULL

SCRATCH0, SCRATCH1, SCRATCH_OUT = END, END + 1, END + 2


def lane_access(build):
    """Wrap a builder so that it also takes the DPP and SDWA forms of its instructions."""

    def wrapped(inst: Instruction):
        if inst.variant == "dpp":
            return _dpp(inst, build)
        if inst.variant == "sdwa":
            return _sdwa(inst, build)
        return build(inst)

    return wrapped


def dpp_source_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the lane its operand comes from, and whether that lane exists (DPP_CTRL of the GFX9 ISA)."""
    lane = np.arange(64)
    row, inside = lane & ~15, lane & 15
    everywhere = np.ones(64, bool)
    if control < 0x100:  # quad_perm
        return (lane & ~3) + (control >> 2 * (lane & 3) & 3), everywhere
    amount = control & 15
    if 0x101 <= control <= 0x10F:  # row_shl: from a higher lane
        return row + np.minimum(inside + amount, 15), inside + amount < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return row + np.maximum(inside - amount, 0), inside >= amount
    if 0x121 <= control <= 0x12F:  # row_ror
        return row + (inside - amount & 15), everywhere
    simple = {
        0x130: (np.minimum(lane + 1, 63), lane < 63),
        0x134: ((lane + 1) % 64, everywhere),
        0x138: (np.maximum(lane - 1, 0), lane > 0),
        0x13C: ((lane - 1) % 64, everywhere),
        0x140: (row + 15 - inside, everywhere),
        0x141: ((lane & ~7) + 7 - (lane & 7), everywhere),
        0x142: (np.maximum(row - 1, 0), row > 0),
        0x143: (np.full(64, 31), lane >= 32),
    }
    if control in simple:
        return simple[control]
    if 0x150 <= control <= 0x15F:  # row_newbcast (gfx90a and later)
        return row + amount, everywhere
    raise NotImplementedError(f"DPP control {control:#x}")


def _dpp(inst: Instruction, build):
    mods = inst.mods
    source, exists = dpp_source_lanes(mods["dpp"])
    lane = np.arange(64)
    enabled = (mods["row_mask"] >> lane // 16 & 1 & (mods["bank_mask"] >> lane % 16 // 4 & 1)).astype(bool)
    if not mods["bc"]:
        enabled &= exists
    operand = inst.operands["src0"]
    row = operand.reg - VGPR
    plain = dataclasses.replace(
        inst, variant="", operands=inst.operands | {"src0": dataclasses.replace(operand, reg=SCRATCH0)}
    )
    inner = build(plain)
    word = np.packbits(enabled, bitorder="little").view("<u8")[0]

    def run(g):
        moved = g.V[row][:, source]
        moved[:, ~exists] = 0
        g.V[SCRATCH0 - VGPR] = moved
        if word == FULL:
            return inner(g)
        saved = g.exec, g.exec_full, g.exec_word
        g.exec, g.exec_full, g.exec_word = g.exec & enabled, False, g.exec_word & word
        try:
            return inner(g)
        finally:
            g.exec, g.exec_full, g.exec_word = saved

    return run


def _select(x: np.ndarray, selector: int, signed: bool) -> np.ndarray:
    """SDWA source selector: 0-3 a byte, 4-5 a half, 6 the whole dword."""
    if selector == 6:
        return x
    width = 8 if selector < 4 else 16
    field = x >> np.uint32(selector * 8 if selector < 4 else (selector - 4) * 16) & np.uint32((1 << width) - 1)
    if signed:
        top = np.uint32(1 << width - 1)
        field = (field ^ top) - top
    return field


def _sdwa(inst: Instruction, build):
    from .operands import fetch_u32

    mods, operands = inst.mods, dict(inst.operands)
    picks = []
    for role, scratch in (("src0", SCRATCH0), ("src1", SCRATCH1)):
        if role in operands:
            old = operands[role]
            bare = dataclasses.replace(old, neg=False, abs=False)
            picks.append((fetch_u32(bare), mods[f"{role}_sel"], bool(mods[f"{role}_sext"]), scratch - VGPR))
            operands[role] = Operand(reg=scratch, neg=old.neg, abs=old.abs)
    destination = inst.operands.get("vdst")
    selector, unused = mods.get("dst_sel", 6), mods.get("dst_unused", 0)
    if destination is not None and selector != 6:
        operands["vdst"] = Operand(reg=SCRATCH_OUT)
    inner = build(dataclasses.replace(inst, variant="", operands=operands))

    def run(g):
        for fetch, pick, signed, row in picks:
            g.V[row] = _select(fetch(g), pick, signed)
        result = inner(g)
        if destination is None or selector == 6:
            return result
        width = 8 if selector < 4 else 16
        shift = np.uint32(selector * 8 if selector < 4 else (selector - 4) * 16)
        field = np.uint32((1 << width) - 1)
        value = (g.V[SCRATCH_OUT - VGPR] & field) << shift
        row = destination.reg - VGPR
        if unused == 2:
            value |= g.V[row] & ~(field << shift)
        elif unused == 1:
            top = np.uint32(1 << width - 1) << shift
            value = (value ^ top) - top
        g.write_vector(row, value)
        return result

    return run
