"""Runs a kernel without its arguments: only what follows from thread numbers and constants has a value.

Loaded data, kernel arguments and workgroup numbers are unknown, and so is all that is computed from them. What
remains is what the checks and the cycle model need: LDS addresses, M0, wave-dependent branches, barriers, and the
order of instructions. Branches on unknown conditions follow a `Route`, all waves alike.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from .codeobject import CodeObject, Kernel
from .decode import EXEC, VCC, VGPR, Instruction
from .delayed import Pending, issue
from .errors import EmulatorError
from .flow import Flow, build_flow
from .lds import ALL_BYTES, ONE_DMA
from .machine import Emulator
from .operands import BUILDERS
from .program import Program
from .registers import is_lds_load, is_vmem, reads, writes
from .scheduler import Launch
from .state import DEFINED, WaveGroup


@dataclass(frozen=True)
class Route:
    """How branches on unknown conditions go.

    Attributes:
        iterations: passes through a loop before it is left.
        forward: other branches: "never" taken, "always", or "alternate" (each branch by its own count of visits).
        exit: which of a loop's exits is used, counted in program order.
        short: inside innermost loops, other branches take the side with fewer instructions to the end of the pass.
    """

    iterations: int = 4
    forward: str = "never"
    exit: int = 0
    short: bool = False


ROUTES = tuple(Route(4 + (e & 1), f, e) for e in (0, 1) for f in ("never", "always", "alternate"))


@dataclass
class SkeletonRun:
    """What one run saw: hazards, LDS accesses, order of instructions of each wave, and how it ended."""

    route: Route
    hazards: list[EmulatorError]
    order: list[list[int]]
    accesses: dict[int, list[tuple[np.ndarray, np.ndarray, int]]]
    unknown_addresses: set[int]
    finished: bool
    stopped_by: EmulatorError | None = None
    visited: set[int] = field(default_factory=set)


def run_skeleton(
    code: CodeObject, kernel: Kernel, route: Route, workgroup: int, *, flow: Flow | None = None, limit: int = 100_000
) -> SkeletonRun:
    """Run one workgroup of `workgroup` threads along `route`; stops after `limit` wave-instructions of a group."""
    flow = flow or build_flow(kernel)
    emulator = Emulator(code, delayed_memory=True, collect_hazards=True, workgroups_at_once=1, max_instructions=limit)
    launch = _SkeletonLaunch(emulator, kernel, flow, route, workgroup)
    stopped = None
    try:
        with np.errstate(all="ignore"):
            launch.run()
    except EmulatorError as error:
        stopped = error
    hazards = [h for h in emulator.hazards if h.kind.startswith("lds")]
    return SkeletonRun(
        route,
        hazards,
        launch.order,
        launch.accesses,
        launch.unknown_addresses,
        stopped is None,
        stopped,
        {i for i, n in enumerate(launch.counts) if n},
    )


class _SkeletonLaunch(Launch):
    def __init__(self, emulator: Emulator, kernel: Kernel, flow: Flow, route: Route, workgroup: int):
        self.route, self.deciders = route, _exits(flow)
        self.shorter = _shorter_sides(flow) if route.short else {}
        self.visits: Counter = Counter()
        self.accesses: dict[int, list] = {}
        self.unknown_addresses: set[int] = set()
        index_of = {inst.address: inst.index for inst in kernel.program}
        run = [self._compile(inst) for inst in kernel.program]
        targets = [index_of.get(inst.target) if inst.target is not None else None for inst in kernel.program]
        program = Program(kernel, kernel.program, run, targets, index_of)
        super().__init__(emulator, program, (1, 1, 1), (workgroup, 1, 1), b"", kernel.descriptor.lds_bytes)
        self.order: list[list[int]] = [[] for _ in range(self.waves)]

    def _attach(self, group: WaveGroup) -> None:
        super()._attach(group)
        group.trace = self._trace
        self.lds.valid[:] |= ALL_BYTES

    def _initial(self, ids) -> WaveGroup:
        group = super()._initial(ids)
        group.unknown = bytearray(b"\1" * len(group.state))
        group.unknown[VGPR] = group.unknown[EXEC] = group.unknown[EXEC + 1] = 0
        return group

    def _trace(self, g: WaveGroup, inst: Instruction, address, mask, size: int) -> None:
        seen = self.accesses.setdefault(inst.index, [])
        if len(seen) < 2:
            seen.append((address.copy(), np.broadcast_to(mask, address.shape).copy(), size))

    def _compile(self, inst: Instruction):
        index = inst.index
        sources = sorted({r for span in reads(inst) for r in span})
        results = sorted({r for span in writes(inst) for r in span})
        body = self._body(inst)

        def run(g):
            for wave in g.waves.tolist():
                self.order[wave].append(index)
            result = body(g, any(g.unknown[r] for r in sources))
            if result is not _UNKNOWN and result is not _KNOWN:
                return result
            value = int(result is _UNKNOWN)
            for r in results:
                g.unknown[r] = value
                g.state[r] = DEFINED
            if value and EXEC in results:
                # A mask that depends on data: take every lane as active.
                g.set_exec(np.ones((g.size, 64), bool))
                g.unknown[EXEC] = g.unknown[EXEC + 1] = 0
            return None

        return run

    def _body(self, inst: Instruction):
        build = BUILDERS.get(inst.mnemonic)
        if inst.encoding == "SMEM":
            return self._counted(inst, "lgkm", scalar=True)
        if is_lds_load(inst):
            return self._lds_load(inst)
        if is_vmem(inst):
            return self._counted(inst, "vm")
        if inst.encoding == "DS":
            return self._lds(inst, build)
        if inst.mnemonic.startswith("s_cbranch"):
            return self._branch(inst, build)
        if build is not None and inst.mnemonic in ("s_barrier", "s_endpgm", "s_branch", "s_waitcnt"):
            plain = build(inst)
            return lambda g, tainted: plain(g)
        if build is None or inst.encoding == "MFMA" or inst.encoding == "SOPP":
            return lambda g, tainted: _UNKNOWN if tainted or inst.encoding == "MFMA" else None
        try:
            plain = build(inst)
        except (NotImplementedError, KeyError, ValueError):
            return lambda g, tainted: _UNKNOWN

        def body(g, tainted):
            if tainted:
                return _UNKNOWN
            plain(g)
            return _KNOWN

        return body

    def _counted(self, inst: Instruction, queue: str, scalar: bool = False):
        def body(g, tainted):
            issue(g, getattr(g, queue), Pending(inst, range(0), None, g.exec, scalar=scalar))
            return _UNKNOWN

        return body

    def _lds_load(self, inst: Instruction):
        size = 16 if "x4" in inst.mnemonic else 12 if "x3" in inst.mnemonic else 4
        offset = inst.mods.get("offset", 0)
        lanes = np.arange(64, dtype=np.int64) * size

        def body(g, tainted):
            memory, mask = g.lds, g.exec
            if g.unknown[124]:
                self.unknown_addresses.add(inst.index)
                issue(g, g.vm, Pending(inst, range(0), None, mask))
                return None
            target = g.S[124].astype(np.int64) + offset + lanes
            index = memory.index(g, target, mask, size, 4)[..., None] + np.arange(size // 4)
            memory.check_write(g, index, mask, dma=True)
            self._trace(g, inst, target, mask, size)
            memory.valid[index[mask]] += ONE_DMA
            issue(g, g.vm, Pending(inst, range(0), None, mask, ("dma", index), memory=memory))
            return None

        return body

    def _lds(self, inst: Instruction, build):
        address = inst.operands.get("vaddr")
        plain = build(inst) if build is not None else None

        def body(g, tainted):
            if plain is None or address is None or any(g.unknown[r] for r in address.regs):
                self.unknown_addresses.add(inst.index)
                issue(g, g.lgkm, Pending(inst, range(0), None, g.exec))
                return _UNKNOWN
            plain(g)
            g.lgkm[-1].regs = range(0)
            return _UNKNOWN

        return body

    def _branch(self, inst: Instruction, build):
        plain = build(inst)
        reg = {"scc": 128, "vcc": VCC, "exe": EXEC}[inst.mnemonic.removeprefix("s_cbranch_")[:3]]

        def body(g, tainted):
            if not g.unknown[reg] and not (reg == VCC and g.unknown[reg + 1]):
                return plain(g)
            return True if self._decide(inst.index, int(g.waves[0]), g.waves.tolist()) else None

        return body

    def _decide(self, index: int, first: int, waves: list[int]) -> bool:
        """Whether an unknown branch is taken: loops run their iterations and are left by the chosen exit."""
        count = self.visits[index, first]
        for wave in waves:
            self.visits[index, wave] = count + 1
        found = self.deciders.get(index)
        if found is None and index in self.shorter:
            return self.shorter[index]
        if found is None:
            return self.route.forward == "always" or self.route.forward == "alternate" and bool(count & 1)
        leaves_when_taken, ordinal, exits = found
        chosen = ordinal == self.route.exit % exits
        leave = count + 1 >= self.route.iterations + (0 if chosen else 1)
        if leave:
            for wave in waves:
                self.visits[index, wave] = 0
        return leave == leaves_when_taken


_UNKNOWN, _KNOWN = object(), object()


def _exits(flow: Flow) -> dict[int, tuple[bool, int, int]]:
    """Branches that leave their innermost loop: whether they leave when taken, which exit they are, of how many."""
    found: dict[int, tuple[bool, int, int]] = {}
    for _, members in flow.loops:
        exits = []
        for index in sorted(members):
            inst = flow.program[index]
            after = flow.successors[index]
            if index in found or len(after) != 2 or not inst.mnemonic.startswith("s_cbranch"):
                continue
            inside = [other in members for other in after]
            if sum(inside) == 1:
                # successors are (fall through, target)
                exits.append((index, not inside[1]))
        for ordinal, (index, when_taken) in enumerate(exits):
            found[index] = (when_taken, ordinal, len(exits))
    return found


def _shorter_sides(flow: Flow) -> dict[int, bool]:
    """For branches of innermost loops whose both sides stay inside: whether the taken side is the shorter way round."""
    found: dict[int, bool] = {}
    innermost = [(h, m) for h, m in flow.loops if not any(other < m for _, other in flow.loops)]
    for header, members in innermost:
        distance = {header: 0}
        queue = deque([header])
        while queue:
            index = queue.popleft()
            for before in flow.predecessors[index]:
                if before in members and before not in distance:
                    distance[before] = distance[index] + 1
                    queue.append(before)
        for index in members:
            after = flow.successors[index]
            if index in found or len(after) != 2 or not all(other in members for other in after):
                continue
            found[index] = distance.get(after[1], 1 << 30) < distance.get(after[0], 1 << 30)
    return found
