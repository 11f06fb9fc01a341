"""s_waitcnt before use: every loaded register behind a vmcnt or lgkmcnt, over all paths.

State of the data flow: for each register that an outstanding load will write, how many operations of the same counter
were issued after it, at least. `s_waitcnt vmcnt(n)` completes those with n or more younger ones. Scalar loads return
out of order, so only lgkmcnt(0) completes them, and they do not count as younger ones of LDS operations.
"""

from __future__ import annotations

from ..decode import Instruction, register_name
from ..exec_control import waitcnt_fields
from ..flow import Flow, fixed_point
from ..registers import is_lds_load, is_vmem, reads, writes
from .report import Violation, violation

VM, LDS, SCALAR = "vmcnt", "lgkmcnt", "lgkmcnt(0)"
_TOP = {VM: 63, LDS: 15, SCALAR: 15}
_CAP = 64


def counters(inst: Instruction) -> tuple[str, ...]:
    """Counters that `inst` increments: loads, and stores too, since they return in order with loads."""
    if inst.encoding == "SMEM":
        return (SCALAR,)
    if inst.encoding == "DS":
        return (LDS,) if inst.mnemonic != "ds_nop" else ()
    if inst.encoding == "FLAT":
        return (VM, LDS)
    return (VM,) if is_vmem(inst) else ()


def loaded_registers(inst: Instruction) -> list[int]:
    if not counters(inst) or is_lds_load(inst):
        return []
    return [reg for role in ("vdst", "sdst") if role in inst.operands for reg in inst.operands[role].regs]


def _transfer(inst: Instruction, state: dict) -> dict:
    """State: {(register, counter): (younger operations, index of the load)}."""
    if inst.mnemonic == "s_waitcnt":
        vm, _, lgkm = waitcnt_fields(inst)
        limit = {
            VM: vm if vm < 63 else _CAP + 1,
            LDS: lgkm if lgkm < 15 else _CAP + 1,
            SCALAR: 0 if lgkm == 0 else _CAP + 1,
        }
        return {k: v for k, v in state.items() if (k[1] == SCALAR and lgkm != 0) or v[0] < limit[k[1]]}
    issued = counters(inst)
    if not issued:
        return state
    new = {}
    for (reg, counter), (younger, source) in state.items():
        grow = counter in issued and counter != SCALAR
        new[reg, counter] = (min(younger + grow, _CAP), source)
    for reg in loaded_registers(inst):
        for counter in issued:
            new[reg, counter] = (0, inst.index)
    return new


def _merge(a: dict, b: dict) -> dict:
    if a == b:
        return a
    new = dict(a)
    for key, value in b.items():
        if key not in new or value < new[key]:
            new[key] = value
    return new


def check_waits(kernel: str, flow: Flow) -> list[Violation]:
    """Registers that are read, or overwritten, while a load into them may be outstanding."""
    program = flow.program
    touched = [({r for s in reads(i) for r in s}, {r for s in writes(i) for r in s}) for i in program]
    nothing: dict[tuple[int, str], tuple[int, int]] = {}
    states = fixed_point(flow, nothing, lambda i, s: _transfer(program[i], s), _merge)
    found = []
    for inst in program:
        state = states[inst.index]
        if not state:
            continue
        used, written = touched[inst.index]
        issued = counters(inst)
        late: dict[str, list[tuple[int, int, int]]] = {}
        for (reg, counter), (younger, source) in state.items():
            # A second load into the register through the same in-order counter lands after the first.
            again = reg in written and not (counter in issued and counter != SCALAR)
            if reg in used or again:
                late.setdefault(counter, []).append((younger, reg, source))
        for counter, entries in late.items():
            younger, _, source = min(entries)
            load = program[source]
            names = ", ".join(register_name(r) for r in sorted({r for _, r, _ in entries})[:8])
            need = SCALAR if counter == SCALAR else f"{counter}({min(younger, _TOP[counter])})"
            text = f"{names} may still be loading (last by `{load.text}` at {load.address:#x}); wants s_waitcnt {need}"
            found.append(violation(kernel, inst, "wait", text, load))
    return found
