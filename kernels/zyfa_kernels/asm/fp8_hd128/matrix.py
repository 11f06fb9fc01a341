"""The matrix phase: scores of the current tile, output and row sums of the one before."""

from __future__ import annotations

from ..instruction import Instruction, op
from ..registers import Reg
from . import staging
from .layout import ROW_BYTES
from .schedule import JOBS, LAST_JOBS, LOOKAHEAD, MATRIX, fragments
from .state import FRAGMENTS, State, stage_offset

FORMAT = ""  # cbsz = blgp = 0: e4m3 operands
SCALE_BYTE_0 = "op_sel_hi:[0,0,0]"


def buffer_of(state: State, number: int) -> Reg:
    return state.frag.group(number % FRAGMENTS, 8)


def read_fragment(
    state: State, number: int, k_stage: int | None, v_stage: int, k_addr: Reg | None = None
) -> list[Instruction]:
    """LDS reads of fragment `number`. `k_addr` replaces address and stage where the stage is not known yet."""
    kind, block, half = fragments()[number]
    into, start = buffer_of(state, number), 64 * half
    if kind == "QK":
        address = k_addr if k_addr is not None else state.k_addr
        offset = (0 if k_addr is not None else stage_offset(k_stage or 0)) + 32 * block * ROW_BYTES
        return [
            op(
                "ds_read_b128",
                into[4 * part : 4 * part + 3],
                address[2 * half + part],
                mods=f"offset:{offset}",
                note=f"K: keys {32 * block}-{32 * block + 31}, dims {start + 32 * part}-{start + 32 * part + 31}",
            )
            for part in range(2)
        ]
    offset = stage_offset(v_stage) + 64 * half * ROW_BYTES
    return [
        op(
            "ds_read_b64_tr_b8",
            into[2 * part : 2 * part + 1],
            state.v_addr[block],
            mods=f"offset:{offset + 16 * part * ROW_BYTES}",
            note=f"V: value dims {32 * block}-{32 * block + 31}, keys {start + 16 * part}-{start + 16 * part + 15}",
        )
        for part in range(4)
    ]


def matrix_instruction(state: State, row: str, number: int) -> Instruction:
    name, *rest = row.split()
    if name == "SUM":
        half = int(rest[0])
        return op(
            "v_mfma_f32_16x16x128_f8f6f4",
            state.sums[half],
            state.ones,
            state.p.group(half, 8),
            0,
            note=f"row sum of P, keys {64 * half}-{64 * half + 63}",
        )
    block, half = map(int, rest)
    a = buffer_of(state, number)
    if name == "QK":
        scores = state.s.group(block, 16)
        return op(
            "v_mfma_f32_32x32x64_f8f6f4",
            scores,
            a,
            state.q.group(half, 8),
            0 if half == 0 else scores,
            note=f"S: keys {32 * block}-{32 * block + 31}, dims {64 * half}-{64 * half + 63}",
        )
    out = state.o.group(block, 16)
    return op(
        "v_mfma_scale_f32_32x32x64_f8f6f4",
        out,
        a,
        state.p.group(half, 8),
        out,
        state.unit,
        state.block_exp[half],
        mods=SCALE_BYTE_0,
        note=f"O: value dims {32 * block}-{32 * block + 31}, keys {64 * half}-{64 * half + 63}",
    )


def matrix_phase(state: State, stage: int) -> None:
    """Tile i in `stage`, tile i-1 in the stage before it; stages K of tile i+3 and V of tile i+2."""
    program = state.program
    number, total = 0, len(fragments())
    program.emit(op("s_setprio", 1, note="matrix instructions first"))
    jobs = [ins for text in JOBS for ins in staging.job(state, text, stage)]
    for place, row in enumerate(MATRIX):
        program.emit(matrix_instruction(state, row, number))
        if not row.startswith("SUM"):
            ahead = number + LOOKAHEAD
            # Past the last fragment come the first ones of the next tile.
            program.emit(read_fragment(state, ahead % total, stage + ahead // total, stage - 1))
            number += 1
        share = -(-len(jobs) // max(1, len(MATRIX) - 1 - place))
        program.emit(jobs[:share], group=0)
        del jobs[:share]
    for text in LAST_JOBS:
        program.emit(staging.job(state, text, stage))
    program.emit(op("s_setprio", 0))


def read_ahead(state: State, k_addr: Reg) -> None:
    """The first fragments of a tile whose stage only the registers know."""
    for number in range(LOOKAHEAD):
        state.program.emit(read_fragment(state, number, None, 0, k_addr))


def scores_only(state: State, k_addr: Reg) -> None:
    """Matrix phase of the first tile: no output yet, and a stage that only the registers know."""
    for number, (kind, block, half) in enumerate(fragments()):
        if kind == "QK":
            state.program.emit(read_fragment(state, number, None, 0, k_addr))
            state.program.emit(matrix_instruction(state, f"QK {block} {half}", number))


def output_only(state: State, stage: int) -> None:
    """Matrix phase after the last tile: its output and row sums."""
    rows = [row for row in MATRIX if not row.startswith("QK")]
    number = first = sum(kind == "QK" for kind, _, _ in fragments())
    for ahead in range(first, first + LOOKAHEAD):
        state.program.emit(read_fragment(state, ahead, None, stage))
    for row in rows:
        state.program.emit(matrix_instruction(state, row, number))
        if not row.startswith("SUM"):
            if number + LOOKAHEAD < len(fragments()):
                state.program.emit(read_fragment(state, number + LOOKAHEAD, None, stage))
            number += 1
