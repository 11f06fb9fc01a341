"""Waits and wait states are derived where they are needed, and a missing one is found on every path."""

from __future__ import annotations

import pytest
from zyfa_kernels.asm import hazards
from zyfa_kernels.asm.instruction import op
from zyfa_kernels.asm.program import Program
from zyfa_kernels.asm.registers import M0, VCC, s, v
from zyfa_kernels.asm.waits import WaitError

MFMA = "v_mfma_f32_32x32x64_f8f6f4"


def lines(program: Program) -> list[str]:
    return [i.text() for i in program.instructions()]


def test_an_lds_read_is_waited_for_by_count_at_its_first_use():
    p = Program("t")
    for n in range(3):
        p.op("ds_read_b128", v[4 * n : 4 * n + 3], v[20])
    p.op("v_mov_b32", v[30], v[5])
    p.op("v_mov_b32", v[31], v[0])
    assert lines(p)[3:] == ["s_waitcnt lgkmcnt(1)", "v_mov_b32 v30, v5", "v_mov_b32 v31, v0"]


def test_a_scalar_load_waits_for_everything_on_its_counter():
    p = Program("t")
    p.op("s_load_dword", s[0], s[2:3], 0)
    p.op("ds_read_b128", v[0:3], v[20])
    p.op("s_add_u32", s[1], s[0], 1)
    assert "s_waitcnt lgkmcnt(0)" in lines(p)


def test_loads_into_lds_are_waited_for_by_group():
    p = Program("t")
    for group in (-1, -1, 0, 0, 0):
        p.op("buffer_load_dwordx4 lds", v[0], s[4:7], 0, mods="offen", group=group)
    p.wait_loads(-1)
    assert lines(p)[-1] == "s_waitcnt vmcnt(3)"
    p.waits.age()
    p.wait_loads(-1)
    assert lines(p)[-1] == "s_waitcnt vmcnt(0)"


def test_the_four_bit_counter_is_not_overrun():
    p = Program("t")
    for n in range(15):
        p.op("ds_read_b64_tr_b8", v[2 * n : 2 * n + 1], v[100])
    with pytest.raises(WaitError, match="16th operation"):
        p.op("ds_read_b64_tr_b8", v[40:41], v[100])


@pytest.mark.parametrize(
    ("first", "second", "states"),
    [
        ((MFMA, v[0:15], v[16:23], v[24:31], 0), ("v_add_f32", v[40], 1.0, v[3]), 20),
        ((MFMA, v[0:15], v[16:23], v[24:31], 0), ("v_mov_b32", v[3], 0), 20),
        ((MFMA, v[0:15], v[16:23], v[24:31], 0), (MFMA, v[0:15], v[16:23], v[24:31], v[0:15]), 0),
        ((MFMA, v[0:15], v[16:23], v[24:31], 0), (MFMA, v[32:47], v[0:7], v[24:31], 0), 20),
        (("v_mfma_f32_16x16x128_f8f6f4", v[0:3], v[16:23], v[24:31], 0), ("v_mov_b32", v[40], v[0]), 12),
        (("v_exp_f32", v[0], v[1]), ("v_add_f32", v[2], 1.0, v[0]), 1),
        (("v_mov_b32", v[0], 0), ("v_permlane32_swap_b32", v[0], v[1]), 2),
        (("v_mov_b32", v[16], 0), (MFMA, v[0:15], v[16:23], v[24:31], 0), 2),
        (("v_mov_b32", v[0], 0), (MFMA, v[0:15], v[16:23], v[24:31], v[0:15]), 2),
        (("v_cvt_scalef32_pk_fp8_f32", v[0], v[1], v[2], s[0]), ("v_mov_b32", v[3], v[0]), 1),
        (("v_cmp_gt_f32", VCC, v[0], v[1]), ("v_cndmask_b32", v[2], v[3], v[4], VCC), 2),
        (("v_readfirstlane_b32", s[4], v[0]), ("buffer_load_dword", v[1], v[2], s[4:7], 0), 5),
        (("s_mov_b32", M0, 0), ("buffer_load_dwordx4 lds", v[0], s[4:7], 0), 1),
        (("v_mov_b32", v[0], 0), ("v_mov_b32", v[1], v[0]), 0),
    ],
)
def test_wait_states_of_the_table(first, second, states):
    """Values from the hazard table of the architecture notes and LLVM's GCNHazardRecognizer."""
    p = Program("t")
    p.op(*first)
    p.op(*second)
    nops = sum(hazards.counted(i) for i in p.instructions() if i.mnemonic == "s_nop")
    assert nops == states
    p.verify()
    if states:
        body = [i for i in p.instructions() if i.mnemonic != "s_nop"]
        with pytest.raises(hazards.HazardError, match="0 wait states"):
            hazards.verify(body)


def test_independent_instructions_count_as_wait_states():
    p = Program("t")
    p.op("v_exp_f32", v[0], v[1])
    p.op("v_mov_b32", v[5], 0)
    p.op("v_add_f32", v[2], 1.0, v[0])
    assert "s_nop" not in " ".join(lines(p))


def test_the_shortest_path_decides():
    """A branch over filler leaves the consumer too close on one path only."""
    p = Program("t")
    p.op(MFMA, v[0:15], v[16:23], v[24:31], 0)
    p.op("s_cbranch_vccnz", ".Lskip")
    for n in range(30):
        p.op("v_mov_b32", v[60 + n], 0)
    p.label(".Lskip")
    p.op("v_mov_b32", v[40], v[0])
    nops = sum(hazards.counted(i) for i in p.instructions() if i.mnemonic == "s_nop")
    assert nops == 19  # the branch itself is one state
    p.verify()


def test_a_hazard_across_the_back_edge_is_found():
    body = [".Lloop", op("v_mov_b32", v[1], v[0]), op("v_exp_f32", v[0], v[1]), op("s_cbranch_scc1", ".Lloop")]
    hazards.verify(body)
    tight = [".Lloop", op("v_permlane32_swap_b32", v[0], v[1]), op("v_mov_b32", v[0], 0), op("s_branch", ".Lloop")]
    with pytest.raises(hazards.HazardError, match="after 1 wait states; 2 are needed"):
        hazards.verify(tight)


def test_paths_that_meet_with_different_loads_outstanding_are_an_error():
    p = Program("t")
    p.op("s_cbranch_scc1", ".Lmeet")
    p.op("ds_read_b128", v[0:3], v[20])
    with pytest.raises(WaitError, match="paths meet at '.Lmeet'"):
        p.label(".Lmeet")
