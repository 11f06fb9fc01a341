"""Which registers an instruction reads and writes, implicit ones included."""

from __future__ import annotations

from .decode import EXEC, M0, SCC, VCC, Instruction

# Instructions that keep part of their destination's old content.
_PARTIAL = (
    "v_cvt_pk_u8_f32",
    "v_cvt_pk_fp8_f32",
    "v_cvt_pk_bf8_f32",
    "v_cvt_sr_fp8_f32",
    "v_cvt_sr_bf8_f32",
    "v_cvt_scalef32_pk_fp8_f32",
    "v_cvt_scalef32_pk_bf8_f32",
    "v_cvt_scalef32_pk_fp4_f32",
    "v_cvt_scalef32_pk_fp8_bf16",
    "v_cvt_scalef32_pk_fp8_f16",
    "v_cvt_scalef32_pk_fp4_bf16",
)
_SCC_READERS = (
    "s_addc_u32",
    "s_subb_u32",
    "s_cselect_b32",
    "s_cselect_b64",
    "s_cmov_b32",
    "s_cmov_b64",
    "s_cmovk_i32",
    "s_cbranch_scc0",
    "s_cbranch_scc1",
)
_SCC_SILENT = (
    "s_mov_b32",
    "s_mov_b64",
    "s_movk_i32",
    "s_mul_i32",
    "s_mul_hi_u32",
    "s_mul_hi_i32",
    "s_cselect_b32",
    "s_cselect_b64",
    "s_cmov_b32",
    "s_cmov_b64",
    "s_cmovk_i32",
    "s_bfm_b32",
    "s_bfm_b64",
    "s_brev_b32",
    "s_brev_b64",
    "s_ff1_i32_b32",
    "s_ff1_i32_b64",
    "s_flbit_i32_b32",
    "s_flbit_i32_b64",
    "s_sext_i32_i8",
    "s_sext_i32_i16",
    "s_bitset0_b32",
    "s_bitset1_b32",
    "s_getpc_b64",
    "s_setpc_b64",
    "s_swappc_b64",
    "s_pack_ll_b32_b16",
    "s_pack_lh_b32_b16",
    "s_pack_hh_b32_b16",
    "s_getreg_b32",
    "s_setreg_b32",
    "s_setreg_imm32_b32",
    "s_call_b64",
    "s_bitreplicate_b64_b32",
)


def partial_destination(inst: Instruction) -> bool:
    """Whether the instruction leaves some bits of its destination as they were."""
    return (
        inst.mnemonic in _PARTIAL
        or "d16" in inst.mnemonic
        or (inst.variant == "sdwa" and inst.mods.get("dst_unused", 0) == 2 and inst.mods.get("dst_sel", 6) != 6)
    )


def destination_roles(inst: Instruction) -> tuple[str, ...]:
    roles = [r for r in ("vdst", "sdst") if r in inst.operands]
    return tuple(roles)


def reads(inst: Instruction) -> list[range]:
    """Unified register ranges that `inst` reads.

    A destination of which it keeps some bits (`partial_destination`) is not among them: a first half or byte may be
    written into a fresh register; reading that back whole is then the error.
    """
    name, found = inst.mnemonic, []
    for role, operand in inst.operands.items():
        if role in ("vdst", "sdst") or operand.reg < 0:
            continue
        found.append(operand.regs)
    if (
        name.startswith("v_permlane")
        and "swap" in name
        or name
        in (
            "v_swap_b32",
            "v_fmac_f32",
            "v_mac_f32",
            "v_fmac_f64",
            "v_pk_fmac_f16",
            "v_fmac_f16",
            "v_dot2c_f32_bf16",
            "v_dot2c_f32_f16",
            "v_writelane_b32",
        )
    ):
        found.append(inst.operands["vdst"].regs)
    elif name.startswith("v_smfmac"):
        found.append(inst.operands["vdst"].regs)
    if inst.encoding == "VOP2" and name in ("v_cndmask_b32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"):
        found.append(range(VCC, VCC + 2))
    if name in ("s_cbranch_vccz", "s_cbranch_vccnz", "v_div_fmas_f32"):
        found.append(range(VCC, VCC + 2))
    if name in _SCC_READERS:
        found.append(range(SCC, SCC + 1))
    if reads_m0(inst):
        found.append(range(M0, M0 + 1))
    if inst.encoding == "SOP1" and "saveexec" in name or name in ("s_cbranch_execz", "s_cbranch_execnz"):
        found.append(range(EXEC, EXEC + 2))
    if name in ("s_bitset0_b32", "s_bitset1_b32", "s_cmovk_i32", "s_cmov_b32", "s_addk_i32", "s_mulk_i32"):
        found.append(inst.operands["sdst"].regs)
    return found


def reads_m0(inst: Instruction) -> bool:
    return (
        bool(inst.encoding == "MUBUF" and inst.mods.get("lds"))
        or "load_lds" in inst.mnemonic
        or (inst.mnemonic in ("s_movrels_b32", "s_movreld_b32", "ds_read_addtid_b32", "ds_write_addtid_b32"))
    )


def writes(inst: Instruction) -> list[range]:
    """Unified register ranges that `inst` writes."""
    name = inst.mnemonic
    found = [inst.operands[role].regs for role in destination_roles(inst)]
    if name.startswith("v_permlane") and "swap" in name or name == "v_swap_b32":
        found.append(inst.operands["src0"].regs)
    if inst.encoding == "VOP2" and name in (
        "v_add_co_u32",
        "v_sub_co_u32",
        "v_subrev_co_u32",
        "v_addc_co_u32",
        "v_subb_co_u32",
        "v_subbrev_co_u32",
    ):
        found.append(range(VCC, VCC + 2))
    if inst.encoding in ("SOP1", "SOP2", "SOPC", "SOPK") and name not in _SCC_SILENT:
        found.append(range(SCC, SCC + 1))
    if name.startswith("v_cmpx") or inst.encoding == "SOP1" and "saveexec" in name:
        found.append(range(EXEC, EXEC + 2))
    return found


def is_mfma(inst: Instruction) -> bool:
    return inst.mnemonic.startswith(("v_mfma", "v_smfmac"))


_TRANS = (
    "v_exp_f32",
    "v_log_f32",
    "v_rcp_f32",
    "v_rcp_iflag_f32",
    "v_rsq_f32",
    "v_sqrt_f32",
    "v_sin_f32",
    "v_cos_f32",
    "v_exp_f16",
    "v_log_f16",
    "v_rcp_f16",
    "v_rsq_f16",
    "v_sqrt_f16",
    "v_sin_f16",
    "v_cos_f16",
    "v_rcp_f64",
    "v_rsq_f64",
    "v_sqrt_f64",
    "v_exp_legacy_f32",
    "v_log_legacy_f32",
)


def is_trans(inst: Instruction) -> bool:
    return inst.mnemonic in _TRANS


def is_valu(inst: Instruction) -> bool:
    return inst.encoding in ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3P") or (inst.encoding == "MFMA" and not is_mfma(inst))


def is_lds_load(inst: Instruction) -> bool:
    """A load from global memory straight into LDS."""
    return bool(inst.encoding == "MUBUF" and inst.mods.get("lds")) or "load_lds" in inst.mnemonic


def is_vmem(inst: Instruction) -> bool:
    return inst.encoding in ("MUBUF", "GLOBAL", "FLAT", "SCRATCH") and inst.mnemonic not in (
        "buffer_inv",
        "buffer_wbl2",
    )
