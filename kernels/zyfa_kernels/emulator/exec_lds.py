"""LDS instructions: reads, writes, transposing reads, and the cross-lane moves that share the LDS crossbar."""

from __future__ import annotations

import re

import numpy as np

from .decode import VGPR, Instruction
from .delayed import Pending, issue
from .lds import ALL_BYTES
from .operands import BUILDERS, builds

U8, U32, I64 = np.uint8, np.uint32, np.int64
_READ = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1, "i8": 1, "u16": 2, "i16": 2}
_WRITE = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def _alignment(size: int) -> int:
    return {12: 16}.get(size, size)


def _fetch(g, inst: Instruction, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Check and read `size` bytes a lane: uint32 [n, W, L] and the dword indices [W, L, n]."""
    memory, mask = g.lds, g.exec
    base = memory.index(g, address, mask, size, _alignment(size))
    if g.trace is not None:
        g.trace(g, inst, address, mask, size)
    if size >= 4:
        index = base[..., None] + np.arange(size // 4)
        memory.check_read(g, index, mask)
        values = np.moveaxis(memory.data[index], -1, 0)
    else:
        index = base[..., None]
        shift = (np.where(mask, address, 0) & 3).astype(U32)
        for offset in range(0, 4, size):
            here = mask & (shift == offset)
            if here.any():
                memory.check_read(g, index, here, need=((1 << size) - 1) << offset)
        values = (memory.data[base] >> (shift * U32(8)) & U32((1 << 8 * size) - 1))[None]
    return values, index


def _deliver(g, inst: Instruction, reg: int, values: np.ndarray, index: np.ndarray) -> None:
    if g.delayed:
        issue(g, g.lgkm, Pending(inst, range(reg, reg + len(values)), values, g.exec, ("read", index), memory=g.lds))
    else:
        for k in range(len(values)):
            g.write_vector(reg - VGPR + k, values[k])


def _address(inst: Instruction, offset: int):
    row = inst.operands["vaddr"].reg - VGPR
    return lambda g: g.V[row].astype(I64) + offset


def _read(inst: Instruction):
    kind = re.match(r"ds_read_([ui]?\w?\d+)", inst.mnemonic)[1]
    size, dst = _READ[kind], inst.operands["vdst"].reg
    address, d16 = _address(inst, inst.mods["offset"]), "d16" in inst.mnemonic
    high = inst.mnemonic.endswith("_hi")

    def run(g):
        values, index = _fetch(g, inst, address(g), size)
        if kind in ("i8", "i16"):
            top = U32(1 << 8 * size - 1)
            values = (values ^ top) - top
        if d16:
            old = g.V[dst - VGPR]
            values = (old & U32(0xFFFF) | values << U32(16)) if high else (old & U32(0xFFFF0000) | values & U32(0xFFFF))
        _deliver(g, inst, dst, values, index)

    return run


for _kind in _READ:
    BUILDERS[f"ds_read_{_kind}"] = _read
for _kind in ("u8", "i8", "u16"):
    for _half in ("_d16", "_d16_hi"):
        BUILDERS[f"ds_read_{_kind}{_half}"] = _read


@builds("ds_read2_b32", "ds_read2_b64", "ds_read2st64_b32", "ds_read2st64_b64")
def read2(inst: Instruction):
    size = 4 if inst.mnemonic.endswith("b32") else 8
    scale = size * (64 if "st64" in inst.mnemonic else 1)
    first, second = (_address(inst, inst.mods[f"offset{k}"] * scale) for k in (0, 1))
    dst = inst.operands["vdst"].reg

    def run(g):
        low, low_index = _fetch(g, inst, first(g), size)
        high, high_index = _fetch(g, inst, second(g), size)
        _deliver(g, inst, dst, np.concatenate([low, high]), np.concatenate([low_index, high_index], axis=-1))

    return run


def transpose_lanes(raw: np.ndarray, bits: int) -> np.ndarray:
    """The transposing reads: in each group of 16 lanes, element k of lane l becomes element 16·k + l of the group.

    raw: uint32 [n, W, 64] as a plain read would return it. The group's data is taken as one row of elements of `bits`
    bits, lane after lane.
    """
    n, waves, _ = raw.shape
    words = np.ascontiguousarray(np.moveaxis(raw, 0, -1))  # [W, 64, n]
    bits_of = np.unpackbits(words.view(U8), axis=-1, bitorder="little").reshape(waves, 4, -1, bits)
    count = 32 * n // bits
    moved = bits_of.reshape(waves, 4, count, 16, bits).transpose(0, 1, 3, 2, 4)
    packed = np.packbits(np.ascontiguousarray(moved).reshape(waves, 64, -1), axis=-1, bitorder="little")
    return np.moveaxis(packed.view(U32), -1, 0)


def transpose_bytes(raw: np.ndarray, kind) -> np.ndarray:
    """`transpose_lanes` for whole bytes or halves (`kind` uint8 or uint16), without going through bits."""
    n, waves, _ = raw.shape
    elements = np.ascontiguousarray(np.moveaxis(raw, 0, -1)).view(kind)  # [W, 64, per lane]
    count = elements.shape[-1]
    moved = elements.reshape(waves, 4, count, 16).transpose(0, 1, 3, 2)
    return np.moveaxis(np.ascontiguousarray(moved).reshape(waves, 64, count).view(U32), -1, 0)


@builds("ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4", "ds_read_b96_tr_b6")
def read_transposed(inst: Instruction):
    bits = int(inst.mnemonic.rsplit("_b", 1)[1])
    size = 12 if bits == 6 else 8
    address, dst = _address(inst, inst.mods["offset"]), inst.operands["vdst"].reg

    def run(g):
        values, index = _fetch(g, inst, address(g), size)
        moved = transpose_bytes(values, {8: U8, 16: np.uint16}[bits]) if bits >= 8 else transpose_lanes(values, bits)
        _deliver(g, inst, dst, moved, index)

    return run


def _put(g, inst: Instruction, address: np.ndarray, size: int, values: np.ndarray) -> np.ndarray:
    memory, mask = g.lds, g.exec
    base = memory.index(g, address, mask, size, _alignment(size))
    if g.trace is not None:
        g.trace(g, inst, address, mask, size)
    index = base[..., None] + np.arange(max(1, size // 4))
    memory.check_write(g, index, mask)
    flat = index[mask]
    if size >= 4:
        memory.data[flat] = np.moveaxis(values, 0, -1)[mask]
        memory.valid[flat] = ALL_BYTES
    else:
        byte = (base * 4 + (np.where(mask, address, 0) & 3))[mask]
        kind = {1: U8, 2: np.uint16}[size]
        memory.data.view(kind)[byte // size] = values[0][mask].astype(kind)
        np.bitwise_or.at(memory.valid, flat[:, 0], (((1 << size) - 1) << (byte & 3)).astype(U8))
    return index


def _write_done(g, inst: Instruction, index: np.ndarray) -> None:
    if g.delayed:
        issue(g, g.lgkm, Pending(inst, range(0), None, g.exec, ("write", index), memory=g.lds))


def _write(inst: Instruction):
    kind = re.match(r"ds_write_(b\d+)", inst.mnemonic)[1]
    size, row = _WRITE[kind], inst.operands["data0"].reg - VGPR
    address, high = _address(inst, inst.mods["offset"]), inst.mnemonic.endswith("_hi")
    count = max(1, size // 4)

    def run(g):
        values = g.V[row : row + count]
        if high:
            values = values >> U32(16)
        _write_done(g, inst, _put(g, inst, address(g), size, values))

    return run


for _kind in _WRITE:
    BUILDERS[f"ds_write_{_kind}"] = _write
for _kind in ("b8", "b16"):
    BUILDERS[f"ds_write_{_kind}_d16_hi"] = _write


@builds("ds_write2_b32", "ds_write2_b64", "ds_write2st64_b32", "ds_write2st64_b64")
def write2(inst: Instruction):
    size = 4 if inst.mnemonic.endswith("b32") else 8
    scale = size * (64 if "st64" in inst.mnemonic else 1)
    first, second = (_address(inst, inst.mods[f"offset{k}"] * scale) for k in (0, 1))
    rows = [inst.operands[f"data{k}"].reg - VGPR for k in (0, 1)]
    count = size // 4

    def run(g):
        low = _put(g, inst, first(g), size, g.V[rows[0] : rows[0] + count])
        high = _put(g, inst, second(g), size, g.V[rows[1] : rows[1] + count])
        _write_done(g, inst, np.concatenate([low, high], axis=-1))

    return run


@builds("ds_bpermute_b32", "ds_permute_b32")
def permute(inst: Instruction):
    address, data = inst.operands["vaddr"].reg - VGPR, inst.operands["data0"].reg - VGPR
    dst, offset, forward = inst.operands["vdst"].reg, inst.mods["offset"], inst.mnemonic == "ds_permute_b32"

    def run(g):
        lane = ((g.V[address] + U32(offset)) >> U32(2)).astype(I64) & 63
        values = g.V[data]
        wave = np.arange(g.size)[:, None]
        if forward:
            out = np.zeros((g.size, 64), U32)
            rows = np.broadcast_to(wave, lane.shape)
            out[rows[g.exec], lane[g.exec]] = values[g.exec]
        else:
            out = np.where(g.exec[wave, lane], values[wave, lane], U32(0))
        _deliver_plain(g, inst, dst, out)

    return run


def _deliver_plain(g, inst: Instruction, dst: int, out: np.ndarray) -> None:
    if g.delayed:
        issue(g, g.lgkm, Pending(inst, range(dst, dst + 1), out[None], g.exec))
    else:
        g.write_vector(dst - VGPR, out)


@builds("ds_swizzle_b32")
def swizzle(inst: Instruction):
    row, dst, offset = inst.operands["vaddr"].reg - VGPR, inst.operands["vdst"].reg, inst.mods["offset"]
    lane = np.arange(64)
    if offset & 0x8000:
        source = (lane & ~3) + (offset >> 2 * (lane & 3) & 3)
    else:
        inside = (lane & 31 & (offset & 31) | offset >> 5 & 31) ^ (offset >> 10 & 31)
        source = (lane & 32) + inside
    return lambda g: _deliver_plain(g, inst, dst, np.where(g.exec[:, source], g.V[row][:, source], U32(0)))


@builds("ds_nop")
def ds_nop(inst: Instruction):
    return lambda g: None
