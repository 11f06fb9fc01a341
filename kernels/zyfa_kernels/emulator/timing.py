"""Timing facts of single instructions that the static checks and the cycle model share."""

from __future__ import annotations

import re

from .decode import Instruction

PASS_CYCLES = 4


def passes(inst: Instruction) -> int:
    """Passes (4 cycles each) for which a matrix instruction owns the matrix pipe.

    From LLVM's gfx950 scheduling model (llvm-mca): 32x32 8 and 16x16 4; twice that for the fp32 ones and for f8f6f4
    with an 8-bit operand on either side.
    """
    shape = re.search(r"_(\d+)x\d+x\d+", inst.mnemonic)
    assert shape is not None, inst.mnemonic
    base = {32: 8, 16: 4, 4: 2}[int(shape[1])]
    if "f8f6f4" in inst.mnemonic:
        return base * 2 if inst.mods.get("cbsz", 0) < 2 or inst.mods.get("blgp", 0) < 2 else base
    return base * 2 if is_f32_product(inst) else base


def is_f32_product(inst: Instruction) -> bool:
    return bool(re.search(r"x\d+_f32$", inst.mnemonic))
