"""Registers and the instruction table: widths, slices, allocation."""

from __future__ import annotations

import pytest
from zyfa_kernels.asm.instruction import InstructionError, op
from zyfa_kernels.asm.registers import VCC, Allocator, RegisterError, s, v


def test_slices_are_inclusive_and_print_as_the_assembler_reads_them():
    assert str(v[0:7]) == "v[0:7]" and v[0:7].count == 8
    assert str(v[4:11][2:3]) == "v[6:7]"
    assert str(v[4:11][2]) == "v6"
    assert str(v[0:15].group(2, 4)) == "v[8:11]"
    assert str(-v[3]) == "-v3"


@pytest.mark.parametrize("wrong", [lambda: v[0:256], lambda: s[100:103], lambda: v[0:7][8], lambda: v[0:7][4:9]])
def test_out_of_range_slices_are_errors(wrong):
    with pytest.raises(RegisterError, match="outside"):
        wrong()


@pytest.mark.parametrize(
    ("mnemonic", "operands", "why"),
    [
        ("v_mfma_f32_32x32x64_f8f6f4", (v[0:15], v[16:23], v[24:30], 0), "7 wide, 8 wanted"),
        ("ds_read_b128", (v[0:1], v[8]), "2 wide, 4 wanted"),
        ("v_add_f32", (v[0], v[1], s[0]), "can't stand there"),
        ("v_mfma_f32_32x32x64_f8f6f4", (v[0:15], v[16:23], v[24:31], 100), "no inline constant"),
        ("s_add_u32", (v[0], s[1], s[2]), "can't stand there"),
        ("v_mov_b32", (v[0],), "takes 2 operands, got 1"),
        ("v_add_f64", (v[0:1], v[2:3], v[4:5]), "not among the instructions"),
    ],
)
def test_operands_that_do_not_fit_are_named(mnemonic, operands, why):
    with pytest.raises(InstructionError, match=why):
        op(mnemonic, *operands)


def test_reads_and_writes_follow_the_roles_of_the_table():
    swap = op("v_permlane32_swap_b32", v[0], v[1])
    assert swap.reads == swap.writes == {("v", 0), ("v", 1)}
    load = op("buffer_load_dwordx4 lds", v[0], s[4:7], 0, mods="offen")
    assert ("m0", 0) in load.reads and not load.writes
    assert load.text() == "buffer_load_dwordx4 v0, s[4:7], 0 offen lds"
    assert op("v_cmp_gt_f32", VCC, v[0], v[1]).writes == {("vcc", 0), ("vcc", 1)}
    assert op("v_fmac_f32", v[0], v[1], v[2]).reads == {("v", 0), ("v", 1), ("v", 2)}


def test_allocation_is_first_fit_and_reuses_freed_registers():
    vgprs = Allocator("v", 16)
    a, b = vgprs.alloc("a", 8), vgprs.alloc("b", 4)
    assert (a.start, b.start) == (0, 8)
    vgprs.free(a)
    assert vgprs.alloc("c", 8).start == 0
    assert vgprs.high_water == 12
    with pytest.raises(RegisterError, match="'d' needs 8 vector registers; 12 of 16 are taken"):
        vgprs.alloc("d", 8)
    with pytest.raises(RegisterError, match="already in use"):
        vgprs.alloc("b", 1)
    with pytest.raises(RegisterError, match="freed before"):
        vgprs.free(a)


def test_an_alias_lies_inside_live_registers_and_shows_in_the_map():
    vgprs = Allocator("v", 16)
    a = vgprs.alloc("a", 8, "buffer")
    alias = vgprs.place("sum", a[4:7], "row sum")
    assert alias.start == 4
    assert any("sum" in line and "alias of a" in line for line in vgprs.table())
    with pytest.raises(RegisterError, match="no live name owns"):
        vgprs.place("x", v[7:8], "")


def test_scalar_tuples_are_aligned():
    sgprs = Allocator("s")
    sgprs.alloc("one")
    assert sgprs.alloc("pair", 2).start == 2
    assert sgprs.alloc("quad", 4).start == 4
