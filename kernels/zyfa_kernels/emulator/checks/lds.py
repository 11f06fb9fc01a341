"""LDS between waves, and bank conflicts, from runs of the kernel without its arguments.

Addresses of LDS accesses follow from thread numbers and constants, so a run that takes every loaded value as unknown
still knows them. The delayed-memory rules of the emulator then say whether what `buffer_load … lds` or ds_write
brings is read before its s_waitcnt and barrier, and whether it is overwritten while another wave may still read. A few
routes through the branches are taken; what they leave out is noted.
"""

from __future__ import annotations

from ..codeobject import CodeObject, Kernel
from ..flow import Flow
from ..registers import is_mfma
from ..skeleton import ROUTES, Route, SkeletonRun, run_skeleton
from .banks import turns
from .report import BankConflict, Violation

_RULES = {"lds-before-wait": "lds-wait", "lds-race": "lds-barrier", "lds-overwrite": "lds-overwrite"}
# A run ends at these, of addresses that it knows: true whichever way the branches go.
_FATAL = ("lds-range", "alignment")


def check_lds(
    code: CodeObject, kernel: Kernel, flow: Flow, workgroup: int, routes: tuple[Route, ...] = ROUTES
) -> tuple[list[Violation], list[BankConflict], list[str]]:
    """(violations, LDS accesses with their conflicts, notes)."""
    runs = [run_skeleton(code, kernel, route, workgroup, flow=flow) for route in routes]
    violations: dict[tuple[str, int], Violation] = {}
    for run in runs:
        fatal = [run.stopped_by] if run.stopped_by is not None and run.stopped_by.kind in _FATAL else []
        for found in [*run.hazards, *fatal]:
            rule = _RULES.get(found.kind, found.kind)
            text = f"wave {found.wave}, lane {found.lane}: {found.message}; on the route {_name(run.route)}"
            address = found.address or 0
            violations.setdefault(
                (rule, address), Violation(rule, address, found.instruction or "", text, kernel.name)
            )
    notes = _notes(kernel, flow, runs)
    return list(violations.values()), _conflicts(flow, runs), notes


def _name(route: Route) -> str:
    return f"{route.iterations} iterations, exit {route.exit}, other branches {route.forward}"


def _notes(kernel: Kernel, flow: Flow, runs: list[SkeletonRun]) -> list[str]:
    visited = set().union(*(run.visited for run in runs))
    reachable = {i for i, r in enumerate(flow.reachable) if r}
    notes = []
    if reachable - visited:
        share = len(reachable & visited) / len(reachable)
        notes.append(f"{kernel.name}: the LDS runs reached {share:.0%} of the instructions")
    stopped = {str(run.stopped_by.kind) for run in runs if run.stopped_by is not None} - set(_FATAL)
    if stopped:
        notes.append(
            f"{kernel.name}: some routes end early ({', '.join(sorted(stopped))}): their branches do not go together"
        )
    unknown = sorted(set().union(*(run.unknown_addresses for run in runs)))
    if unknown:
        places = ", ".join(hex(kernel.program[i].address) for i in unknown[:5])
        notes.append(f"{kernel.name}: LDS addresses that depend on loaded data are not checked, at {places}")
    return notes


def _conflicts(flow: Flow, runs: list[SkeletonRun]) -> list[BankConflict]:
    inner = set().union(*(members for _, members in matrix_loops(flow)))
    worst: dict[int, tuple[int, int]] = {}
    for run in runs:
        for index, seen in run.accesses.items():
            inst = flow.program[index]
            for address, mask, size in seen:
                for wave in range(len(address)):
                    result = turns(inst, address[wave], mask[wave], size)
                    if result > worst.get(index, (0, 0)):
                        worst[index] = result
    return [
        BankConflict(flow.program[i].address, flow.program[i].text, total, ideal, i in inner)
        for i, (total, ideal) in sorted(worst.items())
    ]


def matrix_loops(flow: Flow) -> list[tuple[int, frozenset[int]]]:
    """Innermost loops that hold matrix instructions: the main loops."""
    found = [(h, m) for h, m in flow.loops if any(is_mfma(flow.program[i]) for i in m)]
    return [(h, m) for h, m in found if not any(o < m for _, o in found)]
