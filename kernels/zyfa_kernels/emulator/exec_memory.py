"""Global memory: scalar loads, buffer and global loads and stores, loads straight into LDS."""

from __future__ import annotations

import re

import numpy as np

from .decode import M0, VGPR, Instruction
from .delayed import Pending, issue
from .errors import Fault
from .lds import ALL_BYTES, ONE_DMA
from .operands import BUILDERS, builds, fetch_u32
from .registers import is_lds_load

U32, U64, I64 = np.uint32, np.uint64, np.int64
_SIZES = {
    "ubyte": 1,
    "sbyte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "byte": 1,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}
_NAME = re.compile(
    r"(buffer|global|flat)_(load|store)_(lds_)?(ubyte|sbyte|ushort|sshort|short|byte|dwordx[234]|dword)"
    r"(_d16)?(_hi)?$"
)


@builds("s_load_dword", "s_load_dwordx2", "s_load_dwordx4", "s_load_dwordx8", "s_load_dwordx16")
def scalar_load(inst: Instruction):
    base, dst = inst.operands["saddr"].reg, inst.operands["sdst"]
    offset = inst.mods.get("offset", 0)
    soffset = inst.operands.get("soffset")

    def run(g):
        address = g.S[base, :, 0].astype(U64) | g.S[base + 1, :, 0].astype(U64) << U64(32)
        extra = g.S[soffset.reg, :, 0].astype(U64) if soffset is not None else U64(0)
        values = np.zeros((dst.count, g.size, 1), U32)
        for wave, start in enumerate((address + extra).tolist()):
            try:
                values[:, wave, 0] = g.memory.read_words((start + offset) & ~3, dst.count)
            except Fault as fault:
                raise Fault(fault.kind, fault.message, wave) from None
        if g.delayed:
            issue(g, g.lgkm, Pending(inst, dst.regs, values, np.ones((g.size, 1), bool), scalar=True))
        else:
            for k in range(dst.count):
                g.write_scalar(dst.reg + k, values[k])

    return run


def _global_address(inst: Instruction):
    """Function giving the uint64 address [W, L] of a global or flat access."""
    vaddr, saddr, offset = inst.operands.get("vaddr"), inst.operands.get("saddr"), inst.mods.get("offset", 0)

    def address(g):
        if saddr is not None:
            base = g.S[saddr.reg].astype(U64) | g.S[saddr.reg + 1].astype(U64) << U64(32)
            total = base + g.V[vaddr.reg - VGPR].astype(U64) if vaddr is not None else base + np.zeros((1, 64), U64)
        else:
            row = vaddr.reg - VGPR
            total = g.V[row].astype(U64) | g.V[row + 1].astype(U64) << U64(32)
        return (total.view(I64) + offset).view(U64)

    return address


def _buffer_address(inst: Instruction, dwords: int, size: int):
    """Function giving address [W, L] and, for each dword, whether it lies inside the buffer: bool [n, W, L].

    Raw buffers only (stride 0): byte offset = vaddr + instruction offset, in range while it ends within
    num_records - soffset (GFX9 ISA, "Buffer addressing", range checking).
    """
    vaddr, rsrc = inst.operands.get("vaddr"), inst.operands["srsrc"].reg
    soffset, offset = fetch_u32(inst.operands["soffset"]), inst.mods["offset"]
    if inst.mods["idxen"]:
        raise NotImplementedError("buffer access with an index register")
    step = min(size, 4)

    def address(g):
        words = g.S[rsrc : rsrc + 4]
        if (words[1] >> U32(16) & U32(0x3FFF)).any():
            wave = int(np.argmax((words[1] >> U32(16) & U32(0x3FFF)) != 0))
            raise Fault("buffer", "only raw buffers (stride 0) are modelled", wave)
        base = words[0].astype(I64) | (words[1] & U32(0xFFFF)).astype(I64) << I64(32)
        local = (g.V[vaddr.reg - VGPR].astype(I64) if vaddr is not None else np.zeros((g.size, 64), I64)) + offset
        scalar = soffset(g).astype(I64)
        limit = words[2].astype(I64) - scalar
        inside = np.stack([local + step * (k + 1) <= limit for k in range(dwords)])
        return (base + scalar + local).view(U64), inside

    return address


def _sign(values: np.ndarray, size: int) -> np.ndarray:
    top = U32(1 << 8 * size - 1)
    return (values ^ top) - top


def _load(inst: Instruction):
    match = _NAME.match(inst.mnemonic)
    kind, size = match[4], _SIZES[match[4]]
    dwords = max(1, size // 4)
    if is_lds_load(inst):
        return _load_to_lds(inst, size)
    dst = inst.operands["vdst"]
    is_buffer = match[1] == "buffer"
    where = _buffer_address(inst, dwords, size) if is_buffer else _global_address(inst)

    def run(g):
        if is_buffer:
            address, inside = where(g)
            values = _masked_load(g, address, inside, size)
        else:
            values = g.memory.load(where(g), g.exec, size)
        if kind in ("sbyte", "sshort"):
            values = _sign(values, size)
        if match[5]:
            old = g.V[dst.reg - VGPR]
            values = (
                (old & U32(0xFFFF) | values << U32(16)) if match[6] else (old & U32(0xFFFF0000) | values & U32(0xFFFF))
            )
        if g.delayed:
            issue(g, g.vm, Pending(inst, dst.regs, values, g.exec))
        else:
            for k in range(dwords):
                g.write_vector(dst.reg - VGPR + k, values[k])

    return run


def _masked_load(g, address, inside, size: int) -> np.ndarray:
    """Load whose dwords outside of the buffer read as 0."""
    if inside.all():
        return g.memory.load(address, g.exec, size)
    if size <= 4:
        return g.memory.load(address, g.exec & inside[0], size)
    return np.concatenate([g.memory.load(address + U64(4 * k), g.exec & inside[k], 4) for k in range(len(inside))])


def _load_to_lds(inst: Instruction, size: int):
    """LDS address = M0 + instruction offset + size · lane; lanes outside of the buffer bring zeros."""
    if size < 4:
        raise NotImplementedError("loads of less than a dword into LDS")
    dwords, is_buffer = size // 4, inst.encoding == "MUBUF"
    where = _buffer_address(inst, dwords, size) if is_buffer else _global_address(inst)
    offset = inst.mods.get("offset", 0)
    lanes = np.arange(64, dtype=I64) * size

    def run(g):
        if is_buffer:
            values = _masked_load(g, *where(g), size)
        else:
            values = g.memory.load(where(g), g.exec, size)
        target = g.S[M0].astype(I64) + offset + lanes
        memory, mask = g.lds, g.exec
        index = memory.index(g, target, mask, size, 4)[..., None] + np.arange(dwords)
        memory.check_write(g, index, mask, dma=True)
        if g.trace is not None:
            g.trace(g, inst, target, mask, size)
        if g.delayed:
            memory.valid[index[mask]] += ONE_DMA
            issue(g, g.vm, Pending(inst, range(0), values, mask, ("dma", index), memory=memory))
        else:
            flat = index[mask]
            memory.data[flat] = np.moveaxis(values, 0, -1)[mask]
            memory.valid[flat] = ALL_BYTES

    return run


def _store(inst: Instruction):
    match = _NAME.match(inst.mnemonic)
    size = _SIZES[match[4]]
    dwords, row = max(1, size // 4), inst.operands["data0"].reg - VGPR
    is_buffer = match[1] == "buffer"
    where = _buffer_address(inst, dwords, size) if is_buffer else _global_address(inst)
    shift = U32(16 if match[6] else 0)

    def run(g):
        values = g.V[row : row + dwords]
        if shift:
            values = values >> shift
        if is_buffer:
            address, inside = where(g)
            if inside.all():
                g.memory.store(address, g.exec, size, values)
            else:
                step = min(size, 4)
                for k in range(dwords):
                    g.memory.store(address + U64(step * k), g.exec & inside[k], step, values[k : k + 1])
        else:
            g.memory.store(where(g), g.exec, size, values)
        if g.delayed:
            issue(g, g.vm, Pending(inst, range(0), None, g.exec))

    return run


for _space in ("buffer", "global", "flat"):
    for _kind in _SIZES:
        BUILDERS[f"{_space}_load_{_kind}"] = _load
        BUILDERS[f"{_space}_store_{_kind}"] = _store
    for _kind in ("ubyte", "sbyte", "short"):
        for _half in ("_d16", "_d16_hi"):
            BUILDERS[f"{_space}_load_{_kind}{_half}"] = _load
    for _kind in ("byte", "short"):
        BUILDERS[f"{_space}_store_{_kind}_d16_hi"] = _store
for _kind in ("dword", "dwordx3", "dwordx4"):
    BUILDERS[f"global_load_lds_{_kind}"] = _load
