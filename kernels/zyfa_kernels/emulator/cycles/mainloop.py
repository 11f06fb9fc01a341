"""The cycle model: what the main loop of a kernel costs on one SIMD. All its figures are modelled, none is measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..codeobject import CodeObject, Kernel
from ..decode import VGPR
from ..exec_mfma import matrix_shape
from ..flow import Flow, build_flow
from ..registers import is_mfma
from ..skeleton import Route, run_skeleton
from ..timing import PASS_CYCLES, passes
from .costs import LDS, MFMA, VALU, CostTable
from .params import Parameters
from .simulate import Trace, simulate

ITERATIONS, SKIP = 10, 3
QUERIES, BLOCK_KEYS = 32, 128  # a wave's queries and the keys of a block in the reported figures


@dataclass
class Report:
    """The model's view of a main loop. Every figure is modelled.

    Attributes:
        cycles_per_block: cycles in which each wave of a SIMD does one block: 32 queries × 128 keys.
        matrix_busy: share of the cycles in which the SIMD's matrix pipe runs; vector_busy and lds_busy alike.
        idle_beside_vector: share in which the matrix pipe idles while the vector pipe runs.
        limiter: what bounds the loop.
        predicted_fraction_of_peak: useful matrix work of the loop against the peak of its operand type (FP8: 5.03 PF,
            bf16: 2.52 PF), at equal clocks. Row sums by extra matrix instructions are not useful work.
        vector_cycles_per_score, matrix_cycles_per_block: work, not time.
        barriers: for each barrier of the loop, in order: who arrives last and how long the other waits.
        stalls: cycles a block that the waves of the SIMD spend stalled, by reason.
    """

    kernel: str
    cycles_per_block: float
    matrix_busy: float
    vector_busy: float
    lds_busy: float
    idle_beside_vector: float
    limiter: str
    predicted_fraction_of_peak: float
    vector_cycles_per_score: float
    matrix_cycles_per_block: float
    blocks_per_iteration: float
    barriers: list[dict] = field(default_factory=list)
    stalls: dict[str, float] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=Parameters)
    trace: Trace | None = field(default=None, repr=False)
    window: tuple[int, int] = (0, 0)

    def as_dict(self) -> dict:
        """JSON-ready form, with the keys of `zyfa kernels cycles --json`."""
        skipped = ("trace", "window", "parameters")
        document = {k: v for k, v in self.__dict__.items() if k not in skipped}
        return document | {"modelled": True, "parameters": {n: v for n, v, _ in self.parameters.table()}}

    def picture(self, path: str | Path) -> None:
        """Write the timeline of about two blocks to a .png or .svg file."""
        from .picture import draw

        draw(self, path)


@dataclass
class _Loop:
    """The main loop as one wave ran it: positions in its order where an iteration starts."""

    starts: list[int]
    order: list[int]

    def iteration(self) -> list[int]:
        return self.order[self.starts[SKIP] : self.starts[SKIP + 1]]


def model(
    code: CodeObject,
    kernel: str | None = None,
    *,
    parameters: Parameters | None = None,
    qk_dim: int | None = None,
    v_dim: int = 128,
) -> Report:
    """Model the main loop of a kernel (the only one, or the one named).

    Args:
        qk_dim, v_dim: head dimensions, which turn matrix work into blocks of 128 keys; guessed from the kernel's name
            (192/128 for hd192 or mla, 256/256 for hd256) or 128.

    Raises:
        ValueError: the kernel has no loop with matrix instructions, or no route through it repeats one.
    """
    chosen = code.kernel(kernel)
    flow, p = build_flow(chosen), parameters or Parameters()
    costs = CostTable(p)
    if qk_dim is None:
        qk_dim, v_dim = _dimensions(chosen.name, v_dim)
    waves, loops = _fastest_route(code, chosen, flow, costs)
    orders = [order[: loop.starts[-1]] for order, loop in zip(waves, loops, strict=True)]
    targets = {inst.index: inst.target for inst in chosen.program}
    trace = simulate(chosen.program, orders, costs, p, lambda i, after: targets[i] == chosen.program[after].address)
    return _report(chosen, flow, costs, p, loops, trace, (qk_dim, v_dim))


def _dimensions(name: str, v_dim: int) -> tuple[int, int]:
    if "hd192" in name or "mla" in name or "qh192" in name:
        return 192, 128
    return (256, 256) if "hd256" in name else (128, v_dim)


def _matrix_loops(flow: Flow) -> list[tuple[int, frozenset[int]]]:
    found = [(h, m) for h, m in flow.loops if any(is_mfma(flow.program[i]) for i in m)]
    if not found:
        raise ValueError("the kernel has no loop with matrix instructions")
    return found


def _fastest_route(
    code: CodeObject, kernel: Kernel, flow: Flow, costs: CostTable
) -> tuple[list[list[int]], list[_Loop]]:
    """Orders of the waves that share a SIMD along the route whose main loop has the least vector work."""
    workgroup = kernel.max_workgroup_size
    best: tuple[float, list[list[int]], list[_Loop]] | None = None
    for forward in ("never", "always", "alternate"):
        run = run_skeleton(
            code, kernel, Route(ITERATIONS, forward, 0, short=True), workgroup, flow=flow, limit=400_000
        )
        waves = run.order[::4] if len(run.order) > 4 else run.order[:1]
        loops = [loop for order in waves if (loop := _main_loop(flow, order, costs)) is not None]
        if len(loops) < len(waves):
            continue
        work = sum(_vector_work(flow, loop, costs) for loop in loops)
        if best is None or work < best[0]:
            best = (work, waves, loops)
    if best is None:
        raise ValueError(f"no route through {kernel.name} repeats a loop with matrix instructions")
    return best[1], best[2]


def _vector_work(flow: Flow, loop: _Loop, costs: CostTable) -> float:
    """Vector cycles for each matrix cycle."""
    cost = [costs(flow.program[i]) for i in loop.iteration()]
    return sum(c.cycles for c in cost if c.pipe == VALU) / max(1, sum(c.matrix_cycles for c in cost))


def _main_loop(flow: Flow, order: list[int], costs: CostTable) -> _Loop | None:
    """The repeated loop with the least vector work for its matrix work (so not the masked one)."""
    best = None
    visits = Counter(order)
    for header, members in _matrix_loops(flow):
        if visits[header] < ITERATIONS // 2 + SKIP:
            continue
        starts = [k for k, index in enumerate(order) if index == header]
        # Keep one stay in the loop: consecutive visits with nothing but members between them.
        runs: list[list[int]] = [[starts[0]]]
        for a, b in zip(starts, starts[1:], strict=False):
            if all(index in members for index in order[a:b]):
                runs[-1].append(b)
            else:
                runs.append([b])
        longest = max(runs, key=len)
        if len(longest) < SKIP + 3 or not any(is_mfma(flow.program[i]) for i in order[longest[0] : longest[1]]):
            continue
        loop = _Loop(longest, order)
        work = _vector_work(flow, loop, costs)
        if best is None or work < best[0]:
            best = (work, loop)
    return best[1] if best else None


def _useful(flow: Flow, iteration: list[int]) -> tuple[float, bool]:
    """Useful flop of one wave's iteration, and whether its operands are 16 bits wide.

    A matrix instruction with an operand that came from LDS multiplies K or V; the others are row sums.
    """
    program = flow.program
    loaded = {
        r
        for i in iteration
        if program[i].encoding == "DS" and "vdst" in program[i].operands
        for r in program[i].operands["vdst"].regs
    }
    total, wide = 0.0, False
    for i in iteration:
        inst = program[i]
        if not is_mfma(inst):
            continue
        if any(r in loaded for role in ("src0", "src1") for r in inst.operands[role].regs if r >= VGPR):
            m, n, k = matrix_shape(inst)
            total += 2.0 * m * n * k
            wide = wide or "bf16" in inst.mnemonic or "_f16" in inst.mnemonic
    return total, wide


def _report(
    kernel: Kernel, flow: Flow, costs: CostTable, p: Parameters, loops: list[_Loop], trace: Trace, dims
) -> Report:
    starts = [[trace.issued[w][k] for k in loop.starts[SKIP:-1]] for w, loop in enumerate(loops)]
    window = max(s[0] for s in starts), min(s[-1] for s in starts)
    period = sum((s[-1] - s[0]) / (len(s) - 1) for s in starts) / len(starts)
    if window[1] - window[0] < 2 * period:
        # Without barriers one wave can run ahead of the other: take the time that both need together.
        window = min(s[0] for s in starts), max(s[-1] for s in starts)
        period = (window[1] - window[0]) / (sum(len(s) - 1 for s in starts) / len(starts))
    length = window[1] - window[0]
    iterations = [loop.iteration() for loop in loops]
    flop = sum(_useful(flow, it)[0] for it in iterations)
    wide = any(_useful(flow, it)[1] for it in iterations)
    per_block = 2.0 * QUERIES * BLOCK_KEYS * sum(dims)
    blocks = flop / len(loops) / per_block

    def busy(lane: str) -> float:
        inside = sum(max(0, min(s.end, window[1]) - max(s.start, window[0])) for s in trace.spans if s.lane == lane)
        return inside / length

    flop_per_cycle = 1024 if wide else 2048  # of a SIMD's matrix pipe: 32·32·64·2 in 64 cycles, bf16 half of it
    vector = sum(costs(flow.program[i]).cycles for it in iterations for i in it if costs(flow.program[i]).pipe == VALU)
    matrix = sum(passes(flow.program[i]) * PASS_CYCLES for it in iterations for i in it if is_mfma(flow.program[i]))
    in_window = [(w, c, r) for w, at, c, r in trace.stalls if window[0] <= at < window[1]]
    total_blocks = blocks * len(loops) * length / period
    stalls: dict[str, float] = {}
    for _, cycles, reason in in_window:
        stalls[reason] = stalls.get(reason, 0.0) + cycles / total_blocks
    shares = {"matrix pipe": busy(MFMA), "vector pipe": busy(VALU), "LDS": busy(LDS)}
    return Report(
        kernel=kernel.name,
        cycles_per_block=period / blocks,
        matrix_busy=shares["matrix pipe"],
        vector_busy=shares["vector pipe"],
        lds_busy=shares["LDS"],
        idle_beside_vector=_idle_beside_vector(trace, window),
        limiter=_limiter(shares, stalls),
        predicted_fraction_of_peak=flop / period / flop_per_cycle,
        vector_cycles_per_score=vector / len(loops) / (blocks * QUERIES * BLOCK_KEYS / 64),
        matrix_cycles_per_block=matrix / len(loops) / blocks,
        blocks_per_iteration=blocks,
        barriers=_barriers(flow, trace, window),
        stalls={k: round(v, 1) for k, v in sorted(stalls.items(), key=lambda item: -item[1])},
        parameters=p,
        trace=trace,
        window=window,
    )


def _idle_beside_vector(trace: Trace, window: tuple[int, int]) -> float:
    length = window[1] - window[0]
    rows = {}
    for lane in (MFMA, VALU):
        row = rows[lane] = np.zeros(length, bool)
        for s in trace.spans:
            if s.lane == lane and s.end > window[0] and s.start < window[1]:
                row[max(0, s.start - window[0]) : s.end - window[0]] = True
    return float((rows[VALU] & ~rows[MFMA]).mean())


def _limiter(shares: dict[str, float], stalls: dict[str, float]) -> str:
    name, share = max(shares.items(), key=lambda item: item[1])
    if share >= 0.9 or not stalls:
        return name
    itself = (name, f"{name.lower()} port")
    others = {reason: cycles for reason, cycles in stalls.items() if reason not in itself}
    second = f", then {max(others, key=lambda reason: others[reason])}" if others else ""
    return f"{name} ({share:.0%} busy){second}"


def _barriers(flow: Flow, trace: Trace, window: tuple[int, int]) -> list[dict]:
    """Who arrives last at each barrier of the loop; averages over the visits inside the window."""
    groups: dict[tuple[int, ...], list] = {}
    for visit in trace.barriers:
        if window[0] <= min(visit.arrivals.values()) < window[1] and len(visit.arrivals) > 1:
            groups.setdefault(tuple(visit.indices[w] for w in sorted(visit.indices)), []).append(visit)
    rows = []
    for indices, visits in groups.items():
        last = Counter(v.last for v in visits).most_common(1)[0][0]
        rows.append(
            {
                "addresses": [hex(flow.program[i].address) for i in indices],
                "last": f"wave {4 * last}",
                "other_waits_cycles": round(sum(v.waited for v in visits) / len(visits), 1),
                "visits": len(visits),
            }
        )
    return rows
