"""The gfx950 instructions that the generator may emit, as a table.

A row is `mnemonic: (class, operands, implicit)`. Operands are written in the assembler's order; `=` marks a result,
`+` a result that is also read (partial writes), nothing a source. The letter says what may stand there, the number how
many 32-bit registers wide it is:

    v  vector register        s  scalar register       m  scalar mask (pair or vcc)
    a  vector, scalar, inline constant or literal      c  vector register or inline constant (MFMA's C)
    k  scalar register, inline constant or literal     i  immediate            l  label

`implicit` lists special registers that the instruction reads (name) or writes (=name).
Source of the operand forms: AMD CDNA3/CDNA4 instruction set architecture guides; LLVM's assembler accepts each.
"""

from __future__ import annotations

from dataclasses import dataclass

VALU, TRANS, MFMA, DS, VMEM, VMEM_LDS, VSTORE, SMEM, SALU, BRANCH, BARRIER, WAIT, NOP, END = (
    "valu", "trans", "mfma", "ds", "vmem", "vmem_lds", "vstore",
    "smem", "salu", "branch", "barrier", "wait", "nop", "end",
)  # fmt: skip

_ROWS: dict[str, tuple[str, str, str]] = {
    # Matrix. The 64-deep f8f6f4 forms read cbsz/blgp = 0 as e4m3.
    "v_mfma_f32_32x32x64_f8f6f4": (MFMA, "=v16 v8 v8 c16", ""),
    "v_mfma_scale_f32_32x32x64_f8f6f4": (MFMA, "=v16 v8 v8 c16 v1 v1", ""),
    "v_mfma_f32_16x16x128_f8f6f4": (MFMA, "=v4 v8 v8 c4", ""),
    # Vector arithmetic.
    "v_mov_b32": (VALU, "=v1 a1", ""),
    "v_add_u32": (VALU, "=v1 a1 v1", ""),
    "v_sub_u32": (VALU, "=v1 a1 v1", ""),
    "v_subrev_u32": (VALU, "=v1 a1 v1", ""),
    "v_mul_lo_u32": (VALU, "=v1 a1 a1", ""),
    "v_and_b32": (VALU, "=v1 a1 v1", ""),
    "v_xor_b32": (VALU, "=v1 a1 v1", ""),
    "v_lshlrev_b32": (VALU, "=v1 a1 v1", ""),
    "v_lshrrev_b32": (VALU, "=v1 a1 v1", ""),
    "v_lshl_or_b32": (VALU, "=v1 a1 a1 a1", ""),
    "v_lshl_add_u32": (VALU, "=v1 a1 a1 a1", ""),
    "v_add_f32": (VALU, "=v1 a1 v1", ""),
    "v_sub_f32": (VALU, "=v1 a1 v1", ""),
    "v_mul_f32": (VALU, "=v1 a1 v1", ""),
    "v_pk_mul_f32": (VALU, "=v2 v2 v2", ""),
    "v_fma_f32": (VALU, "=v1 a1 a1 a1", ""),
    "v_fmac_f32": (VALU, "+v1 a1 v1", ""),
    "v_max_f32": (VALU, "=v1 a1 v1", ""),
    "v_maximum3_f32": (VALU, "=v1 a1 a1 a1", ""),
    "v_ceil_f32": (VALU, "=v1 a1", ""),
    "v_permlane32_swap_b32": (VALU, "+v1 +v1", ""),
    "v_cvt_pk_u8_f32": (VALU, "=v1 a1 a1 a1", ""),
    "v_cvt_scalef32_pk_fp8_f32": (VALU, "+v1 a1 a1 a1", ""),
    "v_cvt_pk_bf16_f32": (VALU, "=v1 a1 a1", ""),
    "v_cmp_le_u32": (VALU, "=m2 a1 a1", ""),
    "v_cmp_neq_f32": (VALU, "=m2 a1 a1", ""),
    "v_cmp_gt_f32": (VALU, "=m2 a1 a1", ""),
    "v_cndmask_b32": (VALU, "=v1 a1 a1 m2", ""),
    "v_readfirstlane_b32": (VALU, "=s1 v1", ""),
    "v_exp_f32": (TRANS, "=v1 a1", ""),
    "v_log_f32": (TRANS, "=v1 a1", ""),
    "v_rcp_f32": (TRANS, "=v1 a1", ""),
    # Memory.
    "ds_read_b128": (DS, "=v4 v1", ""),
    "ds_read_b64_tr_b8": (DS, "=v2 v1", ""),
    "buffer_load_dword": (VMEM, "=v1 v1 s4 k1", ""),
    "buffer_load_dwordx4": (VMEM, "=v4 v1 s4 k1", ""),
    "buffer_load_dwordx4 lds": (VMEM_LDS, "v1 s4 k1", "m0"),
    "buffer_store_dword": (VSTORE, "v1 v1 s4 k1", ""),
    "buffer_store_dwordx4": (VSTORE, "v4 v1 s4 k1", ""),
    "s_load_dword": (SMEM, "=s1 s2 k1", ""),
    "s_load_dwordx2": (SMEM, "=s2 s2 i1", ""),
    "s_load_dwordx4": (SMEM, "=s4 s2 i1", ""),
    "s_load_dwordx8": (SMEM, "=s8 s2 i1", ""),
    "s_load_dwordx16": (SMEM, "=s16 s2 i1", ""),
    # Scalar.
    "s_mov_b32": (SALU, "=s1 k1", ""),
    "s_mov_b64": (SALU, "=s2 k2", ""),
    "s_add_u32": (SALU, "=s1 k1 k1", "=scc"),
    "s_addc_u32": (SALU, "=s1 k1 k1", "scc =scc"),
    "s_add_i32": (SALU, "=s1 k1 k1", "=scc"),
    "s_sub_i32": (SALU, "=s1 k1 k1", "=scc"),
    "s_min_i32": (SALU, "=s1 k1 k1", "=scc"),
    "s_max_i32": (SALU, "=s1 k1 k1", "=scc"),
    "s_mul_i32": (SALU, "=s1 k1 k1", ""),
    "s_mul_hi_u32": (SALU, "=s1 k1 k1", ""),
    "s_and_b32": (SALU, "=s1 k1 k1", "=scc"),
    "s_lshl_b32": (SALU, "=s1 k1 k1", "=scc"),
    "s_lshr_b32": (SALU, "=s1 k1 k1", "=scc"),
    "s_ashr_i32": (SALU, "=s1 k1 k1", "=scc"),
    "s_cselect_b32": (SALU, "=s1 k1 k1", "scc"),
    "s_cmp_lt_i32": (SALU, "k1 k1", "=scc"),
    "s_cmp_le_i32": (SALU, "k1 k1", "=scc"),
    "s_cmp_ge_i32": (SALU, "k1 k1", "=scc"),
    "s_cmp_eq_u32": (SALU, "k1 k1", "=scc"),
    "s_cmp_eq_u64": (SALU, "s2 k2", "=scc"),
    "s_setprio": (SALU, "i1", ""),
    "s_branch": (BRANCH, "l1", ""),
    "s_cbranch_scc0": (BRANCH, "l1", "scc"),
    "s_cbranch_scc1": (BRANCH, "l1", "scc"),
    "s_cbranch_vccnz": (BRANCH, "l1", "vcc"),
    "s_barrier": (BARRIER, "", ""),
    "s_nop": (NOP, "i1", ""),
    "s_endpgm": (END, "", ""),
}


@dataclass(frozen=True)
class Operand:
    letter: str
    width: int
    reads: bool
    writes: bool


@dataclass(frozen=True)
class Spec:
    mnemonic: str
    kind: str
    operands: tuple[Operand, ...]
    implicit_reads: tuple[str, ...]
    implicit_writes: tuple[str, ...]


def _parse(mnemonic: str, kind: str, operands: str, implicit: str) -> Spec:
    parsed = []
    for text in operands.split():
        role = text[0] if text[0] in "=+" else ""
        letter, width = text[len(role)], int(text[len(role) + 1 :])
        parsed.append(Operand(letter, width, reads=role != "=", writes=role != ""))
    names = implicit.split()
    return Spec(
        mnemonic,
        kind,
        tuple(parsed),
        tuple(n for n in names if not n.startswith("=")),
        tuple(n[1:] for n in names if n.startswith("=")),
    )


ISA: dict[str, Spec] = {name: _parse(name, *row) for name, row in _ROWS.items()}

# Passes of each matrix instruction (4 cycles a pass), fp8 operands.
PASSES = {
    "v_mfma_f32_32x32x64_f8f6f4": 16,
    "v_mfma_scale_f32_32x32x64_f8f6f4": 16,
    "v_mfma_f32_16x16x128_f8f6f4": 8,
}
