"""LDS bank conflicts: how many phases an access takes against how many it would take without conflicts.

An LDS instruction is served in phases of fixed lanes; a phase takes one turn for each different dword that its busiest
bank must deliver. The phases and banks of ds_read_b64, b96, b128 and ds_write_b64 were measured on MI355X by HipKittens
(analysis/paper_experiments/phases in its repository); the other rows are assumed from those and marked so. Under these
phases AITER's hd128 kernels have no conflict in their main loops, as one would expect of their padding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..decode import Instruction


@dataclass(frozen=True)
class Phases:
    """Lanes that are served together, and the banks (of 4 bytes) they share."""

    lanes: tuple[tuple[int, ...], ...]
    banks: int
    measured: bool


def _blocks(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(start, start + size)) for start in range(0, 64, size))


def _quads(*groups: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Phases from the first lanes of their runs of four, for lanes 0-31; lanes 32-63 alike."""
    low = [tuple(first + k for first in group for k in range(4)) for group in groups]
    return tuple(low + [tuple(lane + 32 for lane in phase) for phase in low])


READ_B128 = Phases(_quads((0, 12, 20, 24), (4, 8, 16, 28)), 64, True)
READ_B96 = Phases(_quads((0, 20), (4, 16), (8, 28), (12, 24)), 32, True)
READ_B64 = Phases(_blocks(32), 64, True)
WRITE_B64 = Phases(_blocks(16), 32, True)
READ_B32 = Phases(_blocks(64), 64, False)
WRITE_B32 = Phases(_blocks(32), 32, False)
WRITE_B128 = Phases(_blocks(8), 32, False)


def phases_of(inst: Instruction) -> Phases | None:
    """The phases in which `inst` is served; None if it does not address LDS by lane."""
    name = inst.mnemonic
    if name.startswith("ds_read"):
        if "b128" in name:
            return READ_B128
        if "b96" in name:
            return READ_B96
        # Transposing reads of 64 bits are taken to be served like plain ones.
        return READ_B64 if "b64" in name else READ_B32
    if name.startswith("ds_write"):
        if "b128" in name or "b96" in name:
            return WRITE_B128
        return WRITE_B64 if "b64" in name else WRITE_B32
    return None


def turns(inst: Instruction, address: np.ndarray, mask: np.ndarray, size: int) -> tuple[int, int]:
    """(turns, phases) of one wave's access: byte `address` [64], active lanes [64], `size` bytes a lane.

    Without a conflict the two are equal. Lanes that read the same dword share it; narrower accesses touch one dword.
    """
    served = phases_of(inst)
    if served is None:
        return 0, 0
    dwords = (address[:, None] >> 2) + np.arange(max(1, size // 4))
    total = busy = 0
    for lanes in served.lanes:
        picked = dwords[np.asarray(lanes)][mask[np.asarray(lanes)]]
        if picked.size:
            busy += 1
            wanted = sorted(set(picked.ravel().tolist()))
            total += max(Counter(d % served.banks for d in wanted).values())
    return total, busy
