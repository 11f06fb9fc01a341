"""Reads of registers that no path, or not every path, has written."""

from __future__ import annotations

from ..codeobject import Kernel
from ..decode import EXEC, VGPR, register_name
from ..flow import Flow, fixed_point
from ..registers import reads, writes
from .report import Violation, violation


def initial_registers(kernel: Kernel) -> frozenset[int]:
    """Registers that the hardware sets up at the start of a wave."""
    kd = kernel.descriptor
    count = kd.user_sgprs + sum(kd.workgroup_id_enabled) + (kd.rsrc2 >> 10 & 1)
    # Trap handler registers (ttmp) are always there; M0 is not set up.
    return frozenset([*range(count), VGPR, EXEC, EXEC + 1, *range(108, 124)])


def check_undefined(kernel: Kernel, flow: Flow) -> list[Violation]:
    """Registers read that some path from the entry never wrote. (A write under a partial EXEC counts as a write.)"""
    program = flow.program
    bits_read, bits_written = [], []
    for inst in program:
        bits_read.append(sum(1 << r for r in {r for s in reads(inst) for r in s}))
        bits_written.append(sum(1 << r for r in {r for s in writes(inst) for r in s}))
    start: int = sum(1 << r for r in initial_registers(kernel))
    states = fixed_point(flow, start, lambda i, s: s | bits_written[i], lambda a, b: a & b)
    found = []
    for inst in program:
        defined = states[inst.index]
        if defined is None:
            continue
        missing = bits_read[inst.index] & ~defined
        if missing:
            names = [register_name(r) for r in range(missing.bit_length()) if missing >> r & 1]
            text = f"{', '.join(names[:4])}{'…' if len(names) > 4 else ''} read, but not written on every path before"
            found.append(violation(kernel.name, inst, "undefined-register", text))
    return found
