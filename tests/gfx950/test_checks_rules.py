"""The static checks on small kernels: a clean one passes, and each mutation is reported at the right place."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("triton")
from harness import assemble, source  # noqa: E402
from zyfa_kernels.emulator import CodeObject  # noqa: E402
from zyfa_kernels.emulator.checks import check  # noqa: E402

# Two tiles in flight: while the waves read one, the next comes from memory straight into LDS. Marks name mutations.
GOOD = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshrrev_b32_e32 v1, 6, v0
s_nop 0                              ;#lane-nop
v_readfirstlane_b32 s12, v1
s_lshl_b32 s12, s12, 10
v_and_b32_e32 v2, 63, v0
v_lshlrev_b32_e32 v2, 4, v2
v_lshlrev_b32_e32 v3, 4, v0
s_mov_b32 s10, 0x10000
s_mov_b32 s11, 0x20000
s_mov_b32 s14, 0
s_mov_b32 s15, 0
s_waitcnt lgkmcnt(0)                 ;#scalar-wait
s_mov_b32 s8, s4
s_and_b32 s9, s5, 0xffff
v_mov_b64_e32 v[16:17], 0
v_mov_b64_e32 v[18:19], 0
s_mov_b32 m0, s12
s_nop 0
buffer_load_dwordx4 v3, s[8:11], 0 offen lds
s_waitcnt vmcnt(0)
s_barrier
.Lloop:
s_xor_b32 s15, s15, 0x800
s_add_u32 s13, s12, s15
s_mov_b32 m0, s13
v_add_u32_e32 v3, 0x800, v3
buffer_load_dwordx4 v3, s[8:11], 0 offen lds
v_xor_b32_e32 v4, s15, v2
v_xor_b32_e32 v4, 0xc00, v4
ds_read_b128 v[8:11], v4
s_waitcnt lgkmcnt(0)                 ;#lds-read-wait
v_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[8:11], v[16:19]
s_add_u32 s14, s14, 1
s_cmp_lt_u32 s14, s6
s_waitcnt vmcnt(0)                   ;#dma-wait
s_barrier                            ;#barrier
s_cbranch_scc1 .Lloop
s_nop 7                              ;#mfma-nop
v_mul_f32_e32 v12, 2.0, v16
v_exp_f32_e32 v13, v12
s_nop 0                              ;#trans-nop
v_add_f32_e32 v13, 1.0, v13
v_mov_b32_e32 v14, 0
v_cvt_pk_fp8_f32 v14, v12, v13 op_sel:[0,0,1]
s_nop 1                              ;#swap-nop
v_permlane32_swap_b32_e32 v14, v13
v_cmp_gt_f32_e32 vcc, 0, v12
s_nop 1
v_cndmask_b32_e32 v13, v13, v14, vcc
v_lshlrev_b32_e32 v5, 2, v0
global_store_dword v5, v13, s[4:5]
s_endpgm
"""


def build(text: str, **options) -> CodeObject:
    body = "\n".join(line.split(";#")[0] for line in text.strip().splitlines())
    return CodeObject.load(assemble(source(body, **({"lds": 4096, "vgprs": 64, "accum_offset": 64} | options))))


def without(mark: str) -> str:
    lines = [line for line in GOOD.strip().splitlines() if not line.rstrip().endswith(f";#{mark}")]
    assert len(lines) == len(GOOD.strip().splitlines()) - 1
    return "\n".join(lines)


def findings(text: str, workgroup: int = 128, **options) -> list[tuple[str, str]]:
    return [(v.rule, v.instruction) for v in check(build(text, **options), workgroup).violations]


def test_clean_kernel():
    report = check(build(GOOD), 128)
    assert report.violations == [] and report.advice == []
    assert report.bank_conflicts == 0 and report.mfma == 1 and report.instructions == len(GOOD.strip().splitlines()) - 1
    assert report.as_dict()["violations"] == [] and report.resources[0]["waves_per_simd"] == 8


@pytest.mark.parametrize(
    ("mark", "rule", "instruction"),
    [
        ("scalar-wait", "wait", "s_mov_b32 s8, s4"),
        ("lds-read-wait", "wait", "v_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[8:11], v[16:19]"),
        ("dma-wait", "lds-wait", "ds_read_b128 v[8:11], v4"),
        ("barrier", "lds-barrier", "ds_read_b128 v[8:11], v4"),
        ("mfma-nop", "mfma-result", "v_mul_f32_e32 v12, 2.0, v16"),
        ("trans-nop", "trans", "v_add_f32_e32 v13, 1.0, v13"),
        ("lane-nop", "valu-readlane", "v_readfirstlane_b32 s12, v1"),
        ("swap-nop", "valu-permlane", "v_permlane32_swap_b32_e32 v14, v13"),
    ],
)
def test_one_line_removed(mark, rule, instruction):
    found = findings(without(mark))
    assert (rule, instruction) in found
    # What orders LDS between waves orders reads and overwrites alike; nothing of another kind may appear.
    others = {r for r, _ in found} - {rule}
    assert others <= ({"lds-overwrite", "lds-barrier"} if mark in ("barrier", "dma-wait", "lds-read-wait") else set())


def test_message_names_the_cure():
    text = str(next(v for v in check(build(without("lds-read-wait")), 128).violations if v.rule == "wait"))
    assert "wants s_waitcnt lgkmcnt(0)" in text and "v8, v9, v10, v11 may still be loading" in text
    text = str(next(v for v in check(build(without("mfma-nop")), 128).violations))
    assert "wants 8" in text and "behind `v_mfma_f32_16x16x32_bf16" in text


def test_wait_on_one_path_only():
    body = """
    v_lshlrev_b32_e32 v1, 2, v0
    global_load_dword v2, v1, s[0:1]
    s_cmp_eq_u32 s2, 0
    s_cbranch_scc1 .Lskip
    s_waitcnt vmcnt(0)
    .Lskip:
    v_mov_b32_e32 v3, v2
    s_endpgm
    """
    assert findings(body) == [("wait", "v_mov_b32_e32 v3, v2")]


def test_wait_around_a_loop():
    body = """
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v2, 0
    s_mov_b32 s5, 0
    .Lloop:
    v_add_u32_e32 v3, 1, v2
    global_load_dword v2, v1, s[0:1]
    s_add_u32 s5, s5, 1
    s_cmp_lt_u32 s5, s2
    s_cbranch_scc1 .Lloop
    s_waitcnt vmcnt(0)
    s_endpgm
    """
    assert findings(body) == [("wait", "v_add_u32_e32 v3, 1, v2")]


def test_counts_of_younger_operations():
    loads = "v_lshlrev_b32_e32 v1, 4, v0\n" + "".join(f"global_load_dword v{k}, v1, s[0:1]\n" for k in (2, 3, 4))
    use = "v_mov_b32_e32 v9, v3\ns_waitcnt vmcnt(0)\ns_endpgm"
    assert findings(loads + "s_waitcnt vmcnt(1)\n" + use) == []
    assert findings(loads + "s_waitcnt vmcnt(2)\n" + use) == [("wait", "v_mov_b32_e32 v9, v3")]


def test_scalar_loads_return_out_of_order():
    body = "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s6, s4\n"
    assert findings(body + "s_waitcnt lgkmcnt(0)\ns_endpgm") == [("wait", "s_mov_b32 s6, s4")]


def test_undefined_registers():
    assert findings("v_add_u32_e32 v2, v9, v0\ns_endpgm") == [("undefined-register", "v_add_u32_e32 v2, v9, v0")]
    one_path = "s_cmp_eq_u32 s2, 0\ns_cbranch_scc1 .La\nv_mov_b32_e32 v9, 0\n.La:\nv_mov_b32_e32 v2, v9\ns_endpgm"
    assert findings(one_path) == [("undefined-register", "v_mov_b32_e32 v2, v9")]
    assert findings(one_path.replace("s_cmp_eq", "v_mov_b32_e32 v9, 1\ns_cmp_eq")) == []
    assert [rule for rule, _ in findings("s_cbranch_scc1 .La\n.La:\ns_endpgm")] == ["undefined-register"]


def test_budget():
    assert findings("v_mov_b32_e32 v64, 0\ns_endpgm") == [("register-budget", "v_mov_b32_e32 v64, 0")]
    assert ("occupancy", "s_nop 0") in findings("s_nop 0\ns_endpgm", workgroup=512, vgprs=264, accum_offset=256)
    assert findings("s_nop 0\ns_endpgm", workgroup=512, vgprs=256, accum_offset=256) == []
    assert findings("s_nop 0") == [("code-end", "s_nop 0")]


def test_bank_conflicts():
    fill = "v_lshlrev_b32_e32 v1, 4, v0\nv_mov_b64_e32 v[2:3], 0\nv_mov_b64_e32 v[4:5], 0\nds_write_b128 v1, v[2:5]\n"
    loop = (
        "v_mov_b64_e32 v[16:17], 0\nv_mov_b64_e32 v[18:19], 0\ns_mov_b32 s5, 0\n.Lloop:\nds_read_b128 v[8:11], v6\n"
        "s_waitcnt lgkmcnt(0)\nv_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[8:11], v[16:19]\ns_add_u32 s5, s5, 1\n"
        "s_cmp_lt_u32 s5, s2\ns_cbranch_scc1 .Lloop\ns_endpgm"
    )
    for shift, extra in ((4, 0), (7, 28), (8, 60)):
        # A stride of 16 bytes has no conflict; 128 bytes puts 8 of a phase's 16 lanes on a bank, 256 bytes all 16.
        body = fill + "s_waitcnt lgkmcnt(0)\ns_barrier\n" + f"v_lshlrev_b32_e32 v6, {shift}, v0\n" + loop
        assert check(build(body, lds=65536), 64).bank_conflicts == extra


MIR = """---
name: t
body: |
  bb.0:
    {first}
    {second}
    S_ENDPGM 0
...
"""


def mir_registers(text: str) -> str:
    """v[a:b] to MIR's register names."""
    first, last = (int(x) for x in text[2:-1].split(":"))
    return "_".join(f"{'$' if n == first else ''}vgpr{n}" for n in range(first, last + 1))


def mfma(opcode: str, d: str, a: str, b: str, c: str) -> str:
    c = "0" if c == "0" else mir_registers(c)
    tail = "0, 0" if "F8F6F4" in opcode else "0, 0, 0"
    sources = f"{mir_registers(a)}, {mir_registers(b)}, {c}"
    return f"{mir_registers(d)} = {opcode} {sources}, {tail}, implicit $mode, implicit $exec"


FP8, FP4 = "V_MFMA_F32_32X32X64_F8F6F4_f8_f8_vgprcd_e64", "V_MFMA_F32_32X32X64_F8F6F4_f4_f4_vgprcd_e64"
BF16 = "V_MFMA_F32_32X32X16_BF16_vgprcd_e64"
ADD = "$vgpr{} = V_ADD_F32_e32 $vgpr{}, $vgpr{}, implicit $mode, implicit $exec"
EXP = "$vgpr1 = V_EXP_F32_e32 $vgpr2, implicit $mode, implicit $exec"
SWAP = "$vgpr1, $vgpr5 = V_PERMLANE32_SWAP_B32_e32 $vgpr1, $vgpr5, implicit $exec"
CVT_HIGH = "$vgpr1 = V_CVT_PK_FP8_F32_e64 8, $vgpr2, 0, $vgpr3, $vgpr1, 0, implicit $mode, implicit $exec"
PRODUCT = (
    "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0",
    mfma(FP8, "v[0:15]", "v[16:23]", "v[24:31]", "0"),
)
PAIRS = [
    PRODUCT + ("v_add_f32_e32 v100, v3, v3", ADD.format(100, 3, 3)),
    PRODUCT + ("v_add_f32_e32 v3, v100, v100", ADD.format(3, 100, 100)),
    PRODUCT
    + (
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[80:87], v[0:15]",
        mfma(FP8, "v[0:15]", "v[32:39]", "v[80:87]", "v[0:15]"),
    ),
    PRODUCT
    + (
        "v_mfma_f32_32x32x64_f8f6f4 v[40:55], v[60:67], v[80:87], v[4:19]",
        mfma(FP8, "v[40:55]", "v[60:67]", "v[80:87]", "v[4:19]"),
    ),
    PRODUCT
    + ("v_mfma_f32_32x32x64_f8f6f4 v[40:55], v[0:7], v[80:87], 0", mfma(FP8, "v[40:55]", "v[0:7]", "v[80:87]", "0")),
    (
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], v[40:55]",
        mfma(FP8, "v[0:15]", "v[16:23]", "v[24:31]", "v[40:55]"),
        "v_add_f32_e32 v43, v100, v100",
        ADD.format(43, 100, 100),
    ),
    (
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:19], v[24:27], 0 cbsz:4 blgp:4",
        mfma(FP4, "v[0:15]", "v[16:19]", "v[24:27]", "0").replace("0, 0, implicit", "4, 4, implicit"),
        "v_add_f32_e32 v100, v3, v3",
        ADD.format(100, 3, 3),
    ),
    (
        "v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[24:27], 0",
        mfma(BF16, "v[0:15]", "v[16:19]", "v[24:27]", "0"),
        "v_add_f32_e32 v100, v3, v3",
        ADD.format(100, 3, 3),
    ),
    PRODUCT + ("ds_write_b32 v100, v3", "DS_WRITE_B32_gfx9 $vgpr100, $vgpr3, 0, 0, implicit $exec"),
    ("v_add_f32_e32 v17, v100, v100", ADD.format(17, 100, 100)) + PRODUCT,
    ("v_exp_f32_e32 v1, v2", EXP, "v_add_f32_e32 v3, v1, v1", ADD.format(3, 1, 1)),
    ("v_exp_f32_e32 v1, v2", EXP, "v_permlane32_swap_b32_e32 v1, v5", SWAP),
    ("v_add_f32_e32 v1, v2, v2", ADD.format(1, 2, 2), "v_permlane32_swap_b32_e32 v1, v5", SWAP),
    ("v_permlane32_swap_b32_e32 v1, v5", SWAP, "v_add_f32_e32 v3, v1, v1", ADD.format(3, 1, 1)),
    ("v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]", CVT_HIGH, "v_add_f32_e32 v3, v1, v1", ADD.format(3, 1, 1)),
    ("v_cvt_pk_fp8_f32 v1, v2, v3", CVT_HIGH.replace(" 8,", " 0,"), "v_add_f32_e32 v3, v1, v1", ADD.format(3, 1, 1)),
    (
        "v_readfirstlane_b32 s4, v1",
        "$sgpr4 = V_READFIRSTLANE_B32 $vgpr1, implicit $exec",
        "buffer_load_dword v3, v100, s[4:7], 0 offen",
        "$vgpr3 = BUFFER_LOAD_DWORD_OFFEN $vgpr100, $sgpr4_sgpr5_sgpr6_sgpr7, 0, 0, 0, 0, implicit $exec",
    ),
    (
        "v_add_f32_e32 v1, v2, v2",
        ADD.format(1, 2, 2),
        "v_readlane_b32 s10, v1, 3",
        "$sgpr10 = V_READLANE_B32 $vgpr1, 3",
    ),
]


@pytest.mark.skipif(shutil.which("llc-22") is None, reason="needs LLVM's llc (llc-22)")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0].split()[0]} then {p[2].split()[0]}")
def test_distances_agree_with_llvm(pair, tmp_path):
    """The nops that LLVM's hazard recogniser puts between two instructions are those that the check asks for."""
    first, first_mir, second, second_mir = pair
    (tmp_path / "t.mir").write_text(MIR.format(first=first_mir, second=second_mir))
    run = subprocess.run(
        [
            "llc-22",
            "-mtriple=amdgcn",
            "-mcpu=gfx950",
            "-run-pass",
            "post-RA-hazard-rec",
            "-verify-machineinstrs=0",
            str(tmp_path / "t.mir"),
            "-o",
            "-",
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    body = run.stdout.split("bb.0:")[1].split("S_ENDPGM")[0]
    wanted = sum(int(line.split()[1]) + 1 for line in body.splitlines() if "S_NOP" in line)

    def hazards(nops: int) -> list[str]:
        fill = "".join("s_nop 0\n" for _ in range(nops))
        code = build(f"{first}\n{fill}{second}\ns_endpgm", vgprs=128, accum_offset=128)
        found = check(code, 64, lds_runs=False)
        skip = ("undefined-register", "wait")
        return [v.rule for v in (*found.violations, *found.advice) if v.rule not in skip]

    assert hazards(wanted) == []
    if wanted:
        assert hazards(wanted - 1) != []
