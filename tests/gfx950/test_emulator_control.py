"""Scalar instructions, branches that part waves, barriers, work-item set-up and code-object reading."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("triton")
from harness import assemble, run_snippet, source  # noqa: E402
from zyfa_kernels.emulator import CodeObject, Emulator  # noqa: E402

A, B = 0x9ABCDEF1, 0x12345678
M = 0xFFFFFFFF


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> width - 1 else x


def scalar(code: str, *, count: int = 1) -> int:
    """Run scalar code on s20 = A, s21 = B, s[22:23] = B:A; return s30 (and s31 above it), and SCC in bit 64."""
    numbers = (30, 31, 32) if count == 2 else (30, 32)
    got = run_snippet(
        f"s_mov_b32 s30, 0\ns_mov_b32 s31, 0\ns_cmp_eq_u32 s20, s21\n{code}\ns_cselect_b32 s32, 1, 0",
        {},
        {20: A, 21: B, 22: A, 23: B},
        scalar_outputs=numbers,
    )
    return got[30] | (got[31] << 32 if count == 2 else 0), got[32]


@pytest.mark.parametrize(
    ("code", "value", "scc"),
    [
        ("s_add_u32 s30, s20, s21", A + B & M, A + B > M),
        ("s_sub_u32 s30, s21, s20", B - A & M, A > B),
        ("s_add_i32 s30, s20, s21", A + B & M, 0),
        ("s_sub_i32 s30, s20, s21", A - B & M, 0),
        ("s_sub_i32 s30, 0x80000000, s21", 0x80000000 - B, 1),
        ("s_add_u32 s30, s20, s20\ns_addc_u32 s30, s21, 0", B + 1, 0),
        ("s_sub_u32 s30, s21, s20\ns_subb_u32 s30, 5, 1", 3, 0),
        ("s_mul_i32 s30, s20, s21", A * B & M, 0),
        ("s_mul_hi_u32 s30, s20, s21", A * B >> 32, 0),
        ("s_mul_hi_i32 s30, s20, s21", signed(A) * B >> 32 & M, 0),
        ("s_and_b32 s30, s20, s21", A & B, 1),
        ("s_or_b32 s30, s20, s21", A | B, 1),
        ("s_xor_b32 s30, s20, s20", 0, 0),
        ("s_andn2_b32 s30, s20, s21", A & ~B, 1),
        ("s_not_b32 s30, s20", ~A & M, 1),
        ("s_lshl_b32 s30, s20, 4", A << 4 & M, 1),
        ("s_lshr_b32 s30, s20, 4", A >> 4, 1),
        ("s_ashr_i32 s30, s20, 4", signed(A) >> 4 & M, 1),
        ("s_min_i32 s30, s20, s21", A, 1),
        ("s_max_i32 s30, s20, s21", B, 0),
        ("s_max_u32 s30, s20, s21", A, 1),
        ("s_bfe_u32 s30, s20, 0x80004", A >> 4 & 255, 1),
        ("s_bfe_i32 s30, s20, 0x80004", signed(A >> 4, 8) & M, 1),
        ("s_bfm_b32 s30, 5, 3", 0b11111000, 0),
        ("s_brev_b32 s30, s20", int(f"{A:032b}"[::-1], 2), 0),
        ("s_bcnt1_i32_b32 s30, s20", bin(A).count("1"), 1),
        ("s_ff1_i32_b32 s30, s21", 3, 0),
        ("s_flbit_i32_b32 s30, s21", 3, 0),
        ("s_abs_i32 s30, s20", -signed(A), 1),
        ("s_sext_i32_i8 s30, s20", signed(A, 8) & M, 0),
        ("s_sext_i32_i16 s30, s20", signed(A, 16) & M, 0),
        ("s_movk_i32 s30, -5", M - 4, 0),
        ("s_mov_b32 s30, 7\ns_addk_i32 s30, -9", M - 1, 0),
        ("s_mov_b32 s30, 7\ns_mulk_i32 s30, -9", -63 & M, 0),
        ("s_cmp_lt_i32 s20, s21\ns_cselect_b32 s30, s20, s21", A, 1),
        ("s_cmp_lt_u32 s20, s21\ns_cselect_b32 s30, s20, s21", B, 0),
        ("s_cmp_lg_u64 s[22:23], 0\ns_cmov_b32 s30, s20", A, 1),
        ("s_bitcmp1_b32 s20, 4", 0, 1),
        ("s_bitcmp0_b32 s20, 4", 0, 0),
        ("s_bitset1_b32 s30, 9\ns_bitset0_b32 s30, 3", 512, 0),
        ("s_cmpk_gt_u32 s21, 0x5678", 0, 1),
        ("s_lshl2_add_u32 s30, s21, s20", (B << 2) + A & M, (B << 2) + A > M),
        ("s_pack_ll_b32_b16 s30, s20, s21", A & 0xFFFF | (B & 0xFFFF) << 16, 0),
        ("s_absdiff_i32 s30, s20, s21", B - signed(A), 1),
    ],
)
def test_scalar_32(code, value, scc):
    assert scalar(code) == (value & M, int(scc))


Q = B << 32 | A


@pytest.mark.parametrize(
    ("code", "value", "scc"),
    [
        ("s_mov_b64 s[30:31], s[22:23]", Q, 0),
        ("s_lshl_b64 s[30:31], s[22:23], 9", Q << 9, 1),
        ("s_lshr_b64 s[30:31], s[22:23], 9", Q >> 9, 1),
        ("s_ashr_i64 s[30:31], s[22:23], 9", signed(Q, 64) >> 9, 1),
        ("s_and_b64 s[30:31], s[22:23], -16", Q & ~15, 1),
        ("s_xor_b64 s[30:31], s[22:23], s[22:23]", 0, 0),
        ("s_not_b64 s[30:31], s[22:23]", ~Q, 1),
        ("s_cselect_b64 s[30:31], s[22:23], 1", 1, 0),
    ],
)
def test_scalar_64(code, value, scc):
    assert scalar(code, count=2) == (value & (1 << 64) - 1, scc)


@pytest.mark.parametrize("kind", ["i32", "u32"])
@pytest.mark.parametrize("name", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_scalar_compare(name, kind):
    python = {
        "eq": lambda x, y: x == y, "lg": lambda x, y: x != y, "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    }[name]  # fmt: skip
    for x, y in ((A, B), (B, A), (A, A)):
        code = f"s_mov_b32 s24, {x:#x}\ns_mov_b32 s25, {y:#x}\ns_cmp_{name}_{kind} s24, s25"
        want = python(signed(x), signed(y)) if kind == "i32" else python(x, y)
        assert scalar(code)[1] == int(want)


def test_scalar_compare_64():
    assert scalar("s_cmp_eq_u64 s[22:23], s[22:23]")[1] == 1
    assert scalar("s_mov_b64 s[24:25], s[22:23]\ns_add_u32 s25, s25, 1\ns_cmp_eq_u64 s[22:23], s[24:25]")[1] == 0


def test_saveexec():
    got = run_snippet(
        "s_mov_b64 s[10:11], 0xf0\ns_and_saveexec_b64 s[12:13], s[10:11]\nv_mov_b32_e32 v1, 1\n"
        "s_mov_b64 exec, s[12:13]\nv_mov_b32_e32 v2, 0\ns_mov_b64 exec, 0xf0\nv_mov_b32_e32 v2, v1",
        {},
        outputs=("v2",),
        scalar_outputs=(12, 13),
    )
    assert got[12] == M and got[13] == M
    assert got["v2"].tolist() == [0] * 4 + [1] * 4 + [0] * 56


LOOP = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_readfirstlane_b32 s8, v0
s_lshr_b32 s8, s8, 6
s_mov_b32 s9, 0
s_waitcnt lgkmcnt(0)
v_mov_b32_e32 v1, 0
.Louter:
s_add_u32 s9, s9, 1
s_cmp_gt_u32 s9, s8
s_cbranch_scc1 .Lskip
v_add_u32_e32 v1, 10, v1
.Lskip:
s_barrier
s_cmp_lt_u32 s9, 9
s_cbranch_scc1 .Louter
v_add_u32_e32 v1, s2, v1
s_lshl_b32 s10, s2, 11
s_add_u32 s6, s6, s10
s_addc_u32 s7, s7, 0
v_lshlrev_b32_e32 v2, 2, v0
global_store_dword v2, v1, s[6:7]
s_endpgm
"""


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_waves_part_and_meet_again(at_once):
    emulator = Emulator(CodeObject.load(assemble(source(LOOP))), workgroups_at_once=at_once, delayed_memory=True)
    target = emulator.memory.alloc(5 * 512 * 4)
    emulator.launch("kernel", (5, 1, 1), 512, struct.pack("<QQ", 0, target))
    got = emulator.memory.download(target, np.uint32, (5, 8, 64))
    for workgroup in range(5):
        for wave in range(8):
            assert (got[workgroup, wave] == 10 * wave + workgroup).all()
    assert emulator.stats.by_mnemonic["s_barrier"] == 5 * 8 * 9
    assert emulator.stats.instructions == sum(emulator.stats.by_mnemonic.values())


def test_vcc_and_exec_branches():
    got = run_snippet(
        "v_mov_b32_e32 v1, 0\nv_cmp_gt_u32_e32 vcc, 99, v0\ns_cbranch_vccz .La\nv_add_u32_e32 v1, 1, v1\n.La:\n"
        "v_cmp_gt_u32_e32 vcc, 0, v0\ns_cbranch_vccnz .Lb\nv_add_u32_e32 v1, 2, v1\n.Lb:\ns_mov_b64 exec, 0\n"
        "s_cbranch_execz .Lc\nv_add_u32_e32 v1, 4, v1\n.Lc:\ns_mov_b64 exec, -1",
        {},
        outputs=("v1",),
    )
    assert (got["v1"] == 3).all()


def test_workitem_ids_are_packed():
    code = CodeObject.load(
        assemble(
            source("""
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_and_b32_e32 v1, 0x3ff, v0
v_lshrrev_b32_e32 v2, 10, v0
v_lshl_add_u32 v3, v2, 5, v1
v_lshlrev_b32_e32 v3, 2, v3
s_waitcnt lgkmcnt(0)
global_store_dword v3, v0, s[6:7]
s_endpgm
""")
        )
    )
    emulator = Emulator(code)
    target = emulator.memory.alloc(128 * 4)
    emulator.launch(None, (1, 1, 1), (32, 4, 1), struct.pack("<QQ", 0, target))
    got = emulator.memory.download(target, np.uint32, (4, 32))
    assert all(got[y, x] == (x | y << 10) for x in range(32) for y in range(4))


def test_code_object_facts():
    text = source(
        "v_accvgpr_write_b32 a3, v0\ns_endpgm", name="mine", lds=1234, kernarg=24, vgprs=200, accum_offset=128
    )
    kernel = CodeObject.load(assemble(text)).kernel("mine")
    assert (kernel.descriptor.lds_bytes, kernel.kernarg_bytes, kernel.descriptor.accum_offset) == (1234, 24, 128)
    assert kernel.descriptor.vgprs == 200 and kernel.descriptor.kernarg_sgpr == 0
    assert [i.text for i in kernel.program] == ["v_accvgpr_write_b32 a3, v0", "s_endpgm"]
    with pytest.raises(ValueError, match="invalid|error"):
        assemble(source("v_nonsense v1\ns_endpgm"))
