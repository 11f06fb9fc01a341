"""The lists of blocks and slots compile without a GPU; their values are tested with SGLang's pools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# (mapped to another pool, packed)
CASES = ((False, False), (True, False), (False, True), (True, True))


def compile_all() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from zyfa_kernels.triton.block_table import TILE, _list_kernel

    from tests.triton.compile_prefill import TARGETS

    for target in ("sm_90", "gfx950", "gfx942"):
        for mapped, packed in CASES:
            constants = dict(BLOCK=1 if packed else 16, MAPPED=mapped, PACKED=packed, TILE=TILE)
            # What a call leaves out is None, which Triton takes for a constant.
            constants |= {} if mapped else {"mapping": None}
            constants |= {} if packed else {"first": None}
            types = dict(slots="*i32", rows="*i64", mapping="*i64", first="*i32", lengths="*i32", out="*i32")
            signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in _list_kernel.arg_names}
            made = triton.compile(ASTSource(_list_kernel, signature, constants), target=GPUTarget(*TARGETS[target]))
            assert made.asm
            print("compiled", target, mapped, packed)


def test_compiles() -> None:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("compiled") == 3 * len(CASES)


if __name__ == "__main__":
    compile_all()
