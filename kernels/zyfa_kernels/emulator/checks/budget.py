"""Resources: registers and LDS against what the kernel declares and what lets its waves run together; alignment."""

from __future__ import annotations

from ..codeobject import Kernel
from ..decode import AGPR, VGPR, register_name
from ..flow import Flow
from ..lds import LDS_BYTES
from ..registers import reads, writes
from .report import Violation, violation

REGISTERS_PER_LANE = 512  # of a SIMD, shared by its waves (CDNA3 and CDNA4 ISA, "VGPR allocation")
SIMDS, MAX_WAVES_PER_SIMD = 4, 8


def occupancy(kernel: Kernel, workgroup: int) -> dict:
    """Registers, LDS and the waves that can be resident on a SIMD."""
    vgprs, lds = kernel.descriptor.vgprs, kernel.descriptor.lds_bytes
    waves = -(-workgroup // 64)
    by_registers = min(MAX_WAVES_PER_SIMD, REGISTERS_PER_LANE // vgprs)
    per_simd = -(-waves // SIMDS)
    groups_by_lds = LDS_BYTES // lds if lds else MAX_WAVES_PER_SIMD
    groups = min(by_registers // per_simd if per_simd else 0, groups_by_lds)
    return {
        "kernel": kernel.name,
        "vgprs": vgprs,
        "accum_offset": kernel.descriptor.accum_offset,
        "lds_bytes": lds,
        "workgroup": workgroup,
        "waves": waves,
        "waves_per_simd": min(groups * per_simd, MAX_WAVES_PER_SIMD),
    }


def check_budget(kernel: Kernel, flow: Flow, workgroup: int) -> list[Violation]:
    """Registers outside of the declared ones, a workgroup that does not fit a compute unit, misaligned code."""
    found = []
    first = kernel.program[0]
    kd = kernel.descriptor
    spans = [(inst, span) for inst in kernel.program for span in (*reads(inst), *writes(inst)) if len(span)]
    acc = any(span.start >= AGPR for _, span in spans)
    limit = min(kd.accum_offset, kd.vgprs) if acc else kd.vgprs
    for inst, span in spans:
        if VGPR <= span.start < AGPR and span.stop - VGPR > limit:
            text = f"{register_name(span.stop - 1)} lies outside of the {limit} VGPRs that the kernel declares"
            found.append(violation(kernel.name, inst, "register-budget", text))
        elif span.start >= AGPR and kd.accum_offset + span.stop - AGPR > kd.vgprs:
            text = f"{register_name(span.stop - 1)} lies outside of the {kd.vgprs - kd.accum_offset} AccVGPRs declared"
            found.append(violation(kernel.name, inst, "register-budget", text))
        # gfx90a and later: vector operands of 64 bits and more start at an even register.
        if len(span) > 1 and VGPR <= span.start and span.start & 1:
            text = (
                f"{register_name(span.start, len(span))} starts at an odd register; wider operands start at even ones"
            )
            found.append(violation(kernel.name, inst, "register-alignment", text))
    facts = occupancy(kernel, workgroup)
    per_simd = -(-facts["waves"] // SIMDS)
    if kd.vgprs * per_simd > REGISTERS_PER_LANE:
        text = (
            f"{per_simd} waves a SIMD of {kd.vgprs} registers want {kd.vgprs * per_simd}, a lane has "
            f"{REGISTERS_PER_LANE}: "
            f"at most {REGISTERS_PER_LANE // per_simd} a wave"
        )
        found.append(violation(kernel.name, first, "occupancy", text))
    if kd.lds_bytes > LDS_BYTES:
        text = f"{kd.lds_bytes} bytes of LDS declared, a compute unit has {LDS_BYTES}"
        found.append(violation(kernel.name, first, "lds-budget", text))
    if kernel.entry % 256:
        text = f"the kernel starts at {kernel.entry:#x}, want a multiple of 256"
        found.append(violation(kernel.name, first, "code-alignment", text))
    for index in flow.bad_targets:
        inst = kernel.program[index]
        text = f"branches to {inst.target:#x}, which is not the start of an instruction of this kernel"
        found.append(violation(kernel.name, inst, "branch-target", text))
    for index in flow.falls_off:
        found.append(
            violation(kernel.name, kernel.program[index], "code-end", "execution runs past the last instruction")
        )
    for inst in kernel.program:
        if inst.mnemonic in ("s_setpc_b64", "s_swappc_b64", "s_call_b64"):
            text = "an indirect jump: what it reaches is not checked"
            found.append(violation(kernel.name, inst, "indirect-jump", text))
    return found
