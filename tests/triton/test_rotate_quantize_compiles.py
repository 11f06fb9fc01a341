"""The kernel compiles, without a GPU, for gfx950, gfx942 and sm_90, and to the instructions that it should.

Each compilation is a process of its own: another test's process may have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zyfa_kernels.triton.rotate_quantize_kernel import rotate_quantize as kernel

target, dtype, chosen = json.loads(sys.argv[1])
dim, second = chosen["dim"], chosen["second"]
width = lambda n: 1 << (n - 1).bit_length()
constants = dict(
    Q_HEADS=32, KV_HEADS=8, D0=dim, W0=width(dim), N0=dim**-0.5, D1=second, W1=width(second or 1),
    N1=(second or 1)**-0.5, DV=128, WV=128, ROTATE=chosen["rotate"], INT8=chosen["int8"], NATIVE=target != "gfx942",
    SATURATES=target.startswith("sm"),
    COUNT=chosen["count"], BLOCK=chosen.get("block", 16), ROWS=64, STAGES=1,
)
constants |= {name: 1 for name in kernel.arg_names if name.endswith("_channel")}
types = {
    "q": dtype, "k": dtype, "v": dtype, "table0": "fp32" if chosen["rotate"] == "butterfly" else dtype,
    "q_out": "u8", "k_cache": "u8", "v_cache": "u8", "q_scale": "fp32", "k_scale": "fp32", "v_scale": "fp32",
    "slots": "i64", "saturated": "i64",
}
types["table1"] = types["table0"]
signature, attributes = {}, {}
for index, name in enumerate(kernel.arg_names):
    signature[name] = "constexpr" if name in constants else "*" + types[name] if name in types else "i32"
    if name not in constants and name not in ("q_tokens", "kv_tokens"):
        attributes[(index,)] = [["tt.divisibility", 16]]
source = ASTSource(
    kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, attrs=attributes
)
gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
made = triton.compile(source, target=gpu, options={"num_warps": 4})
print(made.asm["amdgcn" if target.startswith("gfx") else "ptx"])
"""

CASES = {
    "hadamard": dict(dim=128, second=0, rotate="dot", int8=False, count=False),
    "int8 mla counted": dict(dim=128, second=64, rotate="dot", int8=True, count=True),
    "butterfly": dict(dim=64, second=0, rotate="butterfly", int8=False, count=False),
    "mla packed": dict(dim=128, second=64, rotate="dot", int8=False, count=False, block=0),
    "96 wide": dict(dim=96, second=0, rotate="dot", int8=False, count=False),
}
# What the product of a rotation and the conversion of two floats to codes become; no conversion to OCP e4m3 on gfx942.
MATRIX = {"gfx950": "v_mfma_f32_", "gfx942": "v_mfma_f32_", "sm_90": "wgmma.mma_async"}
CONVERSION = {"gfx950": r"v_cvt_(scalef32_)?pk_fp8_f32", "gfx942": None, "sm_90": r"cvt.rn.satfinite.e4m3x2.f32"}


def compiled(target: str, dtype: str, case: str) -> str:
    """The assembly text."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps([target, dtype, CASES[case]])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["gfx950", "gfx942", "sm_90"])
def test_compiles(target, case):
    text = compiled(target, "fp16" if case == "butterfly" else "bf16", case)
    assert (MATRIX[target] in text) == (CASES[case]["rotate"] != "butterfly")
    conversion = CONVERSION[target]
    if conversion is None:
        assert not re.search("pk_fp8_f32", text)
    else:
        assert re.search(conversion, text)
    if target.startswith("gfx"):
        assert re.search(r"ScratchSize: 0\b", text)  # nothing spills
