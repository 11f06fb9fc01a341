"""The linked code, read back by the decoder, is what the generator emitted: every instruction, operand and modifier."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from zyfa_kernels.asm.instruction import INLINE_FLOATS, Instruction
from zyfa_kernels.asm.isa import ISA
from zyfa_kernels.emulator import CodeObject
from zyfa_kernels.runtime.cache import code_object
from zyfa_kernels.runtime.registry import kernel, names
from zyfa_kernels.runtime.toolchain import AssemblyError, assemble

SIGNED = 1 << 32


def tokens(text: str) -> list[str]:
    """Mnemonic, operands and modifiers; constants as unsigned 32-bit numbers, floats that are inline by value."""
    head, _, rest = text.partition(" ")
    out = [re.sub(r"_e(32|64)$", "", head)]
    for word in re.split(r"[ ,]+(?![^\[]*\])", rest.strip()):
        if word in ("", "offset:0"):
            continue
        try:
            out.append(str(int(word, 0) % SIGNED))
        except ValueError:
            number = re.fullmatch(r"-?\d+\.\d+", word)
            out.append(word if not number else "0" if float(word) == 0 else f"float {float(word)}")
    return out


def emitted(name: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions in order, and the index each label stands before."""
    instructions, labels = [], {}
    for item in kernel(name).program.body:
        if isinstance(item, Instruction):
            instructions.append(item)
        elif isinstance(item, str):
            labels[item] = len(instructions)
    return instructions, labels


@pytest.mark.parametrize("name", names())
def test_decoder_reads_back_what_was_emitted(name):
    decoded = list(CodeObject.load(code_object(name)).kernel(kernel(name).symbol).program)
    instructions, labels = emitted(name)
    while decoded[-1].mnemonic in ("s_nop", "s_code_end"):
        decoded.pop()  # padding behind the program
    assert len(decoded) == len(instructions)
    for mine, theirs in zip(instructions, decoded, strict=True):
        if mine.kind == "branch":
            target = int(theirs.text.split()[1], 0)
            assert mine.mnemonic == theirs.mnemonic
            assert target == decoded[labels[mine.operands[0]]].address
        else:
            assert tokens(mine.text()) == tokens(theirs.text), f"{mine.text()!r} became {theirs.text!r}"


def test_the_kernels_use_only_what_the_table_has_and_the_table_holds_nothing_unused():
    used = {i.spec.mnemonic for name in names() for i in kernel(name).program.instructions()}
    used.discard("s_waitcnt")
    assert used == set(ISA)


def test_every_instruction_has_a_test_of_its_own():
    """The emulator's tests name each one in assembly text, some with a part of the name as a parameter."""
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_emulator_*.py")).replace("\\n", " ")
    named = {re.sub(r"\\{\w+\\}", r"\\w*", re.escape(word)) for word in re.findall(r"\b[a-z]+_[\w{}]+", texts)}
    pattern = re.compile("|".join(sorted(named)))
    forms = {m: [m.split()[0] + ending for ending in ("", "_e32", "_e64")] for m in ISA}
    assert [m for m, names_ in forms.items() if not any(map(pattern.fullmatch, names_))] == []
    assert not pattern.fullmatch("v_bogus_f32")


def test_inline_floats_have_the_bit_patterns_of_the_manual():
    assert len(INLINE_FLOATS) == 9
    assert struct.pack("<f", 0.5) == bytes.fromhex("0000003f")


@pytest.mark.parametrize("name", names())
def test_resources_leave_two_waves_a_simd(name):
    made = kernel(name)
    described = CodeObject.load(code_object(name)).kernel(made.symbol)
    assert made.vgprs <= 256 and described.descriptor.lds_bytes == made.lds_bytes <= 160 * 1024
    assert described.kernarg_bytes == made.arguments.size


def test_assembler_errors_are_raised_with_the_assemblers_message():
    with pytest.raises(AssemblyError, match="invalid instruction"):
        assemble("v_bogus_f32 v0, v1\n")
    with pytest.raises(AssemblyError, match="v\\[0:2\\]|invalid|operand"):
        assemble("v_mfma_f32_32x32x64_f8f6f4 v[0:2], v[16:23], v[24:31], 0\n")
