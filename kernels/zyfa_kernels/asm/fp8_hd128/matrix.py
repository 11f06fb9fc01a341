"""The matrix phase: scores of the current tile, output and row sums of the one before."""

from __future__ import annotations

from ..instruction import Instruction, op
from ..registers import M0, Reg
from .layout import K_BASE, ROW_BYTES, STAGES, TILE_BYTES, V_BASE
from .schedule import LOOKAHEAD, MATRIX, fragments
from .state import FRAGMENTS, State, stage_offset

FORMAT = ""  # cbsz = blgp = 0: e4m3 operands
SCALE_BYTE_0 = "op_sel_hi:[0,0,0]"


def buffer_of(state: State, number: int) -> Reg:
    return state.frag.group(number % FRAGMENTS, 8)


def read_fragment(state: State, number: int, k_stage: int | None, v_stage: int, k_addr: Reg | None = None) -> list[Instruction]:
    """LDS reads of fragment `number`. `k_addr` replaces address and stage where the stage is not known yet."""
    kind, block, half = fragments()[number]
    into = buffer_of(state, number)
    if kind == "QK":
        address = k_addr if k_addr is not None else state.k_addr
        offset = (0 if k_addr is not None else stage_offset(k_stage or 0)) + 32 * block * ROW_BYTES
        return [
            op(
                "ds_read_b128",
                into[4 * part : 4 * part + 3],
                address[2 * half + part],
                mods=f"offset:{offset}",
                note=f"K: keys {32 * block}-{32 * block + 31}, dims {64 * half + 32 * part}-{64 * half + 32 * part + 31}",
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
            note=f"V: value dims {32 * block}-{32 * block + 31}, keys {64 * half + 16 * part}-{64 * half + 16 * part + 15}",
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


def stage_load(state: State, which: str, part: int, lds_stage: int) -> list[Instruction]:
    """One of the four loads by which a wave stages its share of a tile: 8 rows into LDS."""
    base = (K_BASE if which == "k" else V_BASE) + stage_offset(lds_stage) + part * TILE_BYTES // 2
    return [
        op("s_add_u32", M0, state.lds_wave, base),
        stage_load_instruction(state, which, part),
    ]


def stage_load_instruction(state: State, which: str, part: int) -> Instruction:
    offset, desc = (state.k_off, state.k_desc) if which == "k" else (state.v_off, state.v_desc)
    return op(
        "buffer_load_dwordx4 lds",
        offset[part],
        desc,
        0,
        mods="offen",
        note=f"{which.upper()} rows {64 * part}-{64 * part + 63} (8 of them by this wave) to LDS",
    )


def advance(state: State, which: str) -> list[Instruction]:
    """Move a descriptor one tile on; past the last key its size is zero and loads fetch nothing."""
    desc, step = (state.k_desc, state.k_step) if which == "k" else (state.v_desc, state.v_step)
    return [
        op("s_add_u32", desc[0], desc[0], step),
        op("s_addc_u32", desc[1], desc[1], 0),
        op("s_sub_i32", desc[2], desc[2], step),
        op("s_max_i32", desc[2], desc[2], 0),
    ]


def matrix_phase(state: State, stage: int) -> None:
    """Tile i in `stage`, tile i-1 in the stage before it; stages K of tile i+3 and V of tile i+2."""
    program = state.program
    number, total = 0, len(fragments())
    program.emit(op("s_setprio", 1, note="matrix instructions first"))
    for row, jobs in MATRIX:
        program.emit(matrix_instruction(state, row, number))
        if not row.startswith("SUM"):
            ahead = number + LOOKAHEAD
            # Past the last fragment come the first ones of the next tile.
            program.emit(read_fragment(state, ahead % total, stage + ahead // total, stage - 1))
            number += 1
        for job in jobs:
            verb, which, *part = job.split()
            if verb == "next":
                program.emit(advance(state, which))
            else:
                lds_stage = stage - 1 if which == "k" else stage + STAGES - 2
                program.emit(stage_load(state, which, int(part[0]), lds_stage), group=0)
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
    rows = [row for row, _ in MATRIX if not row.startswith("QK")]
    number = first = sum(kind == "QK" for kind, _, _ in fragments())
    for ahead in range(first, first + LOOKAHEAD):
        state.program.emit(read_fragment(state, ahead, None, stage))
    for row in rows:
        state.program.emit(matrix_instruction(state, row, number))
        if not row.startswith("SUM"):
            if number + LOOKAHEAD < len(fragments()):
                state.program.emit(read_fragment(state, number + LOOKAHEAD, None, stage))
            number += 1
