"""Turns a kernel's instructions into closures, once, with the checks that every instruction shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import (
    exec_compare,
    exec_control,
    exec_convert,
    exec_lanes,
    exec_lds,
    exec_memory,
    exec_mfma,
    exec_packed,
    exec_scalar,
    exec_valu,
)
from .codeobject import Kernel
from .decode import AGPR, EXEC, VGPR, Instruction, register_name
from .errors import UnknownInstruction
from .operands import BUILDERS
from .registers import is_mfma, reads, writes

_MODULES = (
    exec_compare,
    exec_control,
    exec_convert,
    exec_lanes,
    exec_lds,
    exec_memory,
    exec_mfma,
    exec_packed,
    exec_scalar,
    exec_valu,
)


@dataclass
class Program:
    """Executable form of a kernel: one closure an instruction, branch targets as instruction indices."""

    kernel: Kernel
    instructions: list[Instruction]
    run: list
    targets: list[int | None]
    index_of: dict[int, int] = field(default_factory=dict)


def supported(inst: Instruction) -> str | None:
    """None if the emulator executes `inst`, else the reason why not."""
    build = BUILDERS.get(inst.mnemonic)
    if build is None:
        return f"the emulator has no {inst.mnemonic}"
    try:
        build(inst)
    except (NotImplementedError, KeyError, ValueError) as error:
        return f"the emulator lacks this form of {inst.mnemonic}: {error}"
    return None


def compile_program(kernel: Kernel) -> Program:
    """Compile all of a kernel. What the emulator cannot execute becomes an error only if it is reached."""
    index_of = {inst.address: inst.index for inst in kernel.program}
    first_acc = kernel.descriptor.accum_offset if uses_accvgprs(kernel) else kernel.descriptor.vgprs
    closures, targets = [], []
    for inst in kernel.program:
        closures.append(_compile(inst, kernel, first_acc))
        targets.append(index_of.get(inst.target) if inst.target is not None else None)
    return Program(kernel, kernel.program, closures, targets, index_of)


def _compile(inst: Instruction, kernel: Kernel, first_acc: int):
    build = BUILDERS.get(inst.mnemonic)
    problem = None
    if build is None:
        problem = f"the emulator has no {inst.mnemonic}"
    else:
        try:
            body = build(inst)
        except (NotImplementedError, KeyError, ValueError) as error:
            problem = f"the emulator lacks this form of {inst.mnemonic}: {error}"
    problem = problem or _register_budget(inst, kernel, first_acc)
    if problem is not None:
        return _fail(inst, problem)
    return _guard(inst, body)


def _fail(inst: Instruction, problem: str):
    def run(g):
        raise UnknownInstruction("unknown-instruction", problem, instruction=inst.text, address=inst.address)

    return run


def uses_accvgprs(kernel: Kernel) -> bool:
    return any(span.start >= AGPR for inst in kernel.program for span in (*reads(inst), *writes(inst)))


def _register_budget(inst: Instruction, kernel: Kernel, first_acc: int) -> str | None:
    """AccVGPR n is register accum_offset + n of the lane's file; VGPRs may go past accum_offset where none is used."""
    total = kernel.descriptor.vgprs
    for span in (*reads(inst), *writes(inst)):
        if span.start >= AGPR and first_acc + span.stop - AGPR > total:
            return (
                f"{register_name(span.stop - 1)} lies outside of the {total - first_acc} AccVGPRs the kernel declares"
            )
        if VGPR <= span.start < AGPR and span.stop - VGPR > min(total, first_acc):
            return (
                f"{register_name(span.stop - 1)} lies outside of the {min(total, first_acc)} VGPRs the kernel declares"
            )
    return None


def _guard(inst: Instruction, body):
    """Add the check that every register the instruction reads is defined where it is read."""
    spans = [span for span in reads(inst) if len(span) and span.start not in (EXEC, EXEC + 1)]
    if not spans or inst.mnemonic in ("s_barrier",):
        return body
    everywhere = is_mfma(inst)
    if len(spans) == 1 and len(spans[0]) == 1:
        only = spans[0].start

        def run(g):
            if g.state[only] != 1:
                g.require(only, everywhere)
            return body(g)

        return run
    if all(len(span) == 1 for span in spans) and len(spans) == 2:
        first, second = spans[0].start, spans[1].start

        def run_two(g):
            state = g.state
            if state[first] != 1:
                g.require(first, everywhere)
            if state[second] != 1:
                g.require(second, everywhere)
            return body(g)

        return run_two
    bounds = [(span.start, span.stop) for span in spans]

    def run_any(g):
        state = g.state
        for start, stop in bounds:
            if 0 in state[start:stop] or 2 in state[start:stop]:
                for reg in range(start, stop):
                    g.require(reg, everywhere)
        return body(g)

    return run_any


__all__ = ["Program", "compile_program", "supported"]
