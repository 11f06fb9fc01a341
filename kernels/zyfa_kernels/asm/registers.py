"""Registers as values: slices with checked widths, and named allocation with liveness.

A slice is inclusive at both ends, as in the assembler's own notation: `v[0:7]` is eight registers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

LIMITS = {"v": 256, "a": 256, "s": 102}
PREFIX = {"v": "vector", "a": "accumulator", "s": "scalar"}


class RegisterError(ValueError):
    """A register is out of range, freed, double-booked or of the wrong width."""


@dataclass(frozen=True)
class Reg:
    """`count` consecutive registers of one file ("v", "a", "s"), or one of the special scalars."""

    file: str
    start: int
    count: int
    name: str = field(default="", compare=False)
    negated: bool = False  # the source modifier of VOP3 instructions

    def __neg__(self) -> Reg:
        return replace(self, negated=not self.negated)

    def __getitem__(self, key: int | slice) -> Reg:
        """Sub-range: an index gives one register, `[first:last]` an inclusive range."""
        if isinstance(key, slice):
            if key.step is not None:
                raise RegisterError(f"{self} takes [first:last] without a step")
            first = 0 if key.start is None else key.start
            last = self.count - 1 if key.stop is None else key.stop
        else:
            first = last = key
        if not 0 <= first <= last < self.count:
            raise RegisterError(f"{self.name or self}[{first}:{last}] lies outside its {self.count} registers")
        return Reg(self.file, self.start + first, last - first + 1, self.name)

    def group(self, index: int, width: int) -> Reg:
        """The `index`-th run of `width` registers."""
        return self[index * width : index * width + width - 1]

    @property
    def indices(self) -> range:
        return range(self.start, self.start + self.count)

    def __str__(self) -> str:
        if self.file in SPECIALS:
            return self.file
        if self.count == 1:
            return f"{'-' if self.negated else ''}{self.file}{self.start}"
        return f"{self.file}[{self.start}:{self.start + self.count - 1}]"


# Special scalars are files of their own, so that dependence tracking treats them like any register.
SPECIALS = {"vcc": 2, "exec": 2, "m0": 1, "scc": 1}
VCC, EXEC, M0, SCC = (Reg(name, 0, width, name) for name, width in SPECIALS.items())


class _File:
    """`v[0:7]`, `s[4]`: registers by number."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def __getitem__(self, key: int | slice) -> Reg:
        first, last = (key.start, key.stop) if isinstance(key, slice) else (key, key)
        if not 0 <= first <= last < LIMITS[self.letter]:
            raise RegisterError(f"{self.letter}[{first}:{last}] lies outside 0..{LIMITS[self.letter] - 1}")
        return Reg(self.letter, first, last - first + 1)


v, a, s = _File("v"), _File("a"), _File("s")


@dataclass
class _Entry:
    reg: Reg
    what: str
    live: bool = True


class Allocator:
    """Hands out named registers of one file; a name can be freed and its registers reused."""

    def __init__(self, letter: str, limit: int | None = None) -> None:
        self.letter = letter
        self.limit = LIMITS[letter] if limit is None else limit
        self.entries: list[_Entry] = []

    def alloc(self, name: str, count: int = 1, what: str = "", align: int | None = None) -> Reg:
        """First fit. Scalar pairs and quads are aligned as the hardware asks; vector tuples need even starts."""
        if any(e.live and e.reg.name == name for e in self.entries):
            raise RegisterError(f"the name {name!r} is already in use")
        if align is None:
            align = {1: 1, 2: 2}.get(count, 4) if self.letter == "s" else min(count, 2)
        taken = {i for e in self.entries if e.live for i in e.reg.indices}
        for start in range(0, self.limit - count + 1, align):
            if taken.isdisjoint(range(start, start + count)):
                reg = Reg(self.letter, start, count, name)
                self.entries.append(_Entry(reg, what))
                return reg
        raise RegisterError(
            f"{name!r} needs {count} {PREFIX[self.letter]} registers; {len(taken)} of {self.limit} are taken"
        )

    def place(self, name: str, reg: Reg, what: str = "") -> Reg:
        """A second name for registers that another live name owns (an alias over part of its life)."""
        owners = {i for e in self.entries if e.live for i in e.reg.indices}
        if not owners.issuperset(reg.indices):
            raise RegisterError(f"alias {name!r} covers {reg}, part of which no live name owns")
        alias = Reg(reg.file, reg.start, reg.count, name)
        self.entries.append(_Entry(alias, what + f" (alias of {reg.name or reg})", live=False))
        return alias

    def free(self, *regs: Reg) -> None:
        for reg in regs:
            for entry in self.entries:
                if entry.live and entry.reg == reg and entry.reg.name == reg.name:
                    entry.live = False
                    break
            else:
                raise RegisterError(f"{reg.name or reg} is not allocated, or was freed before")

    @property
    def high_water(self) -> int:
        return max((e.reg.start + e.reg.count for e in self.entries), default=0)

    def table(self) -> list[str]:
        """The register map, one line a name, in order of registers."""
        rows = sorted(self.entries, key=lambda e: (e.reg.start, -e.reg.count))
        width = max((len(e.reg.name) for e in rows), default=0)
        return [f"{e.reg!s:<12} {e.reg.name:<{width}}  {e.what}" for e in rows]
