"""Wait states that the hardware does not enforce.

Each rule says how many wait states must lie between an instruction that writes (or reads) a register and a later one
that touches it. One instruction is one wait state, `s_nop n` is n + 1. The numbers are those of LLVM's
GCNHazardRecognizer for gfx950; a test runs llc's hazard recogniser on the same pairs and compares.

An MFMA behind another one of its wave waits for the matrix pipe, which the first owns for its passes: the hardware
enforces that, so it counts here. LLVM counts every instruction as one wait state; what only that stricter count finds
is advice. So are two rules of LLVM's that every AITER kernel breaks in hundreds of places, and runs: a scalar register
from the vector ALU read by it within 2 wait states, and M0 written right before a load into LDS.
"""

from __future__ import annotations

from functools import cache

from ..decode import EXEC, M0, VGPR, Instruction
from ..flow import Flow, fixed_point
from ..registers import is_lds_load, is_mfma, is_trans, is_valu, is_vmem, partial_destination, reads, writes
from ..timing import is_f32_product, passes
from .report import Violation, violation

LONGEST = 20  # the longest rule: 16 passes + 4
ADVICE = ("valu-sgpr-valu", "m0")
_LANE_READS = ("v_readlane_b32", "v_readfirstlane_b32")


def _mask(spans) -> int:
    bits = 0
    for span in spans:
        bits |= ((1 << len(span)) - 1) << span.start
    return bits


_SCALARS = (1 << VGPR) - 1


class _Facts:
    """What the rules need to know of one instruction; register sets are bit masks over unified register numbers."""

    def __init__(self, inst: Instruction):
        self.inst = inst
        self.reads, self.writes = _mask(reads(inst)), _mask(writes(inst))
        self.vector_reads, self.scalar_reads = self.reads & ~_SCALARS, self.reads & _SCALARS
        self.vector_writes, self.scalar_writes = self.writes & ~_SCALARS, self.writes & _SCALARS
        self.mfma, self.valu, self.trans = is_mfma(inst), is_valu(inst), is_trans(inst)
        self.vmem, self.lds = is_vmem(inst), inst.encoding == "DS"
        self.memory = self.vmem or self.lds
        self.swap = inst.mnemonic.startswith("v_permlane") and "swap" in inst.mnemonic
        self.passes = passes(inst) if self.mfma else 0
        self.states = inst.mods["simm16"] + 1 if inst.mnemonic == "s_nop" else 1
        if self.mfma:
            sparse = inst.mnemonic.startswith("v_smfmac")
            self.c = _mask([inst.operands["vdst" if sparse else "src2"].regs])
            sources = ("src0", "src1", "scale0", "scale1", *(("src2",) if sparse else ()))
            self.ab = _mask([inst.operands[r].regs for r in sources if r in inst.operands])
        self.half_write = self.valu and _writes_high_part(inst)
        if self.half_write or partial_destination(inst):
            self.vector_reads |= self.vector_writes
        self.store_data = 0
        if "store" in inst.mnemonic and "data0" in inst.operands and inst.operands["data0"].count > 2:
            soffset = inst.operands.get("soffset")
            if inst.encoding != "MUBUF" or soffset is None or soffset.reg < 0:
                self.store_data = _mask([inst.operands["data0"].regs])

    @property
    def produces(self) -> bool:
        """Whether anything later may have to keep a distance from this instruction."""
        return bool(self.mfma or self.valu or self.store_data or self.writes >> M0 & 1)


def _writes_high_part(inst: Instruction) -> bool:
    if inst.variant == "sdwa":
        return inst.mods.get("dst_sel", 6) != 6
    if inst.encoding != "VOP3":
        return False
    return bool(inst.mods.get("opsel", 0) & (12 if "fp4" in inst.mnemonic else 8))


def _needed(p: _Facts, c: _Facts) -> tuple[int, str, str]:
    """(wait states, rule, reason) that must lie between `p` and a later `c`; 0 if none."""
    best = (0, "", "")

    def need(states: int, rule: str, reason: str) -> None:
        nonlocal best
        if states > best[0]:
            best = (states, rule, reason)

    if p.mfma:
        done = p.passes + (2 if is_f32_product(p.inst) else 4)
        if c.mfma:
            if p.vector_writes & c.ab:
                need(done, "mfma-result", "the result of a matrix instruction is an operand of another one")
            if p.vector_writes & c.c and c.c != p.vector_writes:
                need(p.passes + 2, "mfma-result", "C overlaps the result of a matrix instruction, but is not the same")
        elif c.valu or c.memory:
            if p.vector_writes & c.vector_reads:
                need(done, "mfma-result", "the result of a matrix instruction is read")
            if p.vector_writes & c.vector_writes:
                need(done, "mfma-overwrite", "the result of a matrix instruction is overwritten")
            if c.valu and p.c & c.vector_writes:
                need(p.passes - 1, "mfma-operand", "C of a matrix instruction is overwritten while it is read")
        return best
    if p.valu:
        if p.vector_writes & c.vector_reads or c.swap and p.vector_writes & c.vector_writes:
            if c.mfma:
                need(2, "valu-mfma", "a vector result is an operand of a matrix instruction")
            if c.swap:
                need(2, "valu-permlane", "a vector result is swapped between lanes")
            if p.trans and c.valu and not c.trans:
                need(1, "trans", "a transcendental's result is read")
            if p.half_write and c.valu:
                need(1, "half-write", "a result that was written to the upper part of a register is read")
            if c.inst.mnemonic in _LANE_READS:
                need(1, "valu-readlane", "a vector result is read by a lane read")
            if c.inst.variant == "dpp" and p.vector_writes & _mask([c.inst.operands["src0"].regs]):
                need(2, "valu-dpp", "a vector result is a DPP operand")
        shared = p.scalar_writes & c.scalar_reads
        if shared:
            if c.vmem:
                need(5, "valu-sgpr", "a scalar register that the vector ALU wrote is read by a memory instruction")
            elif c.valu:
                lane = c.inst.operands.get("src1")
                if c.inst.mnemonic in ("v_readlane_b32", "v_writelane_b32") and lane and shared & _mask([lane.regs]):
                    need(4, "valu-sgpr", "a scalar register that the vector ALU wrote selects a lane")
                elif c.inst.mnemonic == "v_div_fmas_f32":
                    need(4, "valu-sgpr", "VCC of the vector ALU is read by v_div_fmas")
                else:
                    need(2, "valu-sgpr-valu", "a scalar register that the vector ALU wrote is read by it")
        if p.writes >> EXEC & 3:
            if c.inst.variant == "dpp":
                need(5, "valu-exec", "EXEC of the vector ALU is used by a DPP instruction")
            elif c.mfma or c.inst.mnemonic in ("v_readlane_b32", "v_writelane_b32", *_LANE_READS):
                need(4, "valu-exec", "EXEC of the vector ALU is used by a lane or matrix instruction")
    elif p.writes >> M0 & 1 and is_lds_load(c.inst):
        need(1, "m0", "M0 is written right before a load into LDS takes it")
    if p.store_data and c.valu and p.store_data & c.vector_writes:
        need(2, "store-data", "data of a store is overwritten while it is read")
    return best


def check_hazards(kernel: str, flow: Flow) -> tuple[list[Violation], list[Violation]]:
    """Distances that are too short on some path: (violations, advice)."""
    facts = [_Facts(inst) for inst in flow.program]
    sure, strict = _find(kernel, flow, facts, False), _find(kernel, flow, facts, True)
    known = {(v.address, v.rule, v.cause) for v in sure}
    advice = [v for v in sure if v.rule in ADVICE]
    advice += [v for v in strict if (v.address, v.rule, v.cause) not in known]
    return [v for v in sure if v.rule not in ADVICE], advice


def _find(kernel: str, flow: Flow, facts: list[_Facts], strict: bool) -> list[Violation]:
    """One pass of the rules.

    State of the data flow: the wait states passed, at least, since each recent instruction, and those for which the
    wave's own matrix instructions keep the matrix pipe busy, at least.
    """
    pair = cache(lambda p, c: _needed(facts[p], facts[c]))
    pipe = -1  # key of the matrix pipe in a state

    def arrive(index: int, state: dict[int, int]) -> dict[int, int]:
        """State at the moment the instruction issues: a matrix instruction first waits for the pipe."""
        busy = state.get(pipe, 0)
        if strict or not facts[index].mfma or busy <= 0:
            return state
        return {k: age + busy for k, age in state.items() if k != pipe and age + busy < LONGEST}

    def transfer(index: int, state: dict[int, int]) -> dict[int, int]:
        fact = facts[index]
        new = {}
        for key, age in arrive(index, state).items():
            if key == pipe:
                if age > fact.states:
                    new[pipe] = age - fact.states
            elif age + fact.states < LONGEST:
                new[key] = age + fact.states
        if fact.mfma and not strict:
            new[pipe] = fact.passes - 1
        if fact.produces:
            new[index] = 0
        return new

    def merge(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
        if a == b:
            return a
        new = {k: v for k, v in a.items() if k != pipe}
        for key, age in b.items():
            if key != pipe:
                new[key] = min(age, new.get(key, age))
        if pipe in a and pipe in b:
            new[pipe] = min(a[pipe], b[pipe])
        return new

    nothing: dict[int, int] = {}
    states = fixed_point(flow, nothing, transfer, merge)
    found = []
    for inst in flow.program:
        state = states[inst.index]
        if not state:
            continue
        for producer, age in arrive(inst.index, state).items():
            if producer == pipe:
                continue
            states_needed, rule, reason = pair(producer, inst.index)
            if states_needed > age:
                source = flow.program[producer]
                text = (
                    f"{reason}: {age} wait states behind `{source.text}` at {source.address:#x}, wants {states_needed}"
                )
                found.append(violation(kernel, inst, rule, text, source))
    return found
