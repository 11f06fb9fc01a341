"""The kernels of `head_scales` compile without a GPU, and spill nothing on AMD's."""

from __future__ import annotations

import re

import pytest

from tests.triton.compiling import compile_for, run_script

pytest.importorskip("triton")

SHARED = {"sm_90": 227 << 10, "gfx950": 160 << 10, "gfx942": 64 << 10}  # bytes for a program


def compile_all() -> None:
    from zyfa_kernels.triton.head_scales import maxima_kernel, scales_kernel
    from zyfa_kernels.triton.rotate_quantize import default_tile

    mla = dict(
        k_token=16 * 192, k_head=192, k_channel=1, v_token=16 * 256, v_head=256, v_channel=1, D0=128, W0=128,
        N0=128**-0.5, D1=64, W1=64, N1=64**-0.5, DV=128, WV=128, ROTATE="dot", ROWS=64,
    )  # fmt: skip
    for target, shared in SHARED.items():
        stages = default_tile(128**2 + 64**2, 192, 2, shared).stages
        kinds = [(maxima_kernel, mla | {"STAGES": stages}, 4)]
        kinds += [(scales_kernel, {"PROGRAMS": 512, "INT8": int8}, 1) for int8 in (False, True)]
        for kernel, constants, warps in kinds:
            types = dict(k="*bf16", v="*bf16", table0="*bf16", table1="*bf16", largest="*i32", scale="*fp32")
            made = compile_for(target, kernel, constants, types, aligned=True, num_warps=warps)
            print("compiled", target, kernel.__name__, made.metadata.shared, flush=True)
            if target.startswith("gfx"):
                assert re.search(r"ScratchSize: 0\b", made.asm["amdgcn"]), target
            elif kernel is maxima_kernel:
                assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async" in made.asm["ptx"]


def test_compiles() -> None:
    assert run_script(__file__).count("compiled") == 3 * len(SHARED)


if __name__ == "__main__":
    compile_all()
