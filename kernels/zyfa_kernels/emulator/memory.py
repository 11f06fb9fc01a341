"""Emulated global memory: one arena of allocations with guard zones, so that a stray access is an error."""

from __future__ import annotations

import numpy as np

from .errors import Fault

BASE = 0x7F40_0000_0000  # like a GPU pointer: both halves are non-zero, so a lost high half is noticed
GUARD = 64 * 1024
ALIGN = 4096


class GlobalMemory:
    """Byte-addressed memory. Addresses are ints that kernels use as pointers.

    Memory that `alloc` hands out and nobody wrote holds 0xFF bytes: NaN in every float format a kernel stores.
    """

    def __init__(self, initial_bytes: int = 1 << 22):
        self._data = np.full(initial_bytes, 0xFF, np.uint8)
        self._valid = np.zeros(initial_bytes // 4, bool)
        self._end = GUARD
        self.allocations: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        """Reserve `nbytes` (guard zones of 64 KiB around them) and return their address, a multiple of 4096."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        start = -(-self._end // ALIGN) * ALIGN
        stop = start + -(-nbytes // 4) * 4
        needed = stop + GUARD
        if needed > self._data.size:
            size = max(needed, 2 * self._data.size)
            size = -(-size // ALIGN) * ALIGN
            data, valid = np.full(size, 0xFF, np.uint8), np.zeros(size // 4, bool)
            data[: self._data.size], valid[: self._valid.size] = self._data, self._valid
            self._data, self._valid = data, valid
        self._valid[start // 4 : stop // 4] = True
        self._end = stop + GUARD
        self.allocations[BASE + start] = nbytes
        return BASE + start

    def upload(self, array: np.ndarray) -> int:
        """Copy a numpy array (C order) into fresh memory and return its address."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1) if array.size else np.zeros(0, np.uint8)
        address = self.alloc(raw.size)
        self._data[address - BASE : address - BASE + raw.size] = raw
        return address

    def download(self, address: int, dtype, shape) -> np.ndarray:
        """A copy of the array of `dtype` and `shape` at `address`; it must lie inside allocated memory."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        start = address - BASE
        if (
            start < 0
            or start + nbytes > self._data.size
            or not self._valid[start // 4 : -(-(start + nbytes) // 4)].all()
        ):
            raise ValueError(f"{nbytes} bytes at {address:#x} are not all allocated")
        return self._data[start : start + nbytes].copy().view(dtype).reshape(shape)

    def _offsets(self, address: np.ndarray, mask: np.ndarray, size: int, what: str) -> np.ndarray:
        """Arena offsets of `address` (uint64, [waves, lanes]); lanes outside of `mask` give offset 0."""
        offset = np.where(mask, address.astype(np.int64) - BASE, 0)
        align = min(size, 4)
        bad = mask & ((offset < 0) | (offset + size > self._data.size))
        if bad.any():
            self._fail(bad, address, f"{what} of {size} bytes outside of any allocation")
        if align > 1 and (offset & (align - 1)).any():
            self._fail(
                mask & ((offset & (align - 1)) != 0), address, f"{what} of {size} bytes, misaligned", "alignment"
            )
        words = offset >> 2
        for word in range(max(1, (size + 3) // 4)):
            outside = mask & ~self._valid[words + word]
            if outside.any():
                self._fail(outside, address, f"{what} of {size} bytes outside of any allocation")
        return offset

    @staticmethod
    def _fail(bad: np.ndarray, address: np.ndarray, text: str, kind: str = "global-range") -> None:
        wave, lane = np.argwhere(bad)[0]
        value = int(np.broadcast_to(address, bad.shape)[wave, lane])
        raise Fault(kind, f"{text} (address {value:#x})", int(wave), int(lane))

    def load(self, address: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """Load `size` bytes a lane (1, 2 or a multiple of 4) from `address` [W, L]: uint32 [n, W, L], 0 if masked."""
        offset = self._offsets(address, mask, size, "load")
        if size >= 4:
            words = self._data.view(np.uint32)
            index = offset >> 2
            out = np.stack([words[index + k] for k in range(size // 4)])
        elif size == 2:
            out = self._data.view(np.uint16)[offset >> 1].astype(np.uint32)[None]
        else:
            out = self._data[offset].astype(np.uint32)[None]
        if not mask.all():
            out[:, ~mask] = 0
        return out

    def store(self, address: np.ndarray, mask: np.ndarray, size: int, values: np.ndarray) -> None:
        """Store the low `size` bytes a lane of uint32 `values` [n, W, L] where `mask`."""
        offset = self._offsets(address, mask, size, "store")[mask]
        if size >= 4:
            words = self._data.view(np.uint32)
            for k in range(size // 4):
                words[(offset >> 2) + k] = values[k][mask]
        elif size == 2:
            self._data.view(np.uint16)[offset >> 1] = values[0][mask].astype(np.uint16)
        else:
            self._data[offset] = values[0][mask].astype(np.uint8)

    def read_words(self, address: int, count: int) -> np.ndarray:
        """`count` dwords at a scalar address, for scalar loads."""
        start = address - BASE
        if address & 3:
            raise Fault("alignment", f"scalar load from {address:#x}, not a multiple of 4")
        if start < 0 or start + 4 * count > self._data.size or not self._valid[start >> 2 : (start >> 2) + count].all():
            raise Fault(
                "global-range", f"scalar load of {4 * count} bytes outside of any allocation (address {address:#x})"
            )
        return self._data.view(np.uint32)[start >> 2 : (start >> 2) + count]
