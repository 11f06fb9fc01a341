"""Wait states that gfx950 needs between dependent instructions and does not insert itself.

Each instruction counts as one wait state, `s_nop n` as n + 1. The rules follow LLVM's GCNHazardRecognizer for gfx950;
rules for instructions that the generator never emits are left out.
"""

from __future__ import annotations

from .instruction import PARTIAL_WRITES, Instruction
from .isa import BRANCH, DS, END, MFMA, PASSES, SALU, TRANS, VALU, VMEM, VMEM_LDS, VSTORE

VECTOR = (VALU, TRANS)
MEMORY = (DS, VMEM, VMEM_LDS, VSTORE)
LONGEST = max(PASSES.values()) + 4
SWAPS = ("v_permlane32_swap_b32",)


class HazardError(ValueError):
    """Two dependent instructions stand closer than the hardware allows on some path."""


def _after_mfma(producer: Instruction, consumer: Instruction) -> int:
    states = PASSES[producer.mnemonic] + 4
    if consumer.kind == MFMA:
        operands = consumer.slots(1) | consumer.slots(2)
        if producer.writes & operands:
            return states
        chained = consumer.slots(3) == producer.writes == consumer.writes
        overlap = producer.writes & (consumer.slots(3) | consumer.writes)
        # A full overwrite that ignores the old value (C is a constant) is ordered by the matrix pipe itself.
        replaced = not consumer.slots(3) and consumer.writes == producer.writes
        return states if overlap and not chained and not replaced else 0
    if consumer.kind in VECTOR and producer.slots(3) & consumer.writes:
        return states
    return states if producer.writes & (consumer.reads | consumer.writes) else 0


def wait_states(producer: Instruction, consumer: Instruction) -> int:
    """Wait states that must lie between the two instructions."""
    if producer.kind == MFMA:
        return _after_mfma(producer, consumer)
    needed = 0
    fed = producer.writes & consumer.reads
    if fed and producer.kind in VECTOR:
        vector_fed = any(file == "v" for file, _ in fed)
        if vector_fed and consumer.kind == MFMA:
            needed = 2
        if vector_fed and consumer.mnemonic in SWAPS:
            needed = 2
        if vector_fed and producer.kind == TRANS and consumer.kind in VECTOR:
            needed = max(needed, 1)
        if vector_fed and producer.mnemonic in PARTIAL_WRITES and consumer.kind in VECTOR:
            needed = max(needed, 1)
        if vector_fed and consumer.mnemonic == "v_readfirstlane_b32":
            needed = max(needed, 1)
        if not vector_fed and consumer.kind in VECTOR:
            needed = max(needed, 2)  # a mask or scalar written by the vector pipe
        if not vector_fed and consumer.kind in MEMORY:
            needed = max(needed, 5)
    if producer.kind == SALU and ("m0", 0) in fed:
        needed = max(needed, 1)
    if producer.kind == VSTORE and consumer.kind in VECTOR and producer.slots(0) & consumer.writes:
        needed = max(needed, 1)
    return needed


def counted(instruction: Instruction) -> int:
    """Wait states that the instruction itself provides."""
    return int(instruction.operands[0]) + 1 if instruction.mnemonic == "s_nop" else 1  # type: ignore[arg-type]


def missing(before: list[Instruction], consumer: Instruction) -> int:
    """Wait states still missing in front of `consumer` after the straight line `before`."""
    lack = distance = 0
    for producer in reversed(before):
        if distance >= LONGEST:
            break
        lack = max(lack, wait_states(producer, consumer) - distance)
        distance += counted(producer)
    return lack


def verify(body: list[Instruction | str]) -> None:
    """Check every pair along every path; `body` holds instructions and label names. Raises HazardError."""
    labels = {item: n for n, item in enumerate(body) if isinstance(item, str)}
    predecessors: list[list[int]] = [[] for _ in body]
    for n, item in enumerate(body):
        if isinstance(item, Instruction) and item.kind == BRANCH:
            predecessors[labels[str(item.operands[0])]].append(n)
        falls = not (isinstance(item, Instruction) and (item.kind == END or item.mnemonic == "s_branch"))
        if falls and n + 1 < len(body):
            predecessors[n + 1].append(n)
    for n, consumer in enumerate(body):
        if isinstance(consumer, str):
            continue
        best: dict[int, int] = {}
        stack = [(p, 0) for p in predecessors[n]]
        while stack:
            at, distance = stack.pop()
            if distance >= LONGEST or best.get(at, LONGEST) <= distance:
                continue
            best[at] = distance
            producer = body[at]
            if isinstance(producer, Instruction):
                if wait_states(producer, consumer) > distance:
                    raise HazardError(
                        f"{consumer.text()!r} (item {n}) follows {producer.text()!r} (item {at}) after {distance} wait "
                        f"states; {wait_states(producer, consumer)} are needed"
                    )
                distance += counted(producer)
            stack.extend((p, distance) for p in predecessors[at])
