"""Static checks of gfx950 machine code: what neither the assembler nor the hardware would tell.

`check` runs, on every kernel of a code object:

  hazards     wait states between dependent instructions (LLVM's table for gfx950)
  waits       s_waitcnt before the use of what was loaded, over all paths through loops
  lds         LDS that other waves wrote, read only behind s_waitcnt and s_barrier; overwritten only behind a barrier
  undefined   registers read that not every path has written
  budget      registers, LDS and occupancy; alignment of code and operands; branch targets
  banks       LDS bank conflicts of every access

What it says of AITER's own objects (fmha_v3_fwd and fmha_v4_fwd of hsa/gfx950), and why:

  wait                v3 fp8, v4 mxfp6 and f6f4: `lgkmcnt(8)` in front of the PV products waits for none of the four
                      transposed reads that the product takes. The v4 fp8 kernel has lgkmcnt(4) there. True findings,
                      hidden by the 64 cycles of the product before.
  lds-overwrite       all but bf16 hd128: a wave reloads a tile that others which run the same code may still read, with
                      no barrier between; they run nearly in step. bf16 causal: the loads of the next query tile start
                      without a barrier behind the last reads of the one before. True findings, hidden by latency.
  lds-wait, -barrier  bf16 and f4f4: only on routes whose branches never go together (a loop left by an exit that its
                      trip count rules out). False: a real run with delayed memory is clean.
  undefined-register  bf16 and mxfp4: paths that skip the part of a pipeline which fills the registers are never taken
                      together with those that read them. False: the branches hang together.
  mfma-result         hd256 fp8 17 of 20, v4 i8fp8 9 of 12, f6f4 7 of 8 wait states. True by LLVM's table.
  valu-mfma           v4 i8fp8, f4f4, f8f6: one wait state where LLVM wants two.
  valu-permlane       bf16 epilogues: one wait state between two swaps where LLVM wants two.
"""

from __future__ import annotations

from ..codeobject import CodeObject
from ..flow import build_flow
from ..registers import is_mfma
from .budget import check_budget, occupancy
from .hazards import check_hazards
from .lds import check_lds
from .report import BankConflict, Report, Violation
from .undefined import check_undefined
from .waits import check_waits


def check(code: CodeObject, workgroup: int | None = None, *, lds_runs: bool = True) -> Report:
    """Check every kernel of `code`.

    Args:
        workgroup: threads of a workgroup; by default what the metadata declares as the largest.
        lds_runs: also run the kernels without arguments for the LDS rules and bank conflicts (seconds a kernel).

    Returns:
        A Report; `violations` is empty for a clean object. `bank_conflicts` counts the extra LDS turns of one execution
        of every access in the main loops (innermost loops with matrix instructions).
    """
    report = Report([], 0, 0, 0)
    for kernel in code.kernels.values():
        flow = build_flow(kernel)
        threads = workgroup or kernel.max_workgroup_size
        report.instructions += len(kernel.program)
        report.mfma += sum(is_mfma(inst) for inst in kernel.program)
        found, advice = check_hazards(kernel.name, flow)
        report.advice += advice
        found += check_waits(kernel.name, flow)
        found += check_undefined(kernel, flow)
        found += check_budget(kernel, flow, threads)
        report.resources.append(occupancy(kernel, threads))
        if lds_runs:
            more, accesses, notes = check_lds(code, kernel, flow, threads)
            found += more
            report.lds_accesses += accesses
            report.notes += notes
            report.bank_conflicts += sum(a.cycles - a.ideal for a in accesses if a.in_loop)
        report.violations += sorted(found, key=lambda v: (v.address, v.rule))
    return report


__all__ = ["BankConflict", "Report", "Violation", "check"]
