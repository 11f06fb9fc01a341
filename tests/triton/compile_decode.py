"""Compiles the decode kernels for GPUs that need not be there: `compile_decode.py '[["attend", "sm_90", {…}], …]'`.

Prints a line of JSON for each, as `compile_prefill.py` does.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.triton.compile_prefill import TARGETS, sass

HEADS = 4  # key-value heads of the cache


def compiled(name: str, target: str, case: dict[str, Any]) -> Any:
    from zyfa_kernels.triton import decode_call, decode_kernel
    from zyfa_kernels.triton.targets import target_named

    backend, arch, _ = TARGETS[target]
    traits, d, block = target_named(backend, arch), case["dim"], case["block"]
    dv, kernel = min(d, 128), getattr(decode_kernel, f"{name}_kernel")
    code = "*i8" if case["int8"] else "*u8"
    pointers = dict.fromkeys(("q_scale", "k_scale", "v_scale", "maxima", "partial", "state", "lse"), "*fp32")
    pointers |= dict(q=code, k=code, v="*u8", block_table="*i32", seqlens_k="*i32", out="*bf16")
    group = case["group"]
    constants = dict(
        q_stride_t=HEADS * group * d, q_stride_h=d, q_scale_stride_t=HEADS * group, q_scale_stride_h=1,
        k_stride_b=HEADS * block * (d + dv), k_stride_t=d + dv, k_stride_h=block * (d + dv),
        v_stride_b=HEADS * block * (d + dv), v_stride_t=d + dv, v_stride_h=block * (d + dv), k_scale_stride=0,
        v_scale_stride=1, out_stride_t=HEADS * group * dv, out_stride_h=dv, GROUP=group,
        PARTS=-(-group // case["tile_m"]), D1=128 if d == 192 else d, D2=64 if d == 192 else 0, DV=dv, BLOCK=block,
        WINDOW=case["window"], LEAN=case["lean"], INT8=case["int8"], NATIVE=traits.native, PTX=traits.ptx, OFFSET=8.0,
        MOST=decode_call.most_splits(HEADS), LEAST_TILES=decode_call.LEAST_TILES, TILE_M=case["tile_m"], TILE=128,
        AT_ONCE=decode_call.COMBINED_AT_ONCE,
    )  # fmt: skip
    names = kernel.arg_names
    constants = {n: value for n, value in constants.items() if n in names}
    floats = ("softmax_scale_log2", "delta")
    signature = {
        n: "constexpr" if n in constants else pointers.get(n, "fp32" if n in floats else "i32") for n in names
    }
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("q", "k", "v", "partial") if n in names}
    made = ASTSource(kernel, signature, constants, attrs=aligned)
    lanes = TARGETS[target][2]
    warps = 4 if name == "combine" else decode_call.THREADS // lanes
    return triton.compile(made, target=GPUTarget(*TARGETS[target]), options={"num_warps": warps})


def facts(name: str, target: str, case: dict[str, Any]) -> dict[str, Any]:
    made = compiled(name, target, case)
    if target.startswith("sm_"):
        names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", sass(made.asm["cubin"]), re.M)
    else:
        names = re.findall(r"^\s+([vs]_\w+|scratch_\w+)", made.asm["amdgcn"], re.M)
    return {"shared": made.metadata.shared, "operations": Counter(names)}


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        print(json.dumps(facts(*job)))
