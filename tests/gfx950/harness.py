"""Assembles snippets of gfx950 assembly with Triton's LLVM and runs them on the emulator."""

from __future__ import annotations

import struct

import numpy as np
from zyfa_kernels.emulator import CodeObject, Emulator
from zyfa_kernels.runtime import toolchain

KERNEL = """
.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
.amdhsa_code_object_version 6
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
.Lend_{name}:
.size {name}, .Lend_{name}-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_kernarg_size {kernarg}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y 0
  .amdhsa_system_sgpr_workgroup_id_z 0
  .amdhsa_system_vgpr_workitem_id 0
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_next_free_sgpr 100
  .amdhsa_accum_offset {accum_offset}
  .amdhsa_float_denorm_mode_32 {denorm}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 100
    .vgpr_count: {vgprs}
    .max_flat_workgroup_size: 1024
...
.end_amdgpu_metadata
"""


def source(
    body: str,
    *,
    name: str = "kernel",
    lds: int = 0,
    kernarg: int = 16,
    vgprs: int = 512,
    accum_offset: int = 256,
    denorm: int = 3,
) -> str:
    """Text of an assembly file with one kernel of the given body."""
    return KERNEL.format(
        name=name, body=body, lds=lds, kernarg=kernarg, vgprs=vgprs, accum_offset=accum_offset, denorm=denorm
    )


def assemble(text: str) -> bytes:
    """The linked code object of an assembly text. Raises ValueError with LLVM's message."""
    try:
        return toolchain.assemble(text)
    except toolchain.AssemblyError as error:
        raise ValueError(str(error)) from None


def run_snippet(
    code: str,
    vectors: dict[str, np.ndarray] | None = None,
    scalars: dict[int, int] | None = None,
    outputs: tuple[str, ...] = (),
    *,
    scalar_outputs: tuple[int, ...] = (),
    lds: int = 0,
    denorm: int = 3,
    emulator_options: dict | None = None,
    after: str = "s_nop 15\n s_nop 15",
) -> dict:
    """Run `code` on one wave with given registers; returns the asked registers as uint32.

    Args:
        vectors: register ("v4", "a2") to uint32 [64].
        scalars: SGPR number (from 8) to its value.
        outputs: vector registers to read back, as [64]; scalar_outputs: SGPRs to read back, as ints.
    """
    vectors, scalars = vectors or {}, scalars or {}
    body = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "s_waitcnt lgkmcnt(0)", "v_lshlrev_b32_e32 v255, 2, v0"]
    data = []
    for register, values in vectors.items():
        target = register if register.startswith("v") else "v254"
        body += [
            f"global_load_dword {target}, v255, s[4:5]",
            "s_add_u32 s4, s4, 256",
            "s_addc_u32 s5, s5, 0",
            "s_waitcnt vmcnt(0)",
        ]
        if register.startswith("a"):
            body += [f"v_accvgpr_write_b32 {register}, v254", "s_nop 3"]
        data.append(np.asarray(values, np.uint32))
    body += [f"s_mov_b32 s{number}, {value & 0xFFFFFFFF:#x}" for number, value in scalars.items()]
    body += ["s_nop 7", *code.strip().splitlines(), after, "s_mov_b64 exec, -1", "s_nop 7"]
    for number in scalar_outputs:
        body += [
            f"v_mov_b32_e32 v253, s{number}",
            "global_store_dword v255, v253, s[6:7]",
            "s_add_u32 s6, s6, 256",
            "s_addc_u32 s7, s7, 0",
        ]
    for register in outputs:
        if register.startswith("a"):
            body += [f"v_accvgpr_read_b32 v254, {register}", "s_nop 3"]
        body += [
            f"global_store_dword v255, {register if register.startswith('v') else 'v254'}, s[6:7]",
            "s_add_u32 s6, s6, 256",
            "s_addc_u32 s7, s7, 0",
        ]
    body += ["s_endpgm"]
    code_object = CodeObject.load(assemble(source("\n".join(body), lds=lds, denorm=denorm)))
    emulator = Emulator(code_object, **(emulator_options or {}))
    source_at = emulator.memory.upload(np.concatenate(data)) if data else 0
    count = len(outputs) + len(scalar_outputs)
    target_at = emulator.memory.alloc(256 * max(count, 1))
    emulator.launch("kernel", (1, 1, 1), 64, struct.pack("<QQ", source_at, target_at))
    got = emulator.memory.download(target_at, np.uint32, (max(count, 1), 64))
    result = {number: int(got[k, 0]) for k, number in enumerate(scalar_outputs)}
    return result | {register: got[len(scalar_outputs) + k] for k, register in enumerate(outputs)}


def bits(x) -> np.ndarray:
    """fp32 values as uint32."""
    return np.asarray(x, np.float32).view(np.uint32)


def floats(x) -> np.ndarray:
    return np.asarray(x, np.uint32).view(np.float32)
