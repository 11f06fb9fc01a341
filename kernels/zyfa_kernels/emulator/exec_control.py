"""Program flow: branches, barriers, waits, the end; and what only affects time."""

from __future__ import annotations

import numpy as np

from .decode import SCC, Instruction
from .operands import builds

BARRIER, END = object(), object()


class Split:
    """Some waves of a group branch and some do not: `taken` is bool [W]."""

    __slots__ = ("taken",)

    def __init__(self, taken: np.ndarray):
        self.taken = taken


def _decide(taken: np.ndarray):
    if taken.all():
        return True
    return Split(taken) if taken.any() else None


@builds("s_branch")
def branch(inst: Instruction):
    return lambda g: True


@builds("s_cbranch_scc0", "s_cbranch_scc1")
def scc_branch(inst: Instruction):
    wanted = int(inst.mnemonic[-1])
    return lambda g: _decide(g.S[SCC, :, 0] == wanted)


@builds("s_cbranch_vccz", "s_cbranch_vccnz", "s_cbranch_execz", "s_cbranch_execnz")
def mask_branch(inst: Instruction):
    reg, zero = (
        (106 if "vcc" in inst.mnemonic else 126),
        inst.mnemonic.endswith("z") and not inst.mnemonic.endswith("nz"),
    )
    return lambda g: _decide(((g.S[reg, :, 0] | g.S[reg + 1, :, 0]) == 0) == zero)


@builds("s_barrier")
def barrier(inst: Instruction):
    return lambda g: BARRIER


@builds("s_endpgm")
def end(inst: Instruction):
    return lambda g: END


@builds(
    "s_nop",
    "s_setprio",
    "s_sleep",
    "s_icache_inv",
    "s_dcache_inv",
    "s_dcache_wb",
    "s_ttracedata",
    "s_sethalt",
    "v_nop",
    "s_code_end",
    "s_inst_prefetch",
    "s_waitcnt_depctr",
    "buffer_inv",
    "buffer_wbl2",
    "s_setvskip",
    "s_incperflevel",
    "s_decperflevel",
)
def nothing(inst: Instruction):
    return lambda g: None


def waitcnt_fields(inst: Instruction) -> tuple[int, int, int]:
    """(vmcnt, expcnt, lgkmcnt) of an s_waitcnt: vmcnt in bits 3:0 and 15:14, expcnt in 6:4, lgkmcnt in 11:8."""
    simm = inst.mods["simm16"]
    return simm & 15 | (simm >> 14 & 3) << 4, simm >> 4 & 7, simm >> 8 & 15


@builds("s_waitcnt")
def waitcnt(inst: Instruction):
    vm, _, lgkm = waitcnt_fields(inst)

    def run(g):
        if g.vm or g.lgkm:
            from .delayed import retire

            retire(g, vm, lgkm)

    return run


@builds("s_memtime", "s_memrealtime")
def clock(inst: Instruction):
    dst = inst.operands["sdst"].reg
    return lambda g: g.write_scalar(dst, np.full((g.size, 1), g.executed, np.uint64), 2)
