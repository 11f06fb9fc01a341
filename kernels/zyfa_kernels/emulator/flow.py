"""Control flow of a kernel, one node an instruction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from .codeobject import Kernel
from .decode import Instruction

S = TypeVar("S")

_NO_RETURN = ("s_branch", "s_endpgm", "s_setpc_b64", "s_swappc_b64", "s_endpgm_saved", "s_rfe_b64")


@dataclass
class Flow:
    """Successors and predecessors of every instruction, by index; `reachable` from the entry; `bad_targets`."""

    program: list[Instruction]
    entry: int
    successors: list[list[int]]
    predecessors: list[list[int]]
    reachable: list[bool]
    bad_targets: list[int]
    falls_off: list[int]

    @cached_property
    def loops(self) -> list[tuple[int, frozenset[int]]]:
        """Natural loops as (header, members), small ones first."""
        return _loops(self)


def build_flow(kernel: Kernel) -> Flow:
    """The control-flow graph. Indirect jumps have no successor here; the budget check reports them."""
    program = kernel.program
    index_of = {inst.address: inst.index for inst in program}
    successors: list[list[int]] = []
    bad, off = [], []
    for inst in program:
        after = []
        if inst.mnemonic not in _NO_RETURN:
            if inst.index + 1 < len(program):
                after.append(inst.index + 1)
            else:
                off.append(inst.index)
        if inst.target is not None:
            target = index_of.get(inst.target)
            if target is None:
                bad.append(inst.index)
            elif target not in after:
                after.append(target)
        successors.append(after)
    predecessors: list[list[int]] = [[] for _ in program]
    for index, after in enumerate(successors):
        for other in after:
            predecessors[other].append(index)
    entry = index_of[kernel.entry]
    reachable = [False] * len(program)
    reachable[entry] = True
    queue = deque([entry])
    while queue:
        for other in successors[queue.popleft()]:
            if not reachable[other]:
                reachable[other] = True
                queue.append(other)
    return Flow(program, entry, successors, predecessors, reachable, bad, [i for i in off if reachable[i]])


def fixed_point(
    flow: Flow, start: S, transfer: Callable[[int, S], S], merge: Callable[[S, S], S]
) -> list[S | None]:
    """Forward data flow: the state before each reachable instruction, over all paths.

    `transfer(index, state)` gives the state after an instruction; `merge` joins two states and must be monotone. Only
    block heads are merged, so a straight run of code costs one transfer an instruction.
    """
    before: list[S | None] = [None] * len(flow.program)
    before[flow.entry] = start
    queue, queued = deque([flow.entry]), {flow.entry}
    while queue:
        index = queue.popleft()
        queued.discard(index)
        while True:
            state = before[index]
            assert state is not None
            after = transfer(index, state)
            changed = []
            for other in flow.successors[index]:
                old = before[other]
                new = after if old is None else merge(old, after)
                if old is None or new != old:
                    before[other] = new
                    changed.append(other)
            if not changed:
                break
            index = changed.pop(0)
            for other in changed:
                if other not in queued:
                    queued.add(other)
                    queue.append(other)
    return before


def _loops(flow: Flow) -> list[tuple[int, frozenset[int]]]:
    """Natural loops as (header, members): one for each target of a back edge, found by depth-first search."""
    colour = [0] * len(flow.program)
    back: dict[int, list[int]] = {}
    stack = [(flow.entry, iter(flow.successors[flow.entry]))]
    colour[flow.entry] = 1
    while stack:
        index, rest = stack[-1]
        for other in rest:
            if colour[other] == 1:
                back.setdefault(other, []).append(index)
            elif colour[other] == 0:
                colour[other] = 1
                stack.append((other, iter(flow.successors[other])))
                break
        else:
            colour[index] = 2
            stack.pop()
    found = []
    for header, tails in back.items():
        members, work = {header}, [t for t in tails if t != header]
        while work:
            index = work.pop()
            if index not in members:
                members.add(index)
                work.extend(p for p in flow.predecessors[index] if flow.reachable[p])
        found.append((header, frozenset(members)))
    return sorted(found, key=lambda item: len(item[1]))
