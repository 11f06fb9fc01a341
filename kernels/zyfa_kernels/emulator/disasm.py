"""Assembler text of decoded instructions, in LLVM's syntax."""

from __future__ import annotations

from .decode import Instruction, Operand, register_name


def format_operand(operand: Operand) -> str:
    if operand.reg >= 0:
        text = register_name(operand.reg, operand.count)
    elif operand.special:
        text = operand.special
    elif operand.literal:
        text = hex(operand.value)
    else:
        text = str(operand.value)
    if operand.abs:
        text = f"|{text}|"
    return f"-{text}" if operand.neg else text


def format_instruction(inst: Instruction) -> str:
    return inst.mnemonic + " " + ", ".join(format_operand(o) for o in inst.operands.values())
