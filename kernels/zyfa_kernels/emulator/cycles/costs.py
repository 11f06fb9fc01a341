"""Which pipe an instruction goes to and for how long it holds it."""

from __future__ import annotations

from dataclasses import dataclass

from ..decode import Instruction
from ..exec_control import waitcnt_fields
from ..registers import is_lds_load, is_mfma, is_trans, is_valu, is_vmem
from ..timing import PASS_CYCLES, passes
from .params import Parameters

VALU, MFMA, SALU, LDS, VMEM, SMEM, BRANCH, INTERNAL = (
    "valu",
    "mfma",
    "salu",
    "lds",
    "vmem",
    "smem",
    "branch",
    "internal",
)
_QUARTER = ("v_mul_lo_u32", "v_mul_hi_u32", "v_mul_hi_i32", "v_mad_u64_u32", "v_mad_i64_i32")
_HALF = (
    "v_lshlrev_b64",
    "v_lshrrev_b64",
    "v_ashrrev_i64",
    "v_lshl_add_u64",
    "v_permlane32_swap_b32",
    "v_permlane16_swap_b32",
    "v_swap_b32",
)
_PACKED_FP32 = ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")


@dataclass(frozen=True)
class Cost:
    """pipe: where it issues; cycles: how long it holds that pipe; the rest applies to some pipes only."""

    pipe: str
    cycles: int
    packed_fp32: bool = False
    matrix_cycles: int = 0
    lds_bytes: int = 0
    is_dma: bool = False
    waits: tuple[int, int] | None = None
    barrier: bool = False
    priority: int | None = None


class CostTable:
    """Cost of an instruction under some parameters; kept for each instruction of a program."""

    def __init__(self, params: Parameters):
        self.params = params
        self._known: dict[int, Cost] = {}

    def __call__(self, inst: Instruction) -> Cost:
        found = self._known.get(inst.index)
        if found is None:
            found = self._known[inst.index] = _cost(inst, self.params)
        return found


def _cost(inst: Instruction, p: Parameters) -> Cost:
    name = inst.mnemonic
    if is_mfma(inst):
        return Cost(MFMA, p.mfma_issue, matrix_cycles=passes(inst) * PASS_CYCLES)
    if is_valu(inst):
        if name == "v_nop":
            return Cost(VALU, p.valu)
        cycles = (
            p.trans
            if is_trans(inst)
            else p.quarter_rate
            if name in _QUARTER
            else p.half_rate
            if name in _HALF
            else p.valu
        )
        return Cost(VALU, cycles, packed_fp32=name in _PACKED_FP32)
    if inst.encoding == "DS":
        return Cost(LDS, p.slot, lds_bytes=_bytes(inst))
    if is_vmem(inst):
        return Cost(VMEM, p.slot, lds_bytes=_bytes(inst) if is_lds_load(inst) else 0, is_dma=is_lds_load(inst))
    if inst.encoding == "SMEM":
        return Cost(SMEM, p.slot)
    if name == "s_waitcnt":
        vm, _, lgkm = waitcnt_fields(inst)
        return Cost(INTERNAL, p.slot, waits=(vm, lgkm))
    if name == "s_barrier":
        return Cost(INTERNAL, p.slot, barrier=True)
    if name == "s_nop":
        return Cost(INTERNAL, p.slot * (inst.mods["simm16"] + 1))
    if name == "s_setprio":
        return Cost(INTERNAL, p.slot, priority=inst.mods["simm16"] & 3)
    if name.startswith(("s_branch", "s_cbranch")):
        return Cost(BRANCH, p.slot)
    if inst.encoding == "SOPP":
        return Cost(INTERNAL, p.slot)
    return Cost(SALU, p.slot)


def _bytes(inst: Instruction) -> int:
    """LDS bytes that one wave moves."""
    name = inst.mnemonic
    if inst.encoding == "DS":
        data = [inst.operands[r] for r in ("vdst", "data0", "data1") if r in inst.operands]
        return 64 * sum(o.bits for o in data) // 8
    return 64 * (16 if "x4" in name else 12 if "x3" in name else 4)
