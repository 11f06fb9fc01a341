"""Emulated LDS of the workgroups in flight, with a record of who wrote and read what in which barrier interval."""

from __future__ import annotations

import numpy as np

from .errors import Fault

IN_FLIGHT = np.int32(1 << 30)
LDS_BYTES = 160 * 1024
ALL_BYTES = np.uint8(15)
ONE_DMA = np.uint8(16)  # the high half of a dword's `valid` counts outstanding loads into it


class Lds:
    """LDS of `slots` workgroups, `size` bytes each, in one dword array.

    `valid` holds one bit for each byte of a dword that was ever written, and counts the loads from global memory that
    are on their way there. With `track`, every dword also knows its last writer and each wave's last read, and the
    interval (count of barriers passed) in which that access was known complete: two waves that touch a dword in the
    same interval, one of them writing, race.
    """

    def __init__(self, slots: int, size: int, waves: int, track: bool):
        self.size, self.stride = size, -(-size // 4)
        total = slots * self.stride
        self.data = np.zeros(total, np.uint32)
        self.valid = np.zeros(total, np.uint8)
        self.track = track
        self.epoch = np.zeros(slots, np.int32)
        if track:
            self.writer = np.full(total, -1, np.int16)
            self.write_epoch = np.full(total, -1, np.int32)
            self.read_epoch = np.full((total, waves), -1, np.int32)

    def index(self, g, address: np.ndarray, mask: np.ndarray, size: int, align: int) -> np.ndarray:
        """Dword indices of byte `address` (int64 [W, L], inside the workgroup's LDS); where masked, of byte 0."""
        address = np.where(mask, address, 0)
        if (address & (align - 1)).any():
            self._fail(
                mask & (address & (align - 1) != 0),
                address,
                "alignment",
                f"LDS access of {size} bytes needs a multiple of {align}",
            )
        outside = (address < 0) | (address + size > self.size)
        if outside.any():
            self._fail(mask & outside, address, "lds-range", f"LDS access of {size} bytes outside of {self.size} bytes")
        return (address >> 2) + g.lds_base

    @staticmethod
    def _fail(bad: np.ndarray, address: np.ndarray, kind: str, text: str) -> None:
        if bad.any():
            wave, lane = np.argwhere(bad)[0]
            raise Fault(kind, f"{text} (address {int(address[wave, lane]):#x})", int(wave), int(lane))

    def _blame(self, g, bad: np.ndarray, index: np.ndarray, kind: str, text: str) -> None:
        where = np.argwhere(bad)[0]
        wave, lane = int(where[0]), int(where[1])
        dword = int(index[tuple(where)]) - int(g.lds_base[wave, 0])
        text = f"{text} (LDS address {4 * dword:#x})"
        if kind == "undefined-lds":
            raise Fault(kind, text, wave, lane)
        g.hazard(kind, text, wave, lane)

    def check_read(self, g, index: np.ndarray, mask: np.ndarray, need: int = 15) -> None:
        """Check a read of dwords `index` [W, L, n] in lanes `mask` [W, L]; `need` is the byte mask inside the dword."""
        state = self.valid[index]
        bad = (state & (need | 0xF0)) != need
        if bad.any():
            bad &= mask[..., None]
            if bad.any():
                pending = bad & (state >= ONE_DMA)
                if pending.any():
                    self._blame(
                        g,
                        pending,
                        index,
                        "lds-before-wait",
                        "LDS is read while a load into it is outstanding: no s_waitcnt vmcnt covers it",
                    )
                    bad &= ~pending
            if bad.any():
                self._blame(g, bad, index, "undefined-lds", "LDS bytes are read that were never written")
        if self.track:
            now = self.epoch[g.slots][:, None, None]
            foreign = self.writer[index] != g.waves[:, None, None]
            race = foreign & (self.write_epoch[index] >= now) & mask[..., None]
            if race.any():
                self._blame(
                    g,
                    race,
                    index,
                    "lds-race",
                    f"read of what wave {self._writer_at(race, index)} wrote without a wait and a barrier between them",
                )
            self.read_epoch[index[mask], np.broadcast_to(g.waves[:, None], mask.shape)[mask][:, None]] = IN_FLIGHT

    def _writer_at(self, bad: np.ndarray, index: np.ndarray) -> int:
        return int(self.writer[index[tuple(np.argwhere(bad)[0])]])

    def finish_read(self, g, index: np.ndarray, mask: np.ndarray) -> None:
        """The read's data arrived: later writes are safe once a barrier was passed."""
        now = self.epoch[g.slots]
        waves = np.broadcast_to(g.waves[:, None], mask.shape)[mask][:, None]
        self.read_epoch[index[mask], waves] = np.broadcast_to(now[:, None], mask.shape)[mask][:, None]

    def check_write(self, g, index: np.ndarray, mask: np.ndarray, dma: bool = False) -> None:
        """Check a write of dwords `index` [W, L, n] in lanes `mask`, and note that it is in flight."""
        state = self.valid[index]
        if not self.track:
            return
        now = self.epoch[g.slots][:, None, None]
        foreign = self.writer[index] != g.waves[:, None, None]
        # Loads of one wave land in order, so its own second load (not its ds_write) over an outstanding one is sound.
        clash = (state >= ONE_DMA) & mask[..., None]
        if not dma and clash.any():
            self._blame(g, clash, index, "lds-overwrite", "LDS is written while a load into it is outstanding")
        race = foreign & (self.write_epoch[index] >= now) & mask[..., None]
        if race.any():
            self._blame(
                g,
                race,
                index,
                "lds-overwrite",
                f"write over what wave {self._writer_at(race, index)} wrote without a wait and a barrier between them",
            )
        readers = self.read_epoch[index] >= now[..., None]
        own = np.arange(readers.shape[-1]) == g.waves[:, None, None, None]
        race = (readers & ~own).any(axis=-1) & mask[..., None]
        if race.any():
            position = tuple(np.argwhere(race)[0])
            reader = int(np.argmax((readers & ~own)[position]))
            self._blame(
                g,
                race,
                index,
                "lds-overwrite",
                f"write over what wave {reader} read without a wait and a barrier between them",
            )
        flat = index[mask]
        self.writer[flat] = np.broadcast_to(g.waves[:, None], mask.shape)[mask][:, None]
        self.write_epoch[flat] = IN_FLIGHT

    def finish_write(self, g, index: np.ndarray, mask: np.ndarray) -> None:
        now = np.broadcast_to(self.epoch[g.slots][:, None], mask.shape)[mask][:, None]
        self.write_epoch[index[mask]] = now
