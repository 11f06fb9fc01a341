"""Delayed memory: results of loads arrive only when an s_waitcnt demands them, the oldest first."""

from __future__ import annotations

import numpy as np

from .decode import VGPR, Instruction, register_name
from .lds import ALL_BYTES, ONE_DMA
from .state import DEFINED, FULL, PENDING, UNDEFINED


class Pending:
    """One outstanding memory operation of a group of waves.

    regs: unified registers that it will write. values: uint32 [n, W, L] for them. mask: bool [W, L], active lanes.
    lds: None, or ("read" | "write" | "dma", dword indices [W, L, n]); dma also delivers `values` to LDS.
    """

    __slots__ = ("inst", "text", "regs", "values", "mask", "lds", "scalar", "memory")

    def __init__(self, inst: Instruction, regs: range, values, mask, lds=None, scalar: bool = False, memory=None):
        self.inst, self.text, self.regs, self.values, self.mask = inst, inst.text, regs, values, mask
        self.lds, self.scalar, self.memory = lds, scalar, memory

    def take(self, picked):
        values = None if self.values is None else self.values[:, picked]
        lds = None if self.lds is None else (self.lds[0], self.lds[1][picked])
        return Pending(self.inst, self.regs, values, self.mask[picked], lds, self.scalar, self.memory)

    def join(self, other, order):
        values = None
        if self.values is not None:
            values = np.concatenate([self.values, other.values], axis=1)[:, order]
        lds = None
        if self.lds is not None:
            lds = (self.lds[0], np.concatenate([self.lds[1], other.lds[1]])[order])
        mask = np.concatenate([self.mask, other.mask])[order]
        return Pending(self.inst, self.regs, values, mask, lds, self.scalar, self.memory)


def issue(g, queue: list, pending: Pending) -> None:
    """Poison the destinations of `pending` and put it at the end of `queue`."""
    for reg in pending.regs:
        if g.state[reg] == PENDING and not _in_order(queue, reg, pending):
            g.hazard("write-under-load", f"{register_name(reg)} gets a second load while one is outstanding")
            deliver_early(g, reg)
        if reg >= VGPR and g.state[reg] == DEFINED:
            g.lanes_defined[reg - VGPR] = FULL
        g.state[reg] = PENDING
    queue.append(pending)


def _in_order(queue: list, reg: int, pending: Pending) -> bool:
    """Whether every outstanding load of `reg` returns before `pending`: same counter, neither one a scalar load."""
    holders = sum(reg in p.regs and not p.scalar for p in queue)
    return holders > 0 and not pending.scalar


def _complete(g, p: Pending) -> None:
    for k, reg in enumerate(p.regs):
        g.state[reg] = UNDEFINED
        if p.scalar:
            g.write_scalar(reg, p.values[k])
            continue
        np.copyto(g.V[reg - VGPR], p.values[k], where=p.mask)
        g.define_lanes(reg - VGPR, np.packbits(p.mask, axis=1, bitorder="little").view("<u8")[:, 0])
        if any(reg in other.regs for queue in (g.vm, g.lgkm) for other in queue if other is not p):
            g.state[reg] = PENDING
    if p.lds is None:
        return
    kind, index = p.lds
    memory = p.memory
    if kind == "read":
        if memory.track:
            memory.finish_read(g, index, p.mask)
        return
    if kind == "dma":
        flat = index[p.mask]
        if p.values is not None:
            memory.data[flat] = np.moveaxis(p.values, 0, -1)[p.mask]
        memory.valid[flat] = (memory.valid[flat] - ONE_DMA) | ALL_BYTES
    if memory.track:
        memory.finish_write(g, index, p.mask)


def deliver_early(g, reg: int) -> None:
    """Complete what is outstanding for `reg`, and all that is older, so that a run can go on after a hazard."""
    for queue in (g.vm, g.lgkm):
        last = max((i for i, p in enumerate(queue) if reg in p.regs), default=-1)
        for _ in range(last + 1):
            _complete(g, queue.pop(0))


def retire(g, vm: int, lgkm: int) -> None:
    """Complete what an s_waitcnt of `vm` and `lgkm` outstanding operations guarantees to be complete."""
    while len(g.vm) > vm:
        _complete(g, g.vm.pop(0))
    if lgkm == 0:
        while g.lgkm:
            _complete(g, g.lgkm.pop(0))
        return
    # Scalar loads return out of order: with any outstanding, a count above 0 only promises the LDS operations that
    # must be done even if every scalar load returned first.
    scalars = sum(p.scalar for p in g.lgkm)
    done = len(g.lgkm) - lgkm - scalars
    while done > 0:
        position = next(i for i, p in enumerate(g.lgkm) if not p.scalar)
        _complete(g, g.lgkm.pop(position))
        done -= 1
