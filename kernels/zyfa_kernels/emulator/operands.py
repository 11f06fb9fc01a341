"""Turns operands into functions that fetch or store arrays; the registry of instruction implementations."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from .decode import VGPR, Instruction, Operand
from .state import WaveGroup

TINY32 = np.float32(1.1754943508222875e-38)
Run = Callable[[WaveGroup], object]

# mnemonic -> function(instruction) that returns the closure which executes it
BUILDERS: dict[str, Callable[[Instruction], Run]] = {}


def builds(*mnemonics: str):
    """Register a builder for `mnemonics`."""

    def register(function):
        for mnemonic in mnemonics:
            if mnemonic in BUILDERS:
                raise ValueError(f"two implementations of {mnemonic}")
            BUILDERS[mnemonic] = function
        return function

    return register


def constant_bits(value: int | float, width: int = 32) -> int:
    """Bit pattern of an inline or literal constant for an operand of `width` bits."""
    if isinstance(value, float):
        return {
            16: lambda: struct.unpack("<H", struct.pack("<e", value))[0],
            32: lambda: struct.unpack("<I", struct.pack("<f", value))[0],
            64: lambda: struct.unpack("<Q", struct.pack("<d", value))[0],
        }[width]()
    return value & (1 << width) - 1


def flush(x: np.ndarray) -> np.ndarray:
    """fp32 denormals to zero of the same sign."""
    small = np.abs(x) < TINY32
    if small.any():
        return np.where(small, np.copysign(np.float32(0), x), x)
    return x


def fetch_u32(operand: Operand) -> Run:
    """Function that returns the operand's 32 bits: uint32 [W, 64], [W, 1], or a scalar. No modifiers."""
    if operand.reg >= VGPR:
        row = operand.reg - VGPR
        return lambda g: g.V[row]
    if operand.reg >= 0:
        reg = operand.reg
        return lambda g: g.S[reg]
    if operand.special:
        return _special(operand.special)
    constant = np.uint32(constant_bits(operand.value))
    return lambda g: constant


def _special(name: str) -> Run:
    if name == "src_scc":
        return lambda g: g.S[128]
    if name == "src_vccz":
        return lambda g: ((g.S[106] | g.S[107]) == 0).astype(np.uint32)
    if name == "src_execz":
        return lambda g: ((g.S[126] | g.S[127]) == 0).astype(np.uint32)
    raise NotImplementedError(f"source operand {name}")


def fetch_i32(operand: Operand) -> Run:
    if operand.reg >= VGPR:
        row = operand.reg - VGPR
        return lambda g: g.Vi[row]
    get = fetch_u32(operand)
    return lambda g: get(g).view(np.int32)


def fetch_u64(operand: Operand) -> Run:
    """64 bits as uint64, from a register pair or a constant."""
    if operand.reg < 0:
        if operand.special:
            get = fetch_u32(operand)
            return lambda g: get(g).astype(np.uint64)
        bits = constant_bits(operand.value, 64)
        if operand.literal:
            bits = operand.value & 0xFFFFFFFF
        if isinstance(operand.value, int) and not operand.literal and operand.value < 0:
            bits = operand.value & (1 << 64) - 1
        constant = np.uint64(bits)
        return lambda g: constant
    first = operand.reg
    if first >= VGPR:
        row = first - VGPR
        return lambda g: g.V[row].astype(np.uint64) | g.V[row + 1].astype(np.uint64) << np.uint64(32)
    return lambda g: g.S[first].astype(np.uint64) | g.S[first + 1].astype(np.uint64) << np.uint64(32)


def fetch_f32(operand: Operand) -> Run:
    """fp32 with neg/abs applied and, in flush mode, denormals read as zero."""
    if operand.reg >= VGPR:
        row = operand.reg - VGPR

        def base(g):
            return g.Vf[row]
    elif operand.reg >= 0:
        reg = operand.reg

        def base(g):
            return g.Sf[reg]
    elif operand.special:
        get = fetch_u32(operand)

        def base(g):
            return get(g).view(np.float32)
    else:
        constant = np.array(constant_bits(operand.value), np.uint32).view(np.float32)[()]

        def base(g):
            return constant

    if operand.reg < 0 and not operand.special:
        modified = _modify(operand, base)
        return modified

    def fetch(g):
        x = base(g)
        return flush(x) if g.flush32 else x

    return _modify(operand, fetch)


def _modify(operand: Operand, base: Run) -> Run:
    if operand.abs and operand.neg:
        return lambda g: -np.abs(base(g))
    if operand.abs:
        return lambda g: np.abs(base(g))
    if operand.neg:
        return lambda g: -base(g)
    return base


def output_f32(inst: Instruction) -> Callable[[WaveGroup, np.ndarray], np.ndarray]:
    """Function that applies omod, flush and clamp to an fp32 result and returns its bits."""
    omod, clamp = inst.mods.get("omod", 0), inst.mods.get("clmp", 0)
    factor = {0: None, 1: np.float32(2), 2: np.float32(4), 3: np.float32(0.5)}[omod]

    def finish(g, x):
        if factor is not None:
            x = x * factor
        if g.flush32:
            x = flush(x)
        if clamp:
            # A clamped NaN becomes 0 (DX10_CLAMP, which code objects set by default).
            x = np.where(np.isnan(x), np.float32(0), np.clip(x, np.float32(0), np.float32(1)))
        return np.asarray(x, np.float32).view(np.uint32)

    return finish


def destination_row(inst: Instruction, role: str = "vdst") -> int:
    return inst.operands[role].reg - VGPR


def plain_sources(inst: Instruction, fetch) -> list[Run]:
    """Fetch functions of all vector sources of `inst`."""
    return [fetch(inst.operands[role]) for role in ("src0", "src1", "src2") if role in inst.operands]
