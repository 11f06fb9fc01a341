"""Outstanding memory operations, and the `s_waitcnt` that each use of their results needs.

LDS reads and vector memory each return in order, so a wait names how many younger ones may still be out. Scalar loads
return in any order: a use of one waits for everything on its counter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .instruction import Instruction, Slot
from .isa import DS, SMEM, VMEM, VMEM_LDS, VSTORE

LGKM_MAX, VM_MAX = 15, 63


class WaitError(ValueError):
    """A counter would overflow, or two paths meet with different operations outstanding."""


@dataclass(frozen=True)
class _Pending:
    kind: str
    slots: frozenset[Slot]
    group: int | None = None


@dataclass
class Waits:
    lgkm: list[_Pending] = field(default_factory=list)
    vm: list[_Pending] = field(default_factory=list)

    def needed(self, instruction: Instruction) -> tuple[int | None, int | None]:
        """(vmcnt, lgkmcnt) to wait for before the instruction; None where nothing is needed."""
        touched = instruction.reads | instruction.writes
        lgkm = self._youngest(self.lgkm, touched)
        if lgkm is not None and any(p.kind == SMEM for p in self.lgkm):
            lgkm = 0
        if lgkm is None and instruction.kind in (DS, SMEM) and len(self.lgkm) >= LGKM_MAX:
            raise WaitError(
                f"{instruction.text()!r} would be the {len(self.lgkm) + 1}th operation on a counter of 4 bits"
            )
        return self._youngest(self.vm, touched), lgkm

    @staticmethod
    def _youngest(queue: list[_Pending], touched: frozenset[Slot]) -> int | None:
        for age, pending in enumerate(reversed(queue)):
            if pending.slots & touched:
                return age
        return None

    def allowed(self, group: int) -> int | None:
        """vmcnt that makes the loads of `group` and of everything older complete."""
        for age, pending in enumerate(reversed(self.vm)):
            if pending.group is not None and pending.group <= group:
                return age
        return None

    def waited(self, vm: int | None, lgkm: int | None) -> None:
        if vm is not None:
            self.vm = self.vm[len(self.vm) - vm :] if vm else []
        if lgkm is not None:
            self.lgkm = self.lgkm[len(self.lgkm) - lgkm :] if lgkm else []

    def issue(self, instruction: Instruction, group: int | None = None) -> None:
        if instruction.kind in (DS, SMEM):
            self.lgkm.append(_Pending(instruction.kind, instruction.writes))
        elif instruction.kind in (VMEM, VMEM_LDS):
            self.vm.append(_Pending(instruction.kind, instruction.writes, group))
        elif instruction.kind == VSTORE:
            self.vm.append(_Pending(VSTORE, frozenset()))
        if len(self.vm) > VM_MAX:
            raise WaitError(f"{len(self.vm)} vector memory operations outstanding; the counter holds {VM_MAX}")

    def age(self) -> None:
        """One tile further on: a load group's number is its age relative to the current tile."""
        self.vm = [_Pending(p.kind, p.slots, None if p.group is None else p.group - 1) for p in self.vm]

    def snapshot(self) -> tuple[tuple[_Pending, ...], tuple[_Pending, ...]]:
        return tuple(self.lgkm), tuple(self.vm)


def waitcnt_text(vm: int | None, lgkm: int | None) -> str:
    parts = [f"vmcnt({vm})" if vm is not None else "", f"lgkmcnt({lgkm})" if lgkm is not None else ""]
    return "s_waitcnt " + " ".join(p for p in parts if p)
