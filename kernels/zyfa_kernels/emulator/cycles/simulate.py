"""The two waves of a SIMD, instruction by instruction, in issue slots of four cycles.

In each slot every wave may issue its next instruction if its pipe is free, one instruction a pipe; the wave of the
higher priority (s_setprio), then the older one, goes first. A matrix instruction needs the vector issue port for a
moment and then the matrix pipe for its passes; vector instructions of the other wave run beside it. The other SIMDs
do the same thing at the same time, so an LDS or L1 access occupies its pipe four times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..decode import Instruction
from .costs import BRANCH, INTERNAL, LDS, MFMA, SALU, SMEM, VALU, VMEM, Cost
from .params import Parameters


@dataclass
class Span:
    """Something that took time: wave, lane of the timeline, start and end cycle, index of the instruction."""

    wave: int
    lane: str
    start: int
    end: int
    index: int


@dataclass
class BarrierVisit:
    """When each wave arrived at a barrier, and the instruction each stood at."""

    arrivals: dict[int, int]
    indices: dict[int, int]
    release: int = 0

    @property
    def last(self) -> int:
        """The wave that arrived last."""
        return max(self.arrivals, key=lambda w: self.arrivals[w])

    @property
    def waited(self) -> int:
        return max(self.arrivals.values()) - min(self.arrivals.values())


@dataclass
class Trace:
    """Result of a simulation. `issued[w][n]`: cycle at which wave w issued the n-th instruction of its order."""

    spans: list[Span] = field(default_factory=list)
    issued: list[list[int]] = field(default_factory=list)
    barriers: list[BarrierVisit] = field(default_factory=list)
    stalls: list[tuple[int, int, int, str]] = field(default_factory=list)  # wave, cycle, cycles, reason
    end: int = 0


class _Wave:
    def __init__(self, number: int, order: list[int]):
        self.number, self.order, self.at = number, order, 0
        self.ready = self.priority = 0
        self.vm: deque[int] = deque()
        self.lgkm: list[int] = []
        self.barrier: BarrierVisit | None = None
        self.stalled_since, self.reason = -1, ""

    @property
    def done(self) -> bool:
        return self.at >= len(self.order)


class _Simd:
    """State of one SIMD and of the pipes it shares with the others."""

    def __init__(self, orders: list[list[int]], p: Parameters):
        self.p = p
        self.waves = [_Wave(n, order) for n, order in enumerate(orders)]
        self.trace = Trace(issued=[[] for _ in orders])
        self.pipes = dict.fromkeys((VALU, MFMA, SALU, LDS, VMEM, SMEM, BRANCH), 0)
        self.lds_free = self.dma_free = 0
        self.open_barrier: BarrierVisit | None = None

    def blocked(self, wave: _Wave, cost: Cost, now: int, used: set[str]) -> str:
        """Why the wave cannot issue now, or an empty string."""
        if cost.waits is not None:
            while wave.vm and wave.vm[0] <= now:
                wave.vm.popleft()
            wave.lgkm = [t for t in wave.lgkm if t > now]
            if len(wave.vm) > cost.waits[0]:
                return "vmcnt"
            return "lgkmcnt" if len(wave.lgkm) > cost.waits[1] else ""
        if cost.barrier:
            return self._at_barrier(wave, now)
        if cost.pipe == INTERNAL:
            return ""
        port = VALU if cost.pipe == MFMA else cost.pipe
        if port in used or self.pipes[port] > now:
            return "vector pipe" if port == VALU else f"{port} port"
        if cost.pipe == MFMA and self.pipes[MFMA] > now:
            return "matrix pipe"
        if cost.packed_fp32 and self.pipes[MFMA] > now and not self.p.packed_fp32_beside_mfma:
            return "packed fp32 beside a matrix instruction"
        return ""

    def _at_barrier(self, wave: _Wave, now: int) -> str:
        if wave.barrier is None:
            if self.open_barrier is None:
                self.open_barrier = BarrierVisit({}, {})
                self.trace.barriers.append(self.open_barrier)
            visit = wave.barrier = self.open_barrier
            visit.arrivals[wave.number], visit.indices[wave.number] = now, wave.order[wave.at]
            if len(visit.arrivals) == sum(not w.done for w in self.waves):
                visit.release = now + self.p.barrier
                self.open_barrier = None
        if not wave.barrier.release or wave.barrier.release > now:
            return "barrier"
        wave.barrier = None
        return ""

    def issue(self, wave: _Wave, index: int, cost: Cost, now: int, taken) -> None:
        p, pipes, spans = self.p, self.pipes, self.trace.spans
        wave.at += 1
        wave.ready = now + p.slot
        if cost.pipe == INTERNAL:
            wave.ready = now + max(cost.cycles, p.slot)
            if cost.priority is not None:
                wave.priority = cost.priority
        elif cost.pipe == VALU:
            pipes[VALU] = now + cost.cycles
            spans.append(Span(wave.number, VALU, now, now + cost.cycles, index))
        elif cost.pipe == MFMA:
            pipes[VALU], pipes[MFMA] = now + cost.cycles, now + cost.matrix_cycles
            spans.append(Span(wave.number, MFMA, now, now + cost.matrix_cycles, index))
        elif cost.pipe == LDS:
            start = max(self.lds_free, now)
            self.lds_free = start + p.simds * cost.lds_bytes // p.lds_bytes_per_cycle
            wave.lgkm.append(self.lds_free + p.lds_latency)
            spans.append(Span(wave.number, LDS, start, self.lds_free, index))
        elif cost.pipe == SMEM:
            wave.lgkm.append(now + p.scalar_load_latency)
        elif cost.pipe == VMEM:
            if cost.is_dma:
                self.dma_free = max(self.dma_free, now) + p.simds * cost.lds_bytes // p.dma_bytes_per_cycle
                # What it brings also passes the LDS, once.
                start = max(self.lds_free, now)
                self.lds_free = start + p.simds * cost.lds_bytes // p.lds_bytes_per_cycle
                spans.append(Span(wave.number, LDS, start, self.lds_free, index))
            wave.vm.append(max(self.dma_free, now) + p.dma_latency)
        elif cost.pipe == BRANCH and not wave.done and taken(index, wave.order[wave.at]):
            wave.ready = now + p.branch_taken


def simulate(program: list[Instruction], orders: list[list[int]], cost_of, p: Parameters, taken) -> Trace:
    """Run the waves of one SIMD; `orders[w]` are instruction indices, `taken(index, next)` tells a taken branch."""
    simd = _Simd(orders, p)
    trace, now = simd.trace, 0
    while not all(w.done for w in simd.waves):
        used: set[str] = set()
        for wave in sorted(simd.waves, key=lambda w: (-w.priority, w.number)):
            if wave.done or wave.ready > now:
                continue
            index = wave.order[wave.at]
            cost = cost_of(program[index])
            reason = simd.blocked(wave, cost, now, used)
            if reason:
                if wave.stalled_since < 0:
                    wave.stalled_since, wave.reason = now, reason
                continue
            if wave.stalled_since >= 0:
                trace.stalls.append((wave.number, wave.stalled_since, now - wave.stalled_since, wave.reason))
                wave.stalled_since = -1
            trace.issued[wave.number].append(now)
            if cost.pipe != INTERNAL:
                used.add(VALU if cost.pipe == MFMA else cost.pipe)
            simd.issue(wave, index, cost, now, taken)
        now += p.slot
    trace.end = now
    return trace
