"""Output of a workgroup: o = v_scale * O / L in bf16, lse = ln 2 * (m + log2 L)."""

from __future__ import annotations

import math

from ..registers import EXEC, VCC
from .layout import HEAD_DIM
from .prologue import DESCRIPTOR_WORD3, descriptor, offset_pointer
from .state import DV_BLOCKS, State


def output(state: State) -> None:
    p, arg, t = state.program, state.arg_of, state.scratch
    inverse, row, x = state.alpha, state.block_max[0], state.block_max[1]
    p.title("Output", "A row without any visible key has L = 0: its output is 0 and its lse -inf.")
    p.op("v_rcp_f32", inverse, state.row_sum)
    p.op("v_mul_f32", state.base, 0.0, state.row_max)
    p.op("v_fmac_f32", state.base, 0.0, state.scale, note="0, or NaN where a score or the scale is")
    p.op("v_cmp_gt_f32", VCC, state.row_sum, 0.0)
    p.op("v_mul_f32", inverse, state.head_v_scale, inverse)
    p.op("v_cndmask_b32", inverse, state.base, inverse, VCC)
    p.op("v_and_b32", row, 31, state.lane)
    p.op("v_add_u32", row, state.row0, row)
    _lse(state, row, x)
    offset_pointer(p, arg("out"), state.q_start, arg("out_row"), t)
    offset_pointer(p, arg("out"), state.head, arg("out_head"), t)
    descriptor(p, state.io_desc, arg("out"), state.q_len, arg("out_row"), 2 * HEAD_DIM, t[0])
    p.op("v_mul_lo_u32", x, row, arg("out_row"))
    p.op("v_lshrrev_b32", state.base, 5, state.lane)
    p.op("v_lshl_add_u32", x, state.base, 4, x, note="lanes 32-63 store the next 8 value dims")
    for n in range(64):
        p.op("v_mul_f32", state.o[n], inverse, state.o[n])
    p.note("Pairs to bf16; lanes l and l+32 exchange halves, so that each stores 8 consecutive value dims")
    for block in range(DV_BLOCKS):
        for pair in range(2):
            o, packed = state.o.group(2 * block + pair, 8), state.frag.group(2 * (block % 2) + pair, 4)
            for n in range(4):
                p.op("v_cvt_pk_bf16_f32", packed[n], o[2 * n], o[2 * n + 1])
            p.op("v_permlane32_swap_b32", packed[0], packed[2])
            p.op("v_permlane32_swap_b32", packed[1], packed[3])
            p.op("buffer_store_dwordx4", packed, x, state.io_desc, 0, mods=f"offen offset:{64 * block + 32 * pair}")
    p.op("s_endpgm")


def _lse(state: State, row, x) -> None:
    p, arg, t = state.program, state.arg_of, state.scratch
    lse = state.new_max
    p.op("v_log_f32", lse, state.row_sum)
    p.op("v_fmac_f32", lse, state.scale, state.row_max)
    p.op("v_mul_f32", lse, math.log(2.0), lse)
    p.op("s_mul_i32", t[0], state.q_len, 4, note="nothing is stored if the lse pointer is 0")
    p.op("s_cmp_eq_u64", arg("lse"), 0)
    p.op("s_cselect_b32", state.io_desc[2], 0, t[0])
    p.op("s_mov_b32", state.io_desc[3], DESCRIPTOR_WORD3)
    p.op("s_lshl_b32", t[0], state.q_start, 2)
    p.op("s_add_u32", arg("lse")[0], arg("lse")[0], t[0])
    p.op("s_addc_u32", arg("lse")[1], arg("lse")[1], 0)
    offset_pointer(p, arg("lse"), state.head, arg("lse_head"), t)
    p.op("s_mov_b32", state.io_desc[0], arg("lse")[0])
    p.op("s_and_b32", state.io_desc[1], arg("lse")[1], 0xFFFF)
    p.op("v_lshlrev_b32", x, 2, row)
    p.op("s_mov_b64", state.scratch, EXEC)
    p.op("s_mov_b64", EXEC, 0xFFFFFFFF, note="lanes 0-31: the others hold the same rows")
    p.op("buffer_store_dword", lse, x, state.io_desc, 0, mods="offen")
    p.op("s_mov_b64", EXEC, state.scratch)
