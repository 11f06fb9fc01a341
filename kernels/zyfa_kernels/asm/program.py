"""A program under construction: places instructions, derives waits and nops, keeps comments, prints the `.s`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from . import hazards
from .instruction import Instruction, Value, op
from .isa import BRANCH, ISA, WAIT, Spec
from .registers import Allocator
from .waits import WaitError, Waits, waitcnt_text

_WAIT = Spec("s_waitcnt", WAIT, (), (), ())


class _Wait(Instruction):
    def __init__(self, vm: int | None, lgkm: int | None, note: str) -> None:
        super().__init__(_WAIT, (), "", note)
        self.vm, self.lgkm = vm, lgkm

    def text(self) -> str:
        return waitcnt_text(self.vm, self.lgkm)


@dataclass
class Comment:
    lines: tuple[str, ...]
    title: bool = False


@dataclass
class Program:
    """`body` is the text in order: instructions, labels (str) and comments."""

    name: str
    vgprs: Allocator = field(default_factory=lambda: Allocator("v"))
    sgprs: Allocator = field(default_factory=lambda: Allocator("s"))
    body: list[Instruction | str | Comment] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)

    def __post_init__(self) -> None:
        self._histories: list[list[Instruction]] = [[]]  # the last instructions of each path that leads here
        self._branches: dict[str, list[list[Instruction]]] = {}
        self._meeting: dict[str, object] = {}
        self._reachable = True

    def emit(self, *items: Instruction | Iterable[Instruction], group: int | None = None) -> None:
        """Place instructions, each behind the waits and wait states that it needs. `group` tags loads into LDS."""
        for item in items:
            if isinstance(item, Instruction):
                self._place(item, group)
            else:
                self.emit(*item, group=group)

    def op(self, mnemonic: str, *operands: Value, mods: str = "", note: str = "", group: int | None = None) -> None:
        self.emit(op(mnemonic, *operands, mods=mods, note=note), group=group)

    def _place(self, instruction: Instruction, group: int | None) -> None:
        vm, lgkm = self.waits.needed(instruction)
        if vm is not None or lgkm is not None:
            self._wait(vm, lgkm, "")
        lack = max(hazards.missing(history, instruction) for history in self._histories)
        while lack > 0:
            states = min(lack, 16)
            self._append(op("s_nop", states - 1))
            lack -= states
        self._append(instruction)
        self.waits.issue(instruction, group)
        if instruction.kind == BRANCH:
            label = str(instruction.operands[0])
            self._meet(label)
            self._branches.setdefault(label, []).extend(list(h) for h in self._histories)
        if instruction.mnemonic in ("s_branch", "s_endpgm"):
            self._reachable = False

    def _append(self, instruction: Instruction) -> None:
        self.body.append(instruction)
        for history in self._histories:
            history.append(instruction)
            del history[: -hazards.LONGEST]
        if len(self._histories) > 1:  # paths that have become alike
            self._histories = list({tuple(map(id, h)): h for h in self._histories}.values())

    def _wait(self, vm: int | None, lgkm: int | None, note: str) -> None:
        self._append(_Wait(vm, lgkm, note))
        self.waits.waited(vm, lgkm)

    def wait_loads(self, group: int, note: str = "") -> None:
        """Wait until the loads into LDS tagged `group`, and all older ones, have landed."""
        allowed = self.waits.allowed(group)
        if allowed is not None:
            self._wait(allowed, None, note)

    def wait_all(self, note: str = "") -> None:
        self._wait(0, 0, note)

    def label(self, name: str) -> None:
        if not self._reachable:
            if name not in self._meeting:
                raise WaitError(f"label {name!r} is reached by no branch placed before it")
            self.waits.lgkm, self.waits.vm = (list(q) for q in self._meeting[name])  # type: ignore[attr-defined]
            self._histories = []
            self._reachable = True
        else:
            self._meet(name)
        self._histories += self._branches.pop(name, [])
        self.body.append(name)

    def _meet(self, label: str) -> None:
        """Every path into a label must have the same operations outstanding."""
        state = self.waits.snapshot()
        known = self._meeting.setdefault(label, state)
        if known != state:
            raise WaitError(
                f"paths meet at {label!r} with different memory operations outstanding: {known} and {state}"
            )

    def title(self, *lines: str) -> None:
        self.body.append(Comment(lines, title=True))

    def note(self, *lines: str) -> None:
        self.body.append(Comment(lines))

    def instructions(self) -> list[Instruction]:
        return [item for item in self.body if isinstance(item, Instruction)]

    def verify(self) -> None:
        """Re-check wait states along every path, not only in the order of emission."""
        hazards.verify([item for item in self.body if not isinstance(item, Comment)])

    def text(self) -> str:
        out: list[str] = []
        for item in self.body:
            if isinstance(item, str):
                out.append(f"{item}:")
            elif isinstance(item, Comment):
                if item.title:
                    out += ["", "// " + "=" * 100]
                out += (
                    [f"// {line}" for line in item.lines] if item.title else [f"    // {line}" for line in item.lines]
                )
            else:
                text, note = f"    {item.text()}", item.note or item.names()
                out.append(f"{text:<86}  // {note}" if note else text)
        return "\n".join(out) + "\n"


assert all(name == spec.mnemonic for name, spec in ISA.items())
