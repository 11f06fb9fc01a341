"""One instruction: checked against the table of `isa`, printable, and with the registers it reads and writes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property

from .isa import ISA, Operand, Spec
from .registers import SPECIALS, Reg

Value = Reg | int | float | str
Slot = tuple[str, int]  # a single register: (file, index)

INLINE_FLOATS = (0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0)
PARTIAL_WRITES = ("v_cvt_scalef32_pk_fp8_f32",)  # write one half of their register


class InstructionError(ValueError):
    """An instruction is not in the table, or its operands do not fit its row."""


def is_inline(value: int | float) -> bool:
    """Whether the hardware encodes the constant inside the instruction word."""
    if isinstance(value, float):
        return value in INLINE_FLOATS
    return -16 <= value <= 64


def literal(value: int | float) -> str:
    """Assembler text of a constant; floats that are no inline constant become their bit pattern."""
    if isinstance(value, float):
        if is_inline(value):
            return repr(value)
        return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"
    return str(value) if -65536 < value < 65536 else f"0x{value & 0xFFFFFFFF:08x}"


def _fits(operand: Operand, value: Value) -> str | None:
    """None if the value may stand at the operand, else why not."""
    letter, width = operand.letter, operand.width
    if isinstance(value, Reg):
        allowed = {
            "v": ("v", "a"),
            "s": ("s", "vcc", "exec", "m0"),
            "m": ("s", "vcc", "exec"),
            "a": ("v", "s", "vcc", "m0"),
            "c": ("v", "a"),
            "k": ("s", "vcc", "exec", "m0"),
        }
        if value.file not in allowed.get(letter, ()):
            return f"a register of file {value.file!r} can't stand there"
        return None if value.count == width else f"{value} is {value.count} wide, {width} wanted"
    if isinstance(value, str):
        return None if letter == "l" else "only a label may be text"
    if letter in "aki":
        return None
    if letter == "c":
        return None if is_inline(value) else f"{value} is no inline constant"
    return "a constant can't stand there"


@dataclass
class Instruction:
    """`spec` with its operands; `mods` is the assembler's tail ("offset:128"), `note` the comment."""

    spec: Spec
    operands: tuple[Value, ...]
    mods: str = ""
    note: str = ""
    reads: frozenset[Slot] = field(init=False)
    writes: frozenset[Slot] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.operands) != len(self.spec.operands):
            raise InstructionError(
                f"{self.spec.mnemonic} takes {len(self.spec.operands)} operands, got {len(self.operands)}"
            )
        reads: set[Slot] = set()
        writes: set[Slot] = set()
        for number, (operand, value) in enumerate(zip(self.spec.operands, self.operands, strict=True)):
            problem = _fits(operand, value)
            if problem:
                raise InstructionError(f"{self.spec.mnemonic}, operand {number}: {problem}")
            if isinstance(value, Reg):
                slots = {(value.file, i) for i in value.indices}
                if operand.reads:
                    reads |= slots
                if operand.writes:
                    writes |= slots
        for names, into in ((self.spec.implicit_reads, reads), (self.spec.implicit_writes, writes)):
            for name in names:
                into.update((name, i) for i in range(SPECIALS[name]))
        self.reads, self.writes = frozenset(reads), frozenset(writes)

    @cached_property
    def kind(self) -> str:
        return self.spec.kind

    @cached_property
    def mnemonic(self) -> str:
        return self.spec.mnemonic.split()[0]

    def slots(self, number: int) -> frozenset[Slot]:
        """Registers of one operand (empty for a constant)."""
        value = self.operands[number]
        return frozenset((value.file, i) for i in value.indices) if isinstance(value, Reg) else frozenset()

    def names(self) -> str:
        """Names of the registers among the operands, in their order."""
        return ", ".join(x.name for x in self.operands if isinstance(x, Reg) and x.file not in SPECIALS and x.name)

    def text(self) -> str:
        words = [str(x) if isinstance(x, (Reg, str)) else literal(x) for x in self.operands]
        flags = self.spec.mnemonic.split()[1:]
        tail = [t for t in (self.mods, *flags) if t]
        return " ".join([self.mnemonic, ", ".join(words), *tail]).strip()


def op(mnemonic: str, *operands: Value, mods: str = "", note: str = "") -> Instruction:
    """An instruction not yet placed in a program."""
    spec = ISA.get(mnemonic)
    if spec is None:
        raise InstructionError(f"{mnemonic!r} is not among the instructions the generator emits")
    return Instruction(spec, operands, mods, note)
