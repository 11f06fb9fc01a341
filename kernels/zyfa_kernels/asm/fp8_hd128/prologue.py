"""Set-up of a workgroup: which rows and keys are its own, addresses, the first tiles on their way, Q and its scales."""

from __future__ import annotations

from ..program import Program
from ..registers import Reg
from ..registers import v as vector
from . import staging
from .layout import (
    CHUNK,
    HEAD_DIM,
    STAGES,
    TILE_BYTES,
    TILE_KEYS,
    V_BASE,
    WAVE_QUERIES,
    WORKGROUP_QUERIES,
)
from .state import State
from .vector import MIN_EXPONENT, OFFSET

DESCRIPTOR_WORD3 = 0x00020000  # raw buffer, 32-bit elements
NO_KEY = -1.0e30  # running maximum before the first key: finite, so that 0 * inf can't arise
SMALLEST_SCALE = 1.0e-30  # keeps -inf * c at -inf for rows of zeros
E4M3_ONES = 0x38383838


def code_bias(lean: bool, delta: float) -> float:
    """The `code_bias` argument: what is added to codes (lean) or to y - B (exact) of a block with k = 0."""
    if not lean:
        return 0.0
    return 8 * OFFSET + 56 + delta


def descriptor(program: Program, desc: Reg, base: Reg, rows: Reg | int, stride: Reg, tail: int, scratch: Reg) -> None:
    """desc = buffer of `rows` rows of `stride` bytes from `base`, the last of which is `tail` bytes long."""
    program.op("s_mov_b64", desc[0:1], base)
    program.op("s_and_b32", desc[1], desc[1], 0xFFFF, note="48-bit address, stride 0")
    program.op("s_sub_i32", scratch, rows, 1)
    program.op("s_mul_i32", scratch, scratch, stride)
    program.op("s_add_i32", scratch, scratch, tail)
    program.op("s_max_i32", desc[2], scratch, 0)
    program.op("s_mov_b32", desc[3], DESCRIPTOR_WORD3)


def offset_pointer(program: Program, pointer: Reg, count: Reg, stride: Reg, scratch: Reg) -> None:
    """pointer += count * stride, in 64 bits."""
    lo, hi = scratch[0], scratch[1]
    program.op("s_mul_i32", lo, count, stride)
    program.op("s_mul_hi_u32", hi, count, stride)
    program.op("s_add_u32", pointer[0], pointer[0], lo)
    program.op("s_addc_u32", pointer[1], pointer[1], hi)


def arguments(state: State) -> None:
    p, arg = state.program, state.arg_of
    p.title("Arguments, and the rows of this workgroup")
    p.op("s_load_dwordx16", state.ptr, state.kernarg, 0)
    p.op("s_load_dwordx4", state.cu, state.kernarg, 64)
    p.op("s_load_dwordx16", state.arg, state.kernarg, 80)
    p.op("s_load_dwordx8", state.tail[0:7], state.kernarg, 144)
    p.op("s_load_dwordx4", state.tail[8:11], state.kernarg, 176)
    lane = state.lane
    p.op("v_lshrrev_b32", state.limit, 6, vector[0], note="thread number / 64")
    p.op("v_and_b32", lane, 63, vector[0])
    p.op("v_readfirstlane_b32", state.wave, state.limit)
    batch, tile = state.wg[1], state.wg[2]
    lo = state.scratch[0]
    p.op("s_lshl_b32", lo, batch, 2)
    for pointer, span in ((state.cu[0:1], state.q_span), (state.cu[2:3], state.k_span)):
        p.op("s_add_u32", pointer[0], pointer[0], lo)
        p.op("s_addc_u32", pointer[1], pointer[1], 0)
        p.op("s_load_dwordx2", span, pointer, 0)
    p.op("s_mov_b32", state.q_start, state.q_span[0])
    p.op("s_sub_i32", state.q_len, state.q_span[1], state.q_span[0])
    p.op("s_sub_i32", state.k_len, state.k_span[1], state.k_span[0])
    p.op("s_sub_i32", state.context, state.k_len, state.q_len, note="keys before the first query")
    offset_pointer(p, state.table, batch, arg("block_table_row"), state.scratch)
    p.note("Long query tiles first: the last tile of the longest sequence is tile 0 of the grid")
    p.op("s_sub_i32", tile, arg("q_tiles"), tile)
    p.op("s_sub_i32", tile, tile, 1)
    p.op("s_mul_i32", state.row0, tile, WORKGROUP_QUERIES)
    p.op("s_cmp_lt_i32", state.row0, state.q_len)
    p.op("s_cbranch_scc1", ".Lrows")
    p.op("s_endpgm", note="this sequence has fewer query tiles")
    p.label(".Lrows")
    p.note("Query head, and the KV head that it shares")
    head, kv_head = state.head, state.kv_head
    p.op("s_and_b32", head, state.wg[0], arg("xcd_mask"))
    p.op("s_mul_i32", head, head, arg("xcd_heads"))
    p.op("s_lshr_b32", lo, state.wg[0], arg("xcd_shift"))
    p.op("s_add_u32", head, head, lo)
    p.op("s_mul_i32", kv_head, head, arg("group_magic"))
    p.op("s_lshr_b32", kv_head, kv_head, 16)
    p.note("Tiles that hold a key which any row of the workgroup sees")
    last = state.last_key
    if state.variant.causal:
        p.op("s_add_i32", last, state.row0, WORKGROUP_QUERIES)
        p.op("s_min_i32", last, last, state.q_len)
        p.op("s_add_i32", last, last, state.context)
        p.op("s_sub_i32", last, last, 1)
    else:
        p.op("s_sub_i32", last, state.k_len, 1)
    p.op("s_add_i32", state.key0, state.row0, state.context)
    p.op("s_sub_i32", state.key0, state.key0, arg("window"))
    p.op("s_max_i32", state.key0, state.key0, 0)
    p.op("s_and_b32", state.key0, state.key0, -TILE_KEYS, note="first key of the first tile")
    p.op("s_sub_i32", state.tiles, last, state.key0)
    p.op("s_add_i32", state.tiles, state.tiles, TILE_KEYS)
    p.op("s_ashr_i32", state.tiles, state.tiles, TILE_KEYS.bit_length() - 1)
    p.op("s_max_i32", state.tiles, state.tiles, 0)
    p.op("s_add_i32", state.key_last0, state.tiles, -1)
    p.op("s_lshl_b32", state.key_last0, state.key_last0, TILE_KEYS.bit_length() - 1)
    p.op("s_add_i32", state.key_last0, state.key_last0, state.key0)


def constants(state: State) -> None:
    p = state.program
    p.title("Constants")
    p.op("s_mov_b32", state.exp_magic, 12582912.0 + 127 - OFFSET)
    p.op("s_mov_b32", state.min_exp, MIN_EXPONENT)
    if state.variant.lean:
        p.op("s_mov_b32", state.neg_step, -8.0)
    else:
        p.op("s_mov_b32", state.p_unit, 2.0**-OFFSET)
    p.op("s_mov_b32", state.code_bias, state.arg_of("code_bias"))
    p.op("v_mov_b32", state.unit, 0x7F7F7F7F)
    p.op("v_mov_b32", state.row_max, NO_KEY)
    p.op("v_mov_b32", state.row_sum, 0.0)
    for n in range(64):
        p.op("v_mov_b32", state.o[n], 0.0)


def ones(state: State) -> None:
    """Operand A of the row sums. Lane 16 g + r supplies row r; its bytes meet the P bytes of lanes 16 g .. 16 g + 15.

    Lanes 0-15 and 32-47 of P hold queries 0-15, the others queries 16-31. Rows 0-3 and 8-11 sum the former, rows 4-7
    and 12-15 the latter, so that accumulator lane l (rows 4 (l / 16) ..) receives the sum of its own query l % 32.
    """
    p, t = state.program, state.block_max
    p.note("Row-sum operand: 1.0 where (row / 4) % 2 equals the key group's parity")
    p.op("v_lshrrev_b32", t[0], 2, state.lane)
    p.op("v_lshrrev_b32", t[1], 4, state.lane)
    p.op("v_xor_b32", t[0], t[0], t[1])
    p.op("v_and_b32", t[0], 1, t[0])
    p.op("v_add_u32", t[0], -1, t[0], note="all bits where they agree, none elsewhere")
    for n in range(8):
        p.op("v_and_b32", state.ones[n], E4M3_ONES, t[0])


def lds_addresses(state: State) -> None:
    """LDS addresses of the K and V reads (layout.k_fragment, layout.v_fragment)."""
    p, lane, k, v = state.program, state.lane, state.k_addr, state.v_addr
    half, row, t = state.block_max[0], state.block_max[1], state.alpha
    p.title("LDS addresses of the operand reads")
    p.op("v_lshrrev_b32", half, 5, lane)
    p.op("v_and_b32", row, 31, lane)
    p.op("v_and_b32", t, 7, row)
    p.op("v_lshrrev_b32", k[1], 3, row)
    p.op("v_and_b32", k[1], 1, k[1])
    p.op("v_xor_b32", t, t, k[1], note="swizzle of the row")
    p.op("v_xor_b32", t, t, half, note="chunk of quarter 0")
    p.op("v_lshlrev_b32", t, 4, t)
    p.op("v_lshl_or_b32", k[0], row, 7, t)
    for quarter in range(1, 4):
        p.op("v_xor_b32", k[quarter], 2 * CHUNK * quarter, k[0])
    p.note("V: 8 rows of 16 bytes by each group of 16 lanes")
    p.op("v_and_b32", row, 15, lane)
    p.op("v_lshrrev_b32", row, 1, row, note="row of the group, also its swizzle")
    p.op("v_and_b32", t, 3, row)
    p.op("v_lshrrev_b32", v[1], 2, row)
    p.op("v_lshl_add_u32", t, v[1], 3, t)
    p.op("v_lshl_add_u32", t, half, 2, t, note="key: row % 4 + 8 (row / 4) + 4 (lane / 32)")
    p.op("v_lshlrev_b32", t, 7, t)
    p.op("v_lshrrev_b32", v[1], 4, lane)
    p.op("v_and_b32", v[1], 1, v[1])
    p.op("v_xor_b32", v[1], v[1], row, note="swizzled chunk of value dims 0-15 or 16-31")
    p.op("v_lshl_or_b32", t, v[1], 4, t)
    p.op("v_and_b32", v[1], 1, lane)
    p.op("v_lshl_or_b32", t, v[1], 3, t)
    p.op("v_add_u32", v[0], V_BASE, t)
    for block in range(1, 4):
        p.op("v_xor_b32", v[block], 2 * CHUNK * block, v[0])


def addresses(state: State) -> None:
    """Bases of K and V for this sequence and head, pages, and which 16 bytes of 8 rows each lane stages."""
    p, arg, t = state.program, state.arg_of, state.scratch
    p.title("Staging of K and V")
    p.op("s_mul_i32", state.k_start, state.k_start, arg("packed"))
    for which in ("k", "v"):
        offset_pointer(p, arg(which), state.k_start, arg(f"{which}_row"), t)
        offset_pointer(p, arg(which), state.kv_head, arg(f"{which}_head"), t)
        p.op("s_and_b32", arg(which)[1], arg(which)[1], 0xFFFF, note="48-bit address, stride 0")
    p.op("s_mov_b32", state.k_desc[3], DESCRIPTOR_WORD3)
    p.op("s_mov_b32", state.v_desc[3], DESCRIPTOR_WORD3)
    p.op("s_lshl_b32", state.page_mask, 1, arg("page_shift"))
    p.op("s_sub_i32", state.page_mask, state.page_mask, 1)
    p.op("s_lshl_b32", state.lds_wave, state.wave, 10)
    p.op("s_lshl_b32", state.token, state.wave, 3)
    p.op("s_add_i32", state.token, state.token, state.key0)
    lane, row, slot, x = state.lane, state.block_max[0], state.block_max[1], state.alpha
    parity = t[0]
    p.op("s_and_b32", parity, state.wave, 1)
    p.op("s_lshl_b32", t[1], parity, 2)
    p.op("v_lshrrev_b32", row, 3, lane, note="row among the 8 that one instruction stages")
    p.op("v_and_b32", slot, 7, lane)
    p.op("v_xor_b32", x, slot, row)
    p.op("v_xor_b32", x, parity, x, note="K chunk: slot ^ swizzle")
    p.op("v_lshlrev_b32", state.k_off, 4, x)
    p.op("v_and_b32", x, 3, row)
    p.op("v_xor_b32", x, slot, x)
    p.op("v_xor_b32", x, t[1], x, note="V chunk")
    p.op("v_lshlrev_b32", state.v_off, 4, x)
    for off, which in ((state.k_off, "k"), (state.v_off, "v")):
        p.op("v_mul_lo_u32", x, row, arg(f"{which}_row"))
        p.op("v_add_u32", off, off, x)


def first_loads(state: State) -> None:
    """K of tiles 0-2 and V of tiles 0-1, in the order of their use; the loop stages three tiles ahead."""
    p = state.program
    p.title(
        "First tiles on their way", "The last tile lies in the last stage, so the first one starts where that leads."
    )
    p.op("s_sub_i32", state.stage, 0, state.tiles)
    p.op("s_and_b32", state.stage, state.stage, STAGES - 1)
    p.op("s_lshl_b32", state.stage, state.stage, TILE_BYTES.bit_length() - 1)
    pages = (state.pages0, state.pages1, state.v_pages, state.k_pages)
    for tile, into in enumerate(pages):
        for part in range(2):
            p.emit(staging.page_offset(state, state.stage_tmp[part], tile, part, perhaps_none=True))
        p.emit(staging.look_up(state, into, state.stage_tmp[:2]))
    for which, tile, group in (("k", 0, -3), ("k", 1, -2), ("v", 0, -2), ("k", 2, -1), ("v", 1, -1)):
        staging.first_tile(state, which, tile, pages[tile], group)


def queries(state: State) -> None:
    """Q fragments and c = q_scale * k_scale * softmax_scale * log2(e) of each lane's query; what its row may see."""
    p, arg, t = state.program, state.arg_of, state.scratch
    row, x = state.block_max[0], state.alpha
    p.title("Queries")
    p.op("s_lshl_b32", t[0], state.wave, WAVE_QUERIES.bit_length() - 1)
    p.op("s_add_i32", state.row0, state.row0, t[0], note="first row of the wave")
    p.op("v_and_b32", row, 31, state.lane)
    p.op("v_add_u32", row, state.row0, row, note="row of the lane's query")
    offset_pointer(p, arg("q"), state.q_start, arg("q_row"), t)
    offset_pointer(p, arg("q"), state.head, arg("q_head"), t)
    descriptor(p, state.io_desc, arg("q"), state.q_len, arg("q_row"), HEAD_DIM, t[0])
    p.op("v_mul_lo_u32", x, row, arg("q_row"))
    p.op("v_lshrrev_b32", state.limit, 5, state.lane)
    p.op("v_lshl_add_u32", x, state.limit, 4, x)
    for quarter in range(4):
        p.op("buffer_load_dwordx4", state.q.group(quarter, 4), x, state.io_desc, 0, mods=f"offen offset:{32 * quarter}")
    offset_pointer(p, arg("q_scale"), state.q_start, arg("q_scale_row"), t)
    offset_pointer(p, arg("q_scale"), state.head, arg("q_scale_head"), t)
    descriptor(p, state.io_desc, arg("q_scale"), state.q_len, arg("q_scale_row"), 4, t[0])
    p.op("v_mul_lo_u32", x, row, arg("q_scale_row"))
    p.op("buffer_load_dword", state.scale, x, state.io_desc, 0, mods="offen")
    for name in ("k_scale", "v_scale"):
        offset_pointer(p, arg(name), state.kv_head, arg("kv_scale_head"), t)
        p.op("s_load_dword", state.head_k_scale if name == "k_scale" else state.head_v_scale, arg(name), 0)
    p.op("v_lshlrev_b32", x, 2, state.limit)
    if state.variant.causal:
        p.op("v_add_u32", state.limit, state.context, row, note="a query sees the keys up to its own position")
        p.op("s_add_i32", state.visible, state.row0, state.context)
        p.op("s_add_i32", state.reach, state.visible, WAVE_QUERIES - 1)
        p.op("v_mov_b32", state.span, arg("window"))
    else:
        p.op("s_sub_i32", state.visible, state.k_len, 1)
        p.op("s_mov_b32", state.reach, state.visible)
        p.op("v_mov_b32", state.limit, state.visible)
        p.op("v_add_u32", state.span, state.context, row)
        p.op("v_sub_u32", state.span, state.limit, state.span)
        p.op("v_add_u32", state.span, arg("window"), state.span)
    p.op("v_sub_u32", state.limit, state.limit, x)
    p.op("s_add_i32", state.low_first, state.row0, state.context)
    p.op("s_sub_i32", state.low_first, state.low_first, arg("window"))
    p.op("s_add_i32", state.low_last, state.low_first, WAVE_QUERIES - 1)
    p.op("v_mov_b32", x, arg("scale_log2"))
    p.op("v_mul_f32", x, state.head_k_scale, x)
    p.op("v_mul_f32", state.scale, state.scale, x)
    p.op("v_mov_b32", x, SMALLEST_SCALE)
    p.op("v_maximum3_f32", state.scale, state.scale, x, x, note="a NaN scale stays")
    if state.variant.lean:
        p.op("v_mul_f32", state.code_scale, 8.0, state.scale)
