"""The decoder's text against llvm-objdump's, where one that knows gfx950 is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import aiter
import pytest

pytest.importorskip("triton")
from harness import assemble, source  # noqa: E402
from zyfa_kernels.emulator import CodeObject, UnknownInstruction  # noqa: E402
from zyfa_kernels.emulator.decode import decode  # noqa: E402

OBJDUMP = next((p for n in ("llvm-objdump-22", "llvm-objdump-21", "llvm-objdump-20") if (p := shutil.which(n))), None)

SAMPLES = """
s_load_dwordx8 s[8:15], s[0:1], 0x10
s_load_dword s8, s[0:1], s9 offset:0x20
s_add_u32 s8, s9, 0x12345678
s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
s_waitcnt vmcnt(0)
s_waitcnt lgkmcnt(0)
s_waitcnt vmcnt(17) expcnt(2) lgkmcnt(3)
s_setprio 1
v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0
v_mfma_f32_32x32x64_f8f6f4 a[0:15], v[16:21], a[24:27], a[0:15] cbsz:2 blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], v[0:3], v40, v41 op_sel:[1,0,0] op_sel_hi:[0,1,0]
v_mfma_i32_32x32x32_i8 v[0:15], v[16:19], v[20:23], v[0:15]
v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[6:7] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]
v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]
v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, v3 op_sel:[0,0,0,1]
v_cvt_pk_u8_f32 v0, v1, 2, v0
v_max3_f32 v0, |v1|, -v2, v3
v_exp_f32_e64 v0, -v1 mul:2
v_mul_f32_e64 v0, v1, v2 clamp
v_permlane32_swap_b32_e32 v0, v1
v_cndmask_b32_e64 v0, v1, v2, s[10:11]
v_mov_b32_dpp v0, v1 row_ror:4 row_mask:0xf bank_mask:0xf bound_ctrl:0
v_accvgpr_write_b32 a5, v1
ds_read_b64_tr_b8 v[0:1], v2 offset:640
ds_read2_b32 v[0:1], v2 offset0:1 offset1:3
ds_write_b128 v2, v[4:7] offset:16
buffer_load_dwordx4 v1, s[8:11], s20 offen offset:32 lds
buffer_load_dwordx4 v[4:7], v1, s[8:11], 0 offen offset:4080
buffer_store_dwordx2 v[4:5], off, s[8:11], 0
global_load_dwordx4 v[4:7], v1, s[4:5] offset:-16
global_store_dword v[2:3], v4, off
global_load_lds_dwordx4 v[2:3], off
"""


def normal(text: str) -> str:
    return re.sub(r"\s*,\s*", ",", re.sub(r"\s+", " ", text)).strip().lower()


def objdump(path: Path) -> dict[int, str]:
    text = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"^\s+(\S.*?)\s*// ([0-9A-F]+):", text, re.M)
    return {int(address, 16): instruction for instruction, address in found}


@pytest.mark.skipif(OBJDUMP is None, reason="no llvm-objdump that knows gfx950")
def test_text_agrees_with_llvm(tmp_path):
    data = assemble(source(SAMPLES + "s_endpgm"))
    (tmp_path / "a.hsaco").write_bytes(data)
    want = objdump(tmp_path / "a.hsaco")
    program = CodeObject.load(data).kernel().program
    assert [normal(i.text) for i in program] == [normal(want[i.address]) for i in program]


@pytest.mark.skipif(OBJDUMP is None or not aiter.ROOT, reason="needs llvm-objdump and ZYFA_AITER_HSA")
def test_text_agrees_with_llvm_on_aiter():
    count = 0
    for path in sorted(Path(aiter.ROOT).glob("fmha_v[34]_fwd/*.co")):
        want = objdump(path)
        for inst in CodeObject.load(path).instructions:
            if inst.target is None:
                assert normal(inst.text) == normal(want[inst.address]), path.name
            count += 1
    assert count > 100_000


def test_text_assembles_to_the_same_bytes():
    lines = [line for line in SAMPLES.strip().splitlines()]
    program = CodeObject.load(assemble(source("\n".join(lines) + "\ns_endpgm"))).kernel().program
    again = CodeObject.load(assemble(source("\n".join(i.text for i in program)))).kernel().program
    assert [i.raw for i in again] == [i.raw for i in program]


def test_unknown_word_names_its_address():
    with pytest.raises(UnknownInstruction) as caught:
        decode(bytes.fromhex("000080bf") + b"\xff\xff\xff\xff" * 2, 0x1000)
    assert caught.value.address == 0x1004 and "0xffffffff" in str(caught.value)


def test_branch_targets():
    program = (
        CodeObject.load(assemble(source(".La:\ns_nop 0\ns_branch .Lb\ns_nop 1\n.Lb:\ns_cbranch_scc0 .La\ns_endpgm")))
        .kernel()
        .program
    )
    start = program[0].address
    assert program[1].target == start + 12 and program[3].target == start
