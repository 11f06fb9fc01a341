"""Schedules waves: groups that stand at one instruction run together, part at branches and meet at barriers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .codeobject import Kernel
from .decode import SCC, VGPR
from .errors import EmulatorError, Fault
from .exec_control import BARRIER, END, Split
from .lds import Lds
from .program import Program
from .state import LANES, WaveGroup


class Launch:
    """One launch: the workgroups in flight, their groups of waves, and the barriers between them."""

    def __init__(self, emulator, program: Program, grid, threads, kernarg: bytes, lds: int):
        self.emulator, self.program, self.grid, self.threads = emulator, program, grid, threads
        self.kernarg = emulator.memory.upload(np.frombuffer(kernarg, np.uint8).copy())
        self.waves = int(np.prod(threads)) // LANES
        self.slots = min(emulator.workgroups_at_once, int(np.prod(grid)))
        self.lds = Lds(self.slots, lds, self.waves, emulator.delayed_memory)
        self.counts = [0] * len(program.instructions)
        self.lds_size = lds

    def run(self) -> None:
        x, y, z = self.grid
        everyone = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        for first in range(0, len(everyone), self.slots):
            self._run_batch(everyone[first : first + self.slots])

    def _run_batch(self, ids: list[tuple[int, int, int]]) -> None:
        self.ids = ids
        self.lds = Lds(self.slots, self.lds_size, self.waves, self.emulator.delayed_memory)
        ready = [self._initial(ids)]
        parked: list[WaveGroup] = []
        while ready or parked:
            if not ready:
                ready, parked = self._release(parked)
            group = ready.pop()
            outcome = self._advance(group, ready)
            if outcome is BARRIER:
                parked.append(group)

    def _release(self, parked: list[WaveGroup]) -> tuple[list[WaveGroup], list[WaveGroup]]:
        """Let the workgroups pass whose living waves all stand at a barrier; waves at one instruction join."""
        arrived: Counter[int] = Counter()
        for group in parked:
            for workgroup in group.slots.tolist():
                arrived[workgroup] += 1
        complete = np.array([arrived[w] == self.waves for w in range(len(self.ids))])
        if not complete.any():
            self._stuck(parked[0], arrived)
        self.lds.epoch[: len(complete)][complete] += 1
        free: list[WaveGroup] = []
        rest: list[WaveGroup] = []
        for group in parked:
            passing = complete[group.slots]
            if passing.all():
                free.append(group)
            elif passing.any():
                free.append(self._take(group, np.flatnonzero(passing)))
                rest.append(self._take(group, np.flatnonzero(~passing)))
            else:
                rest.append(group)
        joined: list[WaveGroup] = []
        for group in free:
            group.index += 1
            for other in joined:
                if other.can_join(group):
                    other.join(group)
                    other.slots = other.workgroups
                    break
            else:
                joined.append(group)
        return joined, rest

    def _stuck(self, group: WaveGroup, arrived: Counter) -> None:
        inst, slot = self.program.instructions[group.index], int(group.slots[0])
        raise EmulatorError(
            "barrier",
            f"{arrived[slot]} of {self.waves} waves wait here, the others have ended",
            instruction=inst.text,
            address=inst.address,
            workgroup=self.ids[slot],
            wave=int(group.waves[0]),
        )

    def _take(self, group: WaveGroup, picked: np.ndarray) -> WaveGroup:
        other = group.take(picked)
        self._attach(other)
        return other

    def _attach(self, group: WaveGroup) -> None:
        group.slots = group.workgroups
        group.memory, group.lds, group.delayed = self.emulator.memory, self.lds, self.emulator.delayed_memory
        group.trace = self.emulator.trace_lds
        group.collect = self._collect if self.emulator.collect_hazards else None

    def _advance(self, group: WaveGroup, ready: list[WaveGroup]):
        """Run a group to its next barrier or its end; the part that leaves it at a branch goes to `ready`."""
        run, counts = self.program.run, self.counts
        targets: list[Any] = self.program.targets  # None where a branch leaves the kernel
        index, size = group.index, group.size
        limit = self.emulator.max_instructions
        try:
            while True:
                counts[index] += size
                group.index = index
                group.executed += 1
                result = run[index](group)
                if result is None:
                    index += 1
                elif result is True:
                    index = targets[index]
                    if group.executed * size > limit:
                        raise Fault("endless", f"more than {limit} wave-instructions without an end", 0)
                elif result is BARRIER:
                    group.index = index
                    return BARRIER
                elif result is END:
                    return END
                elif type(result) is Split:
                    group.index = targets[index]
                    if group.index is None:
                        break
                    ready.append(self._take(group, np.flatnonzero(result.taken)))
                    rest = self._take(group, np.flatnonzero(~result.taken))
                    rest.index = index + 1
                    ready.append(rest)
                    return None
                if index is None or index >= len(run):
                    break
        except Fault as fault:
            raise self._error(group, index, fault) from None
        group.index = len(run) - 1 if index is None else index
        raise EmulatorError(
            "control-flow",
            "execution leaves the kernel's code",
            workgroup=self.ids[int(group.slots[0])],
            wave=int(group.waves[0]),
        )

    def _collect(self, group: WaveGroup, kind: str, message: str, position: int, lane: int | None) -> None:
        found = self._error(group, group.index, Fault(kind, message, position, lane))
        if all((other.kind, other.address) != (kind, found.address) for other in self.emulator.hazards):
            self.emulator.hazards.append(found)

    def _error(self, group: WaveGroup, index: int, fault: Fault) -> EmulatorError:
        inst = self.program.instructions[index]
        position = fault.position if fault.position is not None else 0
        return EmulatorError(
            fault.kind,
            fault.message,
            instruction=inst.text,
            address=inst.address,
            workgroup=self.ids[int(group.slots[position])],
            wave=int(group.waves[position]),
            lane=fault.lane,
        )

    def _initial(self, ids: list[tuple[int, int, int]]) -> WaveGroup:
        """Registers as the hardware sets them up (LLVM AMDGPUUsage, "Initial Kernel Execution State")."""
        kernel: Kernel = self.program.kernel
        kd = kernel.descriptor
        workgroups = np.repeat(np.arange(len(ids)), self.waves)
        waves = np.tile(np.arange(self.waves), len(ids))
        group = WaveGroup(waves, workgroups, workgroups * self.lds.stride, kd.vgprs, kd.vgprs - kd.accum_offset)
        self._attach(group)
        group.index = self.program.index_of[kernel.entry]
        group.flush32 = kd.float_mode >> 4 & 3 == 0
        pointer = kd.kernarg_sgpr
        if pointer is not None:
            group.S[pointer], group.S[pointer + 1] = self.kernarg & 0xFFFFFFFF, self.kernarg >> 32
            group.state[pointer] = group.state[pointer + 1] = 1
        length, offset = kd.kernarg_preload & 0x7F, kd.kernarg_preload >> 7
        for k in range(length):
            reg = kd.user_sgprs_before_preload + k
            group.S[reg] = self.emulator.memory.read_words(self.kernarg + 4 * (offset + k), 1)[0]
            group.state[reg] = 1
        reg = kd.user_sgprs
        for axis, enabled in enumerate(kd.workgroup_id_enabled):
            if enabled:
                group.S[reg, :, 0] = np.array([ids[w][axis] for w in workgroups], np.uint32)
                group.state[reg] = 1
                reg += 1
        thread = np.arange(self.waves * LANES, dtype=np.uint32)
        tx, ty, _ = self.threads
        packed = thread % tx | thread // tx % ty << 10 | thread // (tx * ty) << 20
        group.V[0] = np.tile(packed.reshape(self.waves, LANES), (len(ids), 1))
        group.state[VGPR] = 1
        group.state[SCC] = 0
        return group
