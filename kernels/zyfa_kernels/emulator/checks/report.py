"""What the static checks report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ..decode import Instruction
from ..errors import EmulatorError


@dataclass(frozen=True)
class Violation:
    """One finding.

    Attributes:
        rule: short name, e.g. ``mfma-result``, ``wait``, ``lds-race``, ``undefined-register``.
        address: byte address of the instruction that is too early, or that is wrong in itself.
        instruction: its text.
        message: what is wrong and what would be right.
        kernel: name of the kernel.
        cause: address of the other instruction involved (the producer), or None.
    """

    rule: str
    address: int
    instruction: str
    message: str
    kernel: str
    cause: int | None = None

    def __str__(self) -> str:
        return f"{self.rule} at {self.address:#x}: `{self.instruction}`: {self.message}"


@dataclass(frozen=True)
class BankConflict:
    """Worst access of one LDS instruction: turns it takes, and turns without a conflict (`cycles`, `ideal`)."""

    address: int
    instruction: str
    cycles: int
    ideal: int
    in_loop: bool


@dataclass
class Report:
    """Result of `check`.

    `bank_conflicts` counts the extra LDS turns of one execution of each access in a main loop. `advice` holds what LLVM
    would space further apart but code known to run does not.
    """

    violations: list[Violation]
    instructions: int
    mfma: int
    bank_conflicts: int
    advice: list[Violation] = field(default_factory=list)
    lds_accesses: list[BankConflict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resources: list[dict] = field(default_factory=list)

    def as_dict(self) -> dict:
        """JSON-ready form, with the keys of `zyfa kernels check --json`."""
        return {
            "violations": [asdict(v) for v in self.violations],
            "instructions": self.instructions,
            "mfma": self.mfma,
            "bank_conflicts": self.bank_conflicts,
            "lds_accesses": [asdict(a) for a in self.lds_accesses if a.cycles > a.ideal],
            "advice": [asdict(v) for v in self.advice],
            "notes": self.notes,
            "resources": self.resources,
        }


def violation(kernel: str, inst: Instruction, rule: str, message: str, cause: Instruction | None = None) -> Violation:
    return Violation(rule, inst.address, inst.text, message, kernel, cause.address if cause is not None else None)


def of_error(error: EmulatorError, kernel: str) -> Violation:
    """What a run with late loads found."""
    where = f"workgroup {error.workgroup}, wave {error.wave}, lane {error.lane}: {error.message}"
    return Violation(error.kind, error.address or 0, error.instruction or "", where, kernel)
