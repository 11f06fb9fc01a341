"""Register state of a group of waves that stand at the same instruction and execute together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import AGPR, EXEC, SCC, VCC, VGPR, register_name
from .errors import Fault

LANES = 64
UNDEFINED, DEFINED, PENDING = 0, 1, 2
FULL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
LANE_BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)


def mask_to_lanes(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two uint32 halves [W, 1] of a wave mask to bool [W, 64]."""
    words = np.concatenate([low, high], axis=1).astype("<u4")
    return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)


def lanes_to_mask(lanes: np.ndarray) -> np.ndarray:
    """Bool [W, 64] to uint32 [W, 2], low half first."""
    return np.packbits(lanes, axis=1, bitorder="little").view("<u4")


class WaveGroup:
    """Waves in lockstep.

    V  uint32 [515, W, 64]: VGPRs, AccVGPRs, and three rows of scratch for DPP and SDWA operands;
       Vf and Vi are float32 and int32 views of it.
    S  uint32 [129, W, 1]: scalar registers by their encoding; row 128 is SCC.
    state  one byte a register: defined in all lanes of all waves, not (then `lanes_defined` says where), or pending.
    """

    slots: np.ndarray  # place of each wave's workgroup among those in flight
    memory: Any
    lds: Any
    delayed: bool
    trace: Callable | None  # called for every LDS access
    collect: Callable | None  # takes faults of timing, which else are raised

    def __init__(self, waves: np.ndarray, workgroups: np.ndarray, lds_base: np.ndarray, vgprs: int, agprs: int):
        count = len(waves)
        self.waves, self.workgroups, self.lds_base = waves, workgroups, lds_base.reshape(count, 1)
        self.vgprs, self.agprs = vgprs, agprs
        self.index = 0
        self.V = np.zeros((515, count, LANES), np.uint32)
        self.S = np.zeros((129, count, 1), np.uint32)
        self.state = bytearray(771)
        self.lanes_defined = np.zeros((515, count), np.uint64)
        self.flush32 = False
        self.fp16_overflow_clamps = False
        self.vm: list = []  # outstanding vector memory operations, oldest first (delayed-memory mode)
        self.lgkm: list = []  # outstanding LDS and scalar loads
        self.executed = 0
        self.unknown: bytearray | None = None  # registers without a value (runs without arguments)
        self._derive()
        self.set_exec(np.ones((count, LANES), bool))

    def _derive(self) -> None:
        self.size = self.V.shape[1]
        self.Vf, self.Vi = self.V.view(np.float32), self.V.view(np.int32)
        self.Sf, self.Si = self.S.view(np.float32), self.S.view(np.int32)

    def set_exec(self, lanes: np.ndarray) -> None:
        halves = lanes_to_mask(lanes)
        self.S[EXEC, :, 0], self.S[EXEC + 1, :, 0] = halves[:, 0], halves[:, 1]
        self.state[EXEC] = self.state[EXEC + 1] = DEFINED
        self.exec_changed()

    def exec_changed(self) -> None:
        """Recompute the lane mask after a write to EXEC."""
        self.exec = mask_to_lanes(self.S[EXEC], self.S[EXEC + 1])
        self.exec_full = bool(self.exec.all())
        self.exec_word = self.S[EXEC, :, 0].astype(np.uint64) | self.S[EXEC + 1, :, 0].astype(np.uint64) << np.uint64(
            32
        )

    def lane_mask(self, reg: int) -> np.ndarray:
        """The 64-bit scalar at `reg` as bool [W, 64]."""
        return mask_to_lanes(self.S[reg], self.S[reg + 1])

    def write_lane_mask(self, reg: int, lanes: np.ndarray) -> None:
        halves = lanes_to_mask(lanes)
        self.S[reg, :, 0], self.S[reg + 1, :, 0] = halves[:, 0], halves[:, 1]
        self.state[reg] = self.state[reg + 1] = DEFINED
        if reg == EXEC:
            self.exec_changed()

    def write_scalar(self, reg: int, value: np.ndarray, count: int = 1) -> None:
        """Write uint32 [W, 1] (or uint64 for count 2) to scalar registers."""
        if reg == 125 or reg > SCC:
            raise Fault("register", f"write to scalar register {register_name(reg)}, which does not exist")
        if count == 1:
            self.S[reg] = value
        else:
            self.S[reg] = value & np.uint64(0xFFFFFFFF)
            self.S[reg + 1] = value >> np.uint64(32)
            self.state[reg + 1] = DEFINED
        self.state[reg] = DEFINED
        if EXEC <= reg <= EXEC + 1:
            self.exec_changed()

    def write_vector(self, row: int, value: np.ndarray) -> None:
        """Write uint32 [W, 64] to vector register `row` (AccVGPRs from 256) in the active lanes."""
        if self.state[row + VGPR] == PENDING:
            self._write_under_load(row + VGPR)
        if self.exec_full:
            self.V[row] = value
            self.state[row + VGPR] = DEFINED
        else:
            np.copyto(self.V[row], value, where=self.exec)
            self.define_lanes(row, self.exec_word)

    def define_lanes(self, row: int, word: np.ndarray) -> None:
        """Mark register `row` defined in the lanes of uint64 [W] `word`."""
        if self.state[row + VGPR] == DEFINED:
            return
        self.lanes_defined[row] |= word
        if (self.lanes_defined[row] == FULL).all():
            self.state[row + VGPR] = DEFINED

    def define_all(self, row: int, count: int) -> None:
        """Mark `count` vector registers from `row` defined in every lane, whatever EXEC says (matrix results)."""
        first = row + VGPR
        if PENDING in self.state[first : first + count]:
            self._write_under_load(first + self.state[first : first + count].index(PENDING))
        self.state[first : first + count] = b"\x01" * count

    def _write_under_load(self, reg: int) -> None:
        self.hazard("write-under-load", f"{register_name(reg)} is written while a load into it is outstanding")
        from .delayed import deliver_early

        deliver_early(self, reg)

    def hazard(self, kind: str, message: str, position: int = 0, lane: int | None = None) -> None:
        """A fault of timing: an error, or a note where the emulator collects them."""
        if self.collect is None:
            raise Fault(kind, message, position, lane)
        self.collect(self, kind, message, position, lane)

    def require(self, reg: int, all_lanes: bool = False) -> None:
        """Raise a Fault unless `reg` is defined in every active lane (every lane if `all_lanes`)."""
        flag = self.state[reg]
        if flag == DEFINED:
            return
        name = register_name(reg)
        if flag == PENDING:
            source = next(p.text for q in (self.vm, self.lgkm) for p in q if reg in p.regs)
            self.hazard("read-before-wait", f"{name} is read while `{source}` is outstanding: no s_waitcnt covers it")
            from .delayed import deliver_early

            deliver_early(self, reg)
            return
        if reg < VGPR:
            raise Fault("undefined-register", f"{name} is read but was never written", 0)
        missing = ~self.lanes_defined[reg - VGPR]
        if not all_lanes:
            missing &= self.exec_word
        if missing.any():
            wave = int(np.argmax(missing != 0))
            lane = int(np.argmax((missing[wave] & LANE_BITS) != 0))
            raise Fault("undefined-register", f"{name} is read but was never written", wave, lane)

    def take(self, picked: np.ndarray) -> WaveGroup:
        """A new group with copies of the waves at positions `picked`."""
        other = object.__new__(WaveGroup)
        other.waves, other.workgroups = self.waves[picked], self.workgroups[picked]
        other.lds_base = self.lds_base[picked]
        other.vgprs, other.agprs, other.index = self.vgprs, self.agprs, self.index
        other.V, other.S = self.V[:, picked].copy(), self.S[:, picked].copy()
        other.state = bytearray(self.state)
        other.lanes_defined = self.lanes_defined[:, picked].copy()
        other.flush32, other.fp16_overflow_clamps = self.flush32, self.fp16_overflow_clamps
        other.vm, other.lgkm = [p.take(picked) for p in self.vm], [p.take(picked) for p in self.lgkm]
        other.executed = self.executed
        other.unknown = None if self.unknown is None else bytearray(self.unknown)
        other._derive()
        other.exec_changed()
        return other

    def can_join(self, other: WaveGroup) -> bool:
        same = [[p.inst.index for p in q] for q in (self.vm, self.lgkm)]
        return (
            self.index == other.index
            and self.flush32 == other.flush32
            and self.fp16_overflow_clamps == other.fp16_overflow_clamps
            and same == [[p.inst.index for p in q] for q in (other.vm, other.lgkm)]
        )

    def join(self, other: WaveGroup) -> None:
        """Take the waves of `other`, which stands at the same instruction, into this group."""
        for reg in range(VGPR, VGPR + 512):
            flags = self.state[reg], other.state[reg]
            if flags[0] != flags[1]:
                for group, flag in ((self, flags[0]), (other, flags[1])):
                    if flag == DEFINED:
                        group.lanes_defined[reg - VGPR] = FULL
                self.state[reg] = UNDEFINED
        for reg in range(VGPR):
            self.state[reg] = min(self.state[reg], other.state[reg])
        if self.unknown is not None and other.unknown is not None:
            self.unknown = bytearray(a | b for a, b in zip(self.unknown, other.unknown, strict=True))
        order = np.argsort(
            np.concatenate([self.workgroups, other.workgroups]) * 64 + np.concatenate([self.waves, other.waves]),
            kind="stable",
        )
        for name in ("waves", "workgroups", "lds_base"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)])[order])
        for name in ("V", "S", "lanes_defined"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)], axis=1)[:, order])
        self.vm = [a.join(b, order) for a, b in zip(self.vm, other.vm, strict=True)]
        self.lgkm = [a.join(b, order) for a, b in zip(self.lgkm, other.lgkm, strict=True)]
        self._derive()
        self.exec_changed()


__all__ = [
    "AGPR",
    "DEFINED",
    "EXEC",
    "LANES",
    "PENDING",
    "SCC",
    "UNDEFINED",
    "VCC",
    "VGPR",
    "WaveGroup",
    "lanes_to_mask",
    "mask_to_lanes",
]
