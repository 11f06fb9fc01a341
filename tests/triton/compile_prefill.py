"""Compiles prefill kernels for GPUs that need not be there: `compile_prefill.py '[["hopper", "sm_90", {…}], …]'`.

Prints a line of JSON for each: its shared memory and AMD's scratch, in bytes, and how often each operation of SASS, or
of MFMA, occurs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": ("cuda", 90, 32),
    "sm_80": ("cuda", 80, 32),
    "gfx950": ("hip", "gfx950", 64),
    "gfx942": ("hip", "gfx942", 64),
}
HEADS, GROUP = 8, 4


def plain(target: str, case: dict[str, Any]) -> Any:
    from zyfa_kernels.triton.prefill_kernel import prefill_kernel as kernel
    from zyfa_kernels.triton.targets import target_named

    backend, arch, _ = TARGETS[target]
    traits, d = target_named(backend, arch), case["dim"]
    code = "*i8" if case["int8"] else "*u8"
    pointers = dict.fromkeys(("q_scale", "k_scale", "v_scale", "out_scale", "lse"), "*fp32")
    pointers |= dict(q=code, k=code, v="*u8", vt="*u8", bad="*i32", block_table="*i32", cu_seqlens_q="*i32")
    pointers |= dict(lengths_k="*i32", out="*u8" if case["fp8_out"] else "*bf16")
    tile = traits.tile(d)
    constants = dict(
        D1=128 if d == 192 else d, D2=64 if d == 192 else 0, DV=min(d, 128), BLOCK=case["block"], CAUSAL=True,
        WINDOW=case["window"], LEAN=case["lean"], INT8=case["int8"], HALF=traits.half, NATIVE=traits.native,
        PTX=traits.ptx, OFFSET=8.0, LSE=True, FP8_OUT=case["fp8_out"], TILE_M=tile["tile_m"], TILE=128,
    )  # fmt: skip
    options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
    return ASTSource, kernel, pointers, constants, options


def hopper(target: str, case: dict[str, Any]) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from zyfa_kernels.triton.prefill_hopper import hopper_kernel as kernel
    from zyfa_kernels.triton.targets import DEFAULT_HOPPER

    d, block = case["dim"], case["block"]
    dv, box = min(d, 128), min(block, 128) or 128
    d1, d2 = (128, 64) if d == 192 else (d, d)
    code, name = (gl.int8, "i8") if case["int8"] else (gl.float8e4nv, "fp8e4nv")

    def boxes(rows: int, columns: int, dtype: Any = code, name: str = name) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
        return f"tensordesc<{name}[{rows}, {columns}],{layout!r}>"

    types = dict(q1_desc=boxes(64, d1), q2_desc=boxes(64, d2), k1_desc=boxes(box, d1), k2_desc=boxes(box, d2))
    types["vt_desc"] = boxes(dv, 128, gl.float8e4nv, "fp8e4nv")
    types |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "out_scale", "lse"), "*fp32")
    types |= dict(k="*i8" if case["int8"] else "*u8", v="*u8", bad="*i32", block_table="*i32", cu_seqlens_q="*i32")
    types |= dict(lengths_k="*i32", out="*fp8e4nv" if case["fp8_out"] else "*bf16")
    token = HEADS // GROUP
    constants = dict(
        heads=HEADS, group=GROUP, q_row_h=0, q_col_h=d, k_row_b=block, k_row_h=0, k_col_h=d, q_scale_stride_t=HEADS,
        q_scale_stride_h=1, k_stride_b=block * token * d, k_stride_t=token * d, k_stride_h=d,
        v_stride_b=block * token * dv, v_stride_t=token * dv, v_stride_h=dv, out_stride_t=HEADS * dv, out_stride_h=dv,
        k_scale_stride=1, v_scale_stride=1, D2=64 if d == 192 else 0, BLOCK=block, CAUSAL=True, WINDOW=case["window"],
        LEAN=case["lean"], INT8=case["int8"], OFFSET=8.0, LSE=True, FP8_OUT=case["fp8_out"],
        STAGES=DEFAULT_HOPPER["stages"], CONSUMER_REGS=DEFAULT_HOPPER["consumer_registers"],
        PRODUCER_REGS=DEFAULT_HOPPER["producer_registers"],
    )  # fmt: skip
    return GluonASTSource, kernel, types, constants, {"num_warps": 4}


def transpose(target: str, case: dict[str, Any]) -> Any:
    from zyfa_kernels.triton.transpose import transpose_kernel as kernel

    pointers = dict.fromkeys(("k", "v", "vt", "bad", "block_table", "cu_seqlens_q", "lengths_k"), "*i32")
    d, block = case["dim"], case["block"]
    dv = min(d, 128)
    constants = dict(
        k_stride_b=block * 2 * d // 4, k_stride_t=2 * d // 4, k_stride_h=d // 4, v_stride_b=block * 2 * dv // 4,
        v_stride_t=2 * dv // 4, v_stride_h=dv // 4, D=d, DV=dv, BLOCK=block, WINDOW=case["window"],
        WGMMA_ORDER=target == "sm_90", CHECK_K=case["int8"], TILE=128,
    )  # fmt: skip
    return ASTSource, kernel, pointers, constants, {"num_warps": 4}


def compiled(kernel: str, target: str, case: dict[str, Any]) -> Any:
    source, function, types, constants, options = globals()[kernel](target, case)
    floats = ("softmax_scale_log2", "delta")
    signature = {
        n: "constexpr" if n in constants else types.get(n, "fp32" if n in floats else "i32") for n in function.arg_names
    }
    vectors = [n for n in function.arg_names if types.get(n, "").startswith("*")]
    vectors += [n for n in function.arg_names if n.startswith(("q_stride", "k_stride", "v_stride", "out_stride"))]
    index = {n: i for i, n in enumerate(function.arg_names)}
    aligned = {(index[n],): [["tt.divisibility", 16]] for n in vectors if n not in constants}
    made = source(function, signature, constants, attrs=aligned)
    return triton.compile(made, target=GPUTarget(*TARGETS[target]), options=options)


def sass(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout


def facts(kernel: str, target: str, case: dict[str, Any]) -> dict[str, Any]:
    made = compiled(kernel, target, case)
    scratch = None
    if target.startswith("sm_"):
        names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", sass(made.asm["cubin"]), re.M)
    else:
        names = re.findall(r"v_mfma\w*", made.asm["amdgcn"])
        scratch = int(re.search(r"ScratchSize: (\d+)", made.asm["amdgcn"])[1])
    return {"shared": made.metadata.shared, "scratch": scratch, "operations": Counter(names)}


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        print(json.dumps(facts(*job)))
