"""Staging of K and V tiles in LDS: where a tile's rows lie in global memory, packed or paged, and the loads.

One code path serves both: packed keys are a single page that is as long as the sequence. A load brings 8 rows; they lie
in one page, since a page holds a power of two of at least 8 tokens.
"""

from __future__ import annotations

from ..instruction import Instruction, op
from ..registers import M0, Reg
from .layout import BLOCK_KEYS, HEAD_DIM, K_BASE, STAGES, TILE_BYTES, TILE_KEYS, V_BASE
from .state import State, stage_offset

ROWS = 8  # that one load instruction of a wave brings
NO_TOKEN = -(2**31)  # before every key


def page_offset(state: State, into: Reg, tile: int, part: int, perhaps_none: bool = False) -> list[Instruction]:
    """Where the block table names the page of a group of rows, of tile `tile` after `state.token`'s.

    Past the last key it is the last key's page; `perhaps_none`: there may be no key, then page 0.
    """
    return [
        op("s_add_i32", into, state.token, tile * TILE_KEYS + part * BLOCK_KEYS),
        op("s_min_i32", into, into, state.last_key),
        *([op("s_max_i32", into, into, 0)] if perhaps_none else []),
        op("s_lshr_b32", into, into, state.arg_of("page_shift")),
        op("s_lshl_b32", into, into, 2),
    ]


def look_up(state: State, into: Reg, offsets: tuple[Reg, ...]) -> list[Instruction]:
    return [op("s_load_dword", into[n], state.table, offset, note="page") for n, offset in enumerate(offsets)]


def address(state: State, which: str, part: int, page: Reg, tile: int) -> list[Instruction]:
    """Descriptor of 8 rows of tile `tile` after `state.token`'s; past the last key its size is 0: zeros are loaded."""
    desc = state.k_desc if which == "k" else state.v_desc
    base, row, stride = (state.arg_of(name) for name in (which, f"{which}_row", f"{which}_page"))
    token, lo, hi = state.stage_tmp
    return [
        op("s_mul_i32", lo, page, stride, note=f"{which.upper()}: address of the page"),
        op("s_mul_hi_u32", hi, page, stride),
        op("s_add_u32", desc[0], base[0], lo),
        op("s_addc_u32", desc[1], base[1], hi),
        op("s_add_i32", token, state.token, tile * TILE_KEYS + part * BLOCK_KEYS),
        op("s_and_b32", hi, token, state.page_mask, note=f"{which.upper()}: address of the row in the page"),
        op("s_mul_i32", lo, hi, row),
        op("s_mul_hi_u32", hi, hi, row),
        op("s_add_u32", desc[0], desc[0], lo),
        op("s_addc_u32", desc[1], desc[1], hi),
        op("s_sub_i32", token, state.last_key, token, note=f"{which.upper()}: up to 8 rows, none past the last key"),
        op("s_min_i32", token, token, ROWS - 1),
        op("s_mul_i32", token, token, row),
        op("s_add_i32", token, token, HEAD_DIM),
        op("s_max_i32", desc[2], token, 0),
    ]


def load(state: State, which: str, part: int, lds: Reg, stage: int) -> list[Instruction]:
    """Load 8 rows into LDS, at `lds` (where this wave stages) plus `stage`."""
    base = (K_BASE if which == "k" else V_BASE) + stage_offset(stage) + part * TILE_BYTES // 2
    desc, offset = (state.k_desc, state.k_off) if which == "k" else (state.v_desc, state.v_off)
    first = part * BLOCK_KEYS
    return [
        op("s_add_u32", M0, lds, base),
        op(
            "buffer_load_dwordx4 lds",
            offset,
            desc,
            0,
            mods="offen",
            note=f"{which.upper()} rows {first}-{first + BLOCK_KEYS - 1} to LDS, 8 of them by this wave",
        ),
    ]


def job(state: State, text: str, stage: int) -> list[Instruction]:
    """A job of the matrix phase of tile i in `stage`: it stages K of tile i+3 and V of tile i+2."""
    verb, *rest = text.split()
    t, last = state.scratch[0], state.stage_tmp
    if verb == "next":
        return [
            op("s_mov_b64", state.v_pages, state.k_pages, note="V follows K by one tile"),
            op("s_add_i32", state.token, state.token, TILE_KEYS),
            *(ins for part in range(2) for ins in page_offset(state, last[part], 0, part)),
        ]
    if verb == "pages":
        return look_up(state, state.k_pages, last[:2])
    if verb == "visible":
        return [
            op("s_add_i32", t, state.key0, TILE_KEYS - 1),
            op("s_cmp_le_i32", t, state.visible),
            op("s_cselect_b32", t, state.key0, NO_TOKEN),
        ]
    if verb == "test":
        return [op("s_cmp_ge_i32", t, state.low_last, note="SCC: every query of the wave sees the whole tile")]
    which, part = rest[0], int(rest[1])
    if verb == "address":
        pages, tile = (state.k_pages, 0) if which == "k" else (state.v_pages, -1)
        return address(state, which, part, pages[part], tile)
    return load(state, which, part, state.lds_wave, stage - 1 if which == "k" else stage + STAGES - 2)


def first_tile(state: State, which: str, tile: int, pages: Reg, group: int) -> None:
    """Stage a tile near the start, whose stage is known to registers alone."""
    p, lds = state.program, state.scratch[0]
    p.op("s_add_u32", lds, state.stage, tile * TILE_BYTES)
    p.op("s_and_b32", lds, lds, STAGES * TILE_BYTES - 1)
    p.op("s_add_u32", lds, lds, state.lds_wave)
    for part in range(2):
        p.emit(address(state, which, part, pages[part], tile))
        p.emit(load(state, which, part, lds, 0), group=group)
