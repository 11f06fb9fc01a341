"""Errors of the emulator. Each names the instruction, its address, the wave and the lane that hit it."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A program did something that gfx950 does not define, or that the emulator does not know.

    Attributes:
        kind: short machine-readable name, e.g. ``undefined-register``, ``global-range``, ``barrier``.
        instruction: text of the instruction, or None where no instruction is to blame.
        address: byte address of the instruction inside the code object, or None.
        workgroup: (x, y, z) of the workgroup, or None.
        wave: index of the wave inside its workgroup, or None.
        lane: lane inside the wave (0-63), or None where the whole wave is concerned.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        instruction: str | None = None,
        address: int | None = None,
        workgroup: tuple[int, int, int] | None = None,
        wave: int | None = None,
        lane: int | None = None,
    ):
        self.kind, self.message = kind, message
        self.instruction, self.address = instruction, address
        self.workgroup, self.wave, self.lane = workgroup, wave, lane
        where = []
        if instruction is not None:
            where.append(f"`{instruction}`")
        if address is not None:
            where.append(f"at {address:#x}")
        if workgroup is not None:
            where.append(f"workgroup {workgroup}")
        if wave is not None:
            where.append(f"wave {wave}")
        if lane is not None:
            where.append(f"lane {lane}")
        super().__init__(f"{kind}: {message}" + (f" ({', '.join(where)})" if where else ""))


class Fault(Exception):
    """Raised inside an instruction; the machine adds instruction, address and wave and re-raises an EmulatorError.

    ``position`` counts waves inside the group that executes together, not inside the workgroup.
    """

    def __init__(self, kind: str, message: str, position: int | None = None, lane: int | None = None):
        super().__init__(message)
        self.kind, self.message, self.position, self.lane = kind, message, position, lane


class UnknownInstruction(EmulatorError):
    """The decoder or the executor has no rule for an instruction."""


class CodeObjectError(ValueError):
    """The file is not an AMDGPU code object for gfx950, or lacks what is needed to launch it."""
