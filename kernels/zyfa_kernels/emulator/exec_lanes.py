"""Moves between lanes and between scalar and vector registers."""

from __future__ import annotations

import numpy as np

from .decode import VGPR, Instruction
from .operands import builds, destination_row, fetch_u32

U32 = np.uint32


@builds("v_readfirstlane_b32")
def readfirstlane(inst: Instruction):
    dst, source = inst.operands["sdst"].reg, fetch_u32(inst.operands["src0"])

    def run(g):
        first = np.where(g.exec.any(axis=1), g.exec.argmax(axis=1), 0)
        values = np.broadcast_to(source(g), (g.size, 64))
        g.write_scalar(dst, np.take_along_axis(values, first[:, None], axis=1))

    return run


@builds("v_readlane_b32")
def readlane(inst: Instruction):
    dst, source, lane = inst.operands["sdst"].reg, fetch_u32(inst.operands["src0"]), fetch_u32(inst.operands["src1"])

    def run(g):
        pick = np.broadcast_to(lane(g) & U32(63), (g.size, 1)).astype(np.int64)
        g.write_scalar(dst, np.take_along_axis(np.broadcast_to(source(g), (g.size, 64)), pick, axis=1))

    return run


@builds("v_writelane_b32")
def writelane(inst: Instruction):
    row, source, lane = destination_row(inst), fetch_u32(inst.operands["src0"]), fetch_u32(inst.operands["src1"])

    def run(g):
        pick = np.broadcast_to(lane(g) & U32(63), (g.size, 1)).astype(np.int64)
        np.put_along_axis(g.V[row], pick, np.broadcast_to(source(g), (g.size, 1)), axis=1)
        g.define_lanes(row, np.uint64(1) << pick[:, 0].astype(np.uint64))

    return run


@builds("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def permlane_swap(inst: Instruction):
    """Swap the upper half (of the wave, or of each 32 lanes) of vdst with the lower half of src0."""
    a, b = destination_row(inst), inst.operands["src0"].reg - VGPR
    width = 32 if "32" in inst.mnemonic.split("_")[1] else 16

    def run(g):
        x, y = g.V[a].copy(), g.V[b].copy()
        upper, lower = x.reshape(g.size, -1, 2, width)[:, :, 1].copy(), y.reshape(g.size, -1, 2, width)[:, :, 0].copy()
        x.reshape(g.size, -1, 2, width)[:, :, 1] = lower
        y.reshape(g.size, -1, 2, width)[:, :, 0] = upper
        g.write_vector(a, x)
        g.write_vector(b, y)

    return run


@builds("v_swap_b32")
def swap(inst: Instruction):
    a, b = destination_row(inst), inst.operands["src0"].reg - VGPR

    def run(g):
        x, y = g.V[a].copy(), g.V[b].copy()
        g.write_vector(a, y)
        g.write_vector(b, x)

    return run
